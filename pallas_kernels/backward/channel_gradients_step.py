"""A step of the gradients where each channel decays by itself: 16 channels of a chunk and output head, in registers.

What `backward.channel_gradients` and `ampere.channel_gradients` have in common: the equations of the first one, from
products with the states at the chunk's borders. What a step belongs to knows its device and shared memory (`own`):
scores(wg), load(name, at), and the buffers gates, totals, decays and operands by warpgroup; `at` names the step.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.backward.channel_gradients_levels import (
    Sums,
    Tokens,
    add_gates,
    gates_of_blocks,
    products_between,
    products_within,
)
from pallas_kernels.chunks.merging import BLOCK
from pallas_kernels.chunks.pair_levels import Decays, Masks
from pallas_kernels.device import rows as block_rows
from pallas_kernels.device.layouts import CHUNK, LOG2_E, RESET_G2, along_rows, zeros

WIDTH = BLOCK
"""Channels of a step."""

LANES = 8
"""Columns of a sum over channels that is still spread over the threads of a row."""


class ChannelGradients(NamedTuple):
    """Results of `channel_gradients`, here and in `pallas_kernels.ampere`, where tokens [places] and their widths are
    padded."""

    dq: Float[Array, "*tokens HO K"]
    dk: Float[Array, "*tokens HO K"]
    de: Float[Array, "*tokens HO K"] | None
    dg: Float[Array, "*tokens HO K"]
    dv_u: Float[Array, "chunks HO C"]
    """M beta dbeta."""
    k_late: Float[Array, "chunks HO C"]
    """The part of k_write that comes through the state after the chunk."""
    k_write: Float[Array, "chunks HO C"]
    """M dbeta."""


def _tokens(own: Any, at: Any, masks: Masks) -> Tokens:
    """The tokens of a step. They are loaded anew for every use, for they would take registers in between."""
    q, k = (own.load(name, at).astype(jnp.float32) for name in ("q", "k"))
    if masks.halves:
        k = block_rows.joined(own.dev, own.load("e", at).astype(jnp.float32), k)
        return Tokens(masks.of_second(q), k, k)
    return Tokens(q, k, own.load("e", at).astype(jnp.float32) if own.erases else k)


def _gates(own: Any, at: Any) -> jax.Array:
    """log2 of the decays of a step."""
    return jnp.maximum(own.load("g", at) * LOG2_E, RESET_G2)


def levels_of_step(own: Any, at: Any, masks: Masks) -> tuple[Sums, jax.Array, jax.Array]:
    """The levels of a step, and its decays from the chunk's start to every token and from it to the end.

    LLVM would put off sums and products until they are used, and what they are made of would take registers: the
    barriers are against that.
    """
    smem, dev, scores, gates = own.smem, own.dev, own.scores(at.wg), own.smem.gates.at[at.wg]
    sums, decays = Sums(*[zeros((CHUNK, WIDTH), jnp.float32)] * 4), None
    alpha, totals = jnp.exp2(_gates(own, at)), smem.totals.at[at.wg]
    if masks.halves:
        alpha = masks.of_first(alpha, 1.0)
    for n in range(4):
        later = masks.bits[n]
        factor, decays = Decays.merged(masks, decays, alpha, n)
        operands = _tokens(own, at, masks).operands(factor, later)
        products = products_within(dev, masks, n, scores, operands)
        sums, w = sums.with_level(factor, later, operands, products)
        decays_here = n > 0 or not masks.halves
        dg = add_gates(dev, sums.dg, w, gates.at[n]) if decays_here else sums.dg
        sums = _of_halves(masks, sums._replace(dg=dg))
        if decays_here:
            sums, decays = masks.computed(sums, decays)
    assert decays is not None
    first, rest = (smem.decays.at[at.wg, n] for n in range(2))
    block_rows.store_first_rows(dev, first, decays.first)
    block_rows.store_first_rows(dev, rest, decays.rest)
    dev.commit()
    between = block_rows.block_decays(dev, first, rest, WIDTH)
    inside = [jnp.where(masks.bits[4 + n], decays.from_first, decays.to_end) for n in range(2)]
    factors = inside[0] * between.near, inside[1] * between.far
    ends = decays.from_first * decays.first * between.before, decays.to_end * between.after
    _, (factors, ends) = masks.computed((), (factors, ends))
    for n, factor in enumerate(factors):
        later = masks.bits[4 + n]
        operands = _tokens(own, at, masks).operands(factor, later)
        products = products_between(dev, smem.operands.at[at.wg], n == 1, scores, operands)
        sums, w = sums.with_level(factor, later, operands, products)
        dg = add_gates(dev, sums.dg, w, gates.at[4 + n], totals.at[n])
        sums = lax.optimization_barrier(_of_halves(masks, sums._replace(dg=dg)))
    return sums, *ends


def _of_halves(masks: Masks, sums: Sums) -> Sums:
    """The sums that are needed: first halves have no queries, so their sums are not computed."""
    return sums._replace(dq=jnp.where(masks.bits[0], sums.dq, 0.0)) if masks.halves else sums


def gradients_of_step(own: Any, at: Any, masks: Masks, sums: Sums, ends, products, gl, diagonal, written):
    """dq, dk, de and dg of a step by name, and its parts of k . late and k . dk added to `written`.

    Args:
      sums, ends: of `levels_of_step`.
      products: dO h, dv h and u dh of the step, and the products of h and dh summed over blocks of 64 rows.
      gl: the decay of the whole chunk, in layout COL.
      diagonal: of dP, in layout ROW.
    """
    dev, dtype, (from_start, to_end), (read_q, read_e, late, inner) = own.dev, own.dtype, ends, products
    read_q, read_e = own.sizes.scale * from_start * read_q, -from_start * read_e
    late, (q, k, e), diagonal = to_end * late, _tokens(own, at, masks), along_rows(diagonal, WIDTH)
    terms = q * read_q + e * read_e, k * late, inner
    dq, dk, de = sums.dq + read_q + diagonal * k, sums.dk + late + diagonal * q, sums.de + read_e
    dq = _of_halves(masks, sums._replace(dq=dq)).dq
    written = [
        x + y[:, 0:LANES] + y[:, LANES:WIDTH] for x, y in zip(written, (terms[1], k * dk), strict=True)
    ]
    results = [x.astype(dtype) for x in (dq, dk if own.erases else dk + de, de)]
    (dq, dk, de), terms, written = lax.optimization_barrier((results, terms, written))
    dg, totals, gates = sums.dg, own.smem.totals.at[at.wg], own.smem.gates.at[at.wg]
    for n, x in enumerate(terms, 2):
        # What is written to the state is most of dg where its cotangent is large: it is not rounded to 8 bits.
        dg = add_gates(dev, dg, x, gates.at[4 + n] if n < 4 else None, totals.at[n], parts=2 if n == 3 else 1)
    dev.commit()
    decays, dg = _gates(own, at) > RESET_G2, dg + gates_of_blocks(totals, gl)
    if masks.halves:
        first, second = (functools.partial(block_rows.half_of, dev, n=n) for n in range(2))
        dq, dk, de, dg = second(dq), second(dk), first(dk), first(dg)
    dg = jnp.where(decays, dg, 0.0)
    return dict(q=dq, k=dk, e=de, g=dg), written
