"""The cotangent of the state at the start of every segment: the walk of `backward.chain` with adjoints alone.

The walk starts from dh_T for the last segment of a sequence and from zeros for the others. What it ends with is what
`segment_states(backwards=True)` needs to find the cotangent at the end of every segment.

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], do [B, T, HO, V], g2_cum and beta [B, HO, NT C] f32, t [B, HO,
NT C, C], dh_T [N, HO, V, K] or [.., K, V] f32 (optional), walked [items, HO] int32 (optional), tables int32 (packed
rows).
Outputs (GMEM): e [items, HO, V, K] f32; without walked items that are a sequence's first are not written.
Shared memory, barriers, hardware, limits, source: `backward.chain`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backward.chain import ROWS, Config, Cta, adjoint_step, start, walk
from pallas_kernels.backward.chain_helper import helper
from pallas_kernels.device.layouts import zeros
from pallas_kernels.device.memory import load_state
from pallas_kernels.work.tables import Items, VisitTables


def choose_chunks(cta: Cta) -> None:
    """Leaves out what is not to be walked over: nothing comes before the first segment."""
    if cta.gmem.walked is None:
        cta.chunks = jnp.where(cta.item.is_first, 0, cta.chunks)
    else:
        cta.chunks = jnp.where(cta.gmem.walked[cta.item.index, cta.head] > 0, cta.chunks, 0)


def segment_role(cta: Cta, walk: Callable) -> None:
    """The role of a state warpgroup: walk(end) from the cotangent after the segment."""
    plgpu.set_max_registers(cta.config.state_registers, action="increase")
    dh_T = cta.gmem.dh_T
    if dh_T is None:
        dh = zeros((ROWS, cta.sizes.K), jnp.float32)
    else:
        n = jnp.minimum(cta.span.sequence, dh_T.shape[0] - 1)  # the padding reads any
        dh = load_state(dh_T.at[n, cta.head], cta.rows, cta.sizes.kv_layout)
    dh = walk(jnp.where(cta.item.is_last, dh, 0.0))
    writes = True if cta.gmem.walked is not None else jnp.logical_not(cta.item.is_first)
    if cta.packed:
        writes = writes & jnp.logical_not(cta.span.is_padding)

    @pl.when(writes)
    def _():
        cta.gmem.e.at[cta.item.index, cta.head].at[cta.rows][...] = dh

    plgpu.wait_smem_to_gmem(0)


def results_of(sizes: Any) -> dict[str, Any]:
    """Shapes and dtypes of the results by name."""
    shape = sizes.split.num_items, sizes.HO, sizes.V, sizes.K
    return {"dh": None, "dv": None, "e": jax.ShapeDtypeStruct(shape, jnp.float32)}


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = Cta(gmem, smem, **static)
    choose_chunks(cta)
    pl.when(cta.wg == cta.num_state)(lambda: helper(cta))
    backward = functools.partial(walk, cta, step=adjoint_step)
    pl.when((cta.wg < cta.num_state) & cta.adjoint)(lambda: segment_role(cta, backward))


def segment_adjoints(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    do: Float[Array, "B T HO V"],
    g2_cum: Float[Array, "B HO T64"],
    beta: Float[Array, "B HO T64"],
    t: Float[Array, "B HO T64 C"],
    dh_T: Float[Array, "N HO _ _"] | None,
    visits: VisitTables | None,
    *,
    scale: float,
    kv_layout: bool = False,
    items: Items,
    walked: Int[Array, "items HO"] | None = None,
    config: Config | None = None,
    interpret=None,
) -> Float[Array, "items HO V K"]:
    """The cotangent at the start of every segment but a sequence's first, from zeros or dh_T at its end.

    Args: those of `chains`; dh_T always of sequences.
      walked: not 0 where the cotangent is found, also at the start of a sequence's first segment; elsewhere e is what
        the walk would start from.

    Returns:
      e of segment_states(backwards=True), float32.
    """
    inputs = {"q": q, "k": k, "v": None, "do": do, "g2_cum": g2_cum, "beta": beta, "t": t, "dh_T": dh_T}
    inputs |= {"walked": walked}
    options: dict[str, Any] = dict(scale=scale, kv_layout=kv_layout, config=config, interpret=interpret)
    return start("segment_adjoints", _body, inputs, results_of, items, visits, chains=1, **options)["e"]
