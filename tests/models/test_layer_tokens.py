"""One token of a Gated DeltaNet in a copy for single tokens, by the kernels of decoding and of its convolution,
without a GPU: interpreted, lowered, and left to plain JAX where they do not take it."""

import functools

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fused_harness import close, close_windows, draws
from layer_kernels import INTERPRET, interpret_tokens
from small_layers import drawn

from gdn_jax.layers import GatedDeltaNet, GatedDeltaNetCache
from gdn_jax.models.inference import recurrent
from gdn_jax.models.inference.part import Call
from gdn_jax.models.inference.recurrent import HeadRows, grouped
from gdn_jax.models.served_layers import Recurrent
from gdn_jax.parts import norms
from gdn_jax.parts.kernels import trusted
from gdn_jax.serving.call import interpreted
from pallas_kernels.decode import conv_update, step
from pallas_kernels.layer import norm

TOKENS = (conv_update, "conv_update"), (step, "step_of_channels")


def token_layer(implementation=None, **options):
    """A small layer whose token the kernel of decoding takes, and a function from its input and cache: with a name of
    an implementation of the layer itself, else of the layer in a copy for single tokens."""
    sizes = dict(num_heads=2, num_v_heads=4, head_dim=32, expand_v=1.0, conv_bias=True)
    options |= dict(implementation=implementation)
    layer = drawn(lambda rngs: GatedDeltaNet(64, **sizes, **options, rngs=rngs))
    graphdef, params = nnx.split(layer)

    def call(params, x, cache):
        layer = nnx.merge(graphdef, params)
        return (layer if implementation else HeadRows(layer))(x, cache=cache)

    return params, call


def token_inputs(params, B=3):
    draw = draws(0)
    layer = GatedDeltaNetCache(draw(B, 256, 3), draw(B, 4, 32, 32))
    return params, draw(B, 1, 64), layer


ways = pytest.mark.parametrize(
    "whole", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["whole", "parts"]
)


@ways
@pytest.mark.parametrize("options", [{}, {"allow_neg_eigval": True, "use_gate": False}], ids=["", "options"])
def test_token_of_a_layer(options, whole, monkeypatch):
    """One token with a cache runs the kernels, interpreted here, and is that of the plain layer."""
    params, plain = token_layer("chunked", **options)
    args = token_inputs(params)
    expected = jax.jit(plain)(*args)
    calls = interpret_tokens(monkeypatch, *TOKENS)
    monkeypatch.setattr(norm, "add_norm", functools.partial(norm.add_norm, interpret=INTERPRET))
    with trusted(whole=whole), interpreted(INTERPRET):
        y, cache = token_layer(**options)[1](*args)
    assert calls == ["conv_update"] * whole + ["step_of_channels"]
    close(expected[0], y, "y")
    close(expected[1].state, cache.state, "state")
    close_windows(expected[1].conv, cache.conv)


def grouped_layer(**options):
    """The layer as generation has it: all projections of its input are one product, and its kernels' channels."""
    sizes = dict(num_heads=2, head_dim=32, expand_v=1.0, **options)
    graphdef, params = nnx.split(drawn(lambda rngs: GatedDeltaNet(64, **sizes, rngs=rngs)))
    layer = HeadRows(grouped(nnx.merge(graphdef, params)))
    return params, lambda params, *args: nnx.merge(graphdef, params)(*args[:1], cache=args[1]), layer


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, 0.1])
def test_token_of_a_layer_with_one_product(start, monkeypatch):
    """The kernels read every projection in the one product, and so does the gated norm; strengths with a bias have an
    array of their own."""
    params, plain, layer = grouped_layer(write_start=start)
    x, cache = draws(0)(3, 1, 64), GatedDeltaNetCache(draws(1)(3, 192, 3), draws(2)(3, 2, 32, 32))
    expected = jax.jit(plain)(params, x, cache)
    own = layer.mixer
    assert own.g_proj.stop == own.g_proj.group.weight[...].shape[0] == 288 and own.b_proj.stop == 196
    of_channels = norms.gated_norm_of_channels
    gates = []

    def told(o, channels, *args, **options):
        gates.append(channels.shape)
        return of_channels(o, channels, *args, **options)

    monkeypatch.setattr(recurrent, "gated_norm_of_channels", told)
    calls = interpret_tokens(monkeypatch, *TOKENS)
    monkeypatch.setattr(norm, "add_norm", functools.partial(norm.add_norm, interpret=INTERPRET))
    with trusted():
        y, after = layer(x, cache=cache)
    assert calls == ["conv_update", "step_of_channels"] and gates == [(3, 1, 288)]
    close(expected[0], y, "y")
    close(expected[1].state, after.state, "state")
    close_windows(expected[1].conv, after.conv)


@pytest.mark.slow
def test_a_token_in_slots_by_kernels(monkeypatch):
    """A server's layers read the channels of the one product, too. Requests in any slots, one of them no request; a
    slot that nobody has holds NaN and keeps it."""
    layer = grouped_layer()[2]
    plain = drawn(lambda rngs: GatedDeltaNet(64, num_heads=2, head_dim=32, expand_v=1.0, rngs=rngs))
    draw, slots = draws(3), np.array([3, -1, 0])
    x, pool = draw(3, 1, 64), GatedDeltaNetCache(draw(4, 192, 3), draw(4, 2, 32, 32))
    pool = jax.tree.map(lambda x: x.at[1].set(jnp.nan), pool)
    kind = Recurrent(False)
    want, after = jax.jit(lambda x, pool: kind.decode(plain, x, pool, slots))(x, pool)
    calls = interpret_tokens(monkeypatch, *TOKENS)
    monkeypatch.setattr(norm, "add_norm", functools.partial(norm.add_norm, interpret=INTERPRET))
    with trusted():
        y, got = kind.decode(layer, x, pool, slots)
    assert calls == ["conv_update", "step_of_channels"]
    np.testing.assert_array_equal(y[1], 0)
    close(want, y, "y")
    for old, a, b in zip(pool, after, got, strict=True):
        np.testing.assert_array_equal(old[1:3], b[1:3])
        close(a[::3], b[::3], "pool")


def test_derivative_of_the_gates_in_one_product(interpreted):
    """The kernel leaves NaN for the heads that are no gates. Their gradient is 0."""
    draw = draws(4)
    o, dy = (draw(2, 1, 4, 256, dtype="bfloat16") for _ in range(2))
    channels, weight = draw(2, 1, 1280, dtype="bfloat16"), draw(256)
    y, back = jax.vjp(norms.gated_norm_of_channels, o, channels, weight)
    do, dchannels, dweight = back(dy)
    assert interpreted == {"gated_norm": 1, "gated_norm_backward": 1}
    gate, dchannels = np.asarray(channels)[..., 256:].reshape(o.shape), np.asarray(dchannels)
    close(fused_oracle.gated_norm(o, gate, weight), y, "y")
    dgate = dchannels[..., 256:].reshape(o.shape)
    expected = fused_oracle.gated_norm_gradients(o, gate, weight, dy)
    for name, a, b in zip(("do", "dgate", "dweight"), expected, (do, dgate, dweight), strict=True):
        close(a, b, name)
    np.testing.assert_array_equal(dchannels[..., :256], 0)


@ways
def test_tokens_by_kernels_have_no_derivative(whole):
    """Whoever asks for one is told what to differentiate."""
    args = jax.eval_shape(token_inputs, token_layer()[0])

    def loss(*args):
        return jnp.sum(token_layer()[1](*args)[0])

    refused = pytest.raises(NotImplementedError, match=r"differentiate model\(...\) itself")
    with trusted(whole=whole), interpreted(INTERPRET), refused:
        jax.eval_shape(jax.grad(loss), *args)


@pytest.mark.parametrize("why", ["mask", "rule", "head_dim", "implementation"])
def test_tokens_that_the_kernel_does_not_take(why):
    """They run in plain JAX."""
    options = {"rule": {"rule": "delta"}, "implementation": {"implementation": "chunked"}}.get(why, {})
    sizes = dict(num_heads=2, head_dim=24 if why == "head_dim" else 32, expand_v=1.0)
    layer = HeadRows.of(drawn(lambda rngs: GatedDeltaNet(64, **sizes, **options, rngs=rngs)), Call(2, True))
    mask = jax.device_put(np.ones((2, 1), bool)) if why == "mask" else None
    x = jax.ShapeDtypeStruct((2, 1, 64), jnp.float32)
    with trusted():
        jaxpr = str(jax.make_jaxpr(lambda x: layer(x, cache=layer.init_cache(2), mask=mask))(x))
    assert "decode_step" not in jaxpr


def test_a_loop_of_tokens_changes_states_where_they_lie():
    """Lowered for a GPU, every layer's state is an alias of what the kernel returns."""
    params, run = token_layer()

    def loop(params, x, cache):
        return jax.lax.fori_loop(0, 3, lambda i, carry: run(params, *carry), (x, cache))

    args = jax.eval_shape(token_inputs, params)
    with trusted():
        text = jax.jit(loop).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    for state in ("3x256x3", "3x4x32x32"):
        calls = [
            line for line in text.splitlines() if "mosaic_gpu" in line and f"tensor<{state}xf32>" in line
        ]
        assert len(calls) == 1 and "output_operand_alias" in calls[0]
