"""Pieces of work that some CTAs claim in turn: who is early takes more of them.

Multiprocessors get memory at unequal speeds, and the slowest one of an equal share ends last. A warpgroup that has
room for the next piece asks a word in global memory for its number. The word is 0 again when a kernel has ended, see
`grid_barrier`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from pallas_kernels.device.lanes import WARP, WARPS
from pallas_kernels.device.launch import warpgroup_index


class Claims:
    """The claims of a warpgroup, which asks for a number, does something else, and takes it behind a barrier."""

    def __init__(self, word: Any, kept: Any) -> None:
        """Takes the word in global memory, [1] int32, and [2 warpgroups] int32 in shared memory."""
        self.word, self.kept, self.wg = word, kept, warpgroup_index()

    def ask(self, i: Any) -> Any:
        """Asks for the i-th number of this warpgroup, which is then on its way."""
        return _ask(self.word)

    def keep(self, i: Any, asked: Any) -> None:
        """Waits for it. A barrier of the warpgroup must follow."""
        _keep(self.kept, self._place(i), asked)

    def take(self, i: Any, asked: Any) -> jax.Array:
        """The number, behind that barrier."""
        return self.kept[self._place(i)]

    def _place(self, i: Any) -> jax.Array:
        """Two in turn: a warp may still read the number before when the next one is kept."""
        return 2 * self.wg + lax.rem(jnp.int32(i), jnp.int32(2))

    def forget(self) -> None:
        """Sets the word back, by one CTA, when nobody asks any more."""
        self.word[0] = jnp.int32(0)


class Turns(NamedTuple):
    """The same where CTAs run one after the other: each takes every n-th number."""

    first: jax.Array
    """Number of the warpgroup among all that claim."""
    n: int
    """How many these are."""

    def ask(self, i: Any) -> jax.Array:
        """See `Claims.ask`."""
        return self.first + jnp.int32(i) * self.n

    def keep(self, i: Any, asked: jax.Array) -> None:
        """See `Claims.keep`."""

    def take(self, i: Any, asked: jax.Array) -> jax.Array:
        """See `Claims.take`."""
        return asked

    def forget(self) -> None:
        """See `Claims.forget`."""


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),),
    return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), plgpu.Layout.WG_SPLAT(())),
)
def _ask(ctx, word):
    i32 = ir.IntegerType.get_signless(32)
    branch: Any = scf.IfOp(_is_first(), [i32], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        found: Any = utils.inline_ptx(
            "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;",
            utils.memref_ptr(word),
            result_types=i32,
            has_side_effects=True,
        )
        scf.yield_([found])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([utils.c(0, i32)])
    return fragmented_array.FragmentedArray.splat(branch.result, (), is_signed=True)


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_SPLAT(())), return_type=None
)
def _keep(ctx, kept, place, asked):
    branch = scf.IfOp(_is_first())
    with ir.InsertionPoint(branch.then_block):
        index = arith.index_cast(ir.IndexType.get(), place.registers.item())
        memref.store(asked.registers.item(), kept, [index])
        scf.yield_([])


def _is_first() -> ir.Value:
    """Whether this is the first thread of its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.andi(utils.thread_idx(), utils.c(WARP * WARPS - 1, i32))
    return arith.cmpi(arith.CmpIPredicate.eq, thread, utils.c(0, i32))
