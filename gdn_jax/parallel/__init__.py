"""One program on many devices: meshes and shardings, and sequences that are longer than a device can hold."""
