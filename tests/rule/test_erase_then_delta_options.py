"""Every option of `erase_then_delta_rule` against the oracle in float64, with all gradients."""

import functools

import erasures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import tiers
from tolerances import assert_close, head_axis, tolerance

import gdn_jax
from gdn_jax import erase_then_delta_rule, erase_then_delta_step
from gdn_jax.checks import cases

SMALL = dict(T=37, B=2, heads=(2, 2, 4), K=8, V=6, chunk_size=16, channel_g="mixed")
CASES = {
    "rows": {},
    "states-vk": dict(state_layout="vk"),
    "packed": dict(B=1, T=40, lengths=(7, 0, 1, 20, 9)),
    "packed-vk": dict(B=1, T=24, lengths=(5, 16), state_layout="vk"),
    "segments": dict(T=24, segments=((1, 16, 7), (8, 3, 13))),
    "l2norm": dict(keys="any", use_qk_l2norm=True),
    "more-queries": dict(heads=(4, 2, 2), scale=0.3),
    "fewer-queries": dict(heads=(1, 2, 4)),
    "decay-of-heads": dict(channel_g=None),
    "no-decay": dict(channel_g=None, g=None),
    "no-beta": dict(beta=None),
    "resets": dict(channel_g="some -inf"),
    "no-initial-state": dict(initial_state=False),
    "chunk-64": dict(chunk_size=64),
    "key-left-out": {},
    "strength-left-out": {},
}
QUICK = ("states-vk", "packed", "segments", "l2norm", "more-queries", "key-left-out")


def made(name, dtype="float32", **more):
    case = cases.Case(f"erasure {name}", **SMALL | CASES[name] | more)
    return erasures.inputs(case, dtype, key=name != "key-left-out", strength=name != "strength-left-out")


def evaluated(x, implementation, rule=erase_then_delta_rule):
    """Outputs and gradients by name."""
    case = x.case

    @jax.jit
    def run(primals, packing, cotangents):
        def call(*primals):
            *tokens, state = primals
            return rule(
                *tokens, initial_state=state, **packing, **case.options, implementation=implementation
            )

        outputs, pull = jax.vjp(call, *primals)
        return outputs, pull(cotangents)

    outputs, gradients = run(x.primals, x.packing, (x.x.do, x.x.dh_T))
    names = ("o", "final_state", *(f"d{name}" for name in erasures.NAMES))
    return dict(zip(names, (*outputs, *gradients), strict=True))


def check(x, got, dtype="float32"):
    for name, want in x.expected().items():
        of = {"dinitial_state": "dh_0"}.get(name, name)
        assert (want is None) == (got[name] is None), name
        if want is not None:
            assert_close(want, np.asarray(got[name], np.float64), tolerance(of, dtype), name, head_axis(of))


@pytest.mark.parametrize("name", tiers(CASES, QUICK))
def test_chunked(name):
    x = made(name)
    check(x, evaluated(x, "chunked"))


@pytest.mark.parametrize("name", tiers(CASES, ("packed-vk",), ("segments", "resets", "strength-left-out")))
def test_recurrent(name):
    x = made(name)
    check(x, evaluated(x, "recurrent"))


def test_vmap():
    """Rows under vmap, one more axis of all arrays, are rows of a batch."""
    x = made("rows")
    *tokens, state = x.primals

    @jax.jit
    def run(tokens, state):
        rule = functools.partial(erase_then_delta_rule, chunk_size=16)
        each = jax.vmap(lambda tokens, state: rule(*tokens, initial_state=state))
        o, S = each([y[:, None] for y in tokens], state[:, None])
        return o[:, 0], S[:, 0]

    expected = x.expected()
    for name, got in zip(("o", "final_state"), run(tokens, state), strict=True):
        assert_close(expected[name], np.asarray(got), tolerance(name, "float32"), name)


@pytest.mark.parametrize(
    "implementation", [None, pytest.param("recurrent", marks=pytest.mark.slow)], ids=["auto", "recurrent"]
)
def test_forward_and_second_derivatives(implementation):
    """A jvp is the product with the gradients, and a second derivative the difference of two gradients."""
    x = made("packed", channel_g=None, g="slow")
    rng = np.random.default_rng(3)
    directions = [rng.standard_normal(y.shape).astype(y.dtype) for y in x.primals]

    @jax.jit
    def run(primals, directions):
        def value(*primals):
            *tokens, state = primals
            options = dict(**x.packing, chunk_size=16, implementation=implementation)
            o, S = erase_then_delta_rule(*tokens, initial_state=state, **options)
            return (o * x.x.do).sum() + (S * x.x.dh_T).sum()

        gradients = jax.grad(value, argnums=range(8))
        step = 1e-2
        ahead, back = (
            gradients(*(y + s * d for y, d in zip(primals, directions, strict=True))) for s in (step, -step)
        )
        numeric = [(a - b) / (2 * step) for a, b in zip(ahead, back, strict=True)]
        _, second = jax.jvp(gradients, primals, directions)
        return jax.jvp(value, primals, directions)[1], second, numeric

    forward, second, numeric = run(x.primals, tuple(directions))
    expected = x.expected()
    want = sum((expected[f"d{name}"] * d).sum() for name, d in zip(erasures.NAMES, directions, strict=True))
    assert abs(float(forward) - want) < 1e-4 * max(
        np.abs(expected[f"d{name}"] * d).sum() for name, d in zip(erasures.NAMES, directions, strict=True)
    )
    for name, a, b in zip(erasures.NAMES, second, numeric, strict=True):
        # The differences are wrong by the square of a step of 1e-2 and by float32's 6e-8 of a gradient over it.
        assert_close(np.asarray(b, np.float64), np.asarray(a), 5e-3, name)


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_steps(layout):
    """A token at a time, with states in both layouts, scaled, of vectors that come to unit length inside."""
    x = made("rows", keys="any", use_qk_l2norm=True, state_layout=layout, scale=0.4, T=6)
    *tokens, state = x.primals

    @jax.jit
    def run(tokens, state):
        def step(state, token):
            o, state = erase_then_delta_step(*token, state, **x.case.rule_options)
            return state, o

        state, o = jax.lax.scan(step, state, [jnp.swapaxes(y, 0, 1) for y in tokens])
        return jnp.swapaxes(o, 0, 1), state

    expected = x.expected()
    for name, got in zip(("o", "final_state"), run(tokens, state), strict=True):
        assert_close(expected[name], np.asarray(got), tolerance(name, "float32"), name)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float64", marks=pytest.mark.slow)])
def test_dtypes(dtype):
    """Arrays of 16 bits, and of 64 where JAX has them."""
    x = made("rows", dtype)
    with jax.enable_x64(dtype == "float64"):
        check(x, evaluated(x, "chunked"), dtype)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("k", "expected keys of unit length"),
        ("erase_key", "expected keys of unit length"),
        ("g", "log decay <= 0"),
    ],
)
def test_debug_checks(name, said):
    """Values that cannot be are refused, whichever half of a token has them."""
    tokens = dict(zip(erasures.NAMES, made("rows", T=4, B=1).primals[:-1], strict=False))
    tokens[name] = 3 + abs(tokens[name])
    gdn_jax.debug_checks(True)
    try:
        rule = jax.jit(functools.partial(erase_then_delta_rule, implementation="recurrent"))
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            jax.block_until_ready(rule(**tokens))
    finally:
        gdn_jax.debug_checks(False)


def test_what_kernels_refuse():
    """A named implementation that cannot run says why."""
    *tokens, _ = made("rows", T=4).primals
    rule = functools.partial(erase_then_delta_rule, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu.*: the default device is a cpu"):
        jax.eval_shape(rule, *tokens)
