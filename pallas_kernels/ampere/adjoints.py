"""The walk backwards: the cotangents of the states at the borders of chunks, and the gradient of v.

With the cotangent of the state transposed, dh [V, K], and for one chunk (all of it float32 but operands of products)

    Z = (dh K^T) Dr + dO^T P          dV = Z T
    dh <- 2^G_0 (gl dh + scale (dO^T D) Q - (dV D) K)

where D_i = 2^(G_i - G_0), Dr_i = beta_i 2^(G_last - G_i), gl = 2^(G_last - G_0), G = g2_cum, and T and P are those of
`prepare`. D counts from the chunk's first token, so that what is rounded holds as few decays as it can: float16 ends
at 2^-24. Write strengths are in P and Dr. It is the walk of `backward.chain`.

Where each channel decays by itself kg, qg and kr of `channel_prepare` hold the decays, and scale:

    Z = (dh kr^T) diag(beta) + dO^T P          dV = Z T          dh <- dh Diag(gl) + dO^T qg - dV kg

Inputs (GMEM): q [places, Hq K], k [places, Hk K], do [places, HO V], t and p [chunks HO C, C], factors = (D, Dr,
2^G_0 repeated, nothing) [chunks HO, 4 C] f32, dh_T [N, HO, V, K] or [.., K, V] f32 (optional), first_chunk [N + 1]
int32.
Outputs (GMEM): dh [chunks HO V, K], the cotangent behind each chunk, dv [places, HO V], both in k's dtype (or none of
them), and dh_0 [N, HO, V, K] or [.., K, V] f32.
Threads, barriers, hardware, limits: `ampere.walk`. Shared memory: `walk.memory`, 98 KB at K = V = 128.
Source: adjoint of Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ampere import decays
from pallas_kernels.ampere.walk import ROWS, Config, Cta, start
from pallas_kernels.device.layouts import CHUNK, WGMMA, zeros
from pallas_kernels.device.memory import store_state

VECTORS = 4
"""Vectors of `adjoint_factors`."""


class Decays(NamedTuple):
    """How a chunk decays."""

    step: Callable[[Cta, Any, jax.Array], jax.Array]
    """One chunk: the cotangent before it, from the one behind."""
    late: tuple[str, ...]
    """Tiles that are read to the end of a step."""
    early: tuple[str, ...]
    """The others."""


def adjoint_factors(
    g2_cum: Float[Array, "chunks HO C"], beta: Float[Array, "chunks HO C"]
) -> Float[Array, "chunks HO C4"]:
    """D, Dr, the first token's decay and nothing for every chunk, side by side."""
    first = g2_cum[..., :1]
    dr = jnp.exp2(g2_cum[..., -1:] - g2_cum) * beta
    vectors = jnp.exp2(g2_cum - first), dr, jnp.broadcast_to(jnp.exp2(first), dr.shape), jnp.zeros_like(dr)
    return jnp.concatenate(vectors, axis=-1)


def _step(cta: Cta, i, dh: jax.Array) -> jax.Array:
    """One chunk: the cotangent before it."""
    dev, gmem, q_tile, k_tile = cta.dev, cta.gmem, cta.slot("q", i), cta.slot("k", i)
    nothing = zeros((ROWS, CHUNK), jnp.float32)
    rounded = dh.astype(cta.dtype)
    if gmem.dh is not None:
        dev.store(gmem.dh.at[cta.states_of(i)], rounded)
    late = dev.add_transposed(nothing, dev.left(rounded), k_tile)
    do_t = plgpu.load(cta.own_columns("do", i), layout=WGMMA)
    z = dev.add(late * cta.factor(1, i), dev.left(do_t), cta.slot("p", i))
    dv = dev.add(nothing, dev.left(z.astype(cta.dtype)), cta.slot("t", i))
    if gmem.dv is not None:
        dev.store_transposed(gmem.dv.at[cta.tokens_of(i)], dv.astype(cta.dtype))
    d = cta.factor(0, i)
    read = dev.left((do_t.astype(jnp.float32) * (d * cta.sizes.scale)).astype(cta.dtype))
    written = dev.left((dv * -d).astype(cta.dtype))
    decay, first = cta.number(CHUNK - 1, i), cta.number(2 * CHUNK, i)
    cta.leave_early_tiles(i, HEADS.early)
    before = dev.add(dh * decay, read, q_tile, step=16)
    return dev.add(before, written, k_tile, step=16) * first


def _step_of_channels(cta: Cta, i, dh: jax.Array) -> jax.Array:
    """One chunk: the cotangent before it. What queries read is added early, and then leaves its tile."""
    dev, gmem, dtype = cta.dev, cta.gmem, cta.dtype
    nothing = zeros((ROWS, CHUNK), jnp.float32)
    rounded = dh.astype(dtype)
    if gmem.dh is not None:
        dev.store(gmem.dh.at[cta.states_of(i)], rounded)
    late = dev.add_transposed(nothing, dev.left(rounded), cta.slot("kr", i))
    do_t = dev.left(plgpu.load(cta.own_columns("do", i), layout=WGMMA))
    z = dev.add(late * decays.CHANNELS.strengths(cta, i), do_t, cta.slot("p", i))
    before = dev.add(dh * decays.CHANNELS.decay(cta, i), do_t, cta.slot("qg", i), step=16)
    dv = dev.add(nothing, dev.left(z.astype(dtype)), cta.slot("t", i))
    if gmem.dv is not None:
        dev.store_transposed(gmem.dv.at[cta.tokens_of(i)], dv.astype(dtype))
    written = dev.left((-dv).astype(dtype))
    cta.leave_early_tiles(i, CHANNELS.early)
    return dev.add(before, written, cta.slot("kg", i), step=16)


HEADS = Decays(_step, ("q", "k"), ("do", "t", "p", "factors"))
CHANNELS = Decays(_step_of_channels, ("kg",), ("kr", "qg", "do", "t", "p", "factors"))


def _adjoints(cta: Cta, of: Decays) -> None:
    dh = cta.walk(of.step, cta.read(cta.gmem.dh_T), of.early, of.late)
    if cta.gmem.dh_0 is not None:
        store_state(cta.gmem.dh_0.at[cta.sequence, cta.head], cta.rows, dh, cta.sizes.kv_layout)


class Adjoints(NamedTuple):
    """Results of `adjoints`."""

    dh: Float[Array, "chunks HO V K"] | None
    dv: Float[Array, "places HO V"] | None
    dh_0: Float[Array, "N HO _ _"] | None


def adjoints(
    keys: Mapping[str, jax.Array],
    do: Float[Array, "places HO V"],
    t: Float[Array, "chunks HO C C"],
    p: Float[Array, "chunks HO C C"],
    factors: Float[Array, "chunks HO _"],
    dh_T: Float[Array, "N HO _ _"] | None,
    first_chunk: Int[Array, " N1"],
    *,
    of: Decays = HEADS,
    scale: float,
    kv_layout: bool,
    with_dh_0: bool = True,
    only_dh_0: bool = False,
    config: Config | None = None,
    interpret: Any = None,
) -> Adjoints:
    """The cotangent behind each chunk, dv and those of the initial states; see the module docstring.

    Args: those of `states.outputs`.
      factors: of `adjoint_factors` or `decays.channel_factors`.
      of: how a chunk decays.
      dh_T: cotangents of the final states, float32, None for zeros.
      with_dh_0: whether the cotangents of the initial states are written.
      only_dh_0: whether nothing else is.
    """
    (places, HO, V), chunks, N = do.shape, t.shape[0], first_chunk.shape[0] - 1
    tiles = {name: keys[name] for name in (*of.early, *of.late) if name in keys}
    K = tiles[of.late[0]].shape[-1]
    dh_0 = jax.ShapeDtypeStruct((N, HO, *((K, V) if kv_layout else (V, K))), jnp.float32)
    results = start(
        "mma_adjoints",
        functools.partial(_adjoints, of=of),
        tiles | {"do": do, "t": t, "p": p, "factors": factors, "first_chunk": first_chunk},
        {"dh_T": dh_T},
        {
            "dh": None if only_dh_0 else jax.ShapeDtypeStruct((chunks * HO * V, K), t.dtype),
            "dv": None if only_dh_0 else jax.ShapeDtypeStruct((places, HO * V), t.dtype),
            "dh_0": dh_0 if with_dh_0 else None,
        },
        early=of.early,
        late=of.late,
        is_backwards=True,
        scale=scale,
        kv_layout=kv_layout,
        config=config,
        interpret=interpret,
        most_slots=1,  # a second one is no faster: 1.79 and 1.82 ms at (16, 32) 1x32768 (H100, 2026-11-25)
    )
    if only_dh_0:
        return Adjoints(None, None, results["dh_0"])
    dh, dv = results["dh"].reshape(chunks, HO, V, K), results["dv"].reshape(places, HO, V)
    return Adjoints(dh, dv, results.get("dh_0"))
