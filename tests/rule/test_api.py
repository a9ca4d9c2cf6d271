"""The public operation from outside: layouts, dtypes, every error text, choice of implementation, run-time checks."""

import copy
import dataclasses
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import warnings

import compiled_programs
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, head_axis, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle
from gdn_jax.shapes import ArgumentError

SMALL = cases.Case("api", T=5, B=2, heads=(2, 2, 4), K=6, V=3)


def arguments(case=SMALL, dtype="float32", **change):
    return on_device(cases.inputs(case, dtype).arguments | change)


def on_device(x):
    """NumPy arrays as JAX's, where there are some: nothing is compiled for that."""
    return {name: jax.device_put(y) for name, y in x.items() if y is not None}


def test_positional_order():
    """q, k, v, g, beta, then keywords only, as in the specification."""
    parameters = inspect.signature(gdn_jax.gated_delta_rule).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert positional == ["q", "k", "v", "g", "beta"]
    assert keyword == dict(
        scale=None,
        initial_state=None,
        cu_seqlens=None,
        segment_ids=None,
        use_qk_l2norm=False,
        state_layout="kv",
        chunk_size=64,
        implementation=None,
    )


# Layouts and dtypes.


@pytest.mark.slow
@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_layouts_are_transposes(implementation):
    """ "vk" transposes the states that go in and come out, and their gradients; everything else keeps its bits."""
    x = cases.inputs(SMALL)
    kv = harness.evaluate(implementation, {"state_layout": "kv"}, x)
    turned = {name: getattr(x, name).swapaxes(-1, -2) for name in ("initial_state", "dh_T")}
    vk = harness.evaluate(implementation, {"state_layout": "vk"}, x._replace(**turned))
    for name, y in kv.items():
        y = y.swapaxes(-1, -2) if name in ("final_state", "dh_0") else y
        assert_close(y, vk[name], tolerance(name, "float32"), name, head_axis(name))


@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "dtype", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("float16", "bfloat16")), "float32"]
)
def test_dtypes(implementation, dtype):
    """o in the dtype of v, states float32, every gradient in the dtype of its input; float16 is accurate too."""
    x = cases.inputs(SMALL, dtype)
    got = harness.evaluate(implementation, {}, x)
    assert got["o"].dtype == x.v.dtype and got["final_state"].dtype == np.float32
    for name, primal in zip(("dq", "dk", "dv", "dg", "dbeta", "dh_0"), x[:6], strict=True):
        assert got[name].dtype == primal.dtype, name
    harness.check(SMALL, x, dtype, got)


@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
def test_float16_state_beyond_its_range(implementation):
    """States are float32 inside: 65504, the largest float16, is no limit to them."""
    x = cases.inputs(cases.Case("large state", T=70, heads=(1, 1, 1)), "float16")
    x = x._replace(initial_state=x.initial_state * 1e6, q=x.q / np.float16(64))
    _, final = oracle.forward(**x.arguments)
    call = jax.jit(lambda x: gdn_jax.gated_delta_rule(**x, implementation=implementation))
    assert_close(final, call(x.arguments)[1], tolerance("final_state", "float16"), axis=1)


def test_no_tokens():
    """T = 0 is a row without tokens: its state passes through."""
    case = cases.Case("empty", T=0)
    x = arguments(case)
    for implementation in harness.IMPLEMENTATIONS:
        o, state = jax.jit(lambda x, name=implementation: gdn_jax.gated_delta_rule(**x, implementation=name))(
            x
        )
        assert o.shape == (2, 0, 2, 24)
        np.testing.assert_array_equal(state, x["initial_state"])


# Choice of implementation.


def test_supported_implementations():
    """Names, fastest first, each with None or a reason; and what it says is what happens."""
    x = arguments()
    supported = gdn_jax.supported_implementations(**x)
    assert list(supported) == ["mosaic_gpu", "mosaic_mma", "chunked", "recurrent"]
    assert supported["chunked"] is None and supported["recurrent"] is None
    for implementation, reason in supported.items():
        if reason is None:
            jax.eval_shape(lambda name=implementation: gdn_jax.gated_delta_rule(**x, implementation=name))
        else:
            with pytest.raises(NotImplementedError, match=implementation) as error:
                gdn_jax.gated_delta_rule(**x, implementation=implementation)
            assert reason in str(error.value)
    if jax.default_backend() == "cpu":  # the device comes before what other arguments could mend
        for name in ("mosaic_gpu", "mosaic_mma"):
            assert supported[name] == "the default device is a cpu; the kernels need an NVIDIA GPU"


def test_kernels_of_channels_are_refused():
    """On a CPU, with the device's reason."""
    x = arguments(dataclasses.replace(SMALL, channel_g="mild"))
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="the default device is a cpu"):
            gdn_jax.delta_rule(**x, implementation="mosaic_gpu")


def test_default_implementation():
    """None is the first that supports the call."""
    x = arguments()
    first = next(name for name, reason in gdn_jax.supported_implementations(**x).items() if reason is None)
    default = jax.jit(lambda x: gdn_jax.gated_delta_rule(**x))(x)
    named = jax.jit(lambda x: gdn_jax.gated_delta_rule(**x, implementation=first))(x)
    jax.tree.map(np.testing.assert_array_equal, default, named)


def test_supported_implementations_takes_shapes(no_type_checks):
    """It can be asked before there are arrays."""
    shapes = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), arguments())
    assert gdn_jax.supported_implementations(**shapes) == gdn_jax.supported_implementations(**arguments())


# Errors. Each names the argument, what was expected and what came.

X = cases.inputs(SMALL)
ONE_ROW = {name: y[:1] for name, y in X.arguments.items()}
PACKED = dict(ONE_ROW, initial_state=None, cu_seqlens=np.array([0, 2, 5], np.int32))
f32 = np.float32

ERRORS = {
    # name: (change of a correct call, argument that is named, what was expected, what came)
    "q-rank": (dict(q=X.q[0]), "q", "B, T", r"\[5, 2, 6\]"),
    "k-rank": (dict(k=X.k[..., None]), "k", "B, T", r"\[2, 5, 2, 6, 1\]"),
    "v-rank": (dict(v=X.v[0, 0]), "v", "B, T", r"\[4, 3\]"),
    "k-batch": (dict(k=X.k[:1]), "k", "B, T, Hk, K", r"\[1, 5, 2, 6\]"),
    "v-batch": (dict(v=X.v[:1]), "v", "B, T, HV, V", r"\[1, 5, 4, 3\]"),
    "k-tokens": (dict(k=X.k[:, :4]), "k", "B, T, Hk, K", r"\[2, 4, 2, 6\]"),
    "v-tokens": (dict(v=X.v[:, :4]), "v", "B, T, HV, V", r"\[2, 4, 4, 3\]"),
    "k-width": (dict(k=X.k[..., :5]), "k", "6", r"\[2, 5, 2, 5\]"),
    "heads-before-tokens": (
        {name: np.zeros((2, heads, 16, 6), f32) for name, heads in (("q", 2), ("k", 2), ("v", 4))}
        | dict(g=None, beta=None, initial_state=None),
        "v",
        r"not \[B, heads, T, width\]",
        r"\[2, 4, 16, 6\]",
    ),
    "q-heads": (dict(q=np.zeros((2, 5, 3, 6), f32)), "q", "divides HO .* 4", "3"),
    "k-heads": (dict(k=np.zeros((2, 5, 3, 6), f32)), "k", "divides HO .* 4", "3"),
    "k-more-heads": (dict(k=np.zeros((2, 5, 8, 6), f32)), "k", "divides HO .* 4", "8"),
    "v-heads": (
        dict(v=np.zeros((2, 5, 3, 3), f32), q=np.zeros((2, 5, 4, 6), f32)),
        "v",
        "divides HO .* 4",
        "3",
    ),
    "no-heads": (dict(q=np.zeros((2, 5, 0, 6), f32)), "q", "divides HO", "0"),
    "q-integer": (dict(q=np.zeros((2, 5, 2, 6), np.int32)), "q", "float", "int32"),
    "k-integer": (dict(k=np.zeros((2, 5, 2, 6), np.int32)), "k", "float", "int32"),
    "v-integer": (dict(v=np.zeros((2, 5, 4, 3), np.int32)), "v", "float", "int32"),
    "k-dtype": (dict(k=X.k.astype(np.float16)), "k", "float32", "float16"),
    "v-dtype": (dict(v=X.v.astype(np.float16)), "v", "float32", "float16"),
    "q-list": (dict(q=[1.0]), "q", "an array", "list"),
    "K-too-wide": (
        dict(q=np.zeros((2, 5, 2, 257), f32), k=np.zeros((2, 5, 2, 257), f32)),
        "q",
        "1 to 256",
        "257",
    ),
    "V-too-wide": (dict(v=np.zeros((2, 5, 4, 257), f32)), "v", "1 to 256", "257"),
    "g-shape": (dict(g=X.g[..., :2]), "g", "B, T, HO", r"\[2, 5, 2\]"),
    "g-rank": (dict(g=X.g[..., None]), "g", "B, T, HO", r"\[2, 5, 4, 1\]"),
    "g-integer": (dict(g=np.zeros((2, 5, 4), np.int32)), "g", "float", "int32"),
    "beta-shape": (dict(beta=X.beta[:, :4]), "beta", "B, T, HO", r"\[2, 4, 4\]"),
    "beta-of-key-heads": (dict(beta=X.beta[..., :2]), "beta", "B, T, HO", r"\[2, 5, 2\]"),
    "beta-integer": (dict(beta=np.ones((2, 5, 4), np.int32)), "beta", "float", "int32"),
    "state-layout": (dict(state_layout="k-last"), "state_layout", "'kv', 'vk'", "'k-last'"),
    "state-transposed": (
        dict(state_layout="vk"),
        "initial_state",
        r"V, K\] = \[2, 4, 3, 6\]",
        r"\[2, 4, 6, 3\]",
    ),
    "state-sequences": (
        dict(initial_state=X.initial_state[:1]),
        "initial_state",
        r"\[2, 4, 6, 3\]",
        r"\[1, 4, 6, 3\]",
    ),
    "state-heads": (
        dict(initial_state=X.initial_state[:, :2]),
        "initial_state",
        r"\[2, 4, 6, 3\]",
        r"\[2, 2, 6, 3\]",
    ),
    "state-integer": (
        dict(initial_state=np.zeros((2, 4, 6, 3), np.int32)),
        "initial_state",
        "float",
        "int32",
    ),
    "chunk-size": (dict(chunk_size=48), "chunk_size", "16, 32, 64, 128", "48"),
    "chunk-size-0": (dict(chunk_size=0), "chunk_size", "16, 32, 64, 128", "0"),
    "implementation": (
        dict(implementation="triton"),
        "implementation",
        "'mosaic_gpu', 'mosaic_mma', 'chunked', 'recurrent'",
        "triton",
    ),
    "cu-rows": (dict(cu_seqlens=np.array([0, 5]), initial_state=None), "cu_seqlens", "B = 1", "B = 2"),
    "cu-rank": (dict(PACKED, cu_seqlens=np.array([[0, 5]])), "cu_seqlens", r"N \+ 1", r"\[1, 2\]"),
    "cu-float": (dict(PACKED, cu_seqlens=np.array([0.0, 5.0], f32)), "cu_seqlens", "integer", "float32"),
    "cu-empty": (dict(PACKED, cu_seqlens=np.array([0])), "cu_seqlens", "two entries", "1"),
    "cu-states": (
        dict(PACKED, initial_state=X.initial_state[:1]),
        "initial_state",
        r"\[2, 4, 6, 3\]",
        r"\[1, 4, 6, 3\]",
    ),
    "both-packings": (
        dict(PACKED, segment_ids=np.zeros((1, 5), np.int32)),
        "cu_seqlens",
        "segment_ids",
        "both",
    ),
    "segments-shape": (dict(segment_ids=np.zeros((2, 4), np.int32)), "segment_ids", "B, T", r"\[2, 4\]"),
    "segments-float": (dict(segment_ids=np.zeros((2, 5), f32)), "segment_ids", "integer", "float32"),
}


def changed(change):
    call = {name: y for name, y in (X.arguments | change).items() if y is not None}
    return {name: jax.device_put(y) if isinstance(y, np.ndarray) else y for name, y in call.items()}


def _exceptions(kind: type = BaseException) -> set[type]:
    """The package's own classes of exceptions that are imported."""
    return {
        c
        for sub in kind.__subclasses__()
        for c in (sub, *_exceptions(sub))
        if c.__module__.startswith("gdn_jax")
    }


def test_exceptions_can_be_made_again():
    """By pickle, as a child process sends them; by copy; and from their text alone, as keras does."""
    for module in ("commands.locks", "commands.parsing", "serving", "training.trainer"):
        importlib.import_module(f"gdn_jax.{module}")
    classes = _exceptions()
    assert {"ArgumentError", "RunError", "Taken", "Usage", "Help", "QueueFull", "Diverged"} <= {
        c.__name__ for c in classes
    }
    made = [c("a text") for c in classes] + [ArgumentError("k", "shape [B]", [2, 3])]
    for error in made:
        again = pickle.loads(pickle.dumps(error)), copy.copy(error), type(error)(str(error))
        for other in again:
            assert type(other) is type(error) and str(other) == str(error)
        assert again[0].__dict__ == again[1].__dict__ == error.__dict__


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, no_type_checks):
    """ValueError "argument: expected ..., got ...", the same from both rules and from supported_implementations."""
    change, argument, expected, got = ERRORS[name]
    call = changed(change)
    pattern = rf"^{argument}: expected .*{expected}.*, got .*{got}"
    for rule in (gdn_jax.gated_delta_rule, gdn_jax.delta_rule):
        with pytest.raises(ValueError, match=pattern):
            rule(**call)
        with pytest.raises(ValueError, match=pattern):
            jax.eval_shape(lambda rule=rule: rule(**call))
    if "implementation" not in call:
        with pytest.raises(ValueError, match=pattern):
            gdn_jax.supported_implementations(**call)


def test_a_flag_that_is_none(no_type_checks):
    for call in (gdn_jax.supported_implementations, gdn_jax.delta_rule):
        with pytest.raises(ValueError, match=r"^use_qk_l2norm: expected True or False, got "):
            call(**changed(dict(use_qk_l2norm="no")))


STRENGTHS = {
    "both strengths": (dict(erase=X.beta), "beta", "None where erase or write is given", "both"),
    "erase of other channels": (dict(beta=None, erase=np.ones((2, 5, 4, 3), f32)), "erase", "shape", "4, 3"),
    "write of other heads": (dict(beta=None, write=np.ones((2, 5, 3), f32)), "write", "shape", "5, 3"),
    "g of other channels": (dict(g=np.zeros((2, 5, 4, 4), f32)), "g", "B, T, HO, K", "4, 4"),
    "g of integers": (dict(g=np.zeros((2, 5, 4, 6), np.int32)), "g", "dtype", "int32"),
    "beta of a channel": (dict(beta=np.ones((2, 5, 4, 6), f32)), "beta", "B, T, HO", "4, 6"),
}


@pytest.mark.parametrize("name", STRENGTHS)
def test_errors_of_channels(name, no_type_checks):
    change, argument, expected, got = STRENGTHS[name]
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*{expected}.*, got .*{got}"):
        gdn_jax.delta_rule(**changed(change))


STEP_ERRORS = {
    "q-rank": (dict(q=X.q), "q", "B, heads, width", r"\[2, 5, 2, 6\]"),
    "k-width": (dict(k=X.k[:, 0, :, :5]), "k", "6", "5"),
    "v-batch": (dict(v=X.v[:1, 0]), "v", "2", "1"),
    "k-heads": (dict(k=np.zeros((2, 3, 6), f32)), "k", "divides HO", "3"),
    "q-integer": (dict(q=np.zeros((2, 2, 6), np.int32)), "q", "float", "int32"),
    "v-dtype": (dict(v=X.v[:, 0].astype(np.float16)), "v", "float32", "float16"),
    "g-rank": (dict(g=X.g), "g", "B, HO", r"\[2, 5, 4\]"),
    "beta-shape": (dict(beta=X.beta[:, 0, :2]), "beta", "HO", "2"),
    "layout": (dict(state_layout="kk"), "state_layout", "'kv', 'vk'", "'kk'"),
    "state": (dict(state_layout="vk"), "(initial_)?state", r"\[2, 4, 3, 6\]", r"\[2, 4, 6, 3\]"),
    "g-number": (dict(g=1.0), "g", r"an array \[B, HO\]", "float"),
    "beta-text": (dict(beta="1"), "beta", r"an array \[B, HO\]", "str"),
}


@pytest.mark.parametrize("name", STEP_ERRORS)
def test_step_errors(name, no_type_checks):
    change, argument, expected, got = STEP_ERRORS[name]
    call = (
        {key: y[:, 0] for key, y in X.arguments.items() if key != "initial_state"}
        | {"state": X.initial_state}
        | change
    )
    call = {key: jax.device_put(y) if isinstance(y, np.ndarray) else y for key, y in call.items()}
    for step in (gdn_jax.gated_delta_step, gdn_jax.delta_step):
        if step is gdn_jax.gated_delta_step or name != "g-rank":
            with pytest.raises(ValueError, match=rf"^{argument}: expected .*{expected}.*, got .*{got}"):
                step(**call)


OTHER_ERRORS = {
    "g of chunk states": (
        lambda: gdn_jax.delta_chunk_states(X.k, X.v, X.g[0, 0]),
        "g: expected shape [B, T, HO, channels]",
    ),
    "offsets of products": (
        lambda: gdn_jax.gated_delta_product(
            X.q[:1], X.k[:1, :, None], X.v[:1, :, None], cu_seqlens=np.array([0, 6], np.uint8)
        ),
        "cu_seqlens: expected ascending values from 0 to at most T = 5, got [0, 6]",
    ),
    "segments of products": (
        lambda: gdn_jax.gated_delta_product(X.q, X.k[:, :, None], X.v[:, :, None], segment_ids=[0, 1]),
        "segment_ids: expected an array [B, T], got list",
    ),
}


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_errors_of_other_operations(name, no_type_checks):
    call, message = OTHER_ERRORS[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


def test_type_checks_are_on():
    """The other tests run with jaxtyping switched on: a wrong shape does not reach the body of a function."""
    with pytest.raises(Exception, match="k"):
        gdn_jax.gated_delta_rule(**changed(dict(k=X.k[:, :4])))


# Values that are only seen at run time.


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


FIRST_CALLS = """
import jax, jax.numpy as jnp, gdn_jax
x = jnp.ones((1, 5, 1, 2))
call = jax.jit(lambda x: gdn_jax.gated_delta_rule(x, x, x, use_qk_l2norm=True)[0])
call(x), call(x)
print(call._cache_size())
"""


def test_a_first_call_compiles_once():
    """In a new process: an import inside the first call must not change what JAX keys its compilations by."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_empty_batch(implementation):
    @jax.jit
    def run(q, k, v):
        return gdn_jax.gated_delta_rule(q, k, v, implementation=implementation), gdn_jax.chunk_states(k, v)

    (o, final), states = run(*(np.zeros((0, 70, 2, 8), f32) for _ in range(3)))
    assert o.shape == (0, 70, 2, 8) and final.shape == (0, 2, 8, 8)
    assert states.shape == (0, 2, 2, 8, 8)


@pytest.mark.parametrize("borders", [[10, 20, 5], [0, 30, 20, 40], [5, 30, 40], [0, -3, 40], [0, 41]])
@pytest.mark.parametrize("function", ["gated_delta_rule", "chunk_states"])
def test_known_borders_are_checked(function, borders, no_type_checks):
    """Lengths instead of offsets, among others, which would give rows of zeros."""
    arrays = (jax.device_put(np.zeros((1, 40, 1, 4), f32)),) * (3 if function == "gated_delta_rule" else 2)
    with pytest.raises(
        ValueError, match=r"^cu_seqlens: expected ascending values from 0 to at most T = 40, got"
    ):
        getattr(gdn_jax, function)(*arrays, cu_seqlens=np.array(borders))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(scale=np.ones(3)),
            r"scale: expected a number, or a floating array of shape \[\], got float64\[3\]",
        ),
        (dict(scale="half"), r"scale: expected a number, or a floating array of shape \[\], got 'half'"),
        (dict(chunk_size=64.0), r"chunk_size: expected one of 16, 32, 64, 128, got '64.0'"),
    ],
)
def test_options_of_a_wrong_kind(options, message, no_type_checks):
    x = jax.device_put(np.zeros((1, 4, 1, 4), f32))
    with pytest.raises(ValueError, match="^" + message):
        gdn_jax.gated_delta_rule(x, x, x, **options)


@pytest.mark.parametrize("state", [None, np.zeros((1, 1, 4, 5)), np.zeros((1, 1, 4, 4), int)])
def test_state_of_a_step_is_called_state(state, no_type_checks):
    x = jax.device_put(np.zeros((1, 1, 4), f32))
    with pytest.raises(ValueError, match=r"^state: expected"):
        gdn_jax.gated_delta_step(x, x, x, None, None, state)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_calls_outside_jit_compile_once(implementation):
    """Also their gradients, and a step: what a notebook does all day."""
    x, state = jnp.ones((1, 70, 1, 4)), jnp.ones((1, 1, 4, 4))

    def call():
        gdn_jax.gated_delta_rule(x, x, x, implementation=implementation)
        jax.grad(lambda q: gdn_jax.gated_delta_rule(q, x, x, implementation=implementation)[0].sum())(x)
        gdn_jax.gated_delta_step(x[:, 0], x[:, 0], x[:, 0], None, None, state)
        gdn_jax.chunk_states(x, x)

    before = compiled_programs.count.programs
    call()
    once = compiled_programs.count.programs
    assert once > before
    call()
    assert compiled_programs.count.programs == once
