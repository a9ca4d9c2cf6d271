"""Kernels of what stands around the rule in a layer, for the many tokens of training and prompts."""
