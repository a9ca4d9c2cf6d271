"""The calls of serving's kernels that the tools look at, see `calls`."""

from functools import partial
from typing import Any

from pallas_kernels.decode.apart_step import apart_step
from pallas_kernels.decode.channel_ring import channel_drafts
from pallas_kernels.decode.channel_step import channel_step
from pallas_kernels.decode.drafts import Drafts, drafts
from pallas_kernels.decode.drafts_mma import drafts_mma
from pallas_kernels.decode.erasure_step import erasure_step
from pallas_kernels.decode.ring import ChannelTokens, Rings, Tokens
from pallas_kernels.decode.step import Channels, step_of_channels
from pallas_kernels.device.needs import Needs
from pallas_kernels.tools.call import Call, call, shapes


def step_call(T=1, K=128, V=128, layout="kv", pool="f32", uneven=False, tree=False) -> Call:
    """`step_of_channels` of T tokens on a pool of eight states, which is in place."""
    N, tokens = _tokens(T, f"{2 * K}", f"{4 * V}")
    state = f"{pool}[8,4,{K},{V}]" if layout == "kv" else f"{pool}[8,4,{V},{K}]"
    slots = dict(read_slots=f"i32[{N}]", write_slots=f"i32[{N},{T}]")
    slots |= dict(num_tokens=f"i32[{N}]" if uneven else "-", parents=f"i32[{N},{T}]" if tree else "-")
    known = dict(heads=(2, 2, 4), scale=0.1, kv_layout=layout == "kv")
    return call(partial(step_of_channels, **known), f"{tokens} {state}", **GATES, **slots)


def joined_call(pool="f32") -> Call:
    """`step_of_channels`, one token whose row is its slot, from the channels of a convolution."""
    known = dict(
        heads=(2, 2, 2), first=Channels(0, 256, 512, 768, 770), scale=0.1, read_slots=None, write_slots=None
    )

    def joined(qkv, products, pool, **gates):
        return step_of_channels(qkv, qkv, qkv, products, products, pool, **gates, **known)

    gates = dict(A_log="f32[2]", dt_bias="f32[2]")
    return call(joined, f"bf16[256,1,768] bf16[256,1,1152] {pool}[256,2,128,128]", Needs.NOTHING, **gates)


def channel_step_call(
    T=1, layout="kv", pool="f32", bounded=False, tree=False, apart=False, erasing=False
) -> Call:
    """`channel_step`, `apart_step` or `erasure_step` of T tokens on a pool of eight states, which is in place."""
    known = dict(heads=(2, 2, 4), scale=0.1, kv_layout=layout == "kv", lower_bound=-5.0 if bounded else None)
    tokens = f"bf16[4,{T},256] bf16[4,{T},256] bf16[4,{T},512] {_of_channels(4, T, apart)}"
    gates = dict(A_log="f32[4]", dt_bias="f32[4,128]")
    slots = dict(read_slots="i32[4]", write_slots=f"i32[4,{T}]", parents=f"i32[4,{T}]" if tree else "-")
    kernel = apart_step if apart else erasure_step if erasing else channel_step
    tokens += " bf16[4,1,2,128] bf16[4,1,4]" if erasing else ""
    return call(partial(kernel, **known), f"{tokens} {pool}[8,4,128,128]", **gates, **slots)


def _of_channels(N: int, T: int, apart: bool) -> str:
    """Raw inputs of the decay and of one strength or two."""
    f = f"bf16[{N},{T},4,128]"
    return f"{f} {f} {f}" if apart else f"{f} bf16[{N},{T},4]"


def ring_call(kernel, T=1, layout="kv", pool="f32", by_channels=False, apart=False) -> Call:
    """A kernel over rings of 16 tokens, with states and rings in place."""
    N, tokens = _tokens(T)
    x: Any = Tokens(*shapes(f"{tokens} f32[4] f32[4]"))
    if by_channels:
        x = ChannelTokens(
            *x[:3], *shapes(f"{_of_channels(N, T, apart)} {'' if apart else '-'} f32[4] f32[4,128]")
        )
    gates = "f32[8,4,16,128]" if by_channels else "f32[8,4,16]"
    rings = f"{pool}[8,4,128,128] bf16[8,2,16,128] bf16[8,4,16,128] {gates} i32[8,4,2]"
    rings += " f32[8,4,128]" if pool in ("i8", "f8") else ""
    arrays = dict(read_slots=f"i32[{N}]") | ({} if T == 1 else dict(accepted=f"i32[{N}]"))
    options: dict[str, Any] = {} if kernel is drafts_mma else dict(kv_layout=layout == "kv")
    options |= dict(drafts=Drafts(T)) if kernel in (drafts, channel_drafts) else {}
    options |= dict(lower_bound=None) if by_channels else {}
    made = call(partial(kernel, scale=0.1, **options), "", **arrays)
    return made._replace(positional=(x, Rings(*shapes(rings))))


def _tokens(T: int, qk: str = "2,128", v: str = "4,128") -> tuple[int, str]:
    """Requests, and q, k, v and the gates of T tokens each: with one token as many as have tiles in the L2 cache.

    Args:
      qk, v: sizes of a token's q or k, and of its v.
    """
    N = 128 if T == 1 else 4
    qk, gates = f"bf16[{N},{T},{qk}]", f"bf16[{N},{T},4]"
    return N, f"{qk} {qk} bf16[{N},{T},{v}] {gates} {gates}"


GATES = dict(A_log="f32[4]", dt_bias="f32[4]")
