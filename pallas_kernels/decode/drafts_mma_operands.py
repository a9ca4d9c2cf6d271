"""The operands of tensor cores that `drafts_mma` makes of its tokens and of a ring before the state is there.

What is float32 becomes the sum of two bfloat16 terms, which have 16 of its 24 bits. Differences of log decays are
those of numbers of at least `LOG_FLOOR`, where a decay is 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.drafts_mma_cta import GRANULE, Cta
from pallas_kernels.decode.ring import LENGTH
from pallas_kernels.decode.tiles import lane_layout, load, log_decay, spread, write_strength
from pallas_kernels.decode.walk import Unit
from pallas_kernels.device.layouts import COL, L2NORM_EPS, ROW, along_columns, along_rows, iota
from pallas_kernels.device.memory import store_any, transposed

LOG_FLOOR = -104.0
"""exp of it is 0 in float32."""


class Raw(NamedTuple):
    """A unit's tokens and its ring in registers, as they were loaded."""

    A_log: jax.Array
    dt_bias: jax.Array
    vectors: list[tuple[jax.Array, jax.Array]]
    """q and k of the tokens of each of `Cta.groups`."""
    ring_k: jax.Array
    ring_u: jax.Array
    ring_g: jax.Array
    tokens: list[tuple[jax.Array, jax.Array, jax.Array]]
    """v, a and b of each token."""


class Held(NamedTuple):
    """A ring before the state is there."""

    total: jax.Array
    """Log decay since the checkpoint; 0 after a flush."""
    decay: jax.Array
    """exp of the log decay since the checkpoint, before the flush."""
    count: jax.Array
    """Tokens in the ring after the flush."""


def two_terms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 numbers whose sum is x, but for its last bits."""
    first = x.astype(jnp.bfloat16)
    return first, (x - first.astype(jnp.float32)).astype(jnp.bfloat16)


def halves(cta: Cta, x: jax.Array) -> jax.Array:
    """Sums of the two terms of columns."""
    return x[:, : cta.columns.half] + x[:, cta.columns.half :]


def load_raw(cta: Cta, at: Unit) -> Raw:
    """Loads a unit's tokens and its ring."""
    gmem, row, head = cta.gmem, at.row, at.head
    A_log, dt_bias = gmem.A_log[head], gmem.dt_bias[head]
    vectors = [
        (load(gmem.q.at[row, some, at.q_head], layout), load(gmem.k.at[row, some, at.k_head], layout))
        for some, _, layout in cta.groups()
    ]
    ring_k, ring_u = load(at.ring_k, cta.key_layout), load(at.ring_u, cta.value_layout)
    ring_g = load(at.ring_g, cta.g_layout.reduce(0))
    tokens = [
        (load(gmem.v.at[row, t, head, at.entries], cta.along_v), gmem.a[row, t, head], gmem.b[row, t, head])
        for t in range(cta.T)
    ]
    return Raw(A_log, dt_bias, vectors, ring_k, ring_u, ring_g, tokens)


def _normalised(x: jax.Array, layout: Any) -> jax.Array:
    """x / |x| of rows, or of one vector."""
    if x.ndim == 1:
        return x * lax.rsqrt(jnp.sum(x * x) + L2NORM_EPS)
    return x * spread(lax.rsqrt(jnp.sum(x * x, axis=1) + L2NORM_EPS), x.shape, 0, layout)


def store_vectors(cta: Cta, raw: Raw) -> None:
    """Stores normalised keys and queries, float32, and the products of each token's two."""
    for (of_k, of_q, layout), vectors in zip(cta.groups(), raw.vectors, strict=True):
        q, k = (x.astype(jnp.float32) for x in vectors)
        if cta.sizes.use_qk_l2norm:
            q, k = (_normalised(x, layout) for x in (q, k))
        store_any(cta.vectors.at[of_k], k)
        store_any(cta.vectors.at[of_q], q)
        if q.ndim == 1:
            cta.own[of_k] = jnp.sum(q * k)
        else:
            store_any(cta.own.at[of_k], jnp.sum(q * k, axis=1))


def store_log_decays(cta: Cta, raw: Raw, count: jax.Array) -> jax.Array:
    """Stores the log decay since each token of the ring. Returns the one since the checkpoint."""
    layout, shape = cta.g_layout, (LENGTH, LENGTH)
    entry = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=layout.reduce(0))
    gates = jnp.where(entry < count, raw.ring_g, 0.0)
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=layout) for i in range(2))
    later = jnp.where(column > row, spread(gates, shape, 1, layout), 0.0)
    store_any(cta.logs.at[pl.ds(0, LENGTH)], jnp.sum(later, axis=1))
    return jnp.sum(gates)


def store_ring(cta: Cta, raw: Raw, count: jax.Array, total: jax.Array, flushes: jax.Array) -> Held:
    """Stores the keys of the ring, and its values as they are or, before a flush, decayed."""

    def of_tokens(x, layout):
        """x, 0 behind the tokens."""
        entry = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=layout.reduce(1))
        return jnp.where(spread(entry < count, x.shape, 0, layout), x, jnp.zeros_like(x))

    layout = cta.value_layout
    store_any(cta.operands.at[pl.ds(0, LENGTH)], of_tokens(raw.ring_k, cta.key_layout))
    since = load(cta.logs.at[pl.ds(0, LENGTH)], layout.reduce(1))
    factor = jnp.where(flushes, jnp.exp(since), 1.0)
    u = of_tokens(raw.ring_u, layout).astype(jnp.float32)
    u = u * spread(factor, u.shape, 0, layout)
    for i, term in enumerate(two_terms(u)):
        store_any(cta.values.at[pl.ds(i * LENGTH, LENGTH)], term)
    left = jnp.where(flushes, 0, count)
    return Held(jnp.where(flushes, 0.0, total), jnp.exp(total), left)


def store_operands(cta: Cta) -> None:
    """Stores keys and queries as sums of two terms, behind the keys of the ring."""
    layout, half = lane_layout(16, 4), cta.columns.half
    for r in range(0, half, 8):
        x = load(cta.vectors.at[pl.ds(r, 8)], layout)
        for i, term in enumerate(two_terms(x)):
            store_any(cta.operands.at[pl.ds(LENGTH + i * half + r, 8)], term)


def _follow(cta: Cta, row: jax.Array, t: int) -> jax.Array:
    """The log decay until the token that token t of a tree follows. Notes the ancestors of t, as bits."""
    T, parent = cta.T, cta.gmem.parents[row, t]
    has_one, at = (parent >= 0) & (parent < t), jnp.clip(parent, 0, T - 1)
    bits = jnp.where(has_one, cta.ancestors[at] | lax.shift_left(jnp.int32(1), at), 0) if t else jnp.int32(0)
    cta.ancestors[t] = bits
    cta.ancestors[T + t] = bits
    return jnp.where(has_one, cta.decayed[at], 0.0) if t else jnp.float32(0)


def store_gates(cta: Cta, raw: Raw, row: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Stores the log decay until each token. Returns the tokens' log decays and write strengths."""
    log, gates, betas = jnp.float32(0), [], []
    for t, (_, a, b) in enumerate(raw.tokens):
        gates.append(log_decay(a, raw.A_log, raw.dt_bias))
        betas.append(write_strength(b, cta.sizes.allow_neg_eigval))
        if cta.gmem.parents is not None:
            log = _follow(cta, row, t)
        log = log + jnp.maximum(gates[-1], LOG_FLOOR)
        cta.decayed[t] = log
        cta.decayed[cta.T + t] = log
        cta.logs[LENGTH + t] = -log
    return gates, betas


def store_weights(cta: Cta, held: Held) -> None:
    """Stores the weights of the ring's values, and what the tokens say to each other."""
    T, half, operands = cta.T, cta.columns.half, cta.operands
    columns = transposed(operands.at[pl.ds(LENGTH, cta.columns.all)])
    product = cta.dev.product(operands.at[pl.ds(0, GRANULE)], columns)
    shape = (GRANULE, half)
    since = along_rows(load(cta.logs, ROW), half) + along_columns(load(cta.decayed, COL), GRANULE)
    row, column = iota(shape, 0), iota(shape, 1)
    # Rows of the ring have their number, rows of tokens LENGTH more.
    if cta.gmem.parents is None:
        is_earlier = row - LENGTH < jnp.where(column < T, column, column - T)
    else:
        bits = along_columns(load(cta.ancestors, COL), GRANULE)
        is_earlier = lax.shift_right_logical(bits, jnp.maximum(row - LENGTH, 0)) & 1 == 1
    counts = (row < held.count) | ((row >= LENGTH) & (row < LENGTH + T) & is_earlier)
    weight = jnp.where(counts, jnp.exp(since) * halves(cta, product), 0.0)
    store_any(cta.between, weight)
    store_any(cta.weights, jnp.concatenate(two_terms(weight), axis=1))
