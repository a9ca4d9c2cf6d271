"""The recurrence, and one token of it, against the oracle."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle


@pytest.mark.parametrize(
    "case, dtype", [*harness.table(("float32", "bfloat16")), *harness.channels("recurrent")]
)
def test_table(case, dtype):
    x = cases.inputs(case, dtype)
    harness.check(case, x, dtype, harness.evaluate("recurrent", case.options, x), form="recurrent")


def test_by_hand():
    """K = V = 1, numbers that can be followed with a pencil.

    S: 1 -> decayed 0.5, error 3 - 2 * 0.5 = 2, write 0.5 * 2 = 1, S = 0.5 + 2 * 1 = 2.5, o = 10 * 3 * 2.5 = 75.
    """

    def one(value):
        return jnp.full((1, 1, 1, 1), value, jnp.float32)

    g, beta = jnp.log(jnp.full((1, 1, 1), 0.5)), jnp.full((1, 1, 1), 0.5)
    for implementation in harness.IMPLEMENTATIONS:
        o, state = gdn_jax.gated_delta_rule(
            one(3.0),
            one(2.0),
            one(3.0),
            g,
            beta,
            scale=10.0,
            initial_state=one(1.0),
            implementation=implementation,
        )
        assert_close([[[[75.0]]]], o, tolerance("o", "float32"))
        assert_close([[[[2.5]]]], state, tolerance("final_state", "float32"))


STEPS = {
    "grouped-values": dict(heads=(1, 1, 2)),
    "grouped-queries-vk": dict(heads=(4, 2, 2), state_layout="vk"),
    "l2norm-scale": dict(heads=(2, 2, 2), use_qk_l2norm=True, scale=0.5),
    "no-g": dict(heads=(2, 2, 2), g=None),
    "no-beta": dict(heads=(2, 2, 2), beta=None),
    "scale-0": dict(heads=(1, 1, 2), scale=0.0),
    "channels": dict(heads=(1, 1, 2), channel_g="kinds"),
    "apart-vk": dict(heads=(4, 2, 2), channel_g="mixed", erase="channel", write="channel", state_layout="vk"),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_equal_oracle(name, dtype):
    """A step over all tokens is the rule."""
    case = cases.Case(name, T=9, **STEPS[name])
    x = cases.inputs(case, dtype)
    options = case.rule_options

    def step(state, token):
        token, apart = token
        if case.channel_g is None:
            o, state = gdn_jax.gated_delta_step(*token, state, **options)
        else:
            o, state = gdn_jax.delta_step(*token, state, **apart, **options)
        return state, o

    apart = {name: getattr(x, name) for name in ("erase", "write")}
    tokens = jax.tree.map(lambda y: jnp.moveaxis(jnp.asarray(y), 1, 0), (x[:5], apart))
    state, o = jax.jit(lambda h, xs: jax.lax.scan(step, h, xs))(x.initial_state, tokens)
    expected, final = oracle.forward(**x.arguments, **options)
    assert o.dtype == x.v.dtype and state.dtype == jnp.float32
    assert_close(expected, np.moveaxis(np.asarray(o), 0, 1), tolerance("o", dtype), "o", 2)
    assert_close(final, state, tolerance("final_state", dtype), "state", 1)


def test_step_keeps_the_dtype_of_the_state():
    case = cases.Case("step", T=1, heads=(2, 2, 2))
    x = cases.inputs(case, "bfloat16")
    state = jnp.asarray(x.initial_state, jnp.bfloat16)
    q, k, v, g, beta = (jnp.asarray(y[:, 0]) for y in x[:5])
    o, after = gdn_jax.gated_delta_step(q, k, v, g, beta, state)
    expected, final = oracle.forward(**{**x.arguments, "initial_state": np.asarray(state)})
    assert after.dtype == jnp.bfloat16 and o.dtype == jnp.bfloat16
    assert_close(expected[:, 0], o, tolerance("o", "bfloat16"))
    assert_close(final, after, tolerance("final_state", "bfloat16"))


@pytest.mark.parametrize("given", ["g and beta", "nothing"])
def test_a_step_with_gates_of_heads_is_the_gated_step(given):
    """To the bit; without gates too, where several value heads share a query head."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 8)).astype(np.float32) for heads in (1, 1, 2))
    g, beta = -np.exp(rng.standard_normal((2, 2))).astype(np.float32), np.full((2, 2), 0.5, np.float32)
    gates = (g, beta) if given == "g and beta" else (None, None)
    state = rng.standard_normal((2, 2, 8, 8)).astype(np.float32)
    both = jax.jit(lambda *x: [step(*x) for step in (gdn_jax.delta_step, gdn_jax.gated_delta_step)])
    for one, other in zip(*both(q, k, v, *gates, state), strict=True):
        np.testing.assert_array_equal(one, other)
