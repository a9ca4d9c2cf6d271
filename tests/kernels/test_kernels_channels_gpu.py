"""The kernels with a decay of each channel on a GPU of compute capability 9.0: the case table, configurations, future
gates, repeats, garbage next to the data."""

import functools

import channel_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_missed import TABLE, WIDE, check, parameters
from harness import truth
from tolerances import STATES, worst_ratio

from gdn_jax import delta_rule, gated_delta_rule
from gdn_jax.checks import cases
from gdn_jax.rule import seam
from pallas_kernels.forward import channel_rule

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", parameters(TABLE, WIDE))
def test_public_call(case, dtype):
    x = cases.inputs(case, dtype)
    arguments = {name: jnp.asarray(y) for name, y in x.arguments.items()}
    run = jax.jit(functools.partial(delta_rule, **case.rule_options, implementation="mosaic_gpu"))
    check(case, dtype, zip(STATES, run(**arguments), strict=True), truth(case.rule_options, x))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, 4])
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("case", parameters(WIDE[:2], [WIDE[5]]))
def test_configurations(case, warpgroups, chunks, known, monkeypatch):
    if known and case.lengths is None:
        pytest.skip("there are no lengths to know")
    config = channel_rule.Config(state_warpgroups=warpgroups, segment_chunks=chunks)
    monkeypatch.setattr(channel_rule, "forward", functools.partial(channel_rule.forward, config=config))
    x = cases.inputs(case, "bfloat16")
    call, given = channel_kernels.call(case, x, known=known)
    outputs = jax.jit(functools.partial(seam.rule, call))(given)
    check(case, "bfloat16", zip(STATES, outputs, strict=True), truth(case.rule_options, x))


@functools.cache
def public():
    """The public call, compiled."""
    return jax.jit(functools.partial(delta_rule, implementation="mosaic_gpu"))


@pytest.mark.parametrize("gate", ["kinds", "mixed", "zero"])
def test_no_gate_reaches_back(gate):
    """Bit for bit, at every position of a block of 16."""
    q, k, v, g, beta = channel_kernels.random_call(200, gate)
    o, _ = public()(q, k, v, g, beta)
    for t in (*range(64, 80), 0, 31, 127):
        other = g.at[:, t + 1 :].set(channel_kernels.gates("kinds", t, (1, 199 - t, 4, 128)))
        assert channel_kernels.same_bits(public()(q, k, v, other, beta)[0][:, : t + 1], o[:, : t + 1]), t


@pytest.mark.parametrize("gate", ["kinds", "mixed"])
def test_a_thousand_repeats_have_the_same_bits(gate):
    arguments = channel_kernels.random_call(4096, gate)
    first = public()(*arguments)
    different = jnp.zeros((), jnp.int32)
    count = jax.jit(lambda n, a, b: n + ((a[0] != b[0]).any() | (a[1] != b[1]).any()))
    for _ in range(1000):
        different = count(different, first, public()(*arguments))
    assert int(different) == 0


def test_equal_channels_are_the_gated_delta_rule():
    q, k, v, g, beta = channel_kernels.random_call(1000, "mild")
    g = jnp.broadcast_to(g[..., :1], g.shape)
    for a, b in zip(public()(q, k, v, g, beta), gated_delta_rule(q, k, v, g[..., 0], beta), strict=True):
        assert worst_ratio(np.asarray(b, np.float64), np.asarray(a, np.float64), None) < 6e-3


def test_slow_channels_over_many_tokens():
    """Against the plain form in float32; whole sequences and segments agree too."""
    q, k, v, g, beta = channel_kernels.random_call(32768, "mixed", heads=1)
    wide_args = (y.astype(jnp.float32) for y in (q, k, v))
    expected = jax.jit(functools.partial(delta_rule, implementation="chunked"))(*wide_args, g, beta)
    for got, want in zip(public()(q, k, v, g, beta), expected, strict=True):
        assert worst_ratio(np.asarray(want, np.float64), np.asarray(got, np.float64), None) < 5e-3


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_behind_the_last_sequence(garbage):
    """Tokens of the padding change nothing, whatever they hold."""
    q, k, v, g, beta = channel_kernels.random_call(300, "mixed")
    cu = jnp.asarray([0, 5, 130, 261])
    clean = public()(q, k, v, g, beta, cu_seqlens=cu)
    q, k, v, beta = (y.at[:, 261:].set(garbage) for y in (q, k, v, beta))
    got = public()(q, k, v, g.at[:, 261:].set(-np.inf), beta, cu_seqlens=cu)
    assert channel_kernels.same_bits(clean, got)
