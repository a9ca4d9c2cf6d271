"""Calls of the kernels of what stands around the rule in a layer."""

from functools import partial

import jax.numpy as jnp

from pallas_kernels.layer.cross_entropy import cross_entropy
from pallas_kernels.layer.embedding import embedding_gradient
from pallas_kernels.layer.gated_norm import gated_norm, gated_norm_backward
from pallas_kernels.layer.logit_cotangents import logit_cotangents
from pallas_kernels.layer.norm import add_norm, add_norm_backward
from pallas_kernels.layer.short_conv import short_conv, short_conv_backward
from pallas_kernels.layer.swiglu import swiglu, swiglu_backward
from pallas_kernels.layer.swiglu_cotangents import swiglu_cotangents
from pallas_kernels.layer.swiglu_product import swiglu_product
from pallas_kernels.layer.weight_gradient import weight_gradient
from pallas_kernels.tools.calls import Call, call

CONV, CONV_BACK = partial(short_conv, heads=4, width=128), short_conv_backward
HEADS = "bf16[1,512,4,128] bf16[1,512,4,128] bf16[1,512,512]"
NORM = partial(add_norm, eps=1e-5, dtype=jnp.bfloat16, keep=True)
NORM_BACK = partial(add_norm_backward, eps=1e-5, x_dtype=jnp.float32, y_dtype=jnp.bfloat16)
GATED, GATED_BACK = partial(gated_norm, eps=1e-5), partial(gated_norm_backward, eps=1e-5)

LAYER_CALLS: dict[str, Call] = {
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
    "gated norm": call(GATED, "bf16[2048,128] bf16[2048,128] f32[128]"),
    "gated norm, joined": call(GATED, "bf16[2048,128] bf16[256,33,128] f32[128]"),
    "gated norm, backwards": call(GATED_BACK, "bf16[2048,128] bf16[2048,128] f32[128] bf16[2048,128]"),
    "gated norm, backwards, joined": call(
        GATED_BACK, "bf16[2048,128] bf16[256,33,128] f32[128] bf16[2048,128]"
    ),
    "swiglu": call(swiglu, "bf16[131072]"),
    "swiglu, backwards": call(swiglu_backward, "bf16[131072] bf16[65536]"),
    "swiglu in its product": call(swiglu_product, "bf16[4096,1024] bf16[1024,5504]"),
    "swiglu in its product, backwards": call(
        swiglu_cotangents, "bf16[4096,1024] bf16[2752,1024] bf16[4096,5504]"
    ),
    "gradient of weights": call(partial(weight_gradient, parts=3), "bf16[65536,1024] bf16[65536,5504]"),
    "embedding": call(embedding_gradient, "f32[64,1024] i32[64] i32[33]"),
    "cross entropy": call(cross_entropy, "bf16[8192,1024] bf16[32768,1024] i32[8192]"),
    "cotangents of logits": call(logit_cotangents, "bf16[8192,32768] f32[128,8192] i32[8192] f32[8192]"),
}
