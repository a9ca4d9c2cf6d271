"""Every gradient but that of v, all chunks in parallel, from the states and their cotangents at the chunks' borders.

For one chunk and one head, with h [V, K] before the chunk, dh [V, K] after it (both transposed), u and dv [C, V]:

    dP = scale Gamma * (dO u^T)                 dL = -Gamma * (dv u^T), strictly lower
    dq = scale D (dO h) + dP K
    read = -D (dv h) + dL K                     late = Dr (u dh)
    dk = read + late + dP^T Q + dL^T K          dbeta = rowsum(dv * u) / beta^2

dg needs one more product, whose trace is <h, dh>. With x_i = q_i . dq_i + k_i . (read - dP^T Q - dL^T K)_i and
l_i = k_i . late_i

    dg_t = sum over i >= t of x_i + sum over i < t of l_i + gl <h, dh>

The diagonal of dP is left out of x: its two parts cancel, and so every term of dg carries the decay that dg is
proportional to; what cancels between pairs of tokens is the same rounded dP and dL. Gamma, D, Dr, gl as in
`backward.chain`. A head's q and k are shared by the heads of its group: dq and dk are summed in registers.

In float16 u and dv come divided by beta: Gamma, D and Dr take beta in, and dbeta = rowsum(dv * u). dP and dL are kept
times 2^lift, which leaves their largest entry as it would be without decay; what the products with them give is
multiplied by 2^-lift in float32.

K > 128: a launch for each 128 columns of K, each of which makes dP and dL again. The columns of dq and dk do not
meet, and dg is a sum over columns.

Work: persistent CTAs walk over items, an item being one visit (a chunk, or what a sequence of packed rows owns of
it) of one key head. An item has a step for each 64 columns of V of each of its output heads.

Threads, barriers and shared memory: `gradients_cta`.

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], do [B, T, HO, V], u [visits, HO, C, V], dv [B, T, HO, V],
h and dh [visits, HO, V, K], g2_cum [B, HO, NT C] f32, beta [B, HO, NT C] and lift [visits, HO] f32 (float16), tables
int32 (packed rows).
Outputs (GMEM): dq [B, T, Hq or HO, K], dk [B, T, Hk, K], dg and rowsum(dv * u) [visits, HO, C] f32.
Hardware: compute capability 9.0. Limits: K and V multiples of 64, V up to 64 token_stages; T a multiple of 8.
Source: adjoint of Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.backward.gradients_compute import compute
from pallas_kernels.backward.gradients_cta import COMPUTE, WIDTH, Config, Cta, Sizes, memory
from pallas_kernels.backward.gradients_helper import helper
from pallas_kernels.device.launch import launch
from pallas_kernels.device.layouts import CHUNK
from pallas_kernels.work.tables import VisitTables, table_inputs

MAX_COLUMNS = 128
"""Columns of K of one launch, as many as fit into shared memory and registers."""

MAX_LIFT = 64.0
"""log2 of the largest factor that the scores are stored times in float16. float32 has room for a state times it."""

BETA_FLOOR = 2.0**-20
"""Least beta that u and dv, which are proportional to it, or dbeta are divided by; the forward writes no less. The
inverse has rows proportional to beta in float16: with 2^-40, dbeta is 8 % off."""


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = Cta(gmem, smem, **static)
    pl.when(cta.wg == COMPUTE)(lambda: helper(cta))
    pl.when(cta.wg < COMPUTE)(lambda: compute(cta))


class Gradients(NamedTuple):
    """Gradients with padded widths; dg of every in-chunk cumulative gate summed up, that is of each token's gate."""

    dq: Float[Array, "B T Hdq K"]
    """Of each query head, or of each output head where key heads share query heads."""
    dk: Float[Array, "B T Hk K"]
    dg: Float[Array, "visits HO C"]
    dbeta: Float[Array, "visits HO C"]
    """beta^2 dbeta; in float16 dbeta itself."""


def gradients(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    do: Float[Array, "B T HO V"],
    u: Float[Array, "visits HO C V"],
    dv: Float[Array, "B T HO V"],
    h: Float[Array, "visits HO V K"],
    dh: Float[Array, "visits HO V K"],
    g2_cum: Float[Array, "B HO T64"],
    visits: VisitTables | None,
    *,
    beta: Float[Array, "B HO T64"] | None = None,
    lift: Float[Array, "visits HO"] | None = None,
    scale: float,
    config: Config | None = None,
    interpret=None,
) -> Gradients:
    """dq, dk, dg and dbeta; see the module docstring.

    Args:
      q, k, do: bfloat16 or float16; K and V multiples of 64, T a multiple of 8.
      u, dv, h, dh: of `chains`.
      g2_cum: of `chunk_gates`.
      visits: tables of packed rows (B = 1), None when every row of the batch is one sequence.
      beta, lift: given for float16 and for nothing else: beta of `chains`, and -log2 of the largest entry of
        Gamma below its diagonal, from 0 to MAX_LIFT.
      scale: factor of the output.
    """
    if (beta is None or lift is None) == (k.dtype == jnp.float16):
        got = [type(x).__name__ for x in (beta, lift)]
        raise ValueError(f"beta and lift: expected for float16 only, got {got} for {k.dtype}")
    inputs = {"q": q, "k": k, "do": do, "u": u, "dv": dv, "h": h, "dh": dh, "g2_cum": g2_cum}
    inputs |= {"beta": beta, "lift": lift}
    call = functools.partial(_call, inputs, visits, scale=scale, config=config, interpret=interpret)
    K = k.shape[3]
    parts = [call(first, min(MAX_COLUMNS, K - first)) for first in range(0, K, MAX_COLUMNS)]
    if len(parts) == 1:
        return parts[0]
    return Gradients(
        jnp.concatenate([x.dq for x in parts], axis=3),
        jnp.concatenate([x.dk for x in parts], axis=3),
        functools.reduce(jnp.add, [x.dg for x in parts]),
        parts[0].dbeta,  # every launch has all of it
    )


def _call(
    inputs: dict[str, Any],
    visits: VisitTables | None,
    first_column: int,
    K: int,
    *,
    scale: float,
    config: Config | None,
    interpret: Any,
) -> Gradients:
    """The kernel, for the K columns of q and k from first_column on."""
    q, k, h = (inputs[name] for name in ("q", "k", "h"))
    (B, T, Hk), Hq, (num_visits, HO, V) = k.shape[:3], q.shape[2], h.shape[:3]
    packed, float16 = visits is not None, inputs["beta"] is not None
    config = config or Config.default(K, V)
    if V > WIDTH * config.token_stages:
        raise ValueError(f"config.token_stages: expected at least {V // WIDTH}, got {config.token_stages}")
    sizes = Sizes(
        T=T,
        N=B if visits is None else visits.cu_seqlens.shape[0] - 1,
        Hq=Hq,
        Hk=Hk,
        HO=HO,
        dq_heads=Hq if Hq % Hk == 0 else HO,
        K=K,
        first_column=first_column,
        V=V,
        visits=num_visits,
        scale=scale,
        float16=float16,
    )
    sums = jax.ShapeDtypeStruct((num_visits, HO, CHUNK), jnp.float32)
    results = launch(
        "gradients",
        functools.partial(_body, config=config, sizes=sizes, interpreted=interpret is not None),
        inputs=inputs | table_inputs(None, visits),
        outputs={
            "dq": jax.ShapeDtypeStruct((B, T, sizes.dq_heads, K), k.dtype),
            "dk": jax.ShapeDtypeStruct((B, T, Hk, K), k.dtype),
            "dg": sums,
            "dbeta": sums,
        },
        memory=memory(config, K, V, k.dtype, packed=packed, float16=float16),
        ctas=config.ctas,
        warpgroups=COMPUTE + 1,
        auto_barriers=False,
        reduction_bytes=0,  # every sum stays inside a warp
        interpret=interpret,
    )
    return Gradients(**results)
