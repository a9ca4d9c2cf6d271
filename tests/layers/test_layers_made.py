"""How a layer of Gated DeltaNet begins: its parameters, a norm and an MLP, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_layers import F32, SIZES, D, drawn, empty_cache, inputs, make
from tolerances import assert_close

from gdn_jax.gates import init_A_log, init_dt_bias
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.layers.blocks import NoDecayParam, RMSNorm, SwiGLU, weight_decay_mask


@pytest.fixture(scope="module")
def layer():
    """Most tests of the layer take the form of the rule that compiles fast; those below with "chunked" the other."""
    return make(implementation="recurrent")


def test_gate_parameters_start_in_their_ranges():
    both = jax.jit(lambda seed: [init(jax.random.key(seed), 100_000) for init in (init_A_log, init_dt_bias)])
    A_log, dt_bias = jax.device_get(both(0))
    assert A_log.dtype == dt_bias.dtype == jnp.float32
    A, dt = np.exp(A_log), np.log1p(np.exp(np.asarray(dt_bias, np.float64)))
    assert np.all(np.isfinite(A_log)) and A.min() > 0 and A.max() < 16.001
    np.testing.assert_allclose(A.mean(), 8, rtol=0.02)  # 16 / sqrt(12 * 1e5) = 0.015, 5 of them
    assert 0.999e-3 < dt.min() and dt.max() < 0.1001
    np.testing.assert_allclose(
        np.log(dt).mean(), np.log(1e-2), atol=0.025
    )  # log(100) / sqrt(12 * 1e5), 6 of them


@pytest.mark.slow
@pytest.mark.parametrize("doubled", [False, True])
def test_write_start(doubled):
    """A bias is all that differs, and beta is its start where the projection is 0."""
    plain, started = (make(allow_neg_eigval=doubled, write_start=start) for start in (None, 0.06))
    beta_of = nnx.jit(lambda layer, x: layer.rule_inputs(x)[0].beta)
    for layer, expected in ((plain, 0.5), (started, 0.06)):
        beta = beta_of(layer, np.zeros((1, 3, D), np.float32))
        np.testing.assert_allclose(beta, (1 + doubled) * expected, rtol=1e-6)
    weights = [nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in (plain, started)]
    np.testing.assert_allclose(weights[1]["b_proj"].pop("bias"), np.log(0.06 / 0.94), rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, *weights)
    x = inputs(2, 40, D)  # rows enough for one product of all projections, and few enough for their own
    beta, few = (np.asarray(beta_of(started, x[:, :n])) for n in (40, 3))
    np.testing.assert_allclose(beta[:, :3], few, rtol=1e-5)


def test_weight_decay_mask():
    layer = make(conv_bias=True)
    params = nnx.state(layer, nnx.Param)
    for tree in (params, nnx.to_pure_dict(params)):
        mask = weight_decay_mask(tree)
        assert jax.tree.structure(mask) == jax.tree.structure(tree)
        plain = {
            jax.tree_util.keystr(path[:-1] if tree is params else path).split("'")[1]: value
            for path, value in jax.tree_util.tree_flatten_with_path(mask)[0]
        }
        kept = {name for name, value in plain.items() if not value}
        assert kept == {"A_log", "dt_bias", "o_norm", "conv_bias"}, kept
    # A stack of layers gives its norms a second axis: the mark, not the rank, must decide.
    assert jax.tree.leaves(weight_decay_mask({"w": NoDecayParam(jax.device_put(inputs(3, 4)))})) == [False]


@pytest.mark.slow
def test_in_a_linen_model_every_parameter_is_in_params():
    """An optimiser over the collection `params` trains gates and norms too, and weight decay still spares them."""
    options = SIZES | {"implementation": "recurrent"}
    linen = nnx.bridge.ToLinen(GatedDeltaNet, args=(D,), kwargs=options)
    x = jax.device_put(inputs(1, 5, D))
    variables = jax.jit(lambda seed: linen.init(jax.random.key(seed), x))(0)
    assert set(variables) == {"params"}
    params = variables["params"]
    assert {"A_log", "dt_bias", "o_norm", "q_proj", "conv_weight"} < set(params)
    grads = jax.jit(jax.grad(lambda params: jnp.sum(linen.apply({"params": params}, x)[0] ** 2)))(params)
    for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]:
        assert np.abs(g).max() > 0, jax.tree_util.keystr(path)
    mask = weight_decay_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    assert not any(jax.tree.leaves([mask["A_log"], mask["dt_bias"], mask["o_norm"]]))
    assert all(jax.tree.leaves([mask["q_proj"], mask["conv_weight"]]))
    stacked = jax.tree.map(lambda a: np.stack([a, a]), params)  # as nn.scan stores layers
    assert not any(jax.tree.leaves(weight_decay_mask(stacked)["A_log"]))


def test_norm_and_mlp():
    norm = drawn(lambda rngs: RMSNorm(8, eps=1e-6, dtype=jnp.bfloat16))
    mlp, x = drawn(lambda rngs: SwiGLU(8, 16, rngs=rngs)), inputs(3, 8) * 1000
    y, product = nnx.jit(lambda norm, mlp, x: (norm(x), mlp(x)))(norm, mlp, x)
    assert y.dtype == jnp.bfloat16
    want = np.asarray(x, np.float64)
    want = want / np.sqrt((want**2).mean(-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=2.0**-8)  # one rounding to 8 bits
    gate, up = (np.asarray(x, np.float64) @ np.asarray(p.kernel[...]) for p in (mlp.gate_proj, mlp.up_proj))
    want = (gate / (1 + np.exp(-np.clip(gate, -700, None))) * up) @ np.asarray(mlp.down_proj.kernel[...])
    assert_close(want, product, F32)


@pytest.mark.parametrize(
    "message, options",
    [
        ("num_v_heads: expected a multiple of num_heads = 2, got 3", {"num_v_heads": 3}),
        ("expand_v: expected head_dim \\* expand_v to be whole and positive, got 7.8", {"expand_v": 1.3}),
        ("expand_v: expected", {"expand_v": 0.0}),
        ("conv_size: expected 2 to 4, got 5", {"conv_size": 5}),
        ("head_dim: expected a positive integer, got 0", {"head_dim": 0}),
        ("num_heads: expected a positive integer, got 1.5", {"num_heads": 1.5}),
        ("head_dim: expected a width up to 256, got 512", {"head_dim": 512}),
        ("expand_v: expected head_dim \\* expand_v up to 256, got 384", {"head_dim": 128, "expand_v": 3.0}),
        ("norm_eps: expected a positive number, got 0", {"norm_eps": 0.0}),
        ("write_start: expected None or a number between 0 and 1, got 1.0", {"write_start": 1.0}),
        ("implementation: expected one of .*, got 'triton'", {"implementation": "triton"}),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_construction_errors(message, options):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.usefixtures("no_type_checks")
def test_call_errors(layer):
    x = jax.device_put(inputs(2, 4, D))
    ones, offsets = jax.device_put(np.ones((2, 4), bool)), jax.device_put(np.array([0, 4]))
    gap = jax.device_put(np.array([[True] * 4, [True, True, False, True]]))
    ids, cache = jax.device_put(np.zeros((2, 4), int)), empty_cache(layer, 2)
    wide = jax.device_put(np.zeros((2, 4, 9, 6), np.float32))
    cases = [
        ("x: expected shape", x[0], {}),
        ("x: expected shape", x[:, :, 1:], {}),
        ("x: expected dtype", x.astype(int), {}),
        ("x: expected at least one token", x[:, :0], {}),
        ("mask: expected shape", x, {"mask": ones[:, 1:]}),
        ("mask: expected dtype bool, got float32", x, {"mask": ones.astype(jnp.float32)}),
        ("mask: expected one run of tokens in each row, got a gap in row 1", x, {"mask": gap}),
        ("segment_ids: expected shape", x, {"segment_ids": ids[:, 1:]}),
        ("cu_seqlens: expected neither", x, {"cu_seqlens": offsets, "mask": ones}),
        ("cu_seqlens: expected neither", x, {"cu_seqlens": offsets, "segment_ids": ids}),
        ("cu_seqlens: expected", x, {"cu_seqlens": offsets}),
        ("cache.conv: expected shape", x, {"cache": empty_cache(layer, 3)}),
        ("cache.state: expected shape", x, {"cache": cache._replace(state=wide)}),
    ]  # fmt: skip
    for message, x, options in cases:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda x=x, options=options: layer(x, **options))
