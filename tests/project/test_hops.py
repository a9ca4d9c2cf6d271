"""How many functions of the packages lie between a public call and the start of its kernel: a reader follows each."""

import pathlib
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

import gdn_jax
import pallas_kernels
from gdn_jax import serving
from gdn_jax.layers import GatedDeltaNet, KimiDeltaAttention
from gdn_jax.models import LanguageModel, ModelConfig
from pallas_kernels.device import launch

FOLDERS = tuple(str(pathlib.Path(package.__file__).parent) for package in (gdn_jax, pallas_kernels))
S = jax.ShapeDtypeStruct


class Started(Exception):
    """Ends a call where its kernel would be made."""


def functions_up_to(kernel: str, monkeypatch, call, *shapes) -> list[str]:
    """Functions of the packages that are being called when a kernel is made, the public one first."""
    make, found = plgpu.kernel, []

    def stop(body, **options):
        if body.__name__ != kernel:
            return make(body, **options)
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
        found.extend(f.f_code.co_qualname for f in frames if f.f_code.co_filename.startswith(FOLDERS))
        raise Started

    monkeypatch.setattr(plgpu, "kernel", stop)
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    monkeypatch.setattr(
        jax, "device_count", lambda: 1
    )  # on several devices an operation is split over them first
    with pytest.raises(Started):
        jax.eval_shape(call, *shapes)
    return found[::-1]


def tokens(*lead, H=2, K=64):
    """Shapes of q, k, v and of both gates."""
    return *[S((*lead, H, K), jnp.bfloat16)] * 3, *[S((*lead, H), jnp.float32)] * 2


def test_rule(monkeypatch):
    """From `gated_delta_rule` to the kernel that writes its outputs, the function that starts it included."""
    found = functions_up_to("outputs", monkeypatch, gdn_jax.gated_delta_rule, *tokens(1, 128))
    assert found[0] == "gated_delta_rule" and found[-1] == "launch"
    assert len(found) <= 9, found


def test_rule_with_a_decay_of_each_channel(monkeypatch):
    """The same from `delta_rule`, whose kernels are another set in the same table."""
    q, k, v, _, beta = tokens(1, 128)
    g = S((1, 128, 2, 64), jnp.float32)
    found = functions_up_to("channel_outputs", monkeypatch, gdn_jax.delta_rule, q, k, v, g, beta)
    assert found[0] == "delta_rule" and found[-1] == "launch"
    assert len(found) <= 8, found


def test_rule_under_a_gradient(monkeypatch):
    """The same from the rule of its derivative."""

    def loss(q, *rest):
        return jnp.sum(gdn_jax.gated_delta_rule(q, *rest)[0].astype(jnp.float32))

    found = functions_up_to("outputs", monkeypatch, jax.grad(loss), *tokens(1, 128))
    assert len(found) <= 9, found


def test_decode(monkeypatch):
    """From `serving.decode` to its kernel on a pool of states, and on one of rings."""

    def call(q, k, v, a, b, pool, gates, slots):
        return serving.decode(q, k, v, a, b, pool, A_log=gates, dt_bias=gates, read_slots=slots)

    pool, rest = S((9, 2, 64, 64), jnp.float32), (S((2,), jnp.float32), S((7,), jnp.int32))
    rings = jax.eval_shape(lambda x: serving.make_ring_pool(x, num_key_heads=2), pool)
    for kernel, arrays in (("decode_step", pool), ("decode_deferred", rings)):
        with monkeypatch.context() as patch:
            found = functions_up_to(kernel, patch, call, *tokens(7), arrays, *rest)
        assert found[0] == "decode" and found[-1] == "launch"
        assert len(found) <= 8, found


def test_layers(monkeypatch):
    """From a layer's call to the kernel of its rule, where the parts around the rule are plain JAX."""
    for layer, kernel, most in (
        (GatedDeltaNet, "outputs", 12),
        (KimiDeltaAttention, "channel_outputs", 10),
    ):
        options: Any = dict(num_heads=2, head_dim=64, dtype=jnp.bfloat16)
        made = nnx.eval_shape(lambda layer=layer, options=options: layer(32, **options, rngs=nnx.Rngs(0)))
        structure, state = nnx.split(made)

        def call(state, x, mask, structure=structure):
            return nnx.merge(structure, state)(x, mask=mask)

        x = S((1, 128, 32), jnp.bfloat16)
        with monkeypatch.context() as patch:
            found = functions_up_to(kernel, patch, call, state, x, S((1, 128), bool))
        assert found[0] == "RecurrentMixer.__call__" and found[-1] == "launch"
        assert len(found) <= most, found


def test_a_model_in_training(monkeypatch):
    """From a model's call under a gradient to the rule's kernel, through a layer that is one operation."""
    config = ModelConfig(16, 32, num_layers=1, num_heads=16, head_dim=64, expand_v=1.0, dtype="bfloat16")
    structure, state = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))

    def loss(state, tokens):
        return jnp.sum(nnx.merge(structure, state)(tokens)[0])

    found = functions_up_to("outputs", monkeypatch, jax.grad(loss), state, S((2, 256), jnp.int32))
    assert found[0] == "LanguageModel.__call__" and "GatedDeltaNet.from_stream" in found
    assert len(found) <= 19, found
