"""Calls of the kernels of a token: the step over pools of states and over rings, and the convolution's."""

from functools import partial

from pallas_kernels.decode.conv_update import conv_update
from pallas_kernels.decode.deferred import deferred
from pallas_kernels.decode.drafts import Drafts, drafts
from pallas_kernels.decode.drafts_mma import drafts_mma
from pallas_kernels.decode.step import Channels, step, step_of_channels
from pallas_kernels.tools.calls import Call, call

SLOTS = dict(read_slots="i32[4]", write_slots="i32[4]")
GATES = dict(A_log="f32[4]", dt_bias="f32[4]")


def _tokens(T: int, K: int = 128, V: int = 128) -> tuple[int, str]:
    """Requests, and q, k, v and the gates of T tokens each: with one token as many as have tiles in the L2 cache."""
    N = 128 if T == 1 else 4
    qk, gates = f"bf16[{N},{T},2,{K}]", f"bf16[{N},{T},4]"
    return N, f"{qk} {qk} bf16[{N},{T},4,{V}] {gates} {gates}"


def step_call(T=1, K=128, V=128, layout="kv", pool="f32", uneven=False, tree=False) -> Call:
    """`step` of T tokens on a pool of eight states, which is in place."""
    N, tokens = _tokens(T, K, V)
    state = f"{pool}[8,4,{K},{V}]" if layout == "kv" else f"{pool}[8,4,{V},{K}]"
    slots = dict(read_slots=f"i32[{N}]", write_slots=f"i32[{N},{T}]")
    slots |= dict(num_tokens=f"i32[{N}]" if uneven else "-", parents=f"i32[{N},{T}]" if tree else "-")
    return call(partial(step, scale=0.1, kv_layout=layout == "kv"), f"{tokens} {state}", **GATES, **slots)


def joined_call(pool="f32") -> Call:
    """`step_of_channels`, one token whose row is its slot, from the channels of a convolution."""
    function = partial(
        _of_channels,
        heads=(2, 2, 2),
        first=Channels(0, 256, 512, 768, 770),
        scale=0.1,
        read_slots=None,
        write_slots=None,
    )
    gates = dict(A_log="f32[2]", dt_bias="f32[2]")
    return call(function, f"bf16[256,1,768] bf16[256,1,1152] {pool}[256,2,128,128]", **gates)


def _of_channels(qkv, products, pool, **options):
    return step_of_channels(qkv, qkv, qkv, products, products, pool, **options)


def ring_call(function, T=1, pool="f32", **options) -> Call:
    """A kernel over rings of 16 tokens, with states and rings in place."""
    N, tokens = _tokens(T)
    ring = f"{pool}[8,4,128,128] bf16[8,2,16,128] bf16[8,4,16,128] f32[8,4,16] i32[8,4,2]"
    accepted = {} if T == 1 else {"accepted": f"i32[{N}]"}
    function = partial(function, scale=0.1, **options)
    return call(function, f"{tokens} {ring}", **GATES, read_slots=f"i32[{N}]", **accepted)


DECODE_CALLS: dict[str, Call] = {
    "decode": step_call(),
    "decode, bfloat16": step_call(pool="bf16"),
    "decode, vk": step_call(layout="vk"),
    "decode, vk, bfloat16": step_call(layout="vk", pool="bf16"),
    "decode, K 256": step_call(K=256),
    "decode, K 256, bfloat16": step_call(K=256, V=256, pool="bf16"),
    "decode, K 32, bfloat16": step_call(K=32, V=32, pool="bf16"),
    "decode, joined": joined_call(),
    "decode, joined, bfloat16": joined_call("bf16"),
    "verify, 4 tokens": step_call(4),
    "verify, 4 tokens, bfloat16": step_call(4, pool="bf16"),
    "verify, 4 tokens, vk, uneven": step_call(4, layout="vk", uneven=True),
    "verify, tree": step_call(8, tree=True),
    "verify, tree, bfloat16": step_call(8, tree=True, pool="bf16"),
    "verify, tree, vk": step_call(8, tree=True, layout="vk"),
    "verify, tree, vk, bfloat16": step_call(8, tree=True, layout="vk", pool="bf16"),
    "verify, tree, K 256": step_call(8, K=256, V=256, tree=True),
    "decode deferred": ring_call(deferred, kv_layout=True),
    "decode deferred, bfloat16": ring_call(deferred, pool="bf16", kv_layout=True),
    "decode deferred, vk": ring_call(deferred, kv_layout=False),
    "decode deferred, vk, bfloat16": ring_call(deferred, pool="bf16", kv_layout=False),
    "verify on a ring, 4 tokens": ring_call(drafts, 4, kv_layout=True, drafts=Drafts(4)),
    "verify on a ring, 4 tokens, vk": ring_call(drafts, 4, kv_layout=False, drafts=Drafts(4)),
    **{
        f"verify on a ring, tensor cores, {T} tokens": ring_call(drafts_mma, T, pool="bf16")
        for T in (2, 4, 8, 16)
    },
    "convolution of a token": call(conv_update, "bf16[4,1024] bf16[8,1024,3] f32[1024,4] -", **SLOTS),
    "convolution of a token, joined": call(
        conv_update, "bf16[4,1168] bf16[8,1024,3] f32[1024,4] -", read_slots="-", write_slots="-"
    ),
    "convolution of a token, float32": call(
        conv_update, "bf16[4,1000] f32[8,1000,2] f32[1000,3] f32[1000]", **SLOTS
    ),
}
