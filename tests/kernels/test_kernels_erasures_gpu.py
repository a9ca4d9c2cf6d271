"""Erase-then-Delta Attention on a GPU of compute capability 9.0: both passes by the kernels of the delta rule, which
take two rows for a token, and a token of running requests in one call."""

import functools

import erasures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, head_axis, tolerance

from gdn_jax import erase_then_delta_rule, serving
from gdn_jax.checks import cases

pytestmark = pytest.mark.gpu

WIDE = dict(K=128, V=128, channel_g="mild")
CASES = {
    "rows": dict(T=200, B=2, heads=(2, 2, 4)),
    "packed": dict(T=300, B=1, heads=(2, 2, 2), lengths=(130, 0, 1, 150), state_layout="vk"),
    "segments": dict(
        T=150, B=2, heads=(2, 2, 2), segments=((70, 80), (1, 149)), use_qk_l2norm=True, keys="any"
    ),
    "narrow": dict(T=100, B=1, heads=(2, 2, 2), K=64, V=96),
    "whole chunks": dict(T=64, B=3, heads=(1, 2, 2), state_layout="vk"),
    "cut into segments": dict(T=1990, B=1, heads=(1, 1, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_both_passes(name, implementation="mosaic_gpu"):
    """Outputs and all gradients against float64."""
    x = erasures.inputs(cases.Case(f"erasure gpu {name}", **WIDE | CASES[name]), "bfloat16")

    @jax.jit
    def run(primals, packing, cotangents):
        def call(*primals):
            *tokens, state = primals
            options = dict(**packing, **x.case.options, implementation=implementation)
            return erase_then_delta_rule(*tokens, initial_state=state, **options)

        outputs, pull = jax.vjp(call, *primals)
        return outputs, pull(cotangents)

    outputs, gradients = run(x.primals, x.packing, (x.x.do, x.x.dh_T))
    names = ("o", "final_state", *(f"d{name}" for name in erasures.NAMES))
    expected = x.expected()
    for name, got in zip(names, (*outputs, *gradients), strict=True):
        of = {"dinitial_state": "dh_0"}.get(name, name)
        bound = tolerance(of, "bfloat16")
        assert_close(expected[name], np.asarray(got, np.float64), bound, name, head_axis(of))


def test_repeats_are_equal(implementation="mosaic_gpu"):
    """Thirty calls of both passes have the same bits, of rows that are cut into segments and of many heads."""
    for sizes in (dict(T=1500, B=1, heads=(2, 2, 2)), dict(T=600, B=4, heads=(8, 8, 16))):
        x = erasures.inputs(cases.Case("erasure repeats", **WIDE | sizes), "bfloat16")

        @jax.jit
        def run(primals, cotangents):
            def call(*primals):
                *tokens, state = primals
                return erase_then_delta_rule(*tokens, initial_state=state, implementation=implementation)

            outputs, pull = jax.vjp(call, *primals)
            return outputs, pull(cotangents)

        given = jax.device_put((x.primals, (x.x.do, x.x.dh_T)))
        first, *others = [jax.tree.leaves(run(*given)) for _ in range(30)]
        for other in others:
            for want, got in zip(first, other, strict=True):
                np.testing.assert_array_equal(np.asarray(want), np.asarray(got))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("requests", [1, 128])
def test_a_token(requests, ring, implementation="mosaic_gpu"):
    """Twenty tokens of every request by kernels are those of plain JAX; nobody else's slot changes."""
    HK, HV, D = 4, 8, 128
    keys = iter(jax.random.split(jax.random.key(5), 12))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), (requests, 20, *shape)).astype(dtype)

    x = dict(q=normal(HK, D), k=normal(HK, D), v=normal(HV, D), a=4 * normal(HV, D), b=normal(HV))
    x |= dict(erase_key=normal(HK, D), w=normal(HV))
    rates = dict(A_log=jnp.linspace(-1, 1, HV), dt_bias=jnp.full((HV, D), -2.0))
    states = jax.random.normal(next(keys), (requests + 2, HV, D, D))
    slots = jnp.arange(requests, dtype=jnp.int32) + 1

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, x, states):
        pool = serving.make_ring_pool(states, num_key_heads=HK, channels=True) if ring else states

        def step(pool, token):
            options = dict(lower_bound=-5.0, read_slots=slots, implementation=implementation)
            o, pool = serving.erase_then_delta_decode(**token, pool=pool, **rates, **options)
            return pool, o

        pool, o = jax.lax.scan(step, pool, {name: jnp.swapaxes(y, 0, 1) for name, y in x.items()})
        return o, serving.snapshot(pool, slots) if ring else pool

    want, after = run("xla", x, states)
    o, pool = run(implementation, x, states)
    assert_close(np.asarray(want, np.float64), np.asarray(o, np.float64), tolerance("o", "bfloat16"), "o")
    # Rings round their entries to bfloat16 in both, each from sums in another order.
    close = tolerance("final_state", "bfloat16" if ring else "float32")
    assert_close(np.asarray(after, np.float64), np.asarray(pool, np.float64), close, "states")
    if not ring:
        np.testing.assert_array_equal(np.asarray(pool)[[0, -1]], np.asarray(states)[[0, -1]])


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_in_one_pass(dtype, layout, requests=128):
    """One token is that of plain JAX from states of both dtypes and layouts; padding and repeats keep their bits."""
    HK, HV, D = 8, 16, 128
    keys = iter(jax.random.split(jax.random.key(6), 12))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape).astype(dtype)

    x = dict(q=normal(requests, HK, D), k=normal(requests, HK, D), v=normal(requests, HV, D))
    x |= dict(a=4 * normal(requests, HV, D), b=normal(requests, HV), w=normal(requests, HV))
    x |= dict(erase_key=normal(requests, HK, D), A_log=jnp.linspace(-1, 1, HV))
    x |= dict(dt_bias=jnp.full((HV, D), -2.0))
    pool = normal(requests + 2, HV, D, D, dtype=dtype)
    slots = np.random.default_rng(0).permutation(requests + 2)[:requests].astype(np.int32)
    slots[1] = -1

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, x, pool):
        options = dict(lower_bound=-5.0, state_layout=layout, implementation=implementation)
        return serving.erase_then_delta_decode(**x, pool=pool, read_slots=jnp.asarray(slots), **options)

    want, after = (np.asarray(y, np.float64) for y in run("xla", x, pool))
    results = [jax.tree.map(np.asarray, run("mosaic_gpu", x, pool)) for _ in range(20)]
    o, new = (np.asarray(y, np.float64) for y in results[0])
    assert_close(want, o, tolerance("o", "bfloat16"), "o")
    assert_close(after, new, tolerance("final_state", dtype), "states")
    others = np.setdiff1d(np.arange(requests + 2), slots)
    np.testing.assert_array_equal(new[others], np.asarray(pool, np.float64)[others])
    for other in results[1:]:
        for first, again in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(first.view(np.uint8), again.view(np.uint8))
