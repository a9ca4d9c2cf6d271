"""Stages of the walks over chunks where each channel decays by itself: how many, their loader, and what both
directions read of them alike.

A `cta` is that of a walk: its `config` is the `Config` here, its shared memory has gl, beta and the barriers
early_read and late_read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.launch import LOADER_REGISTERS, check_registers, release_registers
from pallas_kernels.device.layouts import CHUNK, COL, along_columns, iota
from pallas_kernels.device.memory import Memory, fitting
from pallas_kernels.work.spans import owned_rows

ROWS = 64
"""Rows of the transposed state that one state warpgroup holds."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a walk runs, not what it computes."""

    state_warpgroups: int = 2
    """1 or 2. Two share a head's tiles of keys; one gives twice the CTAs."""
    early_stages: int = 2
    late_stages: int = 2
    state_registers: int = 240
    state_in_smem: bool = False
    """False: the rounded state is always in registers here."""

    def __post_init__(self):
        check_registers(LOADER_REGISTERS, *(self.state_registers,) * self.state_warpgroups)

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a CTA."""
        return self.state_warpgroups + 1

    @classmethod
    def most_stages(cls, state_warpgroups: int, memory: Callable[["Config"], Memory]) -> "Config":
        """The configuration of most stages that fit into the memory that a kernel then declares."""
        registers = {1: 248, 2: 240}[state_warpgroups]
        return fitting((cls(state_warpgroups, *n, registers) for n in ((3, 3), (3, 2), (2, 2))), memory)


def loader(cta: Any, load_early: Callable, load_late: Callable) -> None:
    """The role of the loader: a chunk into every stage, and into each that has been read the next one.

    Args:
      load_early, load_late: start the copies of the i-th chunk of the walk to a stage of each ring.
    """
    smem, chunks, config = cta.smem, cta.chunks, cta.config
    release_registers(LOADER_REGISTERS, config.warpgroups)
    rings = (
        (load_early, config.early_stages, smem.early_read),
        (load_late, config.late_stages, smem.late_read),
    )
    for load, stages, _ in rings:
        for j in range(stages):
            pl.when(j < chunks)(functools.partial(load, cta, jnp.int32(j), j))

    def step(i, _):
        for load, stages, read in rings:
            stage = lax.rem(i, stages)
            plgpu.barrier_wait(read.at[stage])
            pl.when(i + stages < chunks)(functools.partial(load, cta, i + stages, stage))
        return ()

    lax.fori_loop(0, chunks, step, ())


def stages_of(cta: Any, i) -> tuple[jax.Array, jax.Array]:
    """The early and the late stage of the i-th chunk."""
    return lax.rem(i, cta.config.early_stages), lax.rem(i, cta.config.late_stages)


def owned_tokens(cta: Any, i) -> jax.Array:
    """Marks the columns [ROWS, C] that are tokens of the i-th visit."""
    begin, end, _ = owned_rows(cta.span, cta.chunk_of(i))
    token = iota((ROWS, CHUNK), 1)
    return (token >= begin) & (token < end)


def strengths(cta: Any, i, stage) -> jax.Array:
    """Write strengths of the i-th visit's tokens repeated over the rows of the state, 0 at tokens of others."""
    beta = cta.vector(cta.smem.beta, stage)
    return jnp.where(owned_tokens(cta, i), beta, 0.0) if cta.packed else beta


def decayed(cta: Any, stage, h) -> jax.Array:
    """The state with the decay of a whole visit."""
    return h * along_columns(plgpu.load(cta.smem.gl.at[stage], layout=COL), ROWS)
