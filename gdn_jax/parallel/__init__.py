"""One program on many devices: meshes, shardings, and rows whose tokens or heads are split over devices."""
