"""Sets of kernels of the rule, one file a set, behind one protocol."""
