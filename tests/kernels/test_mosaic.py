"""The seam to the GPU kernels without a GPU: the derivative that a public call has, with the kernels interpreted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import GRADIENTS, STATES, assert_close, head_axis, tolerance

from gdn_jax.checks import cases, oracle
from gdn_jax.rule import seam
from gdn_jax.rule.call import Arrays, Call
from gdn_jax.rule.kernels.ampere import Ampere
from gdn_jax.rule.kernels.hopper import Hopper
from pallas_kernels.ampere import backward as mma_backward
from pallas_kernels.ampere import rule as mma_rule
from pallas_kernels.backward import gradients as gradients_kernel
from pallas_kernels.backward import rule as backward
from pallas_kernels.chunks import inverse
from pallas_kernels.forward import rule as forward

INTERPRET = plgpu.InterpretGPUParams()
HOPPER = Hopper()
TINY = dict(T=66, B=1, heads=(1, 1, 1), K=16, V=16)


@pytest.fixture
def interpreted(monkeypatch):
    """Both rules in the interpreter, of few warpgroups, for each takes a thread. What they compute is the same."""
    small_forward = forward.Config(inverse=inverse.Config(warpgroups=2, ctas=1))
    small_backward = backward.Config(gradients=gradients_kernel.Config(ctas=1))
    run_forward = functools.partial(forward.forward, interpret=INTERPRET)
    run_backward = functools.partial(backward.backward, config=small_backward, interpret=INTERPRET)

    def forward_of(x, *, config, **options):
        assert config == forward.Config(), "the seam asks for something else than the default"
        return run_forward(x, config=small_forward, **options)

    monkeypatch.setattr(forward, "forward", forward_of)
    monkeypatch.setattr(backward, "backward", run_backward)


@pytest.fixture
def mma_interpreted(monkeypatch):
    """Both rules by mma.sync in the interpreter."""
    for module, name in ((mma_rule, "forward"), (mma_backward, "backward")):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=INTERPRET))


def value_and_gradients(
    case: cases.Case, x: cases.Inputs, known: bool = False, kernels: Any = HOPPER
) -> dict:
    """Outputs and gradients of the seam by name; outside jit, for inside the interpreter hangs."""
    q, k, v, g, beta, *rest = (None if y is None else put(y) for y in x[:8])
    arrays = Arrays(q, k, v, g, beta, None, *rest)
    lengths = x.cu_seqlens.astype(np.int64).tobytes() if known else None
    static = Call(case.use_qk_l2norm, case.state_layout, kernels=kernels, known_lengths=lengths)
    rule, static, scale = seam.program(static, case.K**-0.5 if case.scale is None else case.scale)

    def call(*primals):
        return rule(static, Arrays(*primals, *arrays[7:]), *scale)

    outputs, vjp = jax.vjp(call, *arrays.floats)
    gradients = [y for y in vjp((put(x.do), put(x.dh_T))) if y is not None]
    return dict(zip(STATES + GRADIENTS, (*outputs, *gradients), strict=True))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            cases.Case("seam-norm", use_qk_l2norm=True, keys="any", state_layout="vk", **TINY),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            cases.Case("seam-scale-20-some-beta-0", scale=20.0, beta="some 0", **TINY),
            marks=pytest.mark.crossed,
        ),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.usefixtures("interpreted")
def test_public_gradient(case):
    """Against the oracle: through the L2 norm; where some beta are 0, with a scale that the kernels do not hold."""
    x = cases.inputs(case, "bfloat16")
    expected = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    for name, y in value_and_gradients(case, x).items():
        assert_close(expected[name], np.asarray(y), tolerance(name, "bfloat16"), name, head_axis(name))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            cases.Case(
                "seam-equal-lengths", use_qk_l2norm=True, keys="any", **TINY | dict(T=32, lengths=(16, 16))
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            cases.Case("seam-scale-20-vk", scale=20.0, state_layout="vk", **TINY), marks=pytest.mark.crossed
        ),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.usefixtures("mma_interpreted")
def test_public_gradient_by_mma(case):
    """Against the oracle: through the L2 norm, where known lengths make rows of sequences; another scale."""
    x = cases.inputs(case, "bfloat16")
    expected = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    for name, y in value_and_gradients(case, x, case.lengths is not None, Ampere()).items():
        assert_close(expected[name], np.asarray(y), tolerance(name, "bfloat16"), name, head_axis(name))


def test_the_norm_comes_before_kernels_without_one(monkeypatch):
    """Where no derivative is asked for."""
    monkeypatch.setattr(mma_rule, "forward", lambda x, **how: (x.q, x.k.swapaxes(1, 2), None))
    q, k = (scale * jnp.ones((1, 3, 1, 16), jnp.bfloat16) for scale in (2, 3))
    call = Call(True, "kv", kernels=Ampere())
    for got in seam.rule(call, Arrays(q, k, q, *[None] * 6)):
        np.testing.assert_array_equal(np.asarray(got, np.float32), 0.25)
