"""The serving kernels on a GPU of compute capability 9.0: values, batches, large pools, long runs, no copies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pool_steps
import pytest
from jax import lax
from pool_steps import CASES, DRAFT_CASES, RING_CASES, Case
from tolerances import rms_ratio

from gdn_jax.checks import oracle
from pallas_kernels.decode.ring_flush import ring_flush
from pallas_kernels.decode.ring_step import ring_step
from pallas_kernels.decode.step import step

pytestmark = pytest.mark.gpu

HEADS = (16, 16, 32)
BATCHES = tuple(
    Case(
        f"{N}-{layout}-{pool_dtype}",
        N=N,
        heads=HEADS,
        kv_layout=layout == "kv",
        pool_dtype=pool_dtype,
        padding=N > 1,
    )
    for N in (1, 4, 16, 127)
    for layout in ("kv", "vk")
    for pool_dtype in ("float32", "bfloat16")
)
DRAFTS = tuple(
    Case(f"drafts-{T}-{layout}", N=8, T=T, heads=(8, 8, 16), kv_layout=layout == "kv", pool_dtype="bfloat16")
    for T in (2, 4, 8, 16)
    for layout in ("kv", "vk")
)
WIDTHS = tuple(
    Case(f"K{K}-V{V}-{layout}", K=K, V=V, kv_layout=layout == "kv", pool_dtype=pool_dtype)
    for K, V in ((256, 256), (64, 128), (128, 64), (96, 192))
    for layout in ("kv", "vk")
    for pool_dtype in ("float32", "bfloat16")
)


def run(case, x):
    return jax.jit(lambda x: step(**x, **case.options))(x)


@pytest.mark.parametrize("case", CASES + BATCHES + DRAFTS + WIDTHS, ids=lambda case: case.name)
def test_step(case):
    x = pool_steps.draw(case)
    pool_steps.assert_right(case, x, *run(case, x))


@pytest.mark.parametrize(("case", "counts"), RING_CASES, ids=lambda x: getattr(x, "name", ""))
def test_deferred(case, counts):
    x = pool_steps.draw_ring(case, counts)
    results = jax.jit(lambda x: ring_step(**x, **case.options, deferred=True))(x)
    after = [0 if n + 1 >= pool_steps.LENGTH else n + 1 for n in counts]
    pool_steps.assert_ring_right(case, x, after, results)


@pytest.mark.parametrize(("case", "counts"), DRAFT_CASES, ids=lambda x: getattr(x, "name", ""))
def test_verify_on_a_ring(case, counts):
    x = pool_steps.draw_ring(case, counts)
    results = jax.jit(lambda x: ring_step(**x, **case.options, deferred=False))(x)
    tokens = [case.T] * case.N if x["num_tokens"] is None else x["num_tokens"].tolist()
    after = [n + m for n, m in zip(counts, tokens, strict=True)]
    pool_steps.assert_ring_right(case, x, after, results)


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(pool_dtype):
    """A request alone, and among 64; and the same call twice."""
    case = Case("batch", N=64, heads=HEADS, pool_dtype=pool_dtype, padding=False)
    x = pool_steps.draw(case)
    o, pool = run(case, x)
    again = run(case, x)
    assert (np.asarray(o) == np.asarray(again[0])).all()
    assert (np.asarray(pool) == np.asarray(again[1])).all()
    by_row = ("q", "k", "v", "a", "b", "read_slots", "write_slots")
    alone = {name: y[5:6] if name in by_row else y for name, y in x.items()}
    one_o, one_pool = run(case, alone)
    slot = int(x["write_slots"][5, 0])
    assert (np.asarray(o[5]) == np.asarray(one_o[0])).all()
    assert (np.asarray(pool[slot]) == np.asarray(one_pool[slot])).all()


def test_slots_past_32_bits():
    """A pool of 8.8 GB, of which the last slot is read and written, and the one before is written."""
    case = Case("large", N=1, heads=(1, 1, 4), padding=False)
    x = pool_steps.draw(case)
    pool = x.pop("pool")
    slot, slots = int(x["read_slots"][0]), 33_600
    large = jnp.zeros((slots, *pool.shape[1:]), pool.dtype).at[slots - 1].set(pool[slot])
    for write in (slots - 1, slots - 2):
        at = {"read_slots": jnp.array([slots - 1], jnp.int32), "write_slots": jnp.array([[write]], jnp.int32)}
        o, new = run(case, x | at | {"pool": large})
        expected_o, expected = pool_steps.truth(
            case, x | {"pool": pool, "write_slots": x["read_slots"][:, None]}
        )
        assert rms_ratio(expected_o, np.asarray(o)) < 5e-3
        assert rms_ratio(expected[slot], np.asarray(new[write])) < 1e-5
        assert not new[: slots - 2].any()


@pytest.mark.parametrize("deferred", [False, True])
def test_ten_thousand_tokens(deferred):
    """Every token's state is the kernel's own."""
    T, heads = 10_000, (1, 1, 2)
    case = Case("long", N=T, slots=T, heads=heads, K=64, V=64, padding=False, gate_shift=-8.0)
    x = pool_steps.draw(case)
    x = {name: y for name, y in x.items() if y is not None} | {"pool": x["pool"][:2]}
    tokens = [x[name][:, None] for name in ("q", "k", "v", "a", "b")]
    options = dict(A_log=x["A_log"], dt_bias=x["dt_bias"], **case.options, read_slots=jnp.zeros(1, jnp.int32))

    def plain(carry, token):
        o, pool = step(*token, carry, **options, write_slots=jnp.zeros((1, 1), jnp.int32))
        return pool, o

    def on_a_ring(carry, token):
        pool, count = carry
        o, *pool = ring_step(*token, *pool, **options, count=count, deferred=True)
        return (pool, jnp.where(count + 1 >= pool_steps.LENGTH, 0, count + 1)), o

    carry = x["pool"]
    if deferred:
        shapes = ((2, 1, 16, 64), (2, 2, 16, 64))
        rings = [*(jnp.zeros(shape, jnp.bfloat16) for shape in shapes), jnp.zeros((2, 2, 16), jnp.float32)]
        carry = ([x["pool"], *rings], jnp.zeros(2, jnp.int32))
    o = np.asarray(jax.jit(partial(lax.scan, on_a_ring if deferred else plain))(carry, tokens)[1])[:, 0, 0]
    f64 = {name: np.asarray(x[name]).astype(np.float64) for name in (*"qkvab", "A_log", "dt_bias", "pool")}
    f64 |= {name: np.swapaxes(f64[name], 0, 1) for name in "qkvab"}
    g = -np.exp(f64["A_log"]) * np.logaddexp(0, f64["a"] + f64["dt_bias"])
    beta = 1 / (1 + np.exp(-f64["b"]))
    state = f64["pool"][:1]
    rule = dict(scale=case.K**-0.5, use_qk_l2norm=True, initial_state=state)
    expected = oracle.forward(*(f64[name] for name in "qkv"), g, beta, **rule)[0][0]
    worst = max(rms_ratio(e, y.astype(np.float64)) for e, y in zip(expected, o, strict=True))
    assert worst < 2e-2


def test_a_given_pool_is_not_copied():
    """In one call, and over the steps of a loop; also the four arrays of a ring."""
    case = Case("in-place", N=4, heads=HEADS, padding=False)
    x = pool_steps.draw(case)
    ring = pool_steps.draw_ring(case, (0, 3, 15, 14))
    names = ("state", "ring_k", "ring_u", "ring_g")

    def once(pool, x):
        return step(**x, pool=pool, **case.options)

    def many(pool, x):
        return lax.fori_loop(0, 3, lambda _, carry: once(carry[1], x), once(pool, x))

    def on_a_ring(pool, x):
        return ring_step(**x, **pool, **case.options, deferred=True)

    def flush(pool, x):
        slots = {name: x[name] for name in ("read_slots", "count")}
        return pool | {"state": ring_flush(**pool, **slots, room=4, kv_layout=case.kv_layout)}

    plain = {name: y for name, y in x.items() if name != "pool"}
    tokens = {name: y for name, y in ring.items() if name not in names}
    rings = {name: ring[name] for name in names}
    for f, pool, rest in ((once, x["pool"], plain), (many, x["pool"], plain), (on_a_ring, rings, tokens)):
        compiled = jax.jit(f, donate_argnums=0).lower(pool, rest).compile()
        bytes_of_pool = sum(y.nbytes for y in jax.tree.leaves(pool))
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= bytes_of_pool
        assert memory.temp_size_in_bytes < x["pool"].nbytes / 8
    compiled = jax.jit(flush, donate_argnums=0).lower(rings, tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < x["pool"].nbytes / 8
