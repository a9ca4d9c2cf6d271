"""The rule by mma.sync, for NVIDIA GPUs without wgmma and bulk copies: compute capability 8.0 and later.

No GPU has run it yet, and no call reaches it: see `docs/devices.md`.
"""
