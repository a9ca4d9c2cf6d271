"""The ring of operands of kernels that multiply by wgmma, the roles of their warpgroups, and how results leave.

All warpgroups of a CTA but the last one multiply, and the last one loads. Operands pass through a ring of slots, each
of which is released a step after the products that read it were issued:

    barrier       who arrives                              who waits
    full[slot]    every copy into the slot                 the multiplying warpgroups
    empty[slot]   the multiplying warpgroups               the loading warpgroup
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.launch import check_registers, grid_index, release_registers
from pallas_kernels.device.memory import Barriers, Memory
from pallas_kernels.device.operations import Device

ROWS = 64
"""Rows of a result that a product of a warpgroup has."""

DEPTH = 64
"""Numbers of the sum in a slot: 128 bytes, over which rows are swizzled."""

OUT = 64
"""Columns that are stored at once: 128 bytes, over which rows are swizzled."""

LOADING_REGISTERS, MULTIPLYING_REGISTERS = 24, 240

check_registers(LOADING_REGISTERS, MULTIPLYING_REGISTERS, MULTIPLYING_REGISTERS)


def barriers(copies: int, multiplying: int, stages: int) -> Memory:
    """The barriers of a ring.

    Args:
      copies: into a slot.
      multiplying: warpgroups.
      stages: slots.
    """
    return {
        "full": Barriers(arrivals=copies, count=stages),
        "empty": Barriers(arrivals=multiplying, count=stages),
    }


class Ring:
    """The ring of a CTA. A step is the number of what passes through, from the first item of the CTA on."""

    def __init__(self, smem: Any, stages: int):
        self.full, self.empty, self.stages = smem.full, smem.empty, stages

    def slot(self, step: Any) -> jax.Array:
        """The place of a step's operands."""
        return lax.rem(step, jnp.int32(self.stages))

    def free(self, step: Any) -> tuple[jax.Array, Any]:
        """The slot of a step, once it may be written, and the barrier that copies arrive on."""
        slot = self.slot(step)
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
        return slot, self.full.at[slot]

    def filled(self, step: Any) -> jax.Array:
        """The slot of a step, once its operands are there."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, step: Any) -> None:
        """Tells the loading warpgroup that this one is done with the slot of a step."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def sums(
        self, dev: Device, first: Any, steps: Any, accs: Sequence[Any], issue: Callable[[Any, Any], None]
    ) -> list[jax.Array]:
        """The sums in accumulators, when the products of some steps have been added to each.

        Args:
          first, steps: number of the first step, and how many there are.
          issue: issue(k, slot) issues the products of the k-th of them, one for each accumulator.
        """

        def step(k, carry):
            issue(k, self.filled(first + k))
            dev.finish(len(accs))
            pl.when(k > 0)(lambda: self.release(first + k - 1))
            return carry

        lax.fori_loop(0, steps, step, ())
        dev.finish(0)
        results = [dev.collect(acc) for acc in accs]
        if isinstance(steps, int):
            self.release(first + steps - 1)
        else:  # there may be none
            pl.when(steps > 0)(lambda: self.release(first + steps - 1))
        return results


def roles(wg: Any, multiplying: int, load: Callable[[], None], multiply: Callable[[], None]) -> None:
    """Runs load() in the last warpgroup of a CTA, and multiply() in those before it; wg is the number of this one.

    Two that multiply get the registers that the other does without; one has enough.
    """

    @pl.when(wg == multiplying)
    def _():
        if multiplying > 1:
            release_registers(LOADING_REGISTERS, multiplying + 1)
        load()

    @pl.when(wg < multiplying)
    def _():
        if multiplying > 1:
            plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        multiply()


def share(items: Any, ctas: int) -> jax.Array:
    """The number of items of this CTA, which takes each `ctas`-th of them."""
    return lax.div(items + ctas - 1 - grid_index(), jnp.int32(ctas))


def store(out: Any, x: jax.Array, target: Callable[[int], Any]) -> None:
    """Writes the rows of a warpgroup, some columns at a time.

    Args:
      out: shared memory [ROWS, OUT], whose last copy may still be on its way; of another kernel it may be narrower.
      x: [ROWS, columns] float32.
      target: where the columns from a number on go.
    """
    rounded, width = x.astype(out.dtype), out.shape[1]
    for first in range(0, x.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = rounded[:, first : first + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, target(first))
