"""Common to all kernels: units, register layouts, shared memory, launches, and operations that Pallas lacks."""
