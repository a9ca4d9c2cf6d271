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

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ampere.decays import HEADS, ChannelDecay, HeadDecay
from pallas_kernels.ampere.spans import Spans, inputs
from pallas_kernels.ampere.walk import ROWS, Config, Cta, start
from pallas_kernels.device.layouts import CHUNK, WGMMA, zeros
from pallas_kernels.device.memory import store_state

Decays = HeadDecay | ChannelDecay


def factors(
    g2_cum: Float[Array, "chunks HO C"], beta: Float[Array, "chunks HO C"]
) -> Float[Array, "chunks HO C2"]:
    """D and Dr of every chunk, side by side."""
    return jnp.concatenate([jnp.exp2(g2_cum), jnp.exp2(g2_cum[..., -1:] - g2_cum) * beta], axis=-1)


def _step(decays: Decays, cta: Cta, i, h: jax.Array) -> jax.Array:
    """One chunk: the state after it."""
    dev, gmem, erased = cta.dev, cta.gmem, cta.slot(decays.erased, i)
    early = decays.early_states if gmem.o is None else decays.early_outputs
    nothing = zeros((ROWS, CHUNK), jnp.float32)
    rounded = h.astype(cta.dtype)
    left, d = dev.left(rounded), decays.before(cta, i)
    hk = dev.add_transposed(nothing, left, erased)
    hq = nothing if gmem.o is None else dev.add_transposed(nothing, left, cta.slot(decays.read, i))
    if gmem.h is not None:
        dev.store(gmem.h.at[cta.states_of(i)], rounded)
    v_t = plgpu.load(cta.own_columns("v", i), layout=WGMMA).astype(jnp.float32)
    r = decays.errors(v_t, d, hk).astype(cta.dtype)
    w = dev.add_transposed(nothing, dev.left(r), cta.slot("t", i))
    if gmem.h is not None:
        dev.store_transposed(gmem.w.at[cta.tokens_of(i)], w.astype(cta.dtype))
    if gmem.o is not None:
        o = dev.add_transposed(decays.outputs(cta, d, hq), dev.left(w.astype(cta.dtype)), cta.slot("p", i))
        dev.store_transposed(gmem.o.at[cta.tokens_of(i)], o.astype(cta.dtype))
    written, decay = dev.left((w * decays.strengths(cta, i)).astype(cta.dtype)), decays.decay(cta, i)
    cta.leave_early_tiles(i, early)
    return dev.add(h * decay, written, cta.slot(decays.written, i), step=16)


def _walk(cta: Cta, decays: Decays) -> None:
    """The body of the three kernels, by the outputs that there are."""
    early = decays.early_states if cta.gmem.o is None else decays.early_outputs
    step = functools.partial(_step, decays)
    h = cta.walk(step, cta.read(cta.gmem.h_0), early, decays.late)
    if cta.gmem.final is not None:
        store_state(cta.gmem.final.at[cta.sequence, cta.head], cta.rows, h, cta.sizes.kv_layout)


def _start(
    name: str,
    decays: Decays,
    keys: Mapping[str, jax.Array],
    arrays: dict[str, jax.Array],
    states: dict[str, Any],
    results: dict[str, Any],
    **options: Any,
) -> dict[str, jax.Array]:
    """Launches one of the three kernels, by the results that it has. Args: as for `walk.start`."""
    early = decays.early_outputs if "o" in results else decays.early_states
    tiles = {name: keys[name] for name in (*early, *decays.late) if name in keys}
    outputs = dict.fromkeys(("o", "final", "h", "w")) | results
    body, known = functools.partial(_walk, decays=decays), dict(early=early, late=decays.late)
    return start(name, body, tiles | arrays, states, outputs, **known, is_backwards=False, **options)


class States(NamedTuple):
    """Results of `states`."""

    h: Float[Array, "chunks HO V K"]
    w: Float[Array, "places HO V"]


class Outputs(NamedTuple):
    """Results of `outputs`."""

    o: Float[Array, "places HO V"]
    final: Float[Array, "N HO _ _"]


def outputs(
    keys: Mapping[str, jax.Array],
    v: Float[Array, "rows HV V"],
    t: Float[Array, "chunks HO C C"],
    p: Float[Array, "chunks HO C C"],
    factors: Float[Array, "chunks HO _"],
    h_0: Float[Array, "N HO _ _"] | None,
    first_chunk: Int[Array, " N1"],
    spans: Spans | None = None,
    *,
    decays: Decays = HEADS,
    scale: float,
    kv_layout: bool,
    config: Config | None = None,
    interpret: Any = None,
) -> Outputs:
    """o and the final states; see the module docstring.

    Args:
      keys: by name, those that decays reads: q and k as v, or kg, qg and kr of `channel_prepare`.
      v: bfloat16 or float16, of `Rows.tiled`.
      t, p: of `prepare` or `channel_prepare`.
      factors: of `factors` or `decays.channel_factors`.
      h_0: initial states, float32, None for zeros.
      first_chunk, spans: of `Rows`.
      decays: how a chunk decays.
      scale: factor of the output; where each channel decays qg and p hold it.
      kv_layout: whether states are [K, V]; else [V, K].
      config: None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    V, (chunks, HO), K, N = v.shape[2], t.shape[:2], keys[decays.written].shape[-1], first_chunk.shape[0] - 1
    places = chunks * CHUNK
    results = _start(
        "mma_outputs",
        decays,
        keys,
        {"v": v, "t": t, "p": p, "factors": factors, "first_chunk": first_chunk},
        {"h_0": h_0, **inputs(spans)},
        {
            "o": jax.ShapeDtypeStruct((places, HO * V), t.dtype),
            "final": jax.ShapeDtypeStruct((N, HO, *((K, V) if kv_layout else (V, K))), jnp.float32),
        },
        scale=scale,
        kv_layout=kv_layout,
        config=config,
        interpret=interpret,
    )
    return Outputs(results["o"].reshape(places, HO, V), results["final"])


def ends(
    keys: Mapping[str, jax.Array],
    v: Float[Array, "places HV V"],
    t: Float[Array, "chunks HO C C"],
    factors: Float[Array, "chunks HO _"],
    h_0: Float[Array, "N HO V K"] | None,
    first_chunk: Int[Array, " N1"],
    *,
    decays: Decays = HEADS,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "N HO V K"]:
    """The final states alone.

    Args: those of `outputs`.
    """
    V, HO, K, N = v.shape[2], t.shape[1], keys[decays.written].shape[-1], first_chunk.shape[0] - 1
    final = jax.ShapeDtypeStruct((N, HO, V, K), jnp.float32)
    arrays = {"v": v, "t": t, "factors": factors, "first_chunk": first_chunk}
    options: dict[str, Any] = dict(scale=1.0, kv_layout=False, config=config, interpret=interpret)
    return _start("mma_ends", decays, keys, arrays, {"h_0": h_0}, {"final": final}, **options)["final"]


def states(
    keys: Mapping[str, jax.Array],
    v: Float[Array, "places HV V"],
    t: Float[Array, "chunks HO C C"],
    factors: Float[Array, "chunks HO _"],
    h_0: Float[Array, "N HO _ _"] | None,
    first_chunk: Int[Array, " N1"],
    *,
    decays: Decays = HEADS,
    kv_layout: bool,
    config: Config | None = None,
    interpret: Any = None,
) -> States:
    """The state before each chunk and W; see the module docstring. Those of chunks of no sequence are not written.

    Args: those of `outputs`.
    """
    (places, _, V), (chunks, HO), K = v.shape, t.shape[:2], keys[decays.written].shape[-1]
    arrays = {"v": v, "t": t, "factors": factors, "first_chunk": first_chunk}
    results = {
        "h": jax.ShapeDtypeStruct((chunks * HO * V, K), t.dtype),
        "w": jax.ShapeDtypeStruct((places, HO * V), t.dtype),
    }
    options: dict[str, Any] = dict(scale=1.0, kv_layout=kv_layout, config=config, interpret=interpret)
    results = _start("mma_states", decays, keys, arrays, {"h_0": h_0}, results, **options)
    return States(results["h"].reshape(chunks, HO, V, K), results["w"].reshape(places, HO, V))
