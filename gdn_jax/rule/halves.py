"""A token of Erase-then-Delta Attention as two rows of the delta rule.

The first half decays and erases at a key of its own, the second half erases and writes, and is read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from gdn_jax.rule.call import CHANNELS, ERASURES, Arrays, Call


def together(
    first: Shaped[Array, "B T *_"] | None, second: Shaped[Array, "B T *_"] | None, group: int = 1
) -> Shaped[Array, "B T2 *_"]:
    """The rows of both halves, zeros for None: `group` tokens' first halves, and then their second ones."""
    like = second if first is None else first
    assert like is not None
    parts = [(jnp.zeros_like(like) if x is None else x)[:, :, None] for x in (first, second)]
    B, T, _, *rest = parts[0].shape
    parts = [x.reshape(B, T // group, 1, group, *rest) for x in parts]
    return jnp.concatenate(parts, axis=2).reshape(B, 2 * T, *rest)


def read(rows: Shaped[Array, "B T2 *_"]) -> Shaped[Array, "B T *_"]:
    """The second halves of rows that follow each other in time."""
    return rows[:, 1::2]


def in_rows(call: Call, x: Arrays) -> tuple[Call, Arrays]:
    """A call with gates `ERASURES` as one with per-channel decay, whose rows follow each other in time."""
    assert call.gates == ERASURES
    x, ids = call.known(x), x.segment_ids
    rows = Arrays(
        together(None, x.q),
        together(x.write, x.k),
        together(None, x.v),
        None if x.g is None else together(x.g, None),
        together(x.erase[..., 0], x.erase[..., 1]),
        None,
        x.initial_state,
        None if x.cu_seqlens is None else 2 * x.cu_seqlens,
        None if ids is None else jnp.repeat(ids, 2, axis=1),
    )
    return call._replace(gates=CHANNELS, known_lengths=None), rows


def forward_in_rows(forward: Callable[..., Any], call: Call, x: Arrays) -> tuple[Any, Any, Any]:
    """A kernel set's forward of a call with gates `ERASURES`, by its forward of the rows."""
    o, final, residuals = forward(*in_rows(call, x))
    return read(o), final, residuals


def backward_in_rows(
    backward: Callable[..., Any], call: Call, x: Arrays, residuals: Any, cotangents: Any
) -> Arrays:
    """A kernel set's backward of a call with gates `ERASURES`, by its backward of the rows."""

    def of_rows(*floats):
        return in_rows(call, Arrays._make((*floats, *x[7:])))[1].floats

    _, pull_back = jax.vjp(of_rows, *x.floats)
    d = backward(*in_rows(call, x), residuals, cotangents._replace(do=together(None, cotangents.do)))
    return Arrays._make((*pull_back(d.floats), None, None))


def with_strengths(erase: jax.Array, write: jax.Array) -> Shaped[Array, "B T HO 2"]:
    """Strengths of both halves in one array, of the first one and of the second one."""
    dtype = jnp.result_type(erase, write)
    return jnp.stack([erase.astype(dtype), write.astype(dtype)], axis=-1)
