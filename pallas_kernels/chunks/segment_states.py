"""The state at the start of every segment, or its cotangent at the end, from the transitions of segments.

    h_0 = given;       h_{i+1} = h_i M_i^T + E_i            with h and dh [V, K], transposed
    dh_last = given;   dh_{last-1} = E_last,   dh_{i-1} = dh_i M_i + E_i   (backwards)

Backwards E is what a segment adds to the cotangent at its start; that of the last segment holds the given cotangent's
part already, so that its M, which the forward does not need, is not needed here either.

The product with the diagonal of M is made in float32, the rest by tensor cores. Where nothing is written the rest is
0, and a state loses no digit but by its decay.

Inputs (GMEM): e [items, HO, V, K] float32, diagonal of M [items, HO, K] float32, rest of M^T [items, HO, K, K]
bfloat16 or float16, h_0 [N, HO, V, K] or [.., K, V] float32 (optional) or a pool of such states and slots of it (see
`work.slots`), first_item int32 (packed rows only): sequence i owns items first_item[i] to first_item[i + 1] - 1.
Outputs (GMEM): border [items, HO, V, K] float32: the state at the start, or the cotangent at the end, of each
segment. Items of no sequence are not written.
Grid: one CTA of one warpgroup for each (sequence, head, 64 rows of h); it walks over the segments.
Shared memory: `_memory`, 3 x 64 KB at K = 128.
Numerics: h, E and the diagonal float32; h is rounded to the operand dtype for the product with the rest, as between
chunks. No error is larger than with all of M in 16 bits: the other products are the same.
Hardware: compute capability 9.0. Limits: K a multiple of 64 up to 256.
Source: the look-back of chunked scans; FlashInfer's and FlashQLA's context-parallel fix-up.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.layouts import COL, WGMMA, along_columns, zeros
from pallas_kernels.device.memory import (
    SMEM_LIMIT,
    Barriers,
    Buffer,
    Memory,
    load_state,
    smem_bytes,
    transposed,
)
from pallas_kernels.device.operations import Device
from pallas_kernels.work.residuals import Transition
from pallas_kernels.work.slots import PoolStates, Slots, load_initial, slot_inputs
from pallas_kernels.work.tables import Items

ROWS = 64


def _memory(stages: int, K: int, dtype) -> Memory:
    """Shared memory of a CTA."""
    return {
        "e": Buffer((stages, ROWS, K), swizzle=128),
        "rest": Buffer((stages, K, K), dtype, swizzle=128),
        "diagonal": Buffer((stages, K)),
        "loaded": Barriers(arrivals=3, count=stages),
    }


def _stages(K: int, dtype) -> int:
    """Segments in flight: at most three, as many as fit."""
    return max(n for n in (1, 2, 3) if n == 1 or smem_bytes(_memory(n, K, dtype)) <= SMEM_LIMIT)


class _Sizes(NamedTuple):
    """Static sizes and switches of one kernel."""

    HO: int
    V: int
    K: int
    per_sequence: int | None
    """Segments of every sequence; None where the table says."""
    kv_layout: bool
    backwards: bool
    stages: int
    slots: Slots | None


def _body(gmem: Any, smem: Any, *, sizes: _Sizes, interpreted: bool):
    dev, stages, (HO, V, K) = Device(interpreted), sizes.stages, sizes[:3]
    row_tile = lax.rem(grid_index(), V // ROWS)
    head = lax.rem(lax.div(grid_index(), V // ROWS), HO)
    sequence = lax.div(grid_index(), HO * (V // ROWS))
    rows = pl.ds(row_tile * ROWS, ROWS)
    if sizes.per_sequence is None:
        first = gmem.first_item[sequence]
        count = gmem.first_item[sequence + 1] - gmem.first_item[sequence]
    else:
        first, count = sequence * sizes.per_sequence, jnp.int32(sizes.per_sequence)

    def item(i):
        """The i-th item that is walked over."""
        return first + (count - 1 - i if sizes.backwards else i)

    def load(i):
        stage = lax.rem(i, stages)
        loaded = smem.loaded.at[stage]
        plgpu.copy_gmem_to_smem(gmem.e.at[item(i), head, rows], smem.e.at[stage], loaded)
        plgpu.copy_gmem_to_smem(gmem.rest.at[item(i), head], smem.rest.at[stage], loaded)
        plgpu.copy_gmem_to_smem(gmem.diagonal.at[item(i), head], smem.diagonal.at[stage], loaded)

    for j in range(stages):
        pl.when(j < count - 1)(functools.partial(load, jnp.int32(j)))
    if sizes.slots is not None:
        h = load_initial(sequence, head, rows, sizes.kv_layout, sizes.slots, gmem)
    elif gmem.h_0 is None:
        h = zeros((ROWS, K), jnp.float32)
    else:
        h = load_state(gmem.h_0.at[sequence, head], rows, sizes.kv_layout)

    def store(i, h):
        """Leaves through the tile of E, which has been read, while the product runs."""
        tile = smem.e.at[lax.rem(i, stages)]
        tile[...] = h
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, gmem.border.at[item(i), head, rows])

    def step(i, h, multiply=True):
        stage = lax.rem(i, stages)
        plgpu.barrier_wait(smem.loaded.at[stage])
        e = plgpu.load(smem.e.at[stage], layout=WGMMA)
        if multiply:
            rest = transposed(smem.rest.at[stage]) if sizes.backwards else smem.rest.at[stage]
            diagonal = along_columns(plgpu.load(smem.diagonal.at[stage], layout=COL), ROWS)
            rounded, start = h.astype(gmem.rest.dtype), h

            def walk(add):
                add(0, rounded, rest)
                store(i, start)

            (h,) = dev.accumulate([e + h * diagonal], walk)
        else:
            store(i, h)
            h = e
        newest = min(stages - 1, 1)  # stores that may still read their tiles, where there are others to load
        plgpu.wait_smem_to_gmem(newest, wait_read_only=True)
        done = i - newest
        pl.when((done >= 0) & (done + stages < count - 1))(lambda: load(done + stages))
        return h

    begin = 0
    if sizes.backwards:  # not through M; a loop of one step, for there may be none
        begin = jnp.clip(count - 1, 0, 1)
        h = lax.fori_loop(0, begin, functools.partial(step, multiply=False), h)
    h = lax.fori_loop(begin, count - 1, step, h)
    store(count - 1, h)
    plgpu.wait_smem_to_gmem(0)


def segment_states(
    e: Float[Array, "items HO V K"],
    m_t: Transition,
    h_0: Float[Array, "N HO _ _"] | PoolStates | None,
    items: Items,
    *,
    num_sequences: int,
    kv_layout: bool = False,
    backwards: bool = False,
    interpret=None,
) -> Float[Array, "items HO V K"]:
    """State before each segment, or cotangent of the state after it; see the module docstring.

    Args:
      e, m_t: of `segment_transitions`; those of a sequence's last segment are not used.
      h_0: initial states, [K, V] with kv_layout else [V, K], or where they lie in a pool; None for zeros.
      backwards: e is of `segment_adjoints` (that of a first segment is not used), and h_0 are cotangents of the final
        states.
      items: what the sequences are cut into.
      num_sequences: N.
    """
    (count, HO, V, K), tables = e.shape, items.tables
    states = h_0 if isinstance(h_0, PoolStates) else None
    sizes = _Sizes(
        HO=HO,
        V=V,
        K=K,
        per_sequence=count // num_sequences if tables is None else None,
        kv_layout=kv_layout,
        backwards=backwards,
        stages=_stages(K, m_t.rest.dtype),
        slots=None if states is None else states.slots,
    )
    inputs = {"e": e, **m_t._asdict(), "h_0": None if states else h_0}
    inputs["first_item"] = None if tables is None else tables.first_item
    results = launch(
        "segment_states",
        functools.partial(_body, sizes=sizes, interpreted=interpret is not None),
        inputs=inputs | slot_inputs(states),
        outputs={"border": jax.ShapeDtypeStruct(e.shape, jnp.float32)},
        memory=_memory(sizes.stages, K, m_t.rest.dtype),
        ctas=num_sequences * HO * (V // ROWS),
        interpret=interpret,
    )
    return results["border"]
