"""Gradients: the oracle's adjoint itself, double precision, one output alone, what the backward keeps."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FINITE_DIFFERENCES, assert_close, differences, head_axis, rms_ratio, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle

SMALL = {
    "plain": cases.Case("fd-plain", T=5, heads=(1, 1, 2), K=3, V=2),
    "grouped-queries": cases.Case(
        "fd-gqa", T=4, B=1, heads=(4, 1, 2), K=2, V=3, scale=0.7, state_layout="vk"
    ),
    "l2norm": cases.Case("fd-l2norm", T=4, B=1, heads=(1, 2, 2), K=3, V=2, use_qk_l2norm=True, keys="any"),
    "no-gates": cases.Case(
        "fd-no-gates", T=4, heads=(2, 2, 2), K=2, V=2, g=None, beta=None, initial_state=False
    ),
    "reset": cases.Case("fd-reset", T=6, B=1, K=3, V=2, g="some -inf"),
    "packed": cases.Case("fd-packed", T=8, B=1, K=2, V=2, lengths=(0, 3, 1, 0, 2)),
    "segments": cases.Case("fd-segments", T=6, K=2, V=2, segments=((1, 2, 3), (6,))),
    "channels": cases.Case("fd-channels", T=5, B=1, K=3, V=2, channel_g="some -inf"),
    "apart": cases.Case(
        "fd-apart", T=5, K=3, V=2, channel_g="mixed", erase="channel", write="channel", use_qk_l2norm=True
    ),
    "apart-heads": cases.Case(
        "fd-apart-heads", T=8, B=1, K=2, V=2, erase="head", write="head", lengths=(0, 3, 4)
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_adjoint_of_the_oracle(name):
    """The oracle's gradients against differences of its forward, coordinate by coordinate, in float64."""
    case = SMALL[name]
    x = cases.inputs(case, "float64")
    options = {key: value for key, value in case.options.items() if key != "chunk_size"}

    def loss(**change):
        o, h_T = oracle.forward(**{**x.arguments, **change}, **options)
        return (o * x.do).sum() + (h_T * x.dh_T).sum()

    gradients = oracle.gradients(**x.arguments, **options, do=x.do, dh_T=x.dh_T)
    for primal, gradient in zip((*harness.PRIMALS, "erase", "write"), gradients, strict=True):
        value = getattr(x, primal)
        if value is None:
            assert gradient is None
            continue
        expected = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            if np.isneginf(value[index]):
                continue  # by definition 0: alpha = 0 can't be changed through g

            def moved(by, index=index, value=value, primal=primal):
                changed = value.copy()
                changed[index] += by
                return loss(**{primal: changed})

            expected[index] = differences(moved)
        assert rms_ratio(expected, gradient) < FINITE_DIFFERENCES, primal


DOUBLE = (
    "slow-decay",
    "mixed-decay",
    "strong-decay",
    "reset-at-some-tokens",
    "beta-0",
    "beta-2",
    "packed",
    "segments",
    "one-chunk-one-key-head",
    "packed-vk-l2norm-scale-1-no-state",
)


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
@pytest.mark.parametrize("name", harness.tiers(DOUBLE, DOUBLE[:6], (DOUBLE[-1],)))
def test_double_precision(implementation, name):
    """With x64 on, nothing inside is computed in less than float64."""
    case = cases.CASES[name]
    with jax.enable_x64(True):
        x = cases.inputs(case, "float64")
        got = harness.evaluate(implementation, case.options, x)
    assert all(y.dtype == np.float64 for y in got.values() if y is not None)
    harness.check(case, x, "float64", got)


@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
@pytest.mark.parametrize("silent", ["do", "dh_T"])
def test_one_output_alone(implementation, silent):
    """Gradients from o alone and from the final state alone, dh_0 from dh_T among them."""
    case = cases.CASES["slow-decay"]
    x = cases.inputs(case)
    x = x._replace(**{silent: np.zeros_like(getattr(x, silent))})
    harness.check(case, x, "float32", harness.evaluate(implementation, case.options, x), form=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
def test_unused_output(implementation):
    """jax.grad of a loss that reads one output only, of some arguments only: no cotangent is dropped or invented."""
    x = cases.inputs(cases.Case("unused", T=70))
    reads_o = oracle.gradients(**x.arguments, do=x.do, dh_T=None)
    reads_state = oracle.gradients(**x.arguments, do=None, dh_T=x.dh_T)

    @jax.jit
    def both(k, g, h_0):
        def call(k, g, h_0):
            arguments = dict(initial_state=h_0, implementation=implementation)
            return gdn_jax.gated_delta_rule(x.q, k, x.v, g, jnp.asarray(x.beta), **arguments)

        first = jax.grad(lambda *a: jnp.vdot(call(*a)[0], x.do), argnums=(0, 1, 2))(k, g, h_0)
        return first, jax.grad(lambda *a: jnp.vdot(call(*a)[1], x.dh_T), argnums=(0, 1, 2))(k, g, h_0)

    x = x._replace(q=jax.device_put(x.q), v=jax.device_put(x.v))
    for expected, got in zip((reads_o, reads_state), both(x.k, x.g, x.initial_state), strict=True):
        for name, y in zip(("dk", "dg", "dh_0"), got, strict=True):
            assert_close(getattr(expected, name), y, tolerance(name, "float32"), name, head_axis(name))


@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
def test_first_token_without_a_past(implementation):
    """The decay of the first token acts on zeros: its dg is 0, not a difference of two large sums."""
    case = cases.CASES["slow-decay"]
    x = cases.inputs(case)
    x = x._replace(initial_state=np.zeros_like(x.initial_state))
    got = harness.evaluate(implementation, case.options, x)
    scale = np.sqrt(np.mean(got["dg"] ** 2))
    assert np.abs(got["dg"][:, 0]).max() <= tolerance("dg", "float32") * scale


@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
def test_cotangents_are_linear(implementation):
    """Doubling both cotangents doubles every gradient bit for bit; zero cotangents give exact zeros."""
    case = cases.CASES["slow-decay"]
    x = cases.inputs(case)

    def run(factor):
        scaled = x._replace(do=factor * x.do, dh_T=factor * x.dh_T)
        return harness.evaluate(implementation, case.options, scaled)

    once, twice, none = run(np.float32(1)), run(np.float32(2)), run(np.float32(0))
    for name in ("dq", "dk", "dv", "dg", "dbeta", "dh_0"):
        np.testing.assert_array_equal(2 * once[name], twice[name])
        assert not none[name].any()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
def test_l2norm_of_a_zero_vector(implementation):
    """A padding token has q = k = 0: its norm has a gradient, x rsqrt(sum x^2 + 1e-6) being smooth there."""
    case = cases.Case("zero-l2", T=5, use_qk_l2norm=True, keys="some zero", g="slow")
    x = cases.inputs(case)
    x.q[:, 2] = 0
    assert (x.k == 0).all(-1).any()
    got = harness.evaluate(implementation, case.options, x)
    harness.check(case, x, "float32", got)


def _bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_backward_keeps(dtype):
    """The inputs, a C x C matrix and a state per chunk and head: all of them, and hardly more."""
    case = cases.Case("residuals", T=1024, B=2, heads=(2, 2, 4), K=32, V=48, chunk_size=32)
    x = cases.inputs(case, dtype)

    def residuals(*primals):
        def call(*p):
            options = dict(chunk_size=case.chunk_size, implementation="chunked")
            return gdn_jax.gated_delta_rule(*p[:5], initial_state=p[5], **options)

        return jax.vjp(call, *primals)[1]

    kept = _bytes(jax.eval_shape(residuals, *x[:6]))
    chunks = case.B * case.HO * case.T // case.chunk_size
    per_chunk = 4 * case.chunk_size**2 + x.q.dtype.itemsize * case.K * case.V
    needed = _bytes(x[:6]) + chunks * per_chunk
    assert needed <= kept <= 1.1 * needed  # a row computed in stretches keeps the state between them too
