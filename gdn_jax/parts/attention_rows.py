"""Softmax attention of a token of each row over a cache: grouped queries, and latent attention."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.partitioning import lie_on_explicit_axes
from gdn_jax.parts.attention import attend
from gdn_jax.parts.kernels import fused_op, run, usable
from gdn_jax.shapes import accumulation_dtype


def attention_rows(
    q: Float[Array, "B 1 H K"],
    k: Float[Array, "R S Hkv K"],
    v: Float[Array, "R S Hkv V"],
    length: Int[Array, " B"],
    *,
    rows: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B 1 H V"]:
    """o_h = sum_{j < length} softmax_j(q_h . k_j / sqrt(K)) v_j in each row, with keys and values of its group.

    The kernel reads the cache once, in bfloat16 and float16, by as many multiprocessors as there are; rows and heads
    may be split over devices. `attend` is what runs elsewhere. The result can be differentiated once, in reverse.

    Args:
      q: one query of each head; head i reads keys and values of head i // (H // Hkv).
      k, v: the cache of S slots. What the slots after `length` hold does not matter.
      length: tokens of each row; fewer than 1 count as 1, and more than S as S.
      rows: rows of a pool, which the kernel reads where they lie; None: k and v have the queries' rows.
      implementation: as for `parts.kernels.usable`.

    Returns:
      o in q's dtype. Numerics: scores and softmax in float32, weights rounded to v's dtype.
    """
    (B, _, H, K), N, length = q.shape, k.shape[2], jnp.maximum(length, 1)
    queries, cache = (q.reshape(B, N, H // N, K),), (k, v)
    if _reason(queries, cache, implementation) is None:
        return _rows(K**-0.5, queries, cache, length, rows).reshape(B, 1, H, -1)
    known = (jnp.arange(k.shape[1]) < length[:, None])[..., None, None]  # other slots may hold NaN
    k, v = (jnp.where(known, x if rows is None else x[rows], 0) for x in (k, v))
    return attend(q, k, v, causal=False, lengths=length)


def latent_rows(
    q: Float[Array, "B H C"],
    r: Float[Array, "B H R"],
    c: Float[Array, "N S C"],
    k: Float[Array, "N S R"],
    length: Int[Array, " B"],
    *,
    scale: float,
    rows: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B H C"]:
    """o_h = sum_{j < length} softmax_j((q_h . c_j + r_h . k_j) scale) c_j in each row.

    By the kernel of `attention_rows`, in which c is read once. Plain JAX reads it twice, and all scores several
    times. The result can be differentiated once, in reverse.

    Args:
      q, r: queries of the heads as they meet c, and as they meet k.
      c, k: the cache of S slots, of q's dtype. What the slots after `length` hold does not matter.
      length: tokens of each row; fewer than 1 count as 1, and more than S as S.
      scale: factor of the scores.
      rows: as for `attention_rows`.
      implementation: as for `parts.kernels.usable`.

    Returns:
      o in q's dtype. Numerics: scores and softmax in float32 (float64 of such arrays), weights rounded to c's dtype.
    """
    queries, cache = (q[:, None], r[:, None]), (c[:, :, None], k[:, :, None])
    by_kernel = _reason(queries, cache, implementation) is None
    return (_rows if by_kernel else _plain)(scale, queries, cache, jnp.maximum(length, 1), rows)[:, 0]


def _reason(queries: Sequence[Any], cache: Sequence[Any], implementation: str | None) -> str | None:
    """Why the kernel does not take a call; None if it does."""
    from pallas_kernels.rows import attention_rows as kernel

    if not usable(implementation, kernel):
        return "kernels do not run here"
    if lie_on_explicit_axes(queries[0], cache[0]):
        return "arrays lie on explicit axes of a mesh"
    return kernel.check_supported(queries, cache)


def _plain(scale: float, queries, cache, length, rows):
    """The operation in plain JAX, which is its derivative's, too."""
    cache = cache if rows is None else [x[rows] for x in cache]
    dtype, seen = queries[0].dtype, jnp.arange(cache[0].shape[1]) < length[:, None]
    # A weight of 0 is not enough: other slots may hold NaN, of a request before this one.
    cache = [jnp.where(seen[..., None, None], x, 0) for x in cache]
    if dtype == jnp.float16:  # XLA has no such products on a CPU
        queries, cache = ([x.astype(jnp.float32) for x in own] for own in (queries, cache))
    wide, keys, values = (
        accumulation_dtype(cache[0]),
        cache[: len(queries)],
        [*cache[len(queries) :], cache[0]],
    )
    scores = [
        jnp.einsum("bngk,bsnk->bngs", *x, preferred_element_type=wide)
        for x in zip(queries, keys, strict=True)
    ]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], sum(scores) * scale, -jnp.inf), axis=-1)
    return jnp.einsum("bngs,bsnv->bngv", weights.astype(values[0].dtype), values[0]).astype(dtype)


def _by_kernel(scale: float, *args):
    from pallas_kernels.rows.attention_rows import attention_rows

    return attention_rows(*args, scale=scale)


def _forward(scale: float, queries, cache, length, rows):
    of_cache = "b . h ." if rows is None else ". . h ."
    operands = ("b h . .",) * len(queries), (of_cache,) * len(cache), "b", "b"
    sizes = {"b": length.shape[0], "h": cache[0].shape[2]}
    args = queries, cache, length, rows
    return run(_by_kernel, scale, args, operands, "b h . .", sizes), args


def _backward(scale: float, saved, do):
    queries, cache, length, rows = saved
    return *jax.vjp(partial(_plain, scale, length=length, rows=rows), queries, cache)[1](do), None, None


_rows = fused_op(_forward, _backward)
