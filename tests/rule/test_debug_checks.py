"""Values that are only seen at run time, with `debug_checks` switched on."""

import warnings

import jax
import numpy as np
import pytest
from small_calls import X, f32, on_device

import gdn_jax
from gdn_jax.checks import cases


@pytest.fixture
def run_time_checks():
    gdn_jax.debug_checks(True)
    yield
    gdn_jax.debug_checks(False)


def finish(call, *arguments):
    jax.block_until_ready(call(*arguments))
    jax.effects_barrier()


def with_number(g, number):
    g = g.copy()
    g[1, 3, 2] = number
    return g


RUN_TIME = {
    "positive-g": (lambda x: x | {"g": with_number(x["g"], 0.5)}, "g: expected .*<= 0.*, got .*0.5"),
    "alpha-for-g": (lambda x: x | {"g": np.exp(x["g"])}, "g: expected .*log_decay_from_alpha"),
    "nan-g": (lambda x: x | {"g": with_number(x["g"], np.nan)}, "g: expected .*, got .*nan"),
    "long-keys": (
        lambda x: x | {"k": 6 * x["k"]},
        r"k: expected keys of unit length.*use_qk_l2norm=True.*, got a largest beta \|k\|\^2 of [1-9]",
    ),
    "descending": (lambda x: x | {"cu_seqlens": np.array([0, 4, 2, 5])}, "cu_seqlens: expected .*ascending"),
    "late-start": (lambda x: x | {"cu_seqlens": np.array([1, 2, 2, 5])}, "cu_seqlens: expected .* 0"),
    "beyond-the-row": (lambda x: x | {"cu_seqlens": np.array([0, 2, 2, 6])}, "cu_seqlens: expected .*5"),
}
CORRECT = {
    False: X.arguments,
    True: cases.inputs(cases.Case("api-packed", T=5, B=1, lengths=(2, 1, 2), K=6, V=3)).arguments,
}


@pytest.mark.parametrize("name", RUN_TIME)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_run_time_checks(name, compiled, run_time_checks):
    """Under jit too: the error that JAX raises carries our text."""
    change, text = RUN_TIME[name]
    x = CORRECT[name not in ("positive-g", "alpha-for-g", "nan-g")]

    def call(x):
        return gdn_jax.gated_delta_rule(**x, implementation="recurrent")

    call = jax.jit(call) if compiled else call
    finish(call, on_device(x))
    with pytest.raises(jax.errors.JaxRuntimeError if compiled else ValueError, match=text):
        finish(call, on_device(change(x)))


@pytest.mark.parametrize("name", RUN_TIME)
def test_run_time_checks_of_chunk_states(name, run_time_checks):
    change, text = RUN_TIME[name]
    x = CORRECT[name not in ("positive-g", "alpha-for-g", "nan-g")]
    call = jax.jit(lambda x: gdn_jax.chunk_states(**{key: y for key, y in x.items() if key != "q"}))
    finish(call, on_device(x))
    with pytest.raises(Exception, match=text):
        finish(call, on_device(change(x)))


def test_heads_before_tokens_where_both_fit():
    """A warning with the checks switched on, as few tokens of many heads may be meant."""
    x = jax.device_put(np.zeros((1, 3, 8, 4), f32))

    def call():
        return jax.eval_shape(lambda: gdn_jax.gated_delta_rule(x, x, x))  # a new function is traced again

    with warnings.catch_warnings(action="error"):
        call()
    gdn_jax.debug_checks(True)
    try:
        with pytest.warns(UserWarning, match="3 tokens of 8 heads"):
            call()
    finally:
        gdn_jax.debug_checks(False)


def test_run_time_checks_are_off_by_default():
    call = jax.jit(lambda x: gdn_jax.gated_delta_rule(**x, implementation="recurrent"))
    for name, (change, _) in RUN_TIME.items():
        x = CORRECT[name not in ("positive-g", "alpha-for-g", "nan-g")]
        finish(call, on_device(change(x)))


def test_run_time_checks_keep_the_gradients(run_time_checks):
    x = on_device(CORRECT[False])

    def loss(v):
        return gdn_jax.gated_delta_rule(**{**x, "v": v}, implementation="recurrent")[0].sum()

    checked = jax.jit(jax.grad(loss))(x["v"])
    gdn_jax.debug_checks(False)
    np.testing.assert_array_equal(checked, jax.jit(jax.grad(loss))(x["v"]))
