"""Benchmarks of `gdn bench`: the rule, its kernels, a model's parts and steps, serving, several devices."""
