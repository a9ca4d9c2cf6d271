"""The family's rule under vmap, derivatives of both orders and both modes, and on arrays that lie on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from gdn_jax import delta_rule
from gdn_jax.checks import family_cases


@pytest.mark.slow
def test_transforms():
    """vmap of the batch, jvp against vjp, and a second derivative, of the chunked form."""
    case = family_cases.FamilyCase(
        family_cases.Case("transforms", T=35, B=2, heads=(1, 1, 2), K=8, V=4), "mixed"
    )
    x = family_cases.inputs(case)
    inputs = tuple(map(jnp.asarray, (x.q, x.k, x.v, x.g, x.beta)))
    rule = functools.partial(delta_rule, chunk_size=16, implementation="chunked")

    @jax.jit
    def mapped(*inputs):
        return rule(*inputs)[0], jax.vmap(lambda *row: rule(*(y[None] for y in row))[0][0])(*inputs)

    assert_close(*map(np.asarray, mapped(*inputs)), 1e-6)
    rng = np.random.default_rng(0)
    tangents = tuple(jnp.asarray(rng.standard_normal(y.shape), y.dtype) for y in inputs)

    def loss(*inputs):
        o, state = rule(*inputs)
        return (o**2).sum() + state.sum()

    def along(*inputs):
        gradients = jax.grad(loss, (0, 1, 2, 3, 4))(*inputs)
        return sum((d * t).sum() for d, t in zip(gradients, tangents, strict=True))

    def forward(g):
        return jax.jvp(loss, (*inputs[:3], g, inputs[4]), tangents)[1]

    reverse, second = jax.jit(jax.value_and_grad(along, 3))(*inputs)
    ahead, other = jax.jit(lambda g: jax.jvp(forward, (g,), tangents[3:4]))(inputs[3])
    assert_close(np.asarray(reverse), np.asarray(ahead), 1e-4)
    assert_close(np.asarray(other), (np.asarray(second) * np.asarray(tangents[3])).sum(), 1e-3)


@pytest.mark.slow
def test_rows_and_heads_on_a_mesh():
    """Under plain jit on arrays that lie split over a mesh of automatic axes the bits are those of one device."""
    case = family_cases.FamilyCase(family_cases.Case("mesh", T=40, B=2, heads=(2, 2, 2), K=8, V=8), "mixed")
    x = family_cases.inputs(case)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("rows", None, "heads")
    arguments = [x.q, x.k, x.v, x.g, x.beta]
    split = [jax.device_put(y, jax.sharding.NamedSharding(mesh, spec)) for y in arguments]
    rule = jax.jit(functools.partial(delta_rule, chunk_size=16, implementation="chunked"))
    for one, many in zip(rule(*arguments), rule(*split), strict=True):
        assert len({tuple(map(str, shard.index)) for shard in many.addressable_shards}) == 4, "not split"
        np.testing.assert_array_equal(one, many)
