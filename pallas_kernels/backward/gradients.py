"""Every gradient but that of v, all chunks in parallel, from the states and their cotangents at the chunks' borders.

For one chunk and one head, with h [V, K] before the chunk, dh [V, K] after it (both transposed), u and dv [C, V], and
diag(beta) = M E, mantissas and powers of `strengths`:

    dP = scale Gamma * (dO u^T)                 dL = -Gamma * (dv u^T), strictly lower
    dq = scale D (dO h) + dP E K
    read = -D (dv h) + dL E K                   late = Dr (u dh)
    inside = dP^T Q + dL^T K                    dk = read + E (late + inside)

dg needs one more product, whose trace is <h, dh>. With x_i = q_i . dq_i + k_i . (read - E inside)_i and
l_i = k_i . (E late)_i

    dg_t = sum over i >= t of x_i + sum over i < t of l_i + gl <h, dh>

The diagonal of dP is left out of x: its two parts cancel, and so every term of dg carries the decay that dg is
proportional to; what cancels between pairs of tokens is the same rounded dP and dL. Gamma, D, gl as in
`backward.chain`; Dr_i = 2^(G_last - G_i). A head's q and k are shared by the heads of its group: dq and dk are summed
in registers.

dbeta is found without dividing by beta, in two ways: M_i dbeta_i = k_i . (late + inside)_i, and M_i beta_i dbeta_i =
dv_i . u_i. `join_dbeta` joins them. u is M times W of `chains`. In bfloat16 E is 1 and not there. In float16 each
head makes E K of the keys, which is exact. (With diag(beta) K, which is not, pairs of tokens that must cancel in dg
leave a hundred times as much.)

In float16 dP and dL are kept times 2^lift, which leaves their largest entry as it would be without decay; what the
products with them give is multiplied by 2^-lift in float32.

K > 128: a launch for each 128 columns of K, each of which makes dP and dL again. The columns of dq and dk do not
meet, and dg is a sum over columns.

Work: persistent CTAs walk over items, an item being one visit (a chunk, or what a sequence of packed rows owns of
it) of one key head. An item has a step for each 64 columns of V of each of its output heads.

Threads, barriers and shared memory: `gradients_cta`.

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], do [B, T, HO, V], u [visits, HO, C, V], dv [B, T, HO, V],
h and dh [visits, HO, V, K], g2_cum [B, HO, NT C] f32, E [B, HO, NT C] and lift [visits, HO] f32 (float16), tables
int32 (packed rows).
Outputs (GMEM): dq [B, T, Hq or HO, K], dk [B, T, Hk, K], dg [visits, HO, C] f32, and the parts of dbeta: dv . u
[visits, HO, C] and k . (late + inside) [2, visits, HO, C] f32, of each compute warpgroup's columns of K.
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

JOIN = 2.0**-6
"""The two ways to dbeta count alike where beta^2 is this. k . (late + inside) alone is off by 3.6e-2 in bfloat16
where all tokens have one key and beta is 0.835; joined it is 1.4e-2, with 2^-4 and 2^-8 too (emulated in NumPy)."""

KEPT = 2.0
"""`join_weight` adds this to JOIN where nothing is lost. Errors of dbeta with a decay of each channel x 1e-3, with
JOIN alone and with this, in bfloat16 with 16 heads of 128 tokens (emulated in NumPy): random keys, gates as of
`gdn bench` 2.89 -> 1.91, slow and fast channels mixed 4.44 -> 3.51; no decay and a cosine of 0.9 between keys 6.03 ->
7.10, with beta of 1 6.77 -> 8.35, and of 0.99 15.6 -> 16.5. With half of it 2.00, 3.59, 6.77, 7.49 and 15.9."""


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = Cta(gmem, smem, **static)
    pl.when(cta.wg == COMPUTE)(lambda: helper(cta))
    pl.when(cta.wg < COMPUTE)(lambda: compute(cta))


class Gradients(NamedTuple):
    """Gradients with padded widths; dg of every in-chunk cumulative gate summed up, that is of each token's gate."""

    dq: Float[Array, "B T Hdq K"]
    """Gradient for each query head, or for each output head where key heads share query heads."""
    dk: Float[Array, "B T Hk K"]
    dg: Float[Array, "visits HO C"]
    dv_u: Float[Array, "visits HO C"]
    """M beta dbeta."""
    k_write: Float[Array, "visits HO C"]
    """M dbeta."""


def join_dbeta(
    dv_u: Float[Array, "*tokens"],
    k_write: Float[Array, "*tokens"],
    beta: Float[Array, "*tokens"],
    mantissa: Float[Array, "*tokens"],
    weight: Float[Array, "*tokens"] | float = JOIN,
) -> Float[Array, "*tokens"]:
    """dbeta from its product with beta and the mantissa, and from that with the mantissa alone, which loses digits
    where keys are alike and counts as much as the other where beta^2 is `weight`, which is JOIN at least. beta may be
    0: nothing is divided by less than JOIN times a mantissa."""
    return (beta * dv_u + weight * k_write) / ((beta * beta + weight) * mantissa)


def join_weight(k_late: Float[Array, "*tokens"], k_write: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """The weight of `join_dbeta` from k . dk and the part of it that keys get through the state after their chunk.

    dv . u multiplies two rounded vectors, k . dk one with exact keys, which is nearer to the truth unless its parts
    take each other away: that through this state, and that through later tokens of the chunk. The less is left, the
    less it counts.
    """
    largest = jnp.maximum(jnp.abs(k_late), jnp.abs(k_write - k_late))
    left = jnp.where(largest > 0, jnp.abs(k_write) / largest, 0.0)
    return JOIN + KEPT * jnp.minimum(left, 1.0) ** 2


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
    power: Float[Array, "B HO T64"] | None = None,
    lift: Float[Array, "visits HO"] | None = None,
    scale: float,
    config: Config | None = None,
    interpret=None,
) -> Gradients:
    """dq, dk, dg and the parts of dbeta; see the module docstring.

    Args:
      q, k, do: bfloat16 or float16; K and V multiples of 64, T a multiple of 8.
      u, dv, h, dh: of `chains`.
      g2_cum: of `chunk_gates`.
      visits: tables of packed rows (B = 1), None when every row of the batch is one sequence.
      power, lift: given for float16 and for nothing else: E, of `strengths.power`, and -log2 of the largest entry of
        Gamma below its diagonal, from 0 to MAX_LIFT.
      scale: factor of the output.
    """
    if (power is None or lift is None) == (k.dtype == jnp.float16):
        got = [type(x).__name__ for x in (power, lift)]
        raise ValueError(f"power and lift: expected for float16 only, got {got} for {k.dtype}")
    inputs = {"q": q, "k": k, "do": do, "u": u, "dv": dv, "h": h, "dh": dh, "g2_cum": g2_cum}
    inputs |= {"power": power, "lift": lift}
    call = functools.partial(_call, inputs, visits, scale=scale, config=config, interpret=interpret)
    K = k.shape[3]
    parts = [call(first, min(MAX_COLUMNS, K - first)) for first in range(0, K, MAX_COLUMNS)]
    if len(parts) == 1:
        return parts[0]
    return Gradients(
        jnp.concatenate([x.dq for x in parts], axis=3),
        jnp.concatenate([x.dk for x in parts], axis=3),
        functools.reduce(jnp.add, [x.dg for x in parts]),
        parts[0].dv_u,  # every launch has all of it
        functools.reduce(jnp.add, [x.k_write for x in parts]),
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
    packed, float16 = visits is not None, inputs["lift"] is not None
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
            "dv_u": sums,
            "k_write": jax.ShapeDtypeStruct((COMPUTE, *sums.shape), jnp.float32),
        },
        memory=memory(config, K, V, k.dtype, packed=packed, float16=float16),
        ctas=config.ctas,
        warpgroups=COMPUTE + 1,
        reduction_bytes=0,  # every sum stays inside a warp
        interpret=interpret,
    )
    of_columns = (results["k_write"][i] for i in range(K // WIDTH))
    return Gradients(**results | {"k_write": functools.reduce(jnp.add, of_columns)})
