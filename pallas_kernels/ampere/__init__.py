"""The rule by mma.sync, for NVIDIA GPUs without wgmma and bulk copies: compute capability 8.0 and later.

Which device gets it, and what was run where, is in `docs/devices.md`.
"""
