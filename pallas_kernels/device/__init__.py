"""What every kernel stands on: units, register layouts, shared memory, launches, and operations that Pallas lacks."""
