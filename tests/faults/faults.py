"""Faults that the tests must notice: each was put in once, went unnoticed, and has had a test of its own since.

A fault is a text that stands at exactly one place of the two packages, the documentation or the notebooks, what takes
its place, and the test that must then fail: a file, or one test of it where the file takes long. They lie in files by
the room of that place.
"""

from faults import adapters, kernels, models, rule, runs, serving

FAULTS = (*rule.FAULTS, *kernels.FAULTS, *serving.FAULTS, *models.FAULTS, *runs.FAULTS, *adapters.FAULTS)
