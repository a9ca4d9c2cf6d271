"""The kernels with a decay of each channel on a GPU of compute capability 9.0: configurations, future gates, repeats,
long calls, garbage next to the data, of outputs and of gradients. The case table is in test_kernels_gpu.py."""

import functools

import channel_kernels
import jax
import jax.numpy as jnp
import missed
import numpy as np
import pytest
from channel_kernels import WIDE, same_bits, wide
from harness import parameters, truth
from tolerances import STATES, worst_ratio

from gdn_jax import delta_rule, gated_delta_rule
from gdn_jax.checks import cases
from gdn_jax.rule import seam
from pallas_kernels.forward import channel_rule

pytestmark = pytest.mark.gpu


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
    missed.check(case, "bfloat16", truth(case.rule_options, x), dict(zip(STATES, outputs, strict=True)))


@pytest.mark.parametrize("case", parameters([wide("wide-known", "kinds", T=700, lengths=(100, 0, 520))]))
def test_lengths_known_while_tracing(case):
    """Outputs and gradients are those with lengths known at run time only, but for rounding."""
    x = cases.inputs(case, "bfloat16")
    both = []
    for known in (True, False):
        call, given = channel_kernels.call(case, x, known=known)
        outputs, vjp = jax.vjp(functools.partial(seam.rule, call), given)
        both.append((outputs, vjp((jnp.asarray(x.do), jnp.asarray(x.dh_T)))[0][:7]))
    assert_close(*both, 1e-2)


def assert_close(got, expected, bound):
    for y, want in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert worst_ratio(np.asarray(want, np.float64), np.asarray(y, np.float64), None) < bound


@functools.cache
def public(implementation="mosaic_gpu"):
    """The public call, compiled."""
    return jax.jit(functools.partial(delta_rule, implementation=implementation))


@functools.cache
def both_passes(implementation="mosaic_gpu"):
    """Outputs, and gradients for cotangents do and 1, compiled; cu_seqlens may follow the arguments."""

    def run(do, arguments, cu_seqlens=None):
        def rule(arguments):
            return delta_rule(*arguments, cu_seqlens=cu_seqlens, implementation=implementation)

        (o, state), vjp = jax.vjp(rule, arguments)
        return (o, state), vjp((do.astype(o.dtype), jnp.ones_like(state)))[0]

    return jax.jit(run)


def cotangent(arguments):
    return jax.random.normal(jax.random.key(1), arguments[2].shape, jnp.bfloat16)


@pytest.mark.parametrize("gate", ["kinds", "mixed", "zero"])
def test_no_gate_reaches_back(gate):
    """Bit for bit, at every position of a block of 16."""
    q, k, v, g, beta = channel_kernels.random_call(200, gate)
    o, _ = public()(q, k, v, g, beta)
    for t in (*range(64, 80), 0, 31, 127):
        other = g.at[:, t + 1 :].set(channel_kernels.gates("kinds", t, (1, 199 - t, 4, 128)))
        assert same_bits(public()(q, k, v, other, beta)[0][:, : t + 1], o[:, : t + 1]), t


@pytest.mark.parametrize(
    ("gate", "heads", "T"), [("kinds", 4, 4096), ("mixed", 4, 4096), ("mixed", 16, 2048)]
)
def test_a_thousand_repeats_have_the_same_bits(gate, heads, T):
    arguments = channel_kernels.random_call(T, gate, heads)
    do, run = cotangent(arguments), both_passes()
    first, different = jax.tree.leaves(run(do, arguments)), jnp.zeros((), jnp.int32)
    count = jax.jit(lambda n, a, b: n + sum((x != y).any() for x, y in zip(a, b, strict=True)))
    for _ in range(1000):
        different = count(different, first, jax.tree.leaves(run(do, arguments)))
    assert int(different) == 0


def test_equal_channels_are_the_gated_delta_rule():
    q, k, v, g, beta = channel_kernels.random_call(1000, "mild")
    g = jnp.broadcast_to(g[..., :1], g.shape)
    assert_close(public()(q, k, v, g, beta), gated_delta_rule(q, k, v, g[..., 0], beta), 6e-3)


def test_slow_channels_over_many_tokens():
    """Against the plain form in float32; whole sequences and segments agree too."""
    arguments = channel_kernels.random_call(32768, "mixed", heads=1)
    exact = tuple(y.astype(jnp.float32) for y in arguments)
    assert_close(public()(*arguments), public("chunked")(*exact), 5e-3)


def test_gradients_of_slow_channels_over_many_tokens():
    """Against the derivative of the plain form in float32."""
    arguments = channel_kernels.random_call(16384, "mixed", heads=1)
    exact = tuple(y.astype(jnp.float32) for y in arguments)
    do = cotangent(arguments)
    assert_close(both_passes()(do, arguments)[1], both_passes("chunked")(do, exact)[1], 2e-2)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_behind_the_last_sequence(garbage):
    """Tokens of the padding change nothing, and have no gradients, whatever they hold."""
    q, k, v, g, beta = channel_kernels.random_call(300, "mixed")
    do, cu = jnp.ones_like(v), jnp.asarray([0, 5, 130, 261])
    outputs, gradients = both_passes()(do, (q, k, v, g, beta), cu)
    q, k, v, beta, do = (y.at[:, 261:].set(garbage) for y in (q, k, v, beta, do))
    got_outputs, got = both_passes()(do, (q, k, v, g.at[:, 261:].set(-np.inf), beta), cu)
    assert same_bits(outputs, got_outputs)
    assert same_bits([y[:, :261] for y in gradients], [y[:, :261] for y in got])
    assert not any(np.asarray(y[:, 261:], np.float32).any() for y in got)
