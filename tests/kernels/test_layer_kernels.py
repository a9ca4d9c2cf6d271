"""Kernels around the rule without a GPU: what each of them refuses, and that layers and models use them."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from gdn_jax.layers import GatedDeltaNet
from gdn_jax.models import LanguageModel, ModelConfig
from pallas_kernels.device import launch
from pallas_kernels.layer import (
    cross_entropy,
    embedding,
    gated_norm,
    logit_cotangents,
    norm,
    short_conv,
    swiglu,
    swiglu_cotangents,
    swiglu_product,
    weight_gradient,
)


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


CONV = (shape(1, 64, 3 * 4 * 32), shape(3 * 4 * 32, 4, dtype="float32"), 4, 32)


@pytest.mark.parametrize(
    ("check", "arguments", "reason"),
    [
        (norm, (shape(8, 128, dtype="float64"),), "x is float64"),
        (norm, (shape(8, 100),), "rows of 100; the kernel takes multiples of 32 up"),
        (norm, (shape(8, 1056),), "rows of 1056; the kernel takes multiples of 128 up"),
        (norm, (shape(8, 8320),), "rows of 8320"),
        (norm, (shape(3, 2, 64),), "rows of 64; the kernel takes multiples of 128"),
        (norm, (shape(0, 64),), "0 rows"),
        (norm, (shape(3, 4096, dtype="float32"),), None),
        (norm, (shape(2, 2, 8192, dtype="float16"),), None),
        (gated_norm, (shape(1, 64, 4, 128, dtype="float32"),), "o is float32"),
        (gated_norm, (shape(1, 64, 4, 96),), "V = 96"),
        (gated_norm, (shape(1, 3, 1, 128),), "a multiple of 1024 numbers"),
        (gated_norm, (shape(0, 8, 128),), "a multiple of 1024 numbers"),
        (gated_norm, (shape(1, 16, 1, 64, dtype="float16"),), None),
        (swiglu, (shape(64, 64, dtype="float32"),), "x is float32"),
        (swiglu, (shape(3, 1024),), "a multiple of 2048 numbers"),
        (swiglu, (shape(0, 2048),), "a multiple of 2048 numbers"),
        (swiglu, (shape(2, 1024, dtype="float16"),), None),
        (swiglu_product, (shape(64, 64, dtype="float32"), 32), "x: float32"),
        (swiglu_product, (shape(12, 64), 32), "x: 12 rows; the kernel takes a multiple of 8"),
        (swiglu_product, (shape(16, 96), 32), "x: rows of 96; the kernel takes a multiple of 64"),
        (swiglu_product, (shape(16, 64), 48), "48 columns; the kernel takes a multiple of 32"),
        (swiglu_cotangents, (shape(0, 64), 32), "dy: 0 rows"),
        (swiglu_cotangents, (shape(2, 8, 64, dtype="float16"), 64), None),
        (weight_gradient, (shape(64, 64, dtype="float32"), 64), "x is float32"),
        (weight_gradient, (shape(12, 64), 64), "x has 12 rows; the kernel takes a multiple of 8"),
        (weight_gradient, (shape(8, 64), 96), "weights [64, 96]; the kernel takes multiples of 64"),
        (weight_gradient, (shape(8, 64, dtype="float16"), 64), None),
        (cross_entropy, (shape(64, 64, dtype="float16"), 64), "x is float16"),
        (cross_entropy, (shape(12, 64), 64), "x: 12 rows"),
        (cross_entropy, (shape(8, 64), 96), "96 words; the kernel takes a multiple of 64"),
        (cross_entropy, (shape(8, 64), 64), None),
        (logit_cotangents, (shape(8, 128, dtype="float32"),), "x is float32"),
        (
            logit_cotangents,
            (shape(8, 320),),
            "8 rows of 320 words; the kernel takes multiples of 8 and of 128",
        ),
        (logit_cotangents, (shape(4, 256),), "4 rows"),
        (logit_cotangents, (shape(8, 384),), None),
        (embedding, (shape(8, 128, dtype="float64"),), "the stream is float64"),
        (embedding, (shape(8, 192),), "rows of 192; the kernel takes multiples of 128"),
        (embedding, (shape(0, 128),), "rows of 128"),
        (embedding, (shape(8, 640, dtype="float32"),), None),
        (short_conv, (shape(1, 64, 384, dtype="float32"), *CONV[1:]), "x is float32"),
        (short_conv, (CONV[0], shape(384, 3, dtype="float32"), 4, 32), "W = 3"),
        (short_conv, (shape(1, 65, 384), *CONV[1:]), "T = 65; the kernel takes multiples of 8"),
        (short_conv, (shape(1, 0, 384), *CONV[1:]), "T = 0"),
        (short_conv, (*CONV[:2], 3, 32), "384 channels with 3 heads of 32"),
        (short_conv, (*CONV[:2], 4, 16), "384 channels with 4 heads of 16"),
        (short_conv, (shape(1, 64, 416), shape(416, 4), 4, 32), "416 channels with 4 heads of 32"),
        (short_conv, CONV, None),
    ],
)
def test_refusals_say_why(check, arguments, reason):
    got = check.check_supported(*arguments)
    assert got is None if reason is None else reason in str(got)


def kernels_of(module, arguments, monkeypatch):
    """How many kernels of each name the program of a module's gradient has, lowered for an NVIDIA GPU. Calls of equal
    shapes share one."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    graphdef, params = nnx.split(module)

    def loss(params, *arguments):
        return nnx.merge(graphdef, params)(*arguments)[0].astype(jnp.float32).sum()

    lowered = jax.jit(jax.value_and_grad(loss)).trace(params, *arguments).lower(lowering_platforms=("cuda",))
    names = re.findall(r"\b00(\w+?)_mosaic_gpu\b", lowered.as_text())
    around = ("short_conv", "gated_norm", "add_norm", "swiglu", "embedding")
    return {name: n for name, n in collections.Counter(names).items() if name.startswith(around)}


@pytest.mark.parametrize("implementation", [None, pytest.param("chunked", marks=pytest.mark.slow)])
def test_layer_uses_the_kernels(implementation, monkeypatch):
    """One convolution for q, k and v, and one norm with the gate, forward and backward."""
    options = dict(num_heads=4, head_dim=32, expand_v=1.0, dtype=jnp.bfloat16)
    layer = nnx.eval_shape(
        lambda: GatedDeltaNet(64, **options, implementation=implementation, rngs=nnx.Rngs(0))
    )
    got = kernels_of(layer, (shape(1, 128, 64),), monkeypatch)
    names = ("short_conv", "short_conv_backward", "gated_norm", "gated_norm_backward")
    assert got == (dict.fromkeys(names, 1) if implementation is None else {})


@pytest.mark.slow
def test_model_uses_the_kernels(monkeypatch):
    """Three blocks share every kernel. Norms before a SwiGLU have no weight; those before these small mixers, which
    do not take it, and the last have one. The first norm has nothing to add, and its derivative no y; the last one's
    derivative has no cotangent of the sum."""
    sizes = dict(vocab_size=64, hidden_size=128, num_layers=3, num_heads=4, head_dim=32, expand_v=1.0)
    config = ModelConfig(**sizes, intermediate_size=384, dtype="bfloat16")
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    got = kernels_of(model, (shape(1, 512, dtype="int32"),), monkeypatch)
    one = ("short_conv", "gated_norm", "swiglu")
    expected = dict.fromkeys((*one, *(f"{name}_backward" for name in one), "embedding_gradient"), 1)
    assert got == expected | {"add_norm": 3, "add_norm_backward": 4}
