"""The walk forwards: outputs and final states, the final states alone, or those at chunks' borders for a backward.

With the state transposed, h [V, K], and for one chunk (all of it float32 but the operands of products)

    R = V^T - (h K^T) D          W = R T^T          O^T = scale (h Q^T) D + W P^T          h <- gl h + (W Dr) K

where D_i = 2^G_i, Dr_i = beta_i 2^(G_last - G_i), gl = 2^G_last, G = g2_cum, and T and P are those of `prepare`. What
token i writes is beta_i times column i of W. Order and rounding of the products are those of `forward.outputs`.

Inputs (GMEM): q [places, Hq K] (outputs only), k [places, Hk K], v [places, HV V], t and p (outputs only) [chunks HO
C, C], factors = (D, Dr) [chunks HO, 2 C] f32, h_0 [N, HO, V, K] or [.., K, V] f32 (optional), first_chunk [N + 1]
int32.
Outputs (GMEM): o [places, HO V] (or not) and the final states [N, HO, V, K] or [.., K, V] f32; or h [chunks HO V, K],
the state before each chunk, and w [places, HO V], W transposed, in k's dtype.
Threads, barriers, hardware, limits: `ampere.walk`. Shared memory: `walk.memory`, 81 KB at K = V = 128.
Source: Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10, transposed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ampere.spans import Spans, inputs
from pallas_kernels.ampere.walk import ROWS, Config, Cta, start
from pallas_kernels.device.layouts import CHUNK, WGMMA, zeros
from pallas_kernels.device.memory import store_state

KEYS = ("k",)
"""Tiles that are read to the end of a step."""

OUTPUT_TILES, STATE_TILES = ("q", "v", "t", "p", "factors"), ("v", "t", "factors")


def factors(
    g2_cum: Float[Array, "chunks HO C"], beta: Float[Array, "chunks HO C"]
) -> Float[Array, "chunks HO C2"]:
    """D and Dr of every chunk, side by side."""
    return jnp.concatenate([jnp.exp2(g2_cum), jnp.exp2(g2_cum[..., -1:] - g2_cum) * beta], axis=-1)


def _step(cta: Cta, i, h: jax.Array) -> jax.Array:
    """One chunk: the state after it."""
    dev, gmem, k_tile = cta.dev, cta.gmem, cta.slot("k", i)
    early = STATE_TILES if gmem.o is None else OUTPUT_TILES
    nothing = zeros((ROWS, CHUNK), jnp.float32)
    rounded = h.astype(cta.dtype)
    left, d = dev.left(rounded), cta.factor(0, i)
    hk = dev.add_transposed(nothing, left, k_tile)
    hq = nothing if gmem.o is None else dev.add_transposed(nothing, left, cta.slot("q", i))
    if gmem.h is not None:
        dev.store(gmem.h.at[cta.states_of(i)], rounded)
    v_t = plgpu.load(cta.own_columns("v", i), layout=WGMMA).astype(jnp.float32)
    r = (v_t - d * hk).astype(cta.dtype)
    w = dev.add_transposed(nothing, dev.left(r), cta.slot("t", i))
    if gmem.h is not None:
        dev.store_transposed(gmem.w.at[cta.tokens_of(i)], w.astype(cta.dtype))
    if gmem.o is not None:
        o = dev.add_transposed(hq * (d * cta.sizes.scale), dev.left(w.astype(cta.dtype)), cta.slot("p", i))
        dev.store_transposed(gmem.o.at[cta.tokens_of(i)], o.astype(cta.dtype))
    written, decay = dev.left((w * cta.factor(1, i)).astype(cta.dtype)), cta.number(CHUNK - 1, i)
    cta.leave_early_tiles(i, early)
    return dev.add(h * decay, written, k_tile, step=16)


def _outputs(cta: Cta) -> None:
    h = cta.walk(_step, cta.read(cta.gmem.h_0), OUTPUT_TILES, KEYS)
    store_state(cta.gmem.final.at[cta.sequence, cta.head], cta.rows, h, cta.sizes.kv_layout)


def _ends(cta: Cta) -> None:
    h = cta.walk(_step, cta.read(cta.gmem.h_0), STATE_TILES, KEYS)
    store_state(cta.gmem.final.at[cta.sequence, cta.head], cta.rows, h, cta.sizes.kv_layout)


def _states(cta: Cta) -> None:
    cta.walk(_step, cta.read(cta.gmem.h_0), STATE_TILES, KEYS)


class States(NamedTuple):
    """Results of `states`."""

    h: Float[Array, "chunks HO V K"]
    w: Float[Array, "places HO V"]


class Outputs(NamedTuple):
    """Results of `outputs`."""

    o: Float[Array, "places HO V"]
    final: Float[Array, "N HO _ _"]


def outputs(
    q: Float[Array, "rows Hq K"],
    k: Float[Array, "rows Hk K"],
    v: Float[Array, "rows HV V"],
    t: Float[Array, "chunks HO C C"],
    p: Float[Array, "chunks HO C C"],
    factors: Float[Array, "chunks HO C2"],
    h_0: Float[Array, "N HO _ _"] | None,
    first_chunk: Int[Array, " N1"],
    spans: Spans | None = None,
    *,
    scale: float,
    kv_layout: bool,
    config: Config | None = None,
    interpret: Any = None,
) -> Outputs:
    """o and the final states; see the module docstring.

    Args:
      q, k, v: bfloat16 or float16, of `Rows.tiled`.
      t, p: of `prepare`.
      h_0: initial states, float32, None for zeros.
      first_chunk, spans: of `Rows`.
      scale: factor of the output.
      kv_layout: whether states are [K, V]; else [V, K].
      config: None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    V, (chunks, HO), K, N = v.shape[2], t.shape[:2], k.shape[2], first_chunk.shape[0] - 1
    places = chunks * CHUNK
    results = start(
        "mma_outputs",
        _outputs,
        {"q": q, "k": k, "v": v, "t": t, "p": p, "factors": factors, "first_chunk": first_chunk},
        {"h_0": h_0, **inputs(spans)},
        {
            "o": jax.ShapeDtypeStruct((places, HO * V), k.dtype),
            "final": jax.ShapeDtypeStruct((N, HO, *((K, V) if kv_layout else (V, K))), jnp.float32),
            "h": None,
            "w": None,
        },
        early=OUTPUT_TILES,
        late=KEYS,
        is_backwards=False,
        scale=scale,
        kv_layout=kv_layout,
        config=config,
        interpret=interpret,
    )
    return Outputs(results["o"].reshape(places, HO, V), results["final"])


def ends(
    k: Float[Array, "places Hk K"],
    v: Float[Array, "places HV V"],
    t: Float[Array, "chunks HO C C"],
    factors: Float[Array, "chunks HO C2"],
    h_0: Float[Array, "N HO V K"] | None,
    first_chunk: Int[Array, " N1"],
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "N HO V K"]:
    """The final states alone.

    Args: those of `outputs`.
    """
    V, HO, K, N = v.shape[2], t.shape[1], k.shape[2], first_chunk.shape[0] - 1
    final = jax.ShapeDtypeStruct((N, HO, V, K), jnp.float32)
    return start(
        "mma_ends",
        _ends,
        {"k": k, "v": v, "t": t, "factors": factors, "first_chunk": first_chunk},
        {"h_0": h_0},
        {"o": None, "final": final, "h": None, "w": None},
        early=STATE_TILES,
        late=KEYS,
        is_backwards=False,
        scale=1.0,
        kv_layout=False,
        config=config,
        interpret=interpret,
    )["final"]


def states(
    k: Float[Array, "places Hk K"],
    v: Float[Array, "places HV V"],
    t: Float[Array, "chunks HO C C"],
    factors: Float[Array, "chunks HO C2"],
    h_0: Float[Array, "N HO _ _"] | None,
    first_chunk: Int[Array, " N1"],
    *,
    kv_layout: bool,
    config: Config | None = None,
    interpret: Any = None,
) -> States:
    """The state before each chunk and W; see the module docstring. Those of chunks of no sequence are not written.

    Args: those of `outputs`.
    """
    (places, _, V), (chunks, HO), K = v.shape, t.shape[:2], k.shape[2]
    results = start(
        "mma_states",
        _states,
        {"k": k, "v": v, "t": t, "factors": factors, "first_chunk": first_chunk},
        {"h_0": h_0},
        {
            "o": None,
            "final": None,
            "h": jax.ShapeDtypeStruct((chunks * HO * V, K), k.dtype),
            "w": jax.ShapeDtypeStruct((places, HO * V), k.dtype),
        },
        early=STATE_TILES,
        late=KEYS,
        is_backwards=False,
        scale=1.0,
        kv_layout=kv_layout,
        config=config,
        interpret=interpret,
    )
    return States(results["h"].reshape(chunks, HO, V, K), results["w"].reshape(places, HO, V))
