"""Calls of the rule with a decay of each channel, for `calls`."""

from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax.shapes import Dims
from pallas_kernels.ampere import channel_backward as mma_backward
from pallas_kernels.ampere import channel_rule as mma_rule
from pallas_kernels.ampere import walk
from pallas_kernels.backward import channel_rule as channel_backward
from pallas_kernels.backward import rule as backward
from pallas_kernels.backward.reach import Entry
from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.forward import channel_rule
from pallas_kernels.tools.call import Call, shapes
from pallas_kernels.work.residuals import Segments, Transition
from pallas_kernels.work.tables import packed_items, row_items


def channels_call(
    T=1024,
    HV=4,
    K=128,
    V=128,
    dtype="bf16",
    N=1,
    packed=False,
    ids=False,
    erase=False,
    halves=False,
    state=True,
    layout="vk",
    norm=False,
    backwards=False,
    is_open=False,
    **config: Any,
) -> Call:
    """The rule with a decay of each channel on one row.

    Args:
      N, packed: sequences of a packed row.
      erase: whether there are erase keys.
      halves: whether a token is two of the T rows, the first of which has an erase key.
      backwards: whether the call is the backward, of what a forward left.
      is_open: the row goes on elsewhere; the call has both passes up to the states that are handed over.
      config: state_warpgroups and segment_chunks, see `channel_rule.Config`.
    """
    x, dims = _arrays(T, HV, K, V, dtype, N, packed, ids, erase, state, layout, halves)
    value = f"{dtype}[1,{T // 2 if halves else T},{HV},{V}]"
    known = channel_rule.Config(**(dict[str, Any](state_warpgroups=2, segment_chunks=0) | config))

    def run(x: channel_rule.ChannelArrays):
        options: dict[str, Any] = dict(scale=0.1, state_layout=layout, use_qk_l2norm=norm, config=known)
        return channel_rule.forward(x, dims, **options)

    def run_open(x: channel_rule.ChannelArrays):
        last = jnp.int32(N - 1) if packed else None
        opened = channel_rule.prepare_open(x, dims, scale=0.1, open_sequence=last, config=known)
        o, final, residuals = opened.finish(x.initial_state)
        cotangents = backward.OutputCotangents(o, final)
        entry = Entry(last, jnp.array(True))
        found = channel_backward.open_adjoints(x, dims, residuals, cotangents, entry)
        return opened.starts(x.initial_state), o, found[:2]

    if is_open:
        return Call(run_open, (x,), {})
    if not backwards:
        return Call(lambda x: run(x)[:2], (x,), {})
    visits, length = T // 64 + (N if packed else 0), known.segment_chunks
    t, p, kg, qg = (
        f"{dtype}[{visits},{HV},{rows},{columns}]"
        for columns in (64, K)
        for rows in (64, 32 if halves else 64)
    )
    pairs = Pairs(*shapes(f"{t} {p} {kg} {qg} {kg} f32[{visits},{HV},{K}]"))
    back = channel_backward.Config(bool(length), known.state_warpgroups)

    def run_back(x: channel_rule.ChannelArrays, pairs: Pairs, beta_t: jax.Array, do: jax.Array):
        segments = None
        if length:
            items = packed_items(x.cu_seqlens, T, length) if packed else row_items(1, T, length)
            starts, square = jnp.zeros((items.split.num_items, HV, V, K)), (items.split.num_items, HV, K, K)
            m_t = Transition(jnp.zeros(square[:3]), jnp.zeros(square, do.dtype))
            segments = Segments(starts, m_t, items)
        residuals = channel_rule.ChannelResiduals(pairs, beta_t, segments)
        cotangents = backward.OutputCotangents(do, x.initial_state)
        options: dict[str, Any] = dict(scale=0.1, state_layout=layout, config=back)
        return channel_backward.backward(x, dims, residuals, cotangents, **options)

    return Call(run_back, (x, pairs, *shapes(f"f32[1,{HV},{T}] {value}")), {})


def _arrays(
    T, HV, K, V, dtype, N, packed, ids, erase, state, layout, halves=False
) -> tuple[channel_rule.ChannelArrays, Dims]:
    """The arrays of a call on one row, and its sizes."""
    widths = f"{K},{V}" if layout == "kv" else f"{V},{K}"
    tokens = T // 2 if halves else T
    token, erase_keys = f"{dtype}[1,{tokens},2,{K}]", f"{dtype}[1,{T},{HV},{K}]" if erase else "-"
    erase_keys = token if halves else erase_keys
    value, gates = f"{dtype}[1,{tokens},{HV},{V}]", f"f32[1,{tokens},{HV},{K}] f32[1,{T},{HV}]"
    states = f"f32[{N},{HV},{widths}]" if state else "-"
    borders = f"{f'i32[{N + 1}]' if packed else '-'} {f'i32[1,{T}]' if ids else '-'}"
    x = channel_rule.ChannelArrays(
        *shapes(f"{token} {token} {erase_keys} {value} {gates} {states} {borders}")
    )
    return x, Dims(1, T, N, 2, 2, HV, HV, K, V)


def mma_channels_call(
    T=1024,
    HV=4,
    K=128,
    V=128,
    dtype="bf16",
    N=1,
    packed=False,
    ids=False,
    erase=False,
    state=True,
    layout="vk",
    segment_chunks=0,
    **config: Any,
) -> Call:
    """The same by mma.sync, and its backward.

    Args:
      config: of `ampere.walk.Config`.
    """
    x, dims = _arrays(T, HV, K, V, dtype, N, packed, ids, erase, state, layout)
    known = walk.Config(**config) if config else None
    static: dict[str, Any] = dict(scale=0.1, state_layout=layout, config=known)

    def run(x: channel_rule.ChannelArrays):
        o, final, residuals = mma_rule.forward(x, dims, segment_chunks=segment_chunks, **static)
        cotangents = backward.OutputCotangents(o, final if state else None)
        return o, final, mma_backward.backward(x, dims, residuals, cotangents, **static)

    return Call(run, (x,), {}, mma_rule.NEEDS)
