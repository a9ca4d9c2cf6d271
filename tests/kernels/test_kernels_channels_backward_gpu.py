"""The backward kernels with a decay of each channel on a GPU of compute capability 9.0: every gradient on the case
table, repeats, long calls, garbage next to the data."""

import functools

import channel_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_missed import TABLE, WIDE, check, parameters
from harness import evaluate, truth
from tolerances import worst_ratio

from gdn_jax import delta_rule
from gdn_jax.checks import cases
from gdn_jax.rule import seam

pytestmark = pytest.mark.gpu

MORE = (
    channel_kernels.wide(
        "wide-packed-erase", T=600, lengths=(100, 129, 300), erase="channel", write="channel"
    ),
    channel_kernels.wide("wide-many", "mild", T=1024, heads=(2, 2, 2), lengths=(7,) * 140),
    channel_kernels.wide("wide-ids", "kinds", T=700, segments=((300, 400),)),
    channel_kernels.wide("wide-vk", T=300, state_layout="vk"),
)


@pytest.mark.parametrize("case", parameters(WIDE, MORE, TABLE))
def test_gradients(case):
    x = cases.inputs(case, "bfloat16")
    check(case, "bfloat16", evaluate("mosaic_gpu", case.options, x).items(), truth(case.rule_options, x))


@pytest.mark.parametrize(
    "case", parameters([channel_kernels.wide("wide-known", "kinds", T=700, lengths=(100, 0, 520))])
)
def test_lengths_known_while_tracing(case):
    """Outputs and gradients are those with lengths known at run time only, but for rounding."""
    x = cases.inputs(case, "bfloat16")
    both = []
    for known in (True, False):
        call, given = channel_kernels.call(case, x, known=known)
        outputs, vjp = jax.vjp(functools.partial(seam.rule, call), given)
        both.append((outputs, vjp((jnp.asarray(x.do), jnp.asarray(x.dh_T)))[0][:7]))
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        assert worst_ratio(np.asarray(one, np.float64), np.asarray(other, np.float64), None) < 1e-2


def test_float16_has_the_plain_derivative():
    """The forward by kernels, the backward in plain JAX."""
    case = TABLE[0]
    x = cases.inputs(case, "float16")
    check(case, "float16", evaluate("mosaic_gpu", case.options, x).items(), truth(case.rule_options, x))


@functools.cache
def gradients(implementation: str):
    """Gradients of `delta_rule` for cotangents do and 1, compiled; cu_seqlens may follow the arguments."""

    def run(do, arguments, cu_seqlens=None):
        def rule(arguments):
            return delta_rule(*arguments, cu_seqlens=cu_seqlens, implementation=implementation)

        (o, state), vjp = jax.vjp(rule, arguments)
        return vjp((do.astype(o.dtype), jnp.ones_like(state)))[0]

    return jax.jit(run)


@pytest.mark.parametrize(("heads", "T"), [(4, 4096), (16, 2048)])
def test_a_thousand_repeats_have_the_same_bits(heads, T):
    arguments = channel_kernels.random_call(T, "mixed", heads)
    do = jax.random.normal(jax.random.key(1), arguments[2].shape, jnp.bfloat16)
    first, run = gradients("mosaic_gpu")(do, arguments), gradients("mosaic_gpu")
    count = jax.jit(lambda n, a, b: n + sum((x != y).any() for x, y in zip(a, b, strict=True)))
    different = jnp.zeros((), jnp.int32)
    for _ in range(1000):
        different = count(different, first, run(do, arguments))
    assert int(different) == 0


def test_slow_channels_over_many_tokens():
    """Against the derivative of the plain form in float32."""
    arguments = channel_kernels.random_call(16384, "mixed", heads=1)
    do = jax.random.normal(jax.random.key(1), arguments[2].shape, jnp.bfloat16)
    got = gradients("mosaic_gpu")(do, arguments)
    exact = tuple(y.astype(jnp.float32) for y in arguments)
    for y, want in zip(got, gradients("chunked")(do, exact), strict=True):
        assert worst_ratio(np.asarray(want, np.float64), np.asarray(y, np.float64), None) < 2e-2


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_behind_the_last_sequence(garbage):
    """Tokens of the padding change nothing, and have no gradients, whatever they hold."""
    q, k, v, g, beta = channel_kernels.random_call(300, "mixed")
    do, cu = jnp.ones_like(v), jnp.asarray([0, 5, 130, 261])
    clean = gradients("mosaic_gpu")(do, (q, k, v, g, beta), cu)
    q, k, v, beta, do = (y.at[:, 261:].set(garbage) for y in (q, k, v, beta, do))
    got = gradients("mosaic_gpu")(do, (q, k, v, g.at[:, 261:].set(-np.inf), beta), cu)
    assert channel_kernels.same_bits([y[:, :261] for y in clean], [y[:, :261] for y in got])
    assert not any(np.asarray(y[:, 261:], np.float32).any() for y in got)
