"""What stands around the rule in a model, in a plain form that defines it, with kernels where they win."""
