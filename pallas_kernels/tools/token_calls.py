"""Calls of the kernels of a token of one row."""

from functools import partial
from typing import Any

import jax.numpy as jnp

from gdn_jax.shapes import Choice, Convolution, LayerScales
from pallas_kernels.device.needs import Needs
from pallas_kernels.rows.attention_rows import Parts
from pallas_kernels.rows.delta_decays import ChannelDecay, HeadDecay
from pallas_kernels.rows.delta_heads import Places, Rule
from pallas_kernels.rows.delta_layer import delta_layer
from pallas_kernels.rows.dense_stream import dense_stream
from pallas_kernels.rows.latent_row import Places as LatentPlaces
from pallas_kernels.rows.latent_row import latent_row
from pallas_kernels.rows.routed_stream import routed_stream
from pallas_kernels.rows.routing import choose
from pallas_kernels.rows.row_product import attended_product, heads_product, stream_product
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


def experts_call(D: int, E: int, F: int, choice: Choice) -> Call:
    """Norm, router, choice of the experts and the experts of one row, with a gate of the shared one if by softmax."""
    router = f"f32[{E},{D}] f32[{E}]" if choice.scoring == "sigmoid" else f"bf16[{E + 1},{D}] -"
    shared = f"bf16[{D},{F}] bf16[{D},{F}] bf16[{F},{D}]"

    def run(x, y, norm, router, bias, gate_up, down, *shared):
        arrays = x, y, norm, router, bias, gate_up, down, shared
        return routed_stream(*arrays, choice=choice, eps=1e-6)

    experts = f"bf16[{E},{D},{2 * F}] bf16[{E},{F},{D}]"
    arrays = f"bf16[1,{D}] bf16[1,{D}] f32[{D}] {router} {experts} {shared}"
    return call(run, arrays, Needs.TMA | Needs.LARGE)


def dense_call(D: int, F: int, parts: int = 1, codes: bool = False, needs: Needs | None = None) -> Call:
    """The second half of a layer with a SwiGLU, after a sum in parts, by numbers or by codes of 8 bits."""
    dtype, scales = ("f8", f" f32[3,{F // 128},{D // 128}]") if codes else ("bf16", "")
    weights = f"{dtype}[{2 * F},{D}] {dtype}[{F},{D}]{scales}"
    arrays = f"bf16[1,{D}] bf16[{parts},{D}] f32[{D}] {weights}"
    return call(partial(dense_stream, eps=1e-6), arrays, needs or Needs.TMA | Needs.LARGE)


def stream_call(D: int, F: int, codes: bool = False, needs: Needs | None = None) -> Call:
    """The norm of the stream times a matrix."""
    weight = f"f8[{F},{D}] f32[{F // 128},{D}]" if codes else f"bf16[{F},{D}]"
    product = partial(stream_product, eps=1e-6, dtype=jnp.bfloat16)
    return call(product, f"f32[1,{D}] bf16[1,{D}] f32[{D}] {weight}", needs)


def heads_call(H: int, G: int, D: int, activation: str = "silu", codes: bool = False) -> Call:
    """The gated norm of H heads of 128 times a matrix, where the gates are the last of G heads."""
    o, weight = f"bf16[{H},128]", f"bf16[{D},{H * 128}]"
    if codes:
        o, weight = f"f32[{H},128]", f"f8[{D},{H * 128}] f32[{D // 128},{H * 128}]"
    product = partial(heads_product, eps=1e-6, activation=activation, dtype=jnp.bfloat16)
    return call(product, f"{o} bf16[{G},128] f32[128] {weight}", Needs.TMA | Needs.LARGE if codes else None)


def attended_call(o, largest, total, length, z, weight):
    """Heads of softmax attention in parts, with gates."""
    return attended_product(Parts(o, largest, total), length, z, weight, group=4)


SIGMOID, SOFTMAX = Choice(8, 8, 4, True, 2.5), Choice(8, 1, 1, True, 1.0, "softmax")

TOKEN_CALLS: dict[str, Call] = {
    "experts that a row chooses": experts_call(1536, 128, 512, SIGMOID),
    "experts that a row chooses, qwen3.5-35b-a3b": experts_call(2048, 256, 512, SOFTMAX),
    "experts that a row chooses, qwen3.5-122b-a10b": experts_call(3072, 256, 1024, SOFTMAX),
    "experts that a row chooses, qwen3-next-80b-a3b": experts_call(
        2048, 512, 512, SOFTMAX._replace(per_token=10)
    ),
    "second half of a row": dense_call(1024, 3584, needs=Needs.MMA),
    "second half of a row, qwen3.5-4b": dense_call(2560, 9216, 32),
    "second half of a row, qwen3.5-4b, 8 bits": dense_call(2560, 9216, 32, codes=True),
    "second half of a row, qwen3.6-27b": dense_call(5120, 17408),
    "second half of a row, qwen3.6-27b, 8 bits": dense_call(5120, 17408, codes=True),
    "row of a stream, qwen3.5-4b, 8 bits": stream_call(2560, 12288, codes=True, needs=Needs.TMA),
    "row of a stream, qwen3.6-27b, 8 bits": stream_call(
        5120, 16384, codes=True, needs=Needs.TMA | Needs.LARGE
    ),
    "row of a stream": stream_call(1536, 10368),
    "row of heads, qwen3.5-4b, 8 bits": heads_call(32, 96, 2560, codes=True),
    "row of heads, qwen3.6-27b, 8 bits": heads_call(48, 128, 5120, codes=True),
    "row of heads": heads_call(16, 81, 1536, "sigmoid"),
    "row of attended heads, qwen3.5-4b": call(
        attended_call,
        "f32[1,4,3,8,256] f32[1,4,3,8] f32[1,4,3,8] i32[1] bf16[40,256] bf16[2560,4096]",
        Needs.TMA | Needs.LARGE,
    ),
    "latent attention of a row": call(
        partial(latent_row, places=LatentPlaces(256, 832), scale=192**-0.5, eps=1e-6),
        "bf16[1,848] bf16[1,9216] f32[512] f32[32] bf16[16,128,512] bf16[1,192,1,64] bf16[1,192,1,512] i32[1]",
    ),
    "routing": call(partial(choose, choice=SIGMOID), "f32[1,128] f32[128]"),
    "routing, 256 experts": call(partial(choose, choice=Choice(8, 1, 1, True, 2.5)), "f32[32,256] f32[256]"),
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
