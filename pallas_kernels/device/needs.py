"""The features of a GPU that kernels need, and which GPUs have them: the only list of compute capabilities.

The file of a kernel says what it needs in `NEEDS`. A test compiles for 10.0 all kernels that need no wgmma.
"""

import enum


class Needs(enum.Flag):
    """Features that only some GPUs have."""

    MMA = enum.auto()
    """mma.sync, ldmatrix and cp.async."""
    TMA = enum.auto()
    """Bulk copies, mbarriers and clusters, and the shared memory of a data-centre GPU."""
    WGMMA = enum.auto()
    """Products of a whole warpgroup, with operands in shared memory."""


HAS = {
    "8.0": Needs.MMA,
    "8.6": Needs.MMA,
    "8.9": Needs.MMA,
    "9.0": Needs.MMA | Needs.TMA | Needs.WGMMA,
    "10.0": Needs.MMA | Needs.TMA,
    "10.3": Needs.MMA | Needs.TMA,
    "12.0": Needs.MMA,
}
"""Compute capability -> what our kernels may use there. They were compiled for each of these, and run on 9.0 alone.
12.0 has bulk copies too, but 99 KB of shared memory, and nobody has compiled those kernels for it."""


def capabilities(needs: Needs) -> tuple[str, ...]:
    """Compute capabilities of the GPUs that have all of it."""
    return tuple(capability for capability, has in HAS.items() if needs in has)
