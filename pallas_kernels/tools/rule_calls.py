"""Calls of the rule, forward and backward, whose kernels `ptxas_report` and `fingerprint` look at.

A call is named by what differs from one row of 1024 tokens with two key heads for four value heads, K = V = 128, of
bfloat16, with a state in layout "vk". Its kernels follow from the call, as they do for users.
"""

from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax.shapes import RuleArrays
from pallas_kernels.backward import rule as backward
from pallas_kernels.forward import rule as forward
from pallas_kernels.tools.calls import Call
from pallas_kernels.work.slots import PoolStates, Slots

BF16, F16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")
I32 = jnp.dtype("int32")


def rule_call(
    T: int = 1024,
    heads: tuple[int, int] = (2, 4),
    K: int = 128,
    V: int = 128,
    dtype: jnp.dtype = BF16,
    *,
    packed: int | None = None,
    ids: bool = False,
    state: bool = True,
    layout: str = "vk",
    pool: jnp.dtype | None = None,
    norm: bool = False,
    warpgroups: int = 2,
    segment_chunks: int = 0,
    is_open: bool = False,
) -> Call:
    """The rule, and its backward where the kernels have one.

    Args:
      heads: of q and k, and of v.
      packed: sequences of a packed row.
      pool: dtype of a pool that holds the states. It, like the L2 norm inside, has no backward.
      warpgroups, segment_chunks: of both passes, see `Config`.
      is_open: the row goes on elsewhere.
    """
    (H, HV), N, S = heads, packed or 1, jax.ShapeDtypeStruct
    token, gate = S((1, T, H, K), dtype), S((1, T, HV), F32)
    widths = (K, V) if layout == "kv" else (V, K)
    states = S((N, HV, *widths), F32) if state else None
    if pool is not None:
        slots = S((N,), I32)
        states = PoolStates(Slots(8, None, 1), S((8, HV, *widths), pool), slots, None, slots, None)  # pyrefly: ignore
    x = RuleArrays(
        token,
        token,
        S((1, T, HV, V), dtype),
        gate,
        gate,
        states,
        None if packed is None else S((packed + 1,), I32),
        S((1, T), I32) if ids else None,
    )
    config = forward.Config(state_warpgroups=warpgroups, segment_chunks=segment_chunks)
    options: dict[str, Any] = dict(scale=0.1, state_layout=layout)

    def run(x: RuleArrays, do, dfinal):
        o, final, residuals = forward.forward(x, use_qk_l2norm=norm, config=config, **options)
        if norm or pool is not None:
            return o, final
        back = backward.Config(segments=segment_chunks > 0, state_warpgroups=warpgroups)
        cotangents = backward.OutputCotangents(do, dfinal)
        return o, final, backward.backward(x, residuals, cotangents, config=back, **options)

    def run_open(x: RuleArrays, do, dfinal):
        sequence = None if packed is None else jnp.int32(packed - 1)
        opened = forward.prepare_open(x, scale=0.1, open_sequence=sequence, config=config)
        starts = opened.starts(x.initial_state)
        o, final, residuals = opened.finish(x.initial_state)
        cotangents = backward.OutputCotangents(do, dfinal)
        return starts, o, final, backward.open_adjoints(x, residuals, cotangents, scale=0.1)

    final = S((N, HV, *widths), F32) if state and pool is None else None
    return Call(run_open if is_open else run, (x, S((1, T, HV, V), dtype), final), {})


SEGMENTS: dict[str, Any] = dict(segment_chunks=4)
HALF: dict[str, Any] = dict(warpgroups=1)
PACKED: dict[str, Any] = dict(packed=3)
OPTIONS: dict[str, dict[str, Any]] = {
    "rule": {},
    "rule, half": HALF,
    "rule, kv": dict(layout="kv"),
    "rule, kv, no states": dict(layout="kv", state=False) | HALF,
    "rule, no states": dict(state=False),
    "rule, segment ids": dict(ids=True),
    "rule, 1 head": dict(heads=(2, 2)),
    "rule, 32 heads, K 192": dict(heads=(2, 64), K=192) | HALF,
    "rule, few tokens, packed": dict(T=256) | PACKED,
    "rule, many tokens": dict(T=2**16),
    "rule, many tokens, packed": dict(T=2**16) | PACKED,
    "rule, many sequences": dict(packed=40),
    "rule, packed": PACKED,
    "rule, packed, half": PACKED | HALF,
    "rule, segments": SEGMENTS,
    "rule, segments, half": SEGMENTS | HALF,
    "rule, packed segments": PACKED | SEGMENTS,
    "rule, packed segments, half": PACKED | SEGMENTS | HALF,
    "rule, normalised": dict(norm=True),
    "rule, normalised, half": dict(norm=True) | HALF,
    "rule, normalised, packed": dict(norm=True) | PACKED,
    "rule, normalised, packed segments": dict(norm=True) | PACKED | SEGMENTS,
    "rule, K 64": dict(K=64, V=64) | HALF,
    "rule, K 64, V 128": dict(K=64),
    "rule, K 256": dict(K=256) | HALF,
    "rule, K 256, packed": dict(K=256) | PACKED | HALF,
    "rule, K 256, segments": dict(K=256) | SEGMENTS | HALF,
    "rule, V 256": dict(V=256) | HALF,
    "rule, float16": dict(dtype=F16),
    "rule, float16, half": dict(dtype=F16) | HALF,
    "rule, float16, packed": dict(dtype=F16) | PACKED | HALF,
    "rule, float16, segments": dict(dtype=F16) | SEGMENTS | HALF,
    "rule, open": dict(layout="kv", is_open=True) | SEGMENTS,
    "rule, open, packed": dict(layout="kv", is_open=True) | PACKED | SEGMENTS,
    "rule, pool": dict(pool=F32, layout="kv") | PACKED,
    "rule, pool, bfloat16": dict(pool=BF16, layout="kv") | PACKED,
    "rule, pool, bfloat16, vk": dict(pool=BF16) | PACKED,
    "rule, pool, vk": dict(pool=F32) | PACKED,
    "rule, pool, half": dict(pool=F32, layout="kv") | PACKED | HALF,
    "rule, pool, bfloat16, half": dict(pool=BF16, layout="kv") | PACKED | HALF,
    "rule, pool, bfloat16, K 256": dict(pool=BF16, layout="kv", K=256) | PACKED | HALF,
    "rule, pool, segments": dict(pool=F32, layout="kv") | PACKED | SEGMENTS,
    "rule, pool, bfloat16, segments": dict(pool=BF16, layout="kv") | PACKED | SEGMENTS,
    "rule, pool, bfloat16, vk, segments": dict(pool=BF16) | PACKED | SEGMENTS,
}
RULE_CALLS: dict[str, Call] = {name: rule_call(**options) for name, options in OPTIONS.items()}
