"""The embedding of tokens, with a gradient that repeats bit for bit and does not sort the cotangents."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.parts.kernels import fused_op, run, token_axes, usable


def embed(
    embedding: Float[Array, "V D"], tokens: Int[Array, "*S"], *, implementation: str | None = None
) -> Float[Array, "*S D"]:
    """The rows of an embedding that tokens name.

    With the kernel the result can be differentiated once, in reverse: the cotangents of an id are added in the order
    of its tokens, in float32.

    Args:
      embedding: [V, D], any floating dtype.
      tokens: [..] integers in [-V, V), where -1 is the last row. Another value gives NaN and has no gradient.
      implementation: None takes a kernel where there is one (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not. "mosaic_gpu" is None with a warning where there is none.

    Returns:
      [.., D] in the embedding's dtype.
    """
    from pallas_kernels.layer import embedding as kernel

    reason = kernel.check_supported(embedding)
    if usable(implementation, kernel, part="the embedding's gradient", reason=reason):
        names, sizes = token_axes(jax.ShapeDtypeStruct((*tokens.shape, 1), embedding.dtype), 1)
        operands = (". .", names.removesuffix(" ."))
        return on_explicit_shards(partial(_embed, None), (embedding, tokens), operands, names, sizes)
    return _take(embedding, tokens)


def _take(embedding, tokens):
    return jnp.take(embedding, tokens, axis=0, mode="fill")


def _forward(_, embedding, tokens):
    return _take(embedding, tokens), (tokens, jnp.zeros((embedding.shape[0], 0)))


def _backward(_, saved, dx):
    tokens, like = saved
    names, sizes = token_axes(dx, 1)
    operands = (names.removesuffix(" ."), names)
    return run(_gradient, like.shape[0], (tokens, dx), operands, ". . +b +t", sizes), None


def _gradient(V, tokens, dx):
    from pallas_kernels.layer.embedding import embedding_gradient

    ids = tokens.reshape(-1).astype(jnp.int32)
    ids = jnp.where(ids < 0, ids + V, ids)
    ids = jnp.where(ids < 0, V, ids)  # those that name no row come last
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    # Unrolled, for a loop would be five kernels a turn.
    numbers = jnp.arange(V + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(ids[order], numbers, method="scan_unrolled").astype(jnp.int32)
    return embedding_gradient(dx.reshape(-1, dx.shape[-1]), order, starts)


_embed = fused_op(_forward, _backward)
