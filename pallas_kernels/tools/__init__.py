"""Programs that look at kernels without running them: registers and spills, and a fingerprint of the PTX."""
