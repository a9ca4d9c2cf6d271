"""A mixture of experts against its definition, and what a few tokens read of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_layers import drawn
from tolerances import FLOAT32, assert_close

from gdn_jax.models import ExpertsConfig
from gdn_jax.models.experts import Experts
from gdn_jax.parts.routing import choose, largest
from gdn_jax.shapes import Choice

F32 = (
    4 * FLOAT32["o"]
)  # four float32 products in a row, each within the bound of the rule: router, two of a SwiGLU, sum


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_are_their_definition(normalise):
    """A token and an expert at a time; one expert gets no token."""
    layer = drawn(lambda rngs: Experts(12, ExpertsConfig(5, 2, 8, 6, normalise), rngs=rngs))
    router = np.array(layer.router[...])
    router[:, 3] = -100
    layer.router[...] = jax.device_put(router)
    x = np.abs(normal(2, 9, 12))
    f64 = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(layer)))
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    want = np.zeros((18, 12))
    for n, row in enumerate(np.asarray(x, np.float64).reshape(18, 12)):
        scores = np.exp(row @ f64["router"] - np.max(row @ f64["router"]))
        p = scores / scores.sum()
        best = np.argsort(p)[-2:]
        assert 3 not in best
        for e in best:
            gate, up = np.split(row @ f64["gate_up"][e], 2)
            weight = p[e] / (p[best].sum() if normalise else 1)
            want[n] += weight * (silu(gate) * up) @ f64["down"][e]
        shared = {name: f64["shared"][f"{name}_proj"]["kernel"] for name in ("gate", "up", "down")}
        y = (silu(row @ shared["gate"]) * (row @ shared["up"])) @ shared["down"]
        want[n] += y / (1 + np.exp(-row @ f64["shared_gate"]))
    got = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert_close(want.reshape(2, 9, 12), np.asarray(got), F32)


def test_experts_begin_apart():
    """Each is drawn as a projection of its own, with the variance of one."""
    layer = drawn(lambda rngs: Experts(64, ExpertsConfig(4, 2, 32, 6), rngs=rngs))
    for stack, inputs in ((layer.gate_up, 64), (layer.down, 32)):
        experts = np.asarray(stack[...]).reshape(4, -1)
        np.testing.assert_allclose(experts.var(axis=1), 1 / inputs, rtol=0.2)  # six deviations of 2048 draws
        correlations = np.corrcoef(experts) - np.eye(4)
        assert np.abs(correlations).max() < 0.15  # 1 / sqrt(2048) = 0.022, six of them


@pytest.mark.slow
def test_few_tokens_read_their_experts_alone():
    """The same outputs and gradients as among many tokens, which read all experts."""
    layer = drawn(lambda rngs: Experts(12, ExpertsConfig(12, 2, 8, 6), rngs=rngs))
    graphdef, params = nnx.split(layer)
    x = normal(9, 12)

    def outputs(params, x):
        return nnx.merge(graphdef, params)(x)[:2]

    def loss(params, x):
        return jnp.sum(jnp.sin(outputs(params, x)))

    programs = [str(jax.make_jaxpr(outputs)(params, y)) for y in (x, x[:2], x[:3])]
    assert ["ragged_dot" in program for program in programs] == [True, False, True]
    both = jax.jit(lambda params, x: (outputs(params, x), jax.grad(loss)(params, x)))
    results = [both(params, y) for y in (x, x[:2])]
    jax.tree.map(lambda a, b: assert_close(a, b, F32), *results)


def test_experts_are_chosen_by_scores_in_float32():
    """Two experts whose scores are one number in bfloat16."""
    config = ExpertsConfig(2, 1, 8, 6, True)
    layer = drawn(lambda rngs: Experts(2, config, dtype=jnp.bfloat16, rngs=rngs))
    layer.router[...] = jax.device_put(np.array([[1.0, 1.0], [0.0, 2.0**-10]], np.float32))
    weights, chosen = nnx.jit(lambda layer, x: layer.route(x))(layer, np.ones((1, 2), jnp.bfloat16))
    assert chosen.item() == 1 and weights.dtype == jnp.float32


def test_weights_of_experts_whose_scores_are_all_0_are_0():
    """As those of transformers are, and not 0 / 0."""
    choice = Choice(per_token=2, groups=1, kept_groups=1, normalise=True, factor=1.0)
    weights, _ = jax.jit(lambda x, bias: choose(x, bias, choice))(
        np.full((1, 4), -200.0, np.float32), np.zeros(4, np.float32)
    )
    np.testing.assert_array_equal(weights, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("shape", "k"), [((30, 9), 9), ((2, 40, 5), 2)])
def test_the_largest_are_found_by_counting_as_by_sorting(shape, k, dtype):
    """Values and places, with equal numbers, infinities, both zeros and NaN of both signs."""
    numbers = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0, -2.0], np.float32)
    x = np.random.default_rng(0).choice(numbers, shape).astype(dtype)
    assert len({*np.signbit(np.asarray(x, np.float32)[np.isnan(np.asarray(x, np.float32))])}) == 2
    both = jax.jit(lambda x: (largest(x, k, True), largest(x, k, False)))
    (got, places), (want, wanted) = jax.device_get(both(x))
    np.testing.assert_array_equal(places, wanted)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
