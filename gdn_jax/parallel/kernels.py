"""The rule over split tokens by the GPU kernels: what tokens do to a state, and the rest from known states.

The kernels cut long rows into segments anyway and find what each segment does to a state. Merged over a device's
segments that is what the whole device does, so that splitting tokens costs hardly more than what is sent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax import gates
from gdn_jax.parallel.borders import Borders
from gdn_jax.parallel.prefix import Affine
from gdn_jax.shapes import RuleArrays


class Saved(NamedTuple):
    """What the forward leaves for the backward."""

    x: RuleArrays
    """initial_state: what this device's tokens started from."""
    residuals: Any


def _normalized(use_qk_l2norm: bool, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q and k as the kernels take them."""
    return (gates.l2norm(q), gates.l2norm(k)) if use_qk_l2norm else (q, k)


def forward(
    x: RuleArrays, borders: Borders, *, scale: float, use_qk_l2norm: bool, interpret: Any = None
) -> tuple[Affine, Callable[[jax.Array], tuple[jax.Array, jax.Array, Saved]]]:
    """The forward up to what enters, and the rest of it.

    Args:
      x: this device's tokens; cu_seqlens is that of the tokens here.
      borders: the sequences that cross its borders.

    Returns:
      What the tokens do to the states of sequences that leave, from the first segment of each that lies here; and a
      function from the states that the tokens start from to o, the final states and what the backward needs.
    """
    from pallas_kernels.forward import rule

    q, k = _normalized(use_qk_l2norm, x.q, x.k)
    options = dict(scale=scale, cu_seqlens=x.cu_seqlens, open_sequence=borders.last, interpret=interpret)
    prepared, finish = rule.prepare_open(q, k, x.v, x.g, x.beta, **options)

    def rest(start: jax.Array) -> tuple[jax.Array, jax.Array, Saved]:
        o, final, residuals = finish(start)
        return o, final, Saved(x._replace(initial_state=start), residuals)

    return _merged(x, prepared, borders.last), rest


def backward(
    saved: Saved,
    borders: Borders,
    do,
    ends,
    *,
    scale: float,
    use_qk_l2norm: bool,
    head_slices: int,
    interpret=None,
) -> tuple[jax.Array, Callable[[jax.Array], tuple[Any, ...]]]:
    """The backward up to what enters from behind, and the rest of it.

    Args:
      ends: cotangents of the final states, zeros for a sequence that leaves.

    Returns:
      The cotangent of the states that entered; and a function from the cotangents of all final states to those of q,
      k, v, g, beta and the states that the tokens started from.
    """
    from pallas_kernels.backward import rule

    x, residuals = saved
    (q, k), through_norm = jax.vjp(lambda q, k: _normalized(use_qk_l2norm, q, k), x.q, x.k)
    options = dict(scale=scale, cu_seqlens=x.cu_seqlens, interpret=interpret)
    e = rule.open_adjoints(q, k, do, residuals, ends, **options)
    segments = residuals.segments

    def rest(ends: jax.Array) -> tuple[Any, ...]:
        behind = jnp.swapaxes(borders.pick(ends, borders.last), -1, -2).astype(e.dtype)
        K64, V64 = e.shape[-1], e.shape[-2]
        behind = jnp.pad(behind, ((0, 0), (0, 0), (0, V64 - behind.shape[2]), (0, K64 - behind.shape[3])))
        _, end = _items_of(segments.items, borders.last, x.k.shape[0])
        arguments = q, k, *x[2:6], residuals, do, ends
        config = rule.Config(segments=True, head_slices=head_slices)
        out = rule.backward(*arguments, config=config, adjoints=e.at[end - 1].set(behind), **options)
        return *through_norm((out.dq, out.dk)), *out[2:]

    return _merged(x, segments._replace(starts=e), borders.first, backwards=True).e, rest


def _items_of(items: Any, sequence: Int[Array, ""] | None, rows: int) -> tuple[jax.Array, jax.Array]:
    """First item and end of the items of sequences that cross a border: of every row, or of one packed sequence."""
    if sequence is None:
        per_row = items.split.num_items // rows
        first = jnp.arange(rows) * per_row
        return first, first + per_row
    first = items.tables.first_item
    return first[sequence][None], first[sequence + 1][None]


def _merged(
    x: RuleArrays, segments: Any, sequence: Int[Array, ""] | None, *, backwards: bool = False
) -> Affine:
    """What the segments of sequences that cross a border do to their states, or to cotangents, one after another.

    A sequence's last item is an empty segment, or none follows it: only its cotangent counts.

    Args:
      segments: with e, or starts in its place, m_t and items.
    """
    e, m_t, items = (segments.starts if backwards else segments.e), segments.m_t, segments.items
    first, end = _items_of(items, sequence, x.k.shape[0])
    number = items.split.num_items // x.k.shape[0]
    if sequence is not None:  # at most so many of one sequence
        number = min(number, -(-x.k.shape[1] // (64 * items.split.segment_chunks)) + 2)
    index = jnp.minimum(first, items.split.num_items - number)[:, None] + jnp.arange(number)
    inside, is_last = (index >= first[:, None]) & (index < end[:, None]), index == end[:, None] - 1
    inside, is_last = inside[..., None, None, None], is_last[..., None, None, None]
    e, m = e[index], m_t[index].astype(e.dtype)
    m = jnp.where(inside & ~is_last, m, jnp.eye(m.shape[-1], dtype=m.dtype))
    e = jnp.where(inside if backwards else inside & ~is_last, e, 0)
    e, m = (
        jnp.swapaxes(e, -1, -2),
        m if backwards else jnp.swapaxes(m, -1, -2),
    )  # [K, V], and the map of these
    if backwards:
        e, m = jnp.flip(e, 1), jnp.flip(m, 1)
    e, m = _in_order(e, m)
    K, V = x.k.shape[3], x.v.shape[3]
    return Affine(e[..., :K, :V], m[..., :K, :K])


def _in_order(
    e: Float[Array, "R S HO K V"], m: Float[Array, "R S HO K K"]
) -> tuple[Float[Array, "R HO K V"], Float[Array, "R HO K K"]]:
    """The maps h -> m h + e along axis 1 one after another as one map; neighbours are merged, level by level."""

    def product(a, b):
        return jnp.einsum("...kj,...jv->...kv", a, b, precision=lax.Precision.HIGHEST)

    while e.shape[1] > 1:
        if e.shape[1] % 2:
            identity = jnp.zeros_like(m[:, :1]) + jnp.eye(m.shape[-1], dtype=m.dtype)
            e, m = jnp.concatenate([e, jnp.zeros_like(e[:, :1])], 1), jnp.concatenate([m, identity], 1)
        e = product(m[:, 1::2], e[:, 0::2]) + e[:, 1::2]
        m = product(m[:, 1::2], m[:, 0::2])
    return e[:, 0], m[:, 0]
