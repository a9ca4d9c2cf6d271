"""The rule with a decay of each channel by mma.sync on a GPU: the public call in the device's code and that of 8.0,
future gates, repeats."""

import contextlib
import functools

import channel_kernels
import jax
import jax.numpy as jnp
import missed
import pytest
from channel_kernels import same_bits, wide
from harness import named, parameters, truth

from gdn_jax import delta_rule
from gdn_jax.checks import cases
from gdn_jax.checks.check import value_and_gradients
from pallas_kernels.ampere import channel_rule
from pallas_kernels.device.needs import capabilities
from pallas_kernels.tools.compiling import lowering_for

pytestmark = pytest.mark.gpu(*capabilities(channel_rule.NEEDS))

WIDE = [case for case in channel_kernels.WIDE if max(case.K, case.V) <= 128]
CASES = [
    *WIDE,
    *(case for case in channel_kernels.TABLE if max(case.K, case.V) <= 128),
    wide("wide-ids", "kinds", T=700, segments=((300, 400),)),
    wide("wide-vk", T=300, state_layout="vk"),
    wide("many heads", T=640, B=2, heads=(8, 8, 8)),
    wide("few heads, cut", T=6000, heads=(1, 1, 1)),
]


def evaluate(case: cases.Case, dtype: str, as_8_0: bool = False) -> None:
    """Both passes of the public call, against the oracle."""
    x = cases.inputs(case, dtype)
    call = jax.jit(value_and_gradients("mosaic_mma", case.options))
    with lowering_for("8.0") if as_8_0 else contextlib.nullcontext():
        results = call(x.primals, (x.do, x.dh_T), x.cu_seqlens, x.segment_ids)
    missed.check(case, dtype, truth(case.options, x), named(results))


@pytest.mark.parametrize("case", parameters(CASES))
def test_both_passes(case):
    evaluate(case, "bfloat16")


@pytest.mark.parametrize("case", parameters(WIDE[:2], [WIDE[3], WIDE[5]]))
def test_code_for_8_0(case):
    evaluate(case, "bfloat16", as_8_0=True)


def test_float16():
    """The forward by kernels, and the derivative in plain JAX."""
    evaluate(WIDE[0], "float16")


@functools.cache
def public():
    """The public call, compiled."""
    return jax.jit(functools.partial(delta_rule, implementation="mosaic_mma"))


@pytest.mark.parametrize("gate", ["kinds", "mixed", "zero"])
def test_no_gate_reaches_back(gate):
    """Bit for bit, at every position of a block of 16."""
    q, k, v, g, beta = channel_kernels.random_call(200, gate)
    o, _ = public()(q, k, v, g, beta)
    for t in (*range(64, 80), 0, 31, 127):
        other = g.at[:, t + 1 :].set(channel_kernels.gates("kinds", t, (1, 199 - t, 4, 128)))
        assert same_bits(public()(q, k, v, other, beta)[0][:, : t + 1], o[:, : t + 1]), t


def test_repeats_have_the_same_bits():
    """A hundred, of both passes."""
    arguments = channel_kernels.random_call(2048, "mixed", 16)

    @jax.jit
    def run(arguments):
        (o, state), pull_back = jax.vjp(lambda *x: delta_rule(*x, implementation="mosaic_mma"), *arguments)
        return o, state, pull_back((jnp.ones_like(o), jnp.ones_like(state)))

    first = jax.tree.leaves(run(arguments))
    different = jax.jit(lambda a, b: sum((x != y).any() for x, y in zip(a, b, strict=True)))
    assert not sum(int(different(first, jax.tree.leaves(run(arguments)))) for _ in range(100))
