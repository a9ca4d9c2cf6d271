"""Serving over the devices of a mesh: each one serves its own heads of every request, and sends nothing.

XLA splits plain JAX by itself. What it cannot look into, a kernel, and what it does not see to be split, an append
to rings, are split here, by heads "h" or channels "d". Slots and requests never are: any request may name any slot.
In a cache, whose slots are the rows "b" of a call, these are split too.

A piece of work is a method of a kind of pool, and the options that it takes after the pool and before other arrays.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.partitioning import (
    expected_shards,
    lie_on_explicit_axes,
    on_explicit_shards,
    on_shards,
    warn_of_gathers,
)
from gdn_jax.rule import arguments
from gdn_jax.serving.call import At, Spans, interpreter

CHANNELS = 128
"""Channels of a block: every shard of a convolution has whole ones."""

PARAMETERS = {"A_log": "h", "dt_bias": "h", "weight": "d", "bias": "d"}
NAMES = (
    PARAMETERS
    | dict.fromkeys(("q", "k", "v", "erase_key"), "h .")
    | dict.fromkeys(("a", "b", "w", "erase_strength", "g", "beta"), "h")
    | {"x": "d"}
)
"""Names of dimensions of the arrays that may be split; any that follow have no name. In arrays of tokens, all but
the parameters, rows and tokens come first."""


def by_heads(work: tuple, pool: Any, tokens: Any, where: Any) -> tuple[jax.Array, Any]:
    """Outputs and the arrays of the pool; every device computes those of its own heads.

    The pool is donated, but a cache is not: a loop that carries it has it changed where it lies; elsewhere XLA copies
    it.

    Args:
      work: the method and its options.
      pool: the pool, of the kind that has the method.
      tokens, where: records of arrays or None. The outputs have the dimensions of the first array of tokens.
    """
    if arguments.debug_checks_are_on():
        _warn_of_gathered(pool, tokens, where)
    if interpreter.get() is not None:
        o, pool = _run(work, *jax.tree.map(jnp.asarray, (pool, tokens, where)))
    else:
        run = look if where.are_rows else change
        o, pool = run(work, (_axes(tokens)[0], pool.axes(where)), pool, tokens, where)
    return o, pool.arrays


def left_to_xla(work: tuple, pool: Any, tokens: Any, where: Any) -> tuple[jax.Array, Any]:
    """The same by XLA, which splits the work by itself, as the arguments lie."""
    o, pool = _change(work, pool, tokens, where)
    return o, pool.arrays


def is_whole(*arrays: Any) -> bool:
    """Whether neither XLA nor the arrays' types split a call on these arrays over devices."""
    if interpreter.get() is not None:
        return True
    leaves = jax.tree.leaves(arrays)
    return not lie_on_explicit_axes(*leaves) and expected_shards(leaves) is None


def _run(work: tuple, pool: Any, *args: Any) -> Any:
    method, *options = work
    return method(pool, *options, *args)


def _on_heads(work: tuple, results: Any, pool: Any, *records: Any) -> Any:
    """Work on records of arrays, by the heads of every device; results: names of the dimensions of what it gives."""
    args, axes = (pool, *records), (pool.axes(records[-1]), *map(_axes, records))
    if lie_on_explicit_axes(*jax.tree.leaves(args)):
        run, sizes = partial(_run, work), _sizes(args, axes, records[-1].are_rows)
        return on_explicit_shards(run, args, axes, results, sizes, in_place=pool.is_opaque)
    if pool.is_opaque and expected_shards(args) is not None:
        return on_shards(_run, work, args, axes, lambda _: results, _sizes(args, axes, records[-1].are_rows))
    method, *options = work
    return method(pool, *options, *records)


change = jax.jit(_on_heads, static_argnums=(0, 1), donate_argnums=2, inline=True)
"""`_on_heads`, compiled; the pool is donated."""

look = jax.jit(_on_heads, static_argnums=(0, 1), inline=True)
"""`_on_heads`, compiled; the pool stays as it is."""

_change = jax.jit(_run, static_argnums=0, donate_argnums=1, inline=True)


def _axes(record: Any) -> Any:
    """Names of the dimensions of a record's arrays. The first has no gate, and shows how many are rows and tokens."""
    rows = "bt"[: np.ndim(record[0]) - len(NAMES.get(record._fields[0], "").split())]

    def one(name: str, x: Any) -> str | None:
        if x is None:
            return None
        names = NAMES.get(name, "").split()
        names = [*rows, *names] if names and name not in PARAMETERS else names
        return " ".join((*names, *"." * (jnp.ndim(x) - len(names))))

    return type(record)(*map(one, record._fields, record))


def _sizes(args: Any, axes: Any, with_rows: bool = False) -> dict[str, int]:
    """Into how many parts heads, channels and perhaps rows can be split: no two parts share a head, or a block, of
    any array."""
    sizes: dict[str, int] = {}
    split = ("h", "d", "b") if with_rows else ("h", "d")

    def count(x: Any, names: str | None) -> None:
        for name, n in zip(names.split(), x.shape, strict=True) if names else ():
            if name in split:
                sizes[name] = math.gcd(sizes.get(name, 0), n)

    jax.tree.map(count, args, axes, is_leaf=lambda x: x is None)
    blocks, rest = divmod(sizes.pop("d", 1), CHANNELS)
    return sizes if rest else sizes | {"d": blocks}


def _warn_of_gathered(pool: Any, tokens: Any, where: At | Spans) -> None:
    """Warns, while the program is compiled, of what every device has to gather; see `warn_of_gathers`."""
    arrays = [x if isinstance(x, jax.Array) else None for x in (pool.states, *tokens)]
    axes = pool.axes(where), _axes(tokens)
    sizes = _sizes((pool, tokens), axes, where.are_rows)
    warn_of_gathers(("pool", *tokens._fields), arrays, (axes[0].states, *axes[1]), sizes)
