"""The public operation from outside: layouts, dtypes, choice of implementation, what is compiled."""

import dataclasses
import inspect
import subprocess
import sys

import compiled_programs
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_calls import SMALL, arguments, f32
from tolerances import assert_close, head_axis, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle


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
