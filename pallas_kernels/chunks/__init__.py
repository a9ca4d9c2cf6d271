"""Kernels over chunks that do not walk: gates and the gated inverse, and the states of segments."""
