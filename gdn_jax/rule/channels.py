"""The delta rule with per-channel decay in its chunkwise WY form.

Inside a chunk of C tokens with the state h at its start, a_t = exp(g_t) [K], e = erase * k and x = write * v:

    kkt      = strictLower(products(e, k))             `products.decayed_products`
    A        = (I + kkt)^-1
    v_new    = A (x - (e from_start) h)                the values that are really written
    o        = scale ((q from_start) h + products(q, k) v_new)
    h'       = exp(sum g) h + (k to_end)^T v_new

A decay of each head is the case of equal channels, which `rule.chunked` computes with fewer and exact operands.

Source: Kimi Team, "Kimi Linear", section 3; fla's `chunk_kda`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.rule import packing
from gdn_jax.rule.chunks.recurrence import ChannelTransition
from gdn_jax.rule.chunks.rows import CPU_STRETCH, Row, in_stretches, stretch_of
from gdn_jax.rule.chunks.stages import Numerics
from gdn_jax.rule.chunks.stretches import packed_in_stretches
from gdn_jax.rule.products import decayed_products

# Tokens times heads of a stretch on a GPU. With per-channel decay the operands of every product are arrays of
# float32 of their own, of which a whole row's would take several GiB; see the log of the chunked form.
_GPU_STRETCH = 2**16
# Tokens times heads times channels of a stretch on a CPU at most, and tokens of a chunk there: longer ones are no
# faster, and each doubling of a chunk is a level more to compile (see the log of the chunked form).
_CPU_STRETCH = 2**17
_CPU_CHUNK = 16


def chunked_rule(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO K"],
    erase: Float[Array, "B T HO _"],
    write: Float[Array, "B T HO _"],
    initial_state: Float[Array, "N HO K V"] | None,
    *,
    scale: float | Float[Array, ""],
    cu_seqlens: Int[Array, "N1"] | None,
    chunk_size: int,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
    """The rule in chunks of `chunk_size` tokens, for any decay. A reset is a gate of -inf.

    Args: those of `definition.recurrent_rule`, and
      chunk_size: tokens of a chunk, a power of two. On a CPU chunks have at most 16 tokens.

    Returns:
      o [B, T, HO, V] and the final states [N, HO, K, V], in the dtype of g.

    Numerics: gates, the triangular solve, states and sums in g's dtype (float32 or float64). So are the operands of
      the products of tokens with tokens, which hold decays here: rounded to bfloat16 they left a state that is mostly
      erased off by 8e-3 (the case write-0). The operands of what reads a state are bfloat16 when q is.
    Memory: the backward pass keeps the inputs and the residuals named in `chunks.rows.RESIDUAL_NAMES`, and
      recomputes the rest. The other temporary arrays of either pass are those of one stretch, and of packed rows the
      inputs in chunks with their cotangents. No array holds a number for two tokens and a channel.
    """
    B, T, HO, _ = g.shape
    arrays, rule = (q, k, v, g, erase, write), partial(_rule, Numerics.of(q.dtype, g.dtype))
    tokens = T
    if jax.default_backend() == "cpu":
        chunk_size = min(chunk_size, _CPU_CHUNK)
    if cu_seqlens is None:
        on_cpu = min(CPU_STRETCH, _CPU_STRETCH // k.shape[-1])
        tokens, chunk_size = stretch_of(T, chunk_size, B * HO, on_cpu=on_cpu, on_gpu=_GPU_STRETCH)
    else:
        rows = chunk_size * packing.max_packed_chunks(T, cu_seqlens.shape[0] - 1, chunk_size)
        at_once, _ = stretch_of(rows, chunk_size, HO, on_cpu=None, on_gpu=_GPU_STRETCH)
        if at_once < rows:
            table = packing.packed_chunks(cu_seqlens, T, chunk_size)
            return packed_in_stretches(rule, table, at_once // chunk_size, arrays, initial_state, scale)

    def run(q, k, v, g, *rest):
        return rule(_row(q, k, v, g, cu_seqlens, chunk_size), q, k, v, g, *rest)

    return in_stretches(run, tokens, arrays, initial_state, scale)


def _rule(numerics, row, q, k, v, g, erase, write, initial_state, scale):
    dtype = numerics.accumulate
    chunks = [row.to_chunks(x).astype(dtype) for x in (q, k, v, g, erase, write)]
    # Without the barrier XLA's CPU lays tokens out in chunks again wherever one of these arrays is read.
    q, k, v, g, erase, write = lax.optimization_barrier(chunks)
    e = erase * k
    (reads, kkt), from_start, to_end = decayed_products((q, e), k, g, numerics.wide())
    transition = ChannelTransition(jnp.exp(g.sum(-2)), e * from_start, k * to_end)
    states, final = row.solve(numerics, _strict(kkt), transition, write * v, initial_state)
    pairs = numerics if states.v_new.dtype == numerics.operand else numerics.wide()
    o = numerics.einsum("...ck,...kv->...cv", q * from_start, states.h)
    o = scale * (o + pairs.einsum("...ij,...jv->...iv", reads, states.v_new))
    return row.from_chunks(o), final


def chunk_states_of(
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO K"],
    erase: Float[Array, "B T HO _"],
    write: Float[Array, "B T HO _"],
    initial_state: Float[Array, "N HO K V"] | None,
    *,
    cu_seqlens: Int[Array, "N1"] | None,
    chunk_size: int,
) -> Float[Array, "B L HO K V"]:
    """State at the start of every chunk, in the dtype of g and computed in it; differentiable.

    With cu_seqlens the chunks are those of `packing.packed_chunks`; unused ones hold 0.

    Args: those of `chunked_rule`.
    """
    numerics = Numerics(g.dtype, g.dtype, lax.Precision.HIGHEST)
    row = _row(k, k, v, g, cu_seqlens, chunk_size)
    k, v, g, erase, write = (row.to_chunks(x).astype(g.dtype) for x in (k, v, g, erase, write))
    (kkt,), from_start, to_end = decayed_products((erase * k,), k, g, numerics)
    transition = ChannelTransition(jnp.exp(g.sum(-2)), erase * k * from_start, k * to_end)
    states, _ = row.solve(numerics, _strict(kkt), transition, write * v, initial_state)
    return row.states(states.h)


def _row(q, k, v, g, cu_seqlens, chunk_size: int) -> Row:
    counts = (q.shape[2], k.shape[2], v.shape[2], g.shape[2])
    return Row(cu_seqlens, k.shape[0], k.shape[1], counts, chunk_size)


def _strict(products: jax.Array) -> jax.Array:
    """The products of tokens with earlier ones alone."""
    C = products.shape[-1]
    return jnp.where(jnp.tril(jnp.ones((C, C), bool), -1), products, 0)
