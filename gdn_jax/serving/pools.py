"""What a pool is: states alone, or with deferred writes a ring of tokens beside each."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from gdn_jax.serving.arguments import check_integers
from gdn_jax.shapes import (
    STATE_LAYOUTS,
    Dims,
    accumulation_dtype,
    check_array,
    check_choice,
    check_floating,
)


class RingPool(NamedTuple):
    """A pool with deferred writes. Every array may have an axis of layers after the first, as in `decode`."""

    state: Float[Array, "slots *state"]
    """Checkpoints [slots, HO, K, V], or [slots, HO, V, K], as a pool without a ring."""
    k: Float[Array, "slots *keys"]
    """Keys since the checkpoint [slots, Hk, L, K], normalised, oldest first."""
    u: Float[Array, "slots *values"]
    """Written values [slots, HO, L, V]."""
    g: Float[Array, "slots *gates"]
    """Log decays [slots, HO, L], float32."""
    cursors: Int[Array, "slots *layers HO 2"]
    """`count` and `before` [slots, HO, 2], the same for all heads of a slot: what works on a head reads and writes
    the head's own."""
    parents: Int[Array, "slots *layers L"] | None = None
    """Those that the last `verify` was given. None in a pool that takes chains alone: what was accepted of a tree has
    to be moved together in the ring, of a chain it is."""

    @property
    def length(self) -> int:
        """L, the tokens that a ring holds."""
        return self.g.shape[-1]

    @property
    def count(self) -> Int[Array, "slots *layers"]:  # pyrefly: ignore[bad-override]
        """How many entries of the ring are tokens; the others are left over and never read."""
        return self.cursors[..., 0, 0]

    @property
    def before(self) -> Int[Array, "slots *layers"]:
        """count before the last call's tokens: where the first of them lies. -1 if that call flushed its only
        token."""
        return self.cursors[..., 0, 1]


def make_cursors(
    count: Int[Array, "slots *layers"], before: Int[Array, "slots *layers"], heads: int
) -> Int[Array, "slots *layers HO 2"]:
    """The cursors of rings, for each value head."""
    both = jnp.stack([count, before], -1).astype(jnp.int32)[..., None, :]
    return jnp.broadcast_to(both, (*both.shape[:-2], heads, 2))


def pool_axes(pool: Any) -> Any:
    """Names of the dimensions of a pool's arrays, for `partitioning.on_shards`: slots "s" and heads "h"."""
    if not isinstance(pool, RingPool):
        return "s h . ." if len(pool.shape) == 4 else "s . h . ."
    states = pool_axes(pool.state)
    slots = states.removesuffix(" h . .")
    parents = None if pool.parents is None else f"{slots} ."
    return RingPool._make((states, states, states, f"{slots} h .", f"{slots} h .", parents))


def make_ring_pool(
    states: Float[Array, "slots *state"],
    *,
    num_key_heads: int,
    length: int = 16,
    dtype: DTypeLike = jnp.bfloat16,
    state_layout: str = "kv",
    trees: bool = False,
) -> RingPool:
    """A pool of states with an empty ring beside each.

    Args:
      states: [slots, HO, K, V], or [slots, HO, V, K] with state_layout "vk"; [slots, layers, ...] for a whole model.
      num_key_heads: Hk.
      length: L, tokens between two writes of a state. 1 writes every token's, as a pool without a ring.
      dtype: of the keys and values in the ring. bfloat16 reads half the bytes and rounds each once.
      state_layout: of the states.
      trees: whether `verify` may be given trees of drafts.

    Raises:
      ValueError: an argument is wrong.
    """
    check_choice("state_layout", state_layout, STATE_LAYOUTS)
    if len(states.shape) not in (4, 5):
        raise ValueError(
            f"states: expected shape [slots, HO, K, V] or [slots, layers, HO, K, V], got {states.shape}"
        )
    if length < 1:
        raise ValueError(f"length: expected at least 1, got {length}")
    *leading, HO, K, V = states.shape
    K, V = (K, V) if state_layout == "kv" else (V, K)
    if num_key_heads < 1 or HO % num_key_heads:
        raise ValueError(f"num_key_heads: expected a divisor of HO = {HO}, got {num_key_heads}")
    return RingPool(
        states,
        jnp.zeros((*leading, num_key_heads, length, K), dtype),
        jnp.zeros((*leading, HO, length, V), dtype),
        jnp.zeros((*leading, HO, length), accumulation_dtype(states)),
        make_cursors(jnp.zeros(leading, jnp.int32), jnp.full(leading, -1, jnp.int32), HO),
        jnp.full((*leading, length), -1, jnp.int32) if trees else None,
    )


def check_ring(pool: RingPool, dims: Dims, layer: Any) -> None:
    """Raises ValueError unless the ring fits the dimensions of a call."""
    leading = pool.state.shape[: 1 if layer is None else 2]
    axes, L = "slots" if layer is None else "slots, layers", pool.length
    check_array("pool.k", pool.k, (*leading, dims.Hk, L, dims.K), f"{axes}, Hk, L, K")
    check_array("pool.u", pool.u, (*leading, dims.HO, L, dims.V), f"{axes}, HO, L, V")
    check_array("pool.g", pool.g, (*leading, dims.HO, L), f"{axes}, HO, L")
    for name, x in (("pool.k", pool.k), ("pool.u", pool.u), ("pool.g", pool.g)):
        check_floating(name, x)
    check_integers("pool.cursors", pool.cursors, (*leading, dims.HO, 2), f"{axes}, HO, 2")
    if pool.parents is not None:
        check_integers("pool.parents", pool.parents, (*leading, L), f"{axes}, L")
