"""The parts around the rule in a model, in plain forms that define them, with kernels where they win."""
