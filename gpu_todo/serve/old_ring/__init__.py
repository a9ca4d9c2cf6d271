"""Serving kernels: a few tokens of every running request, from states in a pool to states in the same pool."""
