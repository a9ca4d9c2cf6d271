"""The family's layers against NumPy float64 layers, and: any cutting, packing or padding equals one pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fused_oracle import sigmoid
from harness import tiers
from layer_oracle import BOUND, assert_row, call, layer_oracle, random_cache, row_of
from small_layers import F32, D, drawn, empty_cache, inputs
from tolerances import assert_close

from gdn_jax.layers import (
    EraseThenDelta,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
)
from gdn_jax.layers.blocks import weight_decay_mask

SIZES = {"num_heads": 2, "num_v_heads": 4, "head_dim": 6, "expand_v": 1.5, "implementation": "recurrent"}
LAYERS = {
    "kda": lambda: make(KimiDeltaAttention, output_gate_bias=True, conv_bias=True),
    "kda-bounded": lambda: make(
        KimiDeltaAttention,
        gate="lower_bound",
        lower_bound=BOUND,
        gate_rank=None,
        output_gate_rank=None,
        allow_neg_eigval=True,
        write_start=0.1,
        num_v_heads=None,
        expand_v=1.0,
    ),
    "kda-plain": lambda: make(KimiDeltaAttention, use_A_log=False, gate_rank=3, use_short_conv=False),
    "kda-exponential": lambda: make(KimiDeltaAttention, gate="exponential", lower_bound=BOUND),
    "gla": lambda: make(GatedLinearAttention, conv_size=2),
    "gdn-2": lambda: make(GatedDeltaNet2, allow_neg_eigval=True, write_start=0.2),
    "gdn-2-exponential": lambda: make(GatedDeltaNet2, gate="exponential", lower_bound=BOUND),
    "eda": lambda: make(EraseThenDelta, lower_bound=BOUND, erase_rank=2, write_start=0.3),
    "eda-bounded": lambda: make(EraseThenDelta, gate="lower_bound", lower_bound=BOUND, erase_rank=2),
    "product": lambda: make(GatedDeltaProduct, num_householder=3, write_start=0.3),
}


def make(kind, **options):
    layer = drawn(lambda rngs: kind(D, **{**SIZES, **options}, rngs=rngs))
    for i, bias in enumerate((layer.conv_bias, getattr(getattr(layer, "g_b_proj", None), "bias", None))):
        if bias is not None:
            bias[...] = jax.device_put(inputs(*bias.shape, seed=i))
    weight = 1 + 0.3 * inputs(layer.head_v_dim)
    layer.o_norm.weight[...] = jax.device_put(weight.astype(layer.o_norm.weight.dtype))
    return layer


@pytest.mark.parametrize("name", tiers(LAYERS, ["kda", "gdn-2", "eda"]))
def test_against_float64(name):
    """Two rows behind a past in one pass; the same in a piece and single tokens."""
    layer = LAYERS[name]()
    x, past = inputs(2, 7, D), random_cache(layer, 2)
    y, new = call(layer, x, cache=past)
    assert y.dtype == np.float32 and new.state.dtype == np.float32
    for row in range(2):
        assert_row(layer, x[row], row_of(past, row), y[row], row_of(new, row), f"row {row}")
    ys, cache = [], past
    for t in range(7):
        token, cache = call(layer, x[:, t : t + 1], cache=cache)
        ys.append(token)
    for row, got in enumerate(np.concatenate(ys, 1)):
        assert_row(layer, x[row], row_of(past, row), got, row_of(cache, row), f"row {row}, token by token")


@pytest.mark.parametrize("name", tiers(["kda", "gdn-2", "eda", "product"], ["kda", "eda"]))
def test_packed_and_padded(name):
    """Packed rows by offsets, by segments and by padding on both sides: each sequence as if alone."""
    layer = LAYERS[name]()
    lengths = (3, 0, 5)
    x = inputs(1, 9, D)  # the last token is padding
    past, offsets = random_cache(layer, 3), np.array([0, 3, 3, 8])
    y, new = call(layer, x, cache=past, cu_seqlens=offsets)
    for n, length in enumerate(lengths):
        if length:
            span = slice(offsets[n], offsets[n + 1])
            assert_row(layer, x[0, span], row_of(past, n), y[0, span], row_of(new, n), f"sequence {n}")
    assert not y[0, 8].any()
    np.testing.assert_array_equal(new.state[1], past.state[1])
    # The same tokens as segments of a padded row; a cache feeds the first one and is that of the last.
    ids, mask = np.array([[9, 0, 0, 0, 1, 1, 1, 1, 1]]), np.array([[0] + [1] * 8], bool)
    shifted = np.roll(x, 1, axis=1)
    first = jax.tree.map(lambda c: c[:1], past)
    y, last = call(layer, shifted, cache=first, segment_ids=ids, mask=mask)
    empty = row_of(empty_cache(layer, 1), 0)
    want = layer_oracle(layer, x[0, :3], row_of(past, 0))[0]
    assert_close(want, y[0, 1:4], F32, "first segment")
    assert_row(layer, x[0, 3:8], empty, y[0, 4:], row_of(last, 0), "second segment")
    assert not y[0, 0].any()


@pytest.mark.parametrize("name", tiers(["kda", "product"], ["product"]))
def test_one_token_that_is_padding(name):
    layer = LAYERS[name]()
    past, mask = random_cache(layer, 2), np.array([[True], [False]])
    x = inputs(2, 1, D)
    y, new = call(layer, x, cache=past, mask=mask)
    assert_row(layer, x[0], row_of(past, 0), y[0], row_of(new, 0))
    assert not y[1].any()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), new, past)


def test_one_step_is_the_gated_delta_net():
    """With one step a token and equal weights the bits of the layer that it generalises."""
    one = make(GatedDeltaProduct, num_householder=1, allow_neg_eigval=False)
    other = make(GatedDeltaNet)
    nnx.update(other, nnx.state(one, nnx.Param))
    x = inputs(2, 9, D)
    jax.tree.map(np.testing.assert_array_equal, call(one, x), call(other, x))


def test_equal_strengths_are_kimi_delta_attention():
    """Gated DeltaNet-2 whose erase and write are one number a head."""
    kda, gdn2 = make(KimiDeltaAttention), make(GatedDeltaNet2)
    nnx.update(gdn2, nnx.filter_state(nnx.state(kda, nnx.Param), lambda path, _: "b_proj" not in path))
    b = np.asarray(kda.b_proj.kernel[...])
    gdn2.b_proj.kernel[...] = jax.device_put(np.repeat(b, gdn2.head_dim, axis=1))
    gdn2.w_proj.kernel[...] = jax.device_put(np.repeat(b, gdn2.head_v_dim, axis=1))
    x = inputs(1, 9, D)
    assert_close(call(kda, x)[0], call(gdn2, x)[0], F32)


@pytest.mark.slow
def test_bfloat16_and_parameters():
    """In chunks; gates and states stay float32; what weight decay spares; caches keep their dtype."""
    narrow = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, implementation="chunked")
    layer = make(KimiDeltaAttention, **narrow)
    assert layer.A_log.dtype == layer.dt_bias.dtype == jnp.float32
    assert layer.f_a_proj.kernel.dtype == layer.conv_weight.dtype == jnp.bfloat16
    x = inputs(1, 8, D)
    y, cache = call(layer, x)
    assert y.dtype == cache.conv.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32
    want = layer_oracle(layer, x[0], row_of(empty_cache(layer, 1), 0))
    assert_close(want[0], y[0].astype(np.float32), 2e-2, "y")
    assert_close(want[2], cache.state[0], 2e-2, "state")
    inputs_of = jax.eval_shape(lambda x: layer.rule_inputs(x)[0], x)
    assert inputs_of.g.dtype == inputs_of.beta.dtype == jnp.float32 and inputs_of.q.dtype == jnp.bfloat16
    mask = nnx.to_pure_dict(weight_decay_mask(nnx.state(layer, nnx.Param)))
    assert not mask["dt_bias"] and not mask["A_log"] and mask["f_b_proj"]["kernel"] and mask["conv_weight"]
    half = jax.tree.map(lambda c: jnp.asarray(c, jnp.bfloat16), random_cache(layer, 1))
    for length in (1, 3):
        new = jax.eval_shape(lambda x, past: layer(x, cache=past)[1], x[:, :length], half)
        assert new.state.dtype == new.conv.dtype == jnp.bfloat16


def test_starts():
    """Fresh weights: rates from 1 to 16 or none, time steps from 1e-3 to 0.1, strengths as they are set."""
    size, bound = dict(num_heads=32, head_dim=8), dict(gate="lower_bound", write_start=0.05)
    free = drawn(lambda rngs: KimiDeltaAttention(8, **size, rngs=rngs), seed=1)
    bounded = drawn(lambda rngs: GatedDeltaNet2(8, **size, **bound, rngs=rngs))
    rates, steps = np.exp(free.A_log[...]), np.log1p(np.exp(free.dt_bias[...]))
    assert 1 <= rates.min() < 3 and 14 < rates.max() <= 16
    assert free.dt_bias.shape == (32, 8) and 1e-3 <= steps.min() < 2e-3 and 0.08 < steps.max() <= 0.1001
    assert not np.any(bounded.A_log[...])
    for linear in bounded.strength_projections():
        np.testing.assert_allclose(sigmoid(np.asarray(linear.bias[...])), 0.05, rtol=1e-5)
    bounded.set_write_start(jnp.float32(0.5))
    assert not np.any(bounded.w_proj.bias[...])
    free.scale_time_steps(0.1)
    np.testing.assert_allclose(np.log1p(np.exp(free.dt_bias[...])), 0.1 * steps, rtol=1e-4)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (
            KimiDeltaAttention,
            {"gate": "sigmoid"},
            "gate: expected one of 'softplus', 'lower_bound', 'exponential'",
        ),
        (KimiDeltaAttention, {"lower_bound": 5.0}, "lower_bound: expected a number below 0, got 5"),
        (GatedDeltaNet2, {"gate_rank": 0}, "gate_rank: expected a positive integer, got 0"),
        (KimiDeltaAttention, {"output_gate_rank": "full"}, "output_gate_rank: expected one of"),
        (GatedDeltaProduct, {"num_householder": 0}, "num_householder: expected a positive integer"),
        (GatedDeltaProduct, {"num_v_heads": 3}, "num_v_heads: expected a multiple of num_heads = 2"),
        (GatedDeltaNet2, {"write_start": 1.0}, "write_start: expected None or a number between 0 and 1"),
    ],
)
def test_errors(kind, options, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        make(kind, **options)
