"""The cotangent of the state at the start of every segment where each channel decays by itself: the walk of
`backward.channel_chain` with adjoints alone, in the roles of `backward.segment_adjoints`.

Inputs (GMEM): do [B, T, HO, V], beta [B, HO, NT C] f32, those of `chunks.pairs`, dh_T [N, HO, V, K] or [.., K, V] f32
(optional), walked [items, HO] int32 (optional), tables int32 (packed rows).
Outputs (GMEM): as of `backward.segment_adjoints`.
Shared memory, barriers, hardware, limits, source: `backward.channel_chain`.
"""

import functools
from typing import Any

from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.backward.chain import Cta
from pallas_kernels.backward.channel_chain import adjoint_step, load_chunks, start, walk
from pallas_kernels.backward.segment_adjoints import choose_chunks, results_of, segment_role
from pallas_kernels.chunks.channel_stages import Config
from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.work.halves import tokens_of
from pallas_kernels.work.tables import Items, VisitTables


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = Cta(gmem, smem, **static)
    choose_chunks(cta)
    backward = functools.partial(walk, cta, step=adjoint_step)
    pl.when(cta.wg == cta.num_state)(lambda: load_chunks(cta))
    pl.when((cta.wg < cta.num_state) & cta.adjoint)(lambda: segment_role(cta, backward))


def channel_segment_adjoints(
    do: Float[Array, "B T HO V"],
    beta: Float[Array, "B HO T64"],
    pairs: Pairs,
    dh_T: Float[Array, "N HO _ _"] | None,
    visits: VisitTables | None,
    *,
    kv_layout: bool = False,
    items: Items,
    of_halves: bool = False,
    walked: Int[Array, "items HO"] | None = None,
    config: Config | None = None,
    interpret=None,
) -> Float[Array, "items HO V K"]:
    """The cotangent at the start of every segment but a sequence's first, from zeros or dh_T at its end.

    Args: those of `channel_chains`; dh_T always of sequences.
      walked: as of `segment_adjoints`.

    Returns:
      e of segment_states(backwards=True), float32.
    """
    inputs = {"v": None, "do": do, "beta": beta, "dh_T": dh_T, "walked": walked}

    options: dict[str, Any] = dict(kv_layout=kv_layout, config=config, interpret=interpret, chains=1)
    options |= dict(tokens=tokens_of(of_halves))
    return start("channel_segment_adjoints", _body, pairs, inputs, results_of, items, visits, **options)["e"]
