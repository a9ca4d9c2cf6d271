"""Sets of kernels of the gated delta rule, one file a set, behind one protocol."""
