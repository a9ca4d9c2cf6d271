"""The calls whose kernels the tools look at, by name.

The name of a call of the rule, or of a step of serving, says all of it: the function, and what differs from the
defaults of the one that makes the call, `rule_call` and its like (`NAMES`). Arrays are written as text, such as
"bf16[64,1024] f32[1024] -", where "-" is None.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from gdn_jax.shapes import RuleArrays
from pallas_kernels.ampere import backward as mma_backward
from pallas_kernels.ampere import rule as mma_rule
from pallas_kernels.ampere import walk
from pallas_kernels.backward import rule as backward
from pallas_kernels.backward.reach import Entry
from pallas_kernels.decode.channel_ring import channel_deferred, channel_drafts
from pallas_kernels.decode.conv_update import conv_update
from pallas_kernels.decode.deferred import deferred
from pallas_kernels.decode.drafts import drafts
from pallas_kernels.decode.drafts_mma import drafts_mma
from pallas_kernels.forward import rule as forward
from pallas_kernels.layer import gated_norm_eight_bits, norm_eight_bits, swiglu_eight_bits
from pallas_kernels.layer.channel_gates import channel_gates, channel_gates_backward
from pallas_kernels.layer.cross_entropy import cross_entropy
from pallas_kernels.layer.eight_bits import eight_bits
from pallas_kernels.layer.embedding import embedding_gradient
from pallas_kernels.layer.gated_norm import gated_norm, gated_norm_backward
from pallas_kernels.layer.logit_cotangents import logit_cotangents
from pallas_kernels.layer.norm import add_norm, add_norm_backward
from pallas_kernels.layer.short_conv import short_conv, short_conv_backward
from pallas_kernels.layer.swiglu import swiglu, swiglu_backward
from pallas_kernels.layer.swiglu_cotangents import swiglu_cotangents
from pallas_kernels.layer.swiglu_product import swiglu_product
from pallas_kernels.layer.weight_gradient import weight_gradient
from pallas_kernels.tools.batch_calls import BATCH_CALLS
from pallas_kernels.tools.call import Call, call, shapes
from pallas_kernels.tools.channel_calls import channels_call, mma_channels_call
from pallas_kernels.tools.serving_calls import channel_step_call, joined_call, ring_call, step_call
from pallas_kernels.tools.token_calls import TOKEN_CALLS
from pallas_kernels.work.slots import PoolStates, Slots


def rule_call(
    T=1024,
    HV=4,
    K=128,
    V=128,
    dtype="bf16",
    N=1,
    packed=False,
    ids=False,
    state=True,
    layout="vk",
    pool: str | None = None,
    norm=False,
    is_open=False,
    **config: Any,
) -> Call:
    """The rule on one row and, where the kernels have one, its backward, with its results as cotangents.

    Args:
      N, packed: sequences of a packed row.
      pool: dtype of a pool that holds the states. It, like the L2 norm inside, has no backward.
      is_open: the row goes on elsewhere.
      config: state_warpgroups and segment_chunks of both passes, see `forward.Config`.
    """
    widths = f"{K},{V}" if layout == "kv" else f"{V},{K}"
    cu_seqlens, segment_ids = f"i32[{N + 1}]" if packed else "-", f"i32[1,{T}]" if ids else "-"
    token, value, gate = f"{dtype}[1,{T},2,{K}]", f"{dtype}[1,{T},{HV},{V}]", f"f32[1,{T},{HV}]"
    states = shapes(f"f32[{N},{HV},{widths}]")[0] if state else None
    if pool is not None:
        array, slots = shapes(f"{pool}[8,{HV},{widths}] i32[{N}]")
        states = PoolStates(Slots(8, None, 1), array, slots, None, slots, None)
    arrays = shapes(f"{token} {token} {value} {gate} {gate} {cu_seqlens} {segment_ids}")
    x = RuleArrays._make((*arrays[:5], states, *arrays[5:]))
    config = dict[str, Any](state_warpgroups=2, segment_chunks=0) | config
    options: dict[str, Any] = dict(scale=0.1, state_layout=layout)

    def run(x: RuleArrays):
        o, final, residuals = forward.forward(
            x, use_qk_l2norm=norm, config=forward.Config(**config), **options
        )
        if norm or pool is not None:
            return o, final
        cotangents = backward.OutputCotangents(o, final if state else None)
        back = backward.Config(config["segment_chunks"] > 0, state_warpgroups=config["state_warpgroups"])
        return o, final, backward.backward(x, residuals, cotangents, config=back, **options)

    def run_open(x: RuleArrays):
        last = jnp.int32(N - 1) if packed else None
        opened = forward.prepare_open(x, scale=0.1, open_sequence=last, config=forward.Config(**config))
        o, final, residuals = opened.finish(x.initial_state)
        cotangents = backward.OutputCotangents(o, final)
        entry = Entry(last, jnp.array(True))
        found = backward.open_adjoints(x, residuals, cotangents, entry, scale=0.1)
        return opened.starts(x.initial_state), o, found[:2]

    return Call(run_open if is_open else run, (x,), {})


def mma_call(**options: Any) -> Call:
    """The rule by mma.sync and its backward on the arrays of `rule_call`.

    Args:
      options: those of `rule_call`, of whose last ones warpgroups and early_slots are `ampere.walk.Config`'s.
    """
    cut = options.pop("segment_chunks", 0)
    config = {name: options.pop(name) for name in ("warpgroups", "early_slots") if name in options}
    known = walk.Config(**config) if config else None
    static: dict[str, Any] = dict(scale=0.1, state_layout=options.get("layout", "vk"), config=known)

    def run(x: RuleArrays):
        o, final, residuals = mma_rule.forward(x, segment_chunks=cut, **static)
        cotangents = backward.OutputCotangents(o, None if x.initial_state is None else final)
        return o, final, mma_backward.backward(x, residuals, cotangents, **static)

    return Call(run, rule_call(**options).positional, {}, mma_rule.NEEDS)


SLOTS = dict(read_slots="i32[4]", write_slots="i32[4]")
MAKERS: dict[str, Callable[..., Call]] = {
    "rule": rule_call,
    "mma": mma_call,
    "channels": channels_call,
    "mma by channels": mma_channels_call,
    "decode": step_call,
    "decode of channels": joined_call,
    "decode by channels": channel_step_call,
    "verify": step_call,
    "verify by channels": channel_step_call,
    "decode deferred": partial(ring_call, deferred),
    "decode deferred by channels": partial(ring_call, channel_deferred, by_channels=True),
    "verify on a ring": partial(ring_call, drafts),
    "verify on a ring by channels": partial(ring_call, channel_drafts, by_channels=True),
    "verify on a ring by tensor cores": partial(ring_call, drafts_mma),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "pairs": dict(warpgroups=2),
    "half": dict(state_warpgroups=1),
    "segments": dict(segment_chunks=4),
    "open": dict(is_open=True, layout="kv", segment_chunks=4),
    "packed": dict(packed=True, N=3),
    "pool": dict(packed=True, N=3, layout="kv", pool="f32"),
    "bfloat16": dict(pool="bf16"),
    "int8": dict(pool="i8"),
    "float8": dict(pool="f8"),
    "float16": dict(dtype="f16"),
    "kv": dict(layout="kv"),
    "vk": dict(layout="vk"),
    "no states": dict(state=False),
    "segment ids": dict(ids=True),
    "erase": dict(erase=True),
    "halves": dict(halves=True),
    "strengths apart": dict(apart=True),
    "erasing": dict(erasing=True),
    "backwards": dict(backwards=True),
    "normalised": dict(norm=True),
    "tree": dict(tree=True),
    "bounded": dict(bounded=True),
    "uneven": dict(uneven=True),
}
"""Options by part of a name; a size such as "K 64" is another part. Of two that contradict, the later one holds."""

NAMES = """
rule; rule, half; rule, kv; rule, kv, no states, half; rule, no states; rule, segment ids; rule, HV 2
rule, HV 64, K 192, half; rule, T 256, packed; rule, T 65536; rule, T 65536, packed; rule, packed, N 40
rule, packed; rule, packed, half; rule, segments; rule, segments, half; rule, packed, segments
rule, packed, segments, half; rule, normalised; rule, normalised, half; rule, normalised, packed
rule, normalised, packed, segments; rule, K 64, V 64, half; rule, K 64; rule, K 256, half; rule, K 256, packed, half
rule, K 256, segments, half; rule, V 256, half; rule, float16; rule, float16, half; rule, float16, packed, half
rule, float16, segments, half; rule, open; rule, open, packed; rule, pool; rule, pool, bfloat16
rule, pool, bfloat16, vk; rule, pool, vk; rule, pool, half; rule, pool, bfloat16, half
rule, pool, bfloat16, K 256, half; rule, pool, segments; rule, pool, bfloat16, segments
rule, pool, bfloat16, vk, segments
mma, pairs; mma, packed; mma, kv, float16, packed, K 64, V 64; mma, segments
mma by channels, pairs; mma by channels, erase, packed; mma by channels, kv, K 64, V 64
mma by channels, segments, erase
channels; channels, half; channels, kv; channels, no states; channels, segment ids; channels, packed
channels, packed, half; channels, segments; channels, packed, segments; channels, erase; channels, normalised
channels, K 64, V 64, half; channels, K 64; channels, V 256; channels, float16; channels, open
channels, halves; channels, backwards, halves
channels, backwards; channels, backwards, packed; channels, backwards, packed, segments, half, erase
decode; decode, bfloat16; decode, vk; decode, vk, bfloat16; decode, K 256; decode, K 256, V 256, bfloat16
decode, K 32, V 32, bfloat16; decode of channels; decode of channels, bfloat16
decode by channels; decode by channels, bfloat16; decode by channels, vk, bounded
decode by channels, vk, bfloat16, bounded; decode by channels, strengths apart, bfloat16
decode by channels, erasing; decode by channels, erasing, bfloat16; decode by channels, erasing, vk, bfloat16
verify, T 4; verify, T 4, bfloat16; verify, T 4, vk, uneven; verify, T 8, tree; verify, T 8, tree, bfloat16
verify, T 8, tree, vk; verify, T 8, tree, vk, bfloat16; verify, T 8, tree, K 256, V 256
verify by channels, T 4; verify by channels, T 8, tree, bfloat16; verify by channels, T 8, vk, tree
verify by channels, T 8, tree, strengths apart
decode deferred; decode deferred, bfloat16; decode deferred, vk; decode deferred, vk, bfloat16
decode deferred, int8; decode deferred, vk, int8; decode deferred, float8
decode deferred by channels; decode deferred by channels, vk, bfloat16, strengths apart
verify on a ring by channels, T 4; verify on a ring by channels, T 4, vk, strengths apart
verify on a ring, T 4; verify on a ring, T 4, vk; verify on a ring, T 4, int8; verify on a ring, T 4, vk, int8
verify on a ring by tensor cores, T 2, bfloat16; verify on a ring by tensor cores, T 4, bfloat16
verify on a ring by tensor cores, T 8, bfloat16; verify on a ring by tensor cores, T 16, bfloat16
"""


def _named(name: str) -> Call:
    """The call of a name of `NAMES`."""
    function, *parts = name.split(", ")
    options: dict[str, Any] = {}
    for part in parts:
        size = re.fullmatch(r"(\w+) (\d+)", part)
        options |= {size[1]: int(size[2])} if size else OPTIONS[part]
    return MAKERS[function](**options)


CONV, CONV_BACK = partial(short_conv, heads=4, width=128), short_conv_backward
HEADS = "bf16[1,512,4,128] bf16[1,512,4,128] bf16[1,512,512]"
NORM = partial(add_norm, eps=1e-5, dtype=jnp.bfloat16, keep=True)
NORM_BACK = partial(add_norm_backward, eps=1e-5, x_dtype=jnp.float32, y_dtype=jnp.bfloat16)
CHANNEL_GATES, CHANNEL_BACK = (
    partial(channel_gates, lower_bound=None),
    partial(channel_gates_backward, lower_bound=None),
)
CHANNEL_GATES_OF = "bf16[512,4,128] f32[4] f32[4,128]"
GATED, GATED_BACK = partial(gated_norm, eps=1e-5), partial(gated_norm_backward, eps=1e-5)

CALLS: dict[str, Call] = {
    **{name: _named(name) for name in re.split(r"[;\n] ?", NAMES.strip())},
    "convolution of a token": call(conv_update, "bf16[4,1024] bf16[8,1024,3] f32[1024,4] -", **SLOTS),
    "convolution of a token, joined": call(
        conv_update, "bf16[4,1168] bf16[8,1024,3] f32[1024,4] -", read_slots="-", write_slots="-"
    ),
    "convolution of a token, float32": call(
        conv_update, "bf16[4,1000] f32[8,1000,2] f32[1000,3] f32[1000]", **SLOTS
    ),
    "short convolution": call(CONV, "bf16[1,512,1536] f32[1536,4] -"),
    "short convolution, segments": call(CONV, "bf16[1,512,1536] f32[1536,4] i32[1,512]"),
    "short convolution, joined": call(CONV, "bf16[1,512,2176] f32[1536,4] -"),
    "short convolution, backwards": call(CONV_BACK, f"bf16[1,512,1536] f32[1536,4] - {HEADS}"),
    "short convolution, backwards, segments": call(
        CONV_BACK, f"bf16[1,512,1536] f32[1536,4] i32[1,512] {HEADS}"
    ),
    "short convolution, backwards, joined": call(
        CONV_BACK, f"bf16[1,512,2176] f32[1536,4] - {HEADS} bf16[1,512,2176]"
    ),
    "norm": call(NORM, "f32[64,1024] bf16[64,1024] f32[1024]"),
    "norm, 4096": call(NORM, "f32[64,4096] bf16[64,4096] f32[4096]"),
    "norm, without a weight": call(NORM, "f32[64,1024] bf16[64,1024] -"),
    "norm, backwards": call(NORM_BACK, "bf16[64,1024] f32[1024] f32[64,1024] bf16[64,1024]"),
    "norm, backwards, 2048": call(NORM_BACK, "bf16[64,2048] f32[2048] f32[64,2048] bf16[64,2048]"),
    "norm, backwards, 5120": call(NORM_BACK, "bf16[64,5120] f32[5120] f32[64,5120] bf16[64,5120]"),
    "norm, without a weight, backwards": call(
        NORM_BACK, "bf16[64,1024] - f32[64,1024] bf16[64,1024]", factors="f32[64]"
    ),
    "channel gates": call(CHANNEL_GATES, CHANNEL_GATES_OF),
    "channel gates, lower bound": call(partial(channel_gates, lower_bound=-5.0), CHANNEL_GATES_OF),
    "channel gates, backwards": call(CHANNEL_BACK, f"{CHANNEL_GATES_OF} f32[512,4,128]"),
    "channel gates, backwards, lower bound": call(
        partial(channel_gates_backward, lower_bound=-5.0), f"{CHANNEL_GATES_OF} f32[512,4,128]"
    ),
    "gated norm": call(GATED, "bf16[2048,128] bf16[2048,128] f32[128]"),
    "gated norm, joined": call(GATED, "bf16[2048,128] bf16[256,33,128] f32[128]"),
    "gated norm, sigmoid": call(
        partial(GATED, activation="sigmoid"), "bf16[2048,128] bf16[2048,128] f32[128]"
    ),
    "gated norm, sigmoid, backwards": call(
        partial(GATED_BACK, activation="sigmoid"), "bf16[2048,128] bf16[2048,128] f32[128] bf16[2048,128]"
    ),
    "gated norm, backwards": call(GATED_BACK, "bf16[2048,128] bf16[2048,128] f32[128] bf16[2048,128]"),
    "gated norm, backwards, joined": call(
        GATED_BACK, "bf16[2048,128] bf16[256,33,128] f32[128] bf16[2048,128]"
    ),
    "swiglu": call(swiglu, "bf16[131072]"),
    "swiglu, backwards": call(swiglu_backward, "bf16[131072] bf16[65536]"),
    "operands of 8 bits": call(partial(eight_bits, dtype="float8_e4m3fn"), "bf16[4096,1024] f32[]"),
    "norm, 8 bits": call(
        partial(
            norm_eight_bits.add_norm_eight_bits,
            eps=1e-5,
            dtype=jnp.bfloat16,
            scale=8.0,
            codes="float8_e4m3fn",
        ),
        "f32[4096,1024] bf16[4096,1024]",
    ),
    "norm, 8 bits, backwards": call(
        partial(norm_eight_bits.add_norm_eight_bits_backward, x_dtype=jnp.float32, codes="float8_e5m2"),
        "bf16[4096,1024] f32[4096] f32[4096,1024] bf16[4096,1024] f32[]",
    ),
    "gated norm, 8 bits": call(
        partial(gated_norm_eight_bits.gated_norm_eight_bits, dtype="float8_e4m3fn", eps=1e-5),
        "bf16[4096,1024] bf16[4096,4224] f32[128] f32[]",
    ),
    "swiglu, 8 bits": call(partial(swiglu_eight_bits.swiglu, dtype="float8_e4m3fn"), "bf16[4096,5504] f32[]"),
    "swiglu, 8 bits, backwards": call(
        partial(swiglu_eight_bits.swiglu_backward, dtype="float8_e5m2"),
        "bf16[4096,5504] bf16[4096,2752] f32[]",
    ),
    "swiglu in its product": call(swiglu_product, "bf16[4096,1024] bf16[1024,5504]"),
    "swiglu in its product, backwards": call(
        swiglu_cotangents, "bf16[4096,1024] bf16[2752,1024] bf16[4096,5504]"
    ),
    "gradient of weights": call(partial(weight_gradient, parts=3), "bf16[65536,1024] bf16[65536,5504]"),
    **BATCH_CALLS,
    **TOKEN_CALLS,
    "embedding": call(embedding_gradient, "f32[64,1024] i32[64] i32[33]"),
    "cross entropy": call(cross_entropy, "bf16[8192,1024] bf16[32768,1024] i32[8192]"),
    "cotangents of logits": call(logit_cotangents, "bf16[8192,32768] f32[128,8192] i32[8192] f32[8192]"),
}
"""Name -> a call."""
