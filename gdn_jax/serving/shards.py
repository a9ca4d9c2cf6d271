"""Serving over the devices of a mesh: each one serves its own heads of every request, and sends nothing.

XLA splits plain JAX by itself. What it cannot look into, a kernel, and what it does not see to be split, an append
to rings, are split here. Slots and requests never are: any request may name any slot.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from gdn_jax.partitioning import (
    RuleAxes,
    expected_shards,
    on_explicit_shards,
    on_shards,
    warn_of_gathers,
)
from gdn_jax.serving.pools import RingPool, pool_axes
from gdn_jax.serving.tokens import Options, Raw
from gdn_jax.shapes import RuleArrays

CHANNELS = 128
"""Of these in a row every shard of a convolution has whole ones."""


def serve(
    f: Callable[..., Any], options: Options, pool: Any, raw: Raw, *others: Any
) -> tuple[jax.Array, Any]:
    """f(options, pool, raw, *others), which is o and the pool; every device computes those of its own heads.

    Args:
      f: a function of a module. On a shard its options have the shard's numbers of heads.
      others: arrays or None, which every device has whole.
    """
    names, tokens = pool_axes(pool), _raw_axes(raw)
    opaque = options.implementation == "mosaic_gpu" or isinstance(pool, RingPool)
    operands, sizes = (names, tokens, *_whole(others)), _sizes(raw)
    return _on_heads(_serve, (f, options), (pool, raw, *others), operands, (tokens.v, names), sizes, opaque)


def _serve(static: tuple[Callable[..., Any], Options], pool: Any, raw: Raw, *others: Any) -> Any:
    f, options = static
    return f(options.of_heads(raw), pool, raw, *others)


def serve_prompts(
    f: Callable[..., Any], static: Hashable, pool: jax.Array, tokens: Sequence[Any], *others: Any
) -> tuple[jax.Array, jax.Array]:
    """f(static, pool, tokens, *others), which is o and the pool; every device computes those of its own heads.

    Args:
      f: a function of a module.
      tokens: q, k, v, g and beta of packed rows, the last two of which may be None.
      others: arrays or None, which every device has whole.
    """
    names, (axes, sizes) = pool_axes(pool), _prompt_axes(tokens)
    operands = (names, axes, *_whole(others))
    return _on_heads(
        f, static, (pool, tuple(tokens), *others), operands, (axes[2], names), sizes, opaque=True
    )


def convolve(
    f: Callable[..., Any], static: Hashable, pool: jax.Array, x: jax.Array, *others: Any, layer: Any
) -> tuple[jax.Array, jax.Array]:
    """f(static, pool, x, weight, bias, read_slots, write_slots, layer), which is y and the pool, by a kernel; every
    device computes those of its own channels.

    Args:
      f: a function of a module. It takes shards of whole blocks of `CHANNELS`.
      others: weight, bias and slots.
    """
    weight, bias, *numbers = others
    names = ". d ." if pool.ndim == 3 else ". . d ."
    operands = (names, ". d", "d .", "d", *_whole((*numbers, layer)))
    D = x.shape[1]
    sizes = {} if D % CHANNELS else {"d": D // CHANNELS}
    args = (pool, x, weight, bias, *numbers, layer)
    return _on_heads(f, static, args, operands, (". d", names), sizes, opaque=True)


def is_split(*arrays: Any) -> bool:
    """Whether XLA, or the arrays' types, may split a call on these arrays over devices."""
    leaves = jax.tree.leaves(arrays)
    explicit = any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in leaves)
    return explicit or expected_shards(leaves) is not None


def on_pool(f: Callable[..., RingPool], static: Hashable, pool: RingPool, *others: Any) -> RingPool:
    """f(static, pool, *others), the pool, of which every device computes its own heads. Arguments: as for `serve`."""
    return _of_ring(f, static, pool, others, pool_axes(pool))


def states_of(f: Callable[..., jax.Array], static: Hashable, pool: RingPool, *others: Any) -> jax.Array:
    """The same for a function whose results are states [N, HO, ..], one for each slot that others name."""
    return _of_ring(f, static, pool, others, "n h . .")


def _of_ring(f: Callable[..., Any], static: Hashable, pool: RingPool, others: Any, results: Any) -> Any:
    # Every device has the cursors of its own heads, all of which say the same.
    operands, sizes = (pool_axes(pool), *_whole(others)), {"h": math.gcd(pool.k.shape[-3], pool.u.shape[-3])}
    return _on_heads(f, static, (pool, *others), operands, results, sizes, opaque=True)


def warn_of_gathered(pool: Any, raw: Raw) -> None:
    """Warns, while the program is compiled, of what every device has to gather; see `warn_of_gathers`."""
    states = pool.state if isinstance(pool, RingPool) else pool
    arrays = [x if isinstance(x, jax.Array) else None for x in (states, *raw)]
    axes: list[Any] = [pool_axes(states), *_raw_axes(raw)]
    warn_of_gathers(("pool", *raw._fields), arrays, axes, _sizes(raw))


def warn_of_gathered_prompts(pool: jax.Array, tokens: Sequence[Any]) -> None:
    """The same for the arguments of `serve_prompts`."""
    axes, sizes = _prompt_axes(tokens)
    warn_of_gathers(("pool", "q", "k", "v", "g", "beta"), (pool, *tokens), (pool_axes(pool), *axes), sizes)


def _prompt_axes(tokens: Sequence[Any]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Names of the dimensions of q, k, v, g and beta, and into how many parts they can be split."""
    sizes, inputs = RuleAxes.of(RuleArrays._make((*tokens, None, None, None)))
    return inputs[:5], sizes


def _raw_axes(raw: Raw) -> Raw:
    leading = "b" if raw.a.ndim == 2 else "b t"
    vector, gate = f"{leading} h .", f"{leading} h"
    return Raw._make((vector, vector, vector, gate, gate, "h", "h"))


def _sizes(raw: Raw) -> dict[str, int]:
    """Into how many parts the heads can be split: no two parts share a head of any array."""
    return {"h": math.gcd(*(x.shape[-2] for x in raw[:3]))}


def _whole(others: Sequence[Any]) -> list[str | None]:
    return [None if x is None else " ".join("." * jnp.ndim(x)) for x in others]


def _on_heads(
    f: Callable[..., Any],
    static: Hashable,
    args: Sequence[Any],
    operands: Sequence[Any],
    results: Any,
    sizes: Mapping[str, int],
    opaque: bool,
) -> Any:
    """f(static, *args) on shards, see `on_shards`. opaque: XLA would gather the arguments."""

    def call(*args):
        if not opaque or expected_shards(args) is None:
            return f(static, *args)
        return on_shards(f, static, args, operands, lambda _: results, sizes)

    return on_explicit_shards(call, args, operands, results, sizes, in_place=opaque)
