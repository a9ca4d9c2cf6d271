"""The numbers of the pages, computed again from the stored runs by code that shares nothing with `results.pages`."""
