"""Layers whose products are channels of one array, which kernels read where they lie, without a GPU."""

import functools

import fused_harness
import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fused_harness import close, draws
from layer_kernels import convolution

from gdn_jax.fused import joined as fused_joined
from gdn_jax.fused import norms as fused_norms
from gdn_jax.fused.short_conv import short_conv as fused_short_conv
from gdn_jax.layers import GatedDeltaNet
from pallas_kernels.device import launch


@functools.cache
def joining_layer(implementation=None, **options):
    """A small layer that can have all products of its input in one array: its gated norm takes four heads at once."""
    sizes = dict(num_heads=4, head_dim=256, expand_v=1.0, dtype=jnp.bfloat16)
    return GatedDeltaNet(32, **sizes | options, implementation=implementation, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_one_product_of_the_input(monkeypatch):
    """All channels are one product forward and two backward, and no sum of their cotangents is in the program, in
    which the convolution's kernel changes the array that the gated norm made."""
    monkeypatch.setattr(launch, "device_reason", lambda: None)
    graphdef, params = nnx.split(joining_layer())

    def loss(params, x):
        return nnx.merge(graphdef, params)(x)[0].astype(jnp.float32).sum()

    args = params, jax.ShapeDtypeStruct((1, 512, 32), "bfloat16")
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    text = gradient.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    wide = [line for line in text.splitlines() if "x4352x" in line and "dot_general" in line]
    assert len(wide) == 3
    updates = [line for line in text.splitlines() if "mosaic_gpu" in line and "output_operand_alias" in line]
    assert len(updates) == 1 and "tensor<1x512x17x256xbf16>" in updates[0]
    assert not any("stablehlo.add" in line and "4352" in line for line in text.splitlines())


def test_one_product_is_all_products(monkeypatch):
    """With the plain form of the convolution in the kernel's place, what a layer makes of its input in one product,
    and the gradients, are those of its products."""

    def plain(joined, weight, segment_ids, *, behind, **options):
        D = weight.shape[0]
        *parts, final = fused_short_conv(joined[..., :D], weight, **options, segment_ids=segment_ids)
        return *parts, final, joined[..., D : D + behind], joined

    monkeypatch.setattr(fused_joined, "short_conv", plain)
    sizes = dict(
        num_heads=2, num_v_heads=4, head_dim=16, expand_v=2.0, allow_neg_eigval=True, write_start=0.1
    )
    graphdef, params = nnx.split(GatedDeltaNet(24, **sizes, rngs=nnx.Rngs(0)))
    draw, segments = draws(0), jnp.arange(9)[None] // 4

    def together(params, x, o):
        layer = nnx.merge(graphdef, params)
        inputs, conv, gate = layer._joined_inputs(x, segments, None)
        return inputs, conv, layer.rule_output(o, x, gate)

    def apart(params, x, o):
        layer = nnx.merge(graphdef, params)
        return *layer.rule_inputs(x, segment_ids=segments), layer.rule_output(o, x)

    args = params, draw(1, 9, 24), draw(1, 9, 4, 32)
    cotangents = jax.tree.map(lambda y: draw(*y.shape), jax.eval_shape(apart, *args))
    expected, got = (fused_harness.compiled_vjp(f)(cotangents, *args) for f in (apart, together))
    for (path, like), y in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        close(like, y, jax.tree_util.keystr(path))


@pytest.mark.slow
def test_seam_of_joined_channels(interpreted):
    """Both kernels with their channels in one array, whose cotangent is NaN where nobody writes it."""
    sizes = dict(B=1, T=8, HV=4, borders=(1, 2, 4), heads=4, width=256)
    (x, weight, segments), cotangents, options, expected = convolution("bfloat16", **sizes)
    draw = draws(3)
    gates, dgates = (draw(1, 8, 256, dtype="bfloat16") for _ in range(2))
    gate, o, dy = (draw(1, 8, 4, 256, dtype="bfloat16") for _ in range(3))
    norm_weight = draw(256)

    def run(joined, weight, o, norm_weight):
        *parts, final, gates, joined = fused_joined.short_conv(
            joined, weight, segments, **options, behind=256
        )
        y = fused_norms.gated_norm(o, joined.reshape(1, 8, -1, 256), norm_weight, joined=True)
        return (*parts, final), gates, y

    args = jnp.concatenate([x, gates, gate.reshape(1, 8, -1)], axis=-1), weight, o, norm_weight
    (parts, got_gates, y), back = jax.vjp(run, *args)
    djoined, dweight, do, dnorm = back(((*cotangents, jnp.zeros_like(parts[-1])), dgates, dy))
    for name, got in zip("qkv", parts, strict=False):
        close(getattr(expected, name), got, name)
    np.testing.assert_array_equal(got_gates, gates)
    close(fused_oracle.gated_norm(o, gate, norm_weight), y, "y")
    dx, after, dgate = jnp.split(djoined, (x.shape[-1], x.shape[-1] + 256), axis=-1)
    close(expected.dx, dx, "dx")
    close(expected.dweight, dweight, "dweight")
    np.testing.assert_array_equal(after, dgates)
    names = "do", "dgate", "dnorm"
    gradients = fused_oracle.gated_norm_gradients(o, gate, norm_weight, dy)
    for name, a, b in zip(names, gradients, (do, dgate.reshape(gate.shape), dnorm), strict=True):
        close(a, b, name)
    assert interpreted == dict.fromkeys(
        ("short_conv", "short_conv_backward", "gated_norm", "gated_norm_backward"), 1
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(conv_bias=True),
        dict(use_short_conv=False),
        dict(use_gate=False),
        dict(head_dim=128),
        dict(head_dim=80),
        dict(dtype=jnp.float32),
    ],
)
def test_layers_whose_products_are_apart(options, monkeypatch):
    """Also few tokens, and tokens with a mask or a past."""
    monkeypatch.setattr(launch, "device_reason", lambda: None)
    x = jnp.zeros((1, 512, 32), jnp.bfloat16)
    assert joining_layer().takes_factor(x)
    assert not joining_layer().takes_factor(x[:, :256])
    assert not joining_layer("chunked").takes_factor(x)
    assert not joining_layer(**options).takes_factor(x)


@pytest.mark.slow
def test_factor_of_a_layers_input(interpreted):
    """As if its input were multiplied by it: here by powers of two, of which nothing is rounded."""
    draw = draws(9)
    x, factor = draw(1, 520, 32, dtype="bfloat16"), 2.0 ** (jnp.arange(32) % 5 - 2)
    layer = joining_layer()
    (rule, conv, channels), again = (
        layer._joined_inputs(x, None, factor),
        layer._joined_inputs((x * factor).astype(x.dtype), None, None),
    )
    assert interpreted["short_conv"]
    for a, b in zip(jax.tree.leaves((rule, conv, channels)), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(
        ValueError, match="factor: expected None for a call that `takes_factor` does not allow"
    ):
        layer(x[:, :256], factor=factor)
