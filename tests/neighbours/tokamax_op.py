"""tokamax's Kimi Delta Attention with our rule registered, its own tests on it, and its serving call beside ours."""

import os
import sys
import unittest

# The public function's annotation knows tokamax's own names only.
os.environ["JAXTYPING_DISABLE"] = "1"

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import tokamax
from compare import GRADIENT, OUTPUT, compare
from tokamax._src.ops.causal_conv1d_gated_delta_rule import api as serving_api
from tokamax._src.ops.kda import api, base_test

from gdn_jax.adapters import tokamax as adapter
from gdn_jax.adapters import tpu_inference

H, B, T, K, V, N = 2, 2, 70, 16, 8, 3
KERNELS = 2e-2
"""How far outputs in bfloat16 may be apart; tokamax's own tests allow 5e-2."""


def inputs(key):
    keys = jax.random.split(key, 10)

    def normal(i, *shape):
        return jax.random.normal(keys[i], shape)

    tokens = normal(0, H, B, T, K), normal(1, H, B, T, K), normal(2, H, B, T, V), normal(3, H, B, T, K)
    beta = jax.nn.sigmoid(normal(4, H, B, T))
    parameters = normal(5, H) / 4, normal(6, H * K)
    return (
        (*tokens, beta),
        parameters,
        normal(7, B, N, H, K, V),
        (normal(8, H, B, T, V), normal(9, B, N, H, K, V)),
    )


def attention(implementation: str, raw: bool, lower_bound: float | None, ids):
    """Outputs and gradients of the public function."""
    tokens, parameters, states, cotangents = inputs(jax.random.key(0))
    if not raw:
        tokens = (*tokens[:3], -jax.nn.softplus(tokens[3]), tokens[4])

    def call(tokens, parameters, states):
        gate = (
            dict(a_log=parameters[0], delta_time_bias=parameters[1], use_gate_in_kernel=True) if raw else {}
        )
        return tokamax.ops.kimi_delta_attention(
            *tokens,
            **gate,
            lower_bound=lower_bound,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm=True,
            segment_ids=ids,
            implementation=implementation,
        )

    outputs, vjp = jax.vjp(jax.jit(call), tokens, parameters, states)
    return outputs, vjp(cotangents)


def compare_attention(name: str) -> None:
    ids = jnp.array([[1] * 20 + [2] * 9 + [0] * 3 + [3] * 38, [2] * 50 + [3] * 15 + [0] * 5], jnp.int32)
    for what, options in {
        "log decay": (False, None, None),
        "raw gate": (True, None, None),
        "bounded gate, sequences and padding": (True, -5.0, ids),
    }.items():
        (outputs, gradients), (ours, our_gradients) = (attention(by, *options) for by in ("xla", name))
        compare(f"{what}, outputs", outputs, ours, OUTPUT)
        compare(f"{what}, gradients", gradients, our_gradients, GRADIENT)


def run_their_tests(name: str) -> None:
    """tokamax's tests of the function's default implementation, which is ours while they run."""
    before, api._DEFAULT_IMPLEMENTATIONS = api._DEFAULT_IMPLEMENTATIONS, (name,)
    jaxtyping.config.update("jaxtyping_disable", False)
    try:
        names = unittest.TestLoader().getTestCaseNames(base_test.KimiDeltaAttentionTest)
        mine = [x for x in names if "default_implementation" in x or "no_final_state" in x]
        suite = unittest.TestSuite(base_test.KimiDeltaAttentionTest(x) for x in mine)
        result = unittest.TextTestRunner(stream=sys.stdout).run(suite)
    finally:
        api._DEFAULT_IMPLEMENTATIONS = before
        jaxtyping.config.update("jaxtyping_disable", True)
    assert result.testsRun >= 5 and result.wasSuccessful()


def check_fallback() -> None:
    """Where its kernels cannot run, "mosaic_gpu" says so, and the next of several names runs."""
    tokens = inputs(jax.random.key(1))[0]
    adapter.register()
    try:
        tokamax.ops.kimi_delta_attention(*tokens, implementation="mosaic_gpu")
    except NotImplementedError as error:
        print(f"  mosaic_gpu alone: {error}")
    else:
        raise AssertionError("mosaic_gpu ran without its GPU")
    first, second = (
        tokamax.ops.kimi_delta_attention(*tokens, implementation=names)[0]
        for names in (("mosaic_gpu", "xla"), "xla")
    )
    np.testing.assert_array_equal(first, second)


def compare_kernels() -> None:
    """Outputs by the kernels, in bfloat16."""
    tokens, _, states, _ = inputs(jax.random.key(1))
    gate = -jax.nn.softplus(tokens[3])
    narrow = [x.astype(jnp.bfloat16) for x in tokens[:3]]
    adapter.register()
    found = [
        tokamax.ops.kimi_delta_attention(
            *narrow,
            gate,
            tokens[4],
            initial_state=states[:, :1],
            use_qk_l2norm=True,
            output_final_state=True,
            implementation=name,
        )
        for name in ("xla", "mosaic_gpu")
    ]
    compare("kernels in bfloat16, outputs", *found, KERNELS)


def compare_serving(running: bool) -> None:
    """tokamax's step of a server beside ours; slot 0 is padding."""
    n_kq, n_v, d_k, d_v, W, slots = 1, 2, 16, 8, 4, 12
    lengths, contexts = ((1, 1, 1, 0), (4, 9, 2, 0)) if running else ((1, 1, 7, 5), (4, 9, 0, 3))
    distribution = jnp.array([3, 3, 3] if running else [2, 2, 4], jnp.int32)
    starts, D, rng = np.cumsum((0, *lengths)), 2 * n_kq * d_k + n_v * d_v, np.random.default_rng(0)
    total = 4 if running else starts[-1] + 2

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    pools = normal(slots, W - 1, D), normal(slots, n_v, d_k, d_v)
    arguments = (
        *(normal(total, D), normal(total, n_v), normal(total, n_v), *pools),
        *(normal(D, 1, W) / 2, normal(D), normal(n_v) / 4, normal(n_v), jnp.asarray(starts, jnp.int32)),
        *(
            jnp.array([3, 7, 2, 0 if running else 9], jnp.int32),
            distribution,
            jnp.asarray(np.add(lengths, contexts), jnp.int32),
        ),
    )
    sizes = dict(n_kq=n_kq, n_v=n_v, d_k=d_k, d_v=d_v, kernel_size=W)
    (windows, states), out = serving_api.IMPLEMENTATIONS["xla"](*arguments, **sizes)
    (our_windows, our_states), our_out = jax.jit(lambda *x: tpu_inference.fused_conv1d_gdn(*x, **sizes))(
        *arguments
    )
    end = starts[-1]  # tokens behind the last request are not defined there
    got = (windows[1:], states[1:], out[:end]), (our_windows[1:], our_states[1:], our_out[:end])
    compare(f"a step of {'running requests' if running else 'requests and prompts'}", *got, OUTPUT)


adapter.register("chunked")
compare_attention("chunked")
run_their_tests("chunked")
if jax.default_backend() == "gpu":
    compare_kernels()
else:
    check_fallback()
for running in (True, False):
    compare_serving(running)
