"""Kernels of what stands around the rule in a layer."""
