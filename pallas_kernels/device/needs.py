"""The features of a GPU that kernels need, and which GPUs have them: the only list of compute capabilities.

The file of a kernel says what it needs in `NEEDS`. A test compiles for 10.0 all kernels that need no wgmma.
"""

import enum


class Needs(enum.Flag):
    """Features that only some GPUs have."""

    NOTHING = 0
    """Only what every GPU of the list has."""

    MMA = enum.auto()
    """mma.sync, ldmatrix and cp.async."""
    TMA = enum.auto()
    """Bulk copies, mbarriers, clusters, and the fence between plain stores and these copies."""
    LARGE = enum.auto()
    """More than the 99 KB of shared memory that every GPU of the list has for a CTA: 227 KB."""
    WGMMA = enum.auto()
    """Products of a whole warpgroup, with operands in shared memory."""


HAS = {
    "8.0": Needs.MMA,
    "8.6": Needs.MMA,
    "8.9": Needs.MMA,
    "9.0": Needs.MMA | Needs.TMA | Needs.LARGE | Needs.WGMMA,
    "10.0": Needs.MMA | Needs.TMA | Needs.LARGE,
    "10.3": Needs.MMA | Needs.TMA | Needs.LARGE,
    "12.0": Needs.MMA | Needs.TMA,
}
"""Compute capability -> what our kernels may use there. They were compiled for all of these, and run on 9.0 alone."""


def capabilities(needs: Needs) -> tuple[str, ...]:
    """Compute capabilities of the GPUs that have all of it."""
    return tuple(capability for capability, has in HAS.items() if needs in has)
