"""The package that users install: what must be in it, and a rehearsal outside of the repository."""
