"""One token of a layer with a decay of each channel in a copy for single tokens, by kernels, without a GPU:
interpreted, and left to plain JAX where they do not take it."""

import numpy as np
import pytest
from flax import nnx
from fused_harness import close, close_windows, draws
from layer_kernels import interpret_tokens
from small_layers import drawn

from gdn_jax.layers import GatedLinearAttention, KimiDeltaAttention, RecurrentCache
from gdn_jax.models.inference.part import Call
from gdn_jax.models.inference.program import ROWS
from gdn_jax.models.inference.recurrent import ChannelRows, grouped
from gdn_jax.parts.kernels import trusted
from pallas_kernels.decode import channel_step, conv_update

TOKENS = (conv_update, "conv_update"), (channel_step, "channel_step")
SIZES = dict(num_heads=2, num_v_heads=4, head_dim=32)
OPTIONS = {
    "softplus": dict(conv_bias=True),
    "bound": dict(gate="lower_bound", use_A_log=False, allow_neg_eigval=True, output_gate_rank=None),
}


def layer_of(kind=KimiDeltaAttention, implementation=None, **options):
    options |= SIZES | dict(implementation=implementation)
    return drawn(lambda rngs: kind(64, **options, rngs=rngs))


def call(layer, x, cache):
    return nnx.jit(lambda layer, x, cache: layer(x, cache=cache))(layer, x, cache)


def inputs(B=3):
    draw = draws(0)
    return draw(B, 1, 64), RecurrentCache(draw(B, 256, 3), draw(B, 4, 32, 32))


@pytest.mark.parametrize("name", ["softplus", pytest.param("bound", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "together", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["grouped", "apart"]
)
def test_token_of_a_layer(name, together, monkeypatch):
    """It is that of the plain layer, also where the projections are one product, as in generation."""
    x, cache = inputs()
    expected = call(layer_of(implementation="chunked", **OPTIONS[name]), x, cache)
    layer = layer_of(**OPTIONS[name])
    rows = ChannelRows(grouped(layer) if together else layer)
    calls = interpret_tokens(monkeypatch, *TOKENS)
    with trusted():
        y, after = rows(x, cache=cache)
    assert calls == ["conv_update", "channel_step"]
    close(expected[0], y, "y")
    close(expected[1].state, after.state, "state")
    close_windows(expected[1].conv, after.conv)


def test_what_erases_nothing_runs_in_plain_jax(monkeypatch):
    """The kernel erases what it writes."""
    calls = interpret_tokens(monkeypatch, *TOKENS)
    with trusted():
        y, _ = call(ROWS[GatedLinearAttention](layer_of(GatedLinearAttention), Call(3, True)), *inputs())
    assert not calls and np.isfinite(y).all()
