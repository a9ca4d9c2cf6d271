"""Calls of the kernel that is a layer of the delta rule for one token of one row."""

from functools import partial
from typing import Any

from gdn_jax.shapes import Convolution, LayerScales
from pallas_kernels.device.needs import Needs
from pallas_kernels.rows.delta_decays import ChannelDecay, HeadDecay
from pallas_kernels.rows.delta_heads import Places, Rule
from pallas_kernels.rows.delta_layer import delta_layer
from pallas_kernels.tools.call import Call, call


def delta_layer_call(places, rule, x, y, norm, weight, state, filters, *others, codes=False):
    """A token from the stream to its output projection."""
    *arrays, A_log, dt_bias = others[: len(others) - 3 * codes]
    scales = LayerScales(*others[-3:]) if codes else None
    gates: dict[str, Any] = dict(A_log=A_log, dt_bias=dt_bias, eps=1e-6)
    convolution = Convolution(state, filters, None)
    return delta_layer(
        x, y, norm, weight, convolution, *arrays, **gates, places=places, rule=rule, scales=scales
    )


CHANNEL_LAYER = Places(0, 2048, 4096, 6144, 8192, 8320), Rule(ChannelDecay(-5.0), False, 1e-6, "sigmoid")
"""Where the channels of a layer of 16 heads lie, and its rule, with a decay of each channel."""


def head_layer_call(H: int, HV: int, D: int, K: int = 128) -> Call:
    """The same with a decay of each head, a stream in parts, and projections as a decoding program groups them."""
    filtered = (2 * H + HV) * K
    gate = -(-(filtered + 2 * HV) // K) * K
    places = Places(0, H * K, 2 * H * K, filtered, filtered + HV, gate)
    arrays = (
        f"bf16[1,{D}] bf16[{HV},{D}] f32[{D}] bf16[{gate + HV * K},{D}] bf16[1,{filtered},3] bf16[{filtered},4] "
        f"f32[1,{HV},{K},{K}] f32[{K}] bf16[{D},{HV * K}] f32[{HV}] f32[{HV}]"
    )
    rule = Rule(HeadDecay(), False, 1e-6, "silu")
    return call(partial(delta_layer_call, places, rule), arrays, Needs.TMA | Needs.LARGE)


def codes_layer_call(H: int, HV: int, D: int, K: int = 128) -> Call:
    """The same by codes of 8 bits, with narrow projections of their own."""
    filtered = (2 * H + HV) * K
    rows, narrow = filtered + HV * K, -(-2 * HV // K) * K
    places = Places(0, H * K, 2 * H * K, rows, rows + narrow - HV, filtered)
    arrays = (
        f"bf16[1,{D}] bf16[{HV},{D}] f32[{D}] f8[{rows},{D}] bf16[1,{filtered},3] bf16[{filtered},4] "
        f"f32[1,{HV},{K},{K}] f32[{K}] f8[{D},{HV * K}] f32[{HV}] f32[{HV}] f32[{rows // 128},{D // 128}] "
        f"f32[{D // 128},{HV * K // 128}] bf16[{narrow},{D}]"
    )
    rule = Rule(HeadDecay(), False, 1e-6, "silu")
    return call(partial(delta_layer_call, places, rule, codes=True), arrays, Needs.TMA | Needs.LARGE)


TOKEN_CALLS: dict[str, Call] = {
    "layer of a token": call(
        partial(delta_layer_call, *CHANNEL_LAYER),
        "f32[1,1536] f32[11,1536] f32[1536] bf16[10368,1536] bf16[1,6144,3] bf16[6144,4] f32[1,16,128,128] f32[128] "
        "bf16[1536,2048] f32[16] f32[16,128]",
        Needs.TMA | Needs.LARGE,
    ),
    "layer of a token, 0.4b": head_layer_call(8, 8, 1024),
    "layer of a token, qwen3.5-0.8b": head_layer_call(16, 16, 1024),
    "layer of a token, 1.3b": head_layer_call(16, 16, 2048),
    "layer of a token, qwen3.5-4b": head_layer_call(16, 32, 2560),
    "layer of a token, qwen3.5-0.8b, 8 bits": codes_layer_call(16, 16, 1024),
    "layer of a token, qwen3.5-2b, 8 bits": codes_layer_call(16, 16, 2048),
    "layer of a token, qwen3.5-4b, 8 bits": codes_layer_call(16, 32, 2560),
    "layer of a token, qwen3-next": head_layer_call(16, 32, 2048),
}
"""Name -> a call."""
