"""Blocks that differ in their weights alone, made and stacked by programs that XLA compiles fast.

XLA compiles every operation that it is given, and a deep model has hundreds of arrays. Here one operation draws or
slices all arrays of one shape.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PRNGKeyArray

from gdn_jax.models.block import Block
from gdn_jax.models.config import period_of


def make_alike(make: Callable[[nnx.Rngs], Block], layers: list[int], key: PRNGKeyArray) -> list[Block]:
    """Blocks with fresh weights for some layers; those of layer i are a function of the key and of i.

    One program makes a block after another. Compiling one draw takes XLA half a second on a GPU, and a block has a
    dozen: this way it compiles them together, and once for all layers and keys. Where the key is traced every array
    is drawn for all blocks at once, as a program of all layers one after another would compile as long as the model
    is deep.
    """
    graphdef = None

    def draw(key, i):
        nonlocal graphdef
        graphdef, state = nnx.split(make(nnx.Rngs(jax.random.fold_in(key, i))))
        return state

    if not isinstance(key, jax.core.Tracer):
        states = [*map(partial(jax.jit(draw), key), layers)]
        assert graphdef is not None
        return [nnx.merge(graphdef, state) for state in states]
    arrays, treedef = jax.tree.flatten(jax.vmap(partial(draw, key))(jnp.asarray(layers)))
    assert graphdef is not None
    per_block = zip(*(jnp.unstack(x) for x in arrays), strict=True)
    return [nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)) for leaves in per_block]


@jax.custom_jvp
def _stack(xs: tuple[Array, ...]) -> Array:
    """jnp.stack(xs), with a derivative that compiles fast."""
    return jnp.stack(xs)


@_stack.defjvp
def _stack_jvp(primals, tangents):
    """Reads the cotangents of the parts by an index that the compiler does not know.

    With known ones XLA compiles as many slices as the model has arrays, with unknown ones one for each shape.
    """
    stacked = _stack(*primals)
    zeros = jnp.zeros_like(stacked)

    def place(i, x):
        index = jax.lax.optimization_barrier(jnp.int32(i))
        return jax.lax.dynamic_update_index_in_dim(zeros, x, index, 0)

    return stacked, reduce(jnp.add, [place(i, x) for i, x in enumerate(*tangents)])


def stacked(blocks: Sequence[Block]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The structures of the blocks of a period, and their weights, stacked along a new first axis.

    Blocks alike have periods of one block.

    Raises:
      ValueError: blocks differ in more than their weights without a period.
    """
    graphdefs, states, others = zip(*(nnx.split(b, nnx.Param, ...) for b in blocks), strict=True)
    shapes = [jax.tree.map(jax.typeof, state) for state in states]
    n = len(blocks)
    period = period_of(list(zip(graphdefs, shapes, strict=True)))
    if jax.tree.leaves(others):
        reason = "a block with state next to its parameters"
    elif period == n > 1:
        reason = f"blocks that differ, in one period of all {n}"
    else:
        stacked = (jax.tree.map(lambda *xs: _stack(xs), *states[i::period]) for i in range(period))
        return graphdefs[:period], tuple(stacked)
    raise ValueError(
        f"scan_layers: expected blocks that differ only in their weights, or two or more periods of such blocks, "
        f"got {reason}"
    )
