"""The page of findings: claims of the literature beside what sweeps gave, and published settings run again."""
