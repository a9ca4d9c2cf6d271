"""A layer as one operation, whose kernels read all products of its input in one array, without a GPU."""

import fused_harness
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from fused_harness import close, draws
from layer_kernels import check_one_operation, joining_layer, plain_kernels

from gdn_jax.layers import GatedDeltaNet, blocks
from gdn_jax.parts import mixer
from pallas_kernels.device import launch


@pytest.mark.slow
def test_one_product_of_the_input(monkeypatch):
    """All channels are one product forward and two backward, and no sum of their cotangents is in the program, in
    which the convolution's kernel changes the array that the gated norm made."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
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


@pytest.mark.slow
def test_one_operation_is_the_layer(monkeypatch):
    """Results and all gradients, also through both states, beside the layer in parts; alone and behind a norm, whose
    scale the projections take over."""
    sizes = dict(
        num_heads=2, num_v_heads=4, head_dim=16, expand_v=2.0, allow_neg_eigval=True, write_start=0.1
    )
    graphdef, params = nnx.split(GatedDeltaNet(24, **sizes, rngs=nnx.Rngs(0)))
    draw, segments = draws(0), jnp.arange(9)[None] // 4
    norm = blocks.RMSNorm(24, zero_centred=True)
    norm.weight[...] = draw(24, scale=0.3)
    norm_def, norm_params = nnx.split(norm)

    def run(params, norm_params, x, y):
        layer, norm = nnx.merge(graphdef, params), nnx.merge(norm_def, norm_params)
        options = dict(segment_ids=segments, return_cache=True)
        return layer(x, **options), layer.from_stream(norm, x, y, **options)

    args = params, norm_params, draw(1, 9, 24), draw(1, 9, 24)
    cotangents = jax.tree.map(lambda y: draw(*y.shape), jax.eval_shape(run, *args))
    expected = fused_harness.compiled_vjp(run)(cotangents, *args)
    plain_kernels(monkeypatch)
    monkeypatch.setattr(mixer, "takes", lambda *_: True)
    monkeypatch.setattr(blocks, "is_one_product", lambda *_: True)
    got = fused_harness.compiled_vjp(run)(cotangents, *args)
    monkeypatch.setattr(mixer, "mix", None)  # that the layer does call
    with pytest.raises(TypeError):
        run(*args)
    for (path, like), y in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        close(like, y, jax.tree_util.keystr(path), sums=2e-6)


@pytest.mark.slow
def test_seam_of_one_operation(interpreted):
    """The kernels with their channels in one array, whose cotangent is NaN where nobody writes it."""

    def evaluate(f, cotangents, *primals):
        values, back = jax.vjp(f, *primals)
        return values, back(cotangents)

    check_one_operation(evaluate, close, B=1, T=8, heads=4, width=256, borders=(1, 2, 4))
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
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    calls = []
    monkeypatch.setattr(mixer, "mix", lambda *args, **_: calls.append(args) or (args[1], args[1], args[1]))

    def is_one(layer, x, **options):
        calls.clear()
        jax.eval_shape(lambda x: layer(x, **options), x)
        return len(calls) == 1

    x = jnp.zeros((1, 512, 32), jnp.bfloat16)
    layer = joining_layer()
    assert is_one(layer, x)
    assert not is_one(layer, x[:, :256])
    assert not is_one(layer, x, mask=jnp.ones((1, 512), bool))
    assert not is_one(layer, x, cache=layer.init_cache(1))
    assert not is_one(joining_layer("chunked"), x)
    assert not is_one(joining_layer(**options), x)
