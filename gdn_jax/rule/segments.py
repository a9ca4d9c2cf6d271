"""Segments of a row: the state is empty where one begins, and a NaN or an infinity of one does not leave it.

Both forms of a rule compute a row as one: across a change of id the decay is 0, and 0 times NaN is NaN. So a number
that is not finite enters a form as 0, and every result of its segment becomes NaN behind the form: to it is added the
sum of 0 x over all inputs x of the segment, which is 0 or NaN. Derivatives do the same with tangents, and with
cotangents in the other direction: that sum is its own transpose, and a cotangent that is not finite enters as 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from gdn_jax.shapes import SegmentIds, accumulation_dtype, changes_segment

# Both are linear, and each is the transpose of the other.
_enter_p, _leave_p = Primitive("gdn_enter_segments"), Primitive("gdn_leave_segments")


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


for _primitive, _transpose, _form in ((_enter_p, _leave_p, _finite), (_leave_p, _enter_p, lambda x: x)):
    _primitive.def_impl(_form)
    _primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(_primitive, mlir.lower_fun(_form, multiple_results=False))
    ad.deflinear2(_primitive, lambda cotangent, _, transpose=_transpose: [transpose.bind(cotangent)])
    batching.defvectorized(_primitive)


OF_ROWS = np.s_[:], -1
"""Owners of outputs and final states, for `within`."""


def of_chunks(T: int, chunk_size: int) -> np.ndarray:
    """Owners of the states at the start of each chunk, for `within`: the tokens before it."""
    return np.maximum(np.arange(0, max(T, 1), chunk_size) - 1, 0)


def within(
    form: Callable[..., Any],
    segment_ids: SegmentIds | None,
    owners: Any,
    *,
    g: Float[Array, "B T HO *K"] | None,
    initial_state: Float[Array, "N HO _ _"] | None,
    **tokens: Float[Array, "B T ..."],
) -> Any:
    """Computes form(g=g, initial_state=initial_state, **tokens), where nothing reaches from one segment to another.

    The results of a segment with a NaN or an infinity are NaN as a whole, in every head. Without any, results are
    those of the form with resets where segments begin, bit for bit but for the sign of a zero.

    Cost: the form runs once. Beside it every array is read for its sum of 0 x, and every result has one number a
    token added; so is it in each order and direction of a derivative. Times: docs/accuracy.md.

    Args:
      form: a form in plain JAX of a whole rule; -inf in g is a reset.
      segment_ids: segments of the rows; the initial states belong to the first ones. None: the form as it is.
      owners: tokens whose segments the results belong to, as an index of the axis T; a tree like the results.
      g, initial_state, tokens: the arrays that form takes.
    """
    if segment_ids is None or not segment_ids.shape[1]:
        return form(g=g, initial_state=initial_state, **tokens)
    assert g is not None
    starts = changes_segment(segment_ids)
    g = jnp.where(jnp.expand_dims(starts, tuple(range(2, g.ndim))), -jnp.inf, g)
    resets = jnp.isneginf(g)
    g = jnp.where(resets, 0, g)
    dtype = accumulation_dtype(g, initial_state, *tokens.values())
    taken = _taken(g, 2, dtype)
    for y in tokens.values():
        taken = taken + _taken(y, 2, dtype)
    if initial_state is not None:
        taken = taken.at[:, 0].add(_taken(initial_state, 1, dtype))
        initial_state = _enter_p.bind(initial_state)
    g = jnp.where(resets, -jnp.inf, _enter_p.bind(g))
    tokens = {name: _enter_p.bind(y) for name, y in tokens.items()}
    results = form(g=g, initial_state=initial_state, **tokens)

    taken = jax.vmap(_over_segments)(taken, jnp.cumsum(starts.astype(jnp.int32), 1))

    def give_back(owner, y):
        back = taken[:, owner].astype(y.dtype)
        return _leave_p.bind(y) + jnp.expand_dims(back, tuple(range(back.ndim, y.ndim)))

    return jax.tree.map(give_back, owners, results)


def _taken(x: jax.Array, axes: int, dtype: jnp.dtype) -> jax.Array:
    """Sum of 0 x over all but the first axes: 0, or NaN where a number is not finite."""
    return jnp.sum(0 * x.astype(dtype), tuple(range(axes, x.ndim)))


def _over_segments(x: Float[Array, " T"], segment: jax.Array) -> Float[Array, " T"]:
    """Sum over the segment of each token."""
    return jax.ops.segment_sum(x, segment, len(x), indices_are_sorted=True)[segment]
