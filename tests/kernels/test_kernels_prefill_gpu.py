"""Prefill by kernels that read and write states in the slots of a pool, on a GPU of compute capability 9.0, through
the public call: values, the bits of all other slots, the bits of states outside a pool, large pools, no copies."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pool_prompts
import pytest
from jax import lax
from pool_prompts import Case
from test_kernels_decode_gpu import assert_nothing_is_copied

from gdn_jax.serving import states

pytestmark = pytest.mark.gpu

SMALL = Case("small", (70, 0, 1, 257, 64, 128), heads=(2, 4), K=128, V=128, padding=(4,), fresh=(0, 2))
LONG = Case("long", (4000, 130), heads=(2, 4), K=128, V=128, fresh=())
MANY = Case("many", (1, 2, 0, 90) * 20, heads=(8, 16), K=128, V=128, padding=(3, 40), fresh=(7,))


def like(case: Case, name: str, **change) -> Case:
    return dataclasses.replace(case, name=name, **change)


CASES = (
    SMALL,
    like(SMALL, "small-bfloat16-vk", pool_dtype="bfloat16", kv_layout=False),
    like(SMALL, "small-bfloat16-crossed", pool_dtype="bfloat16", crossed=True, dropped=(3,)),
    like(SMALL, "small-null-slot-float16-no-gates", null_slot=3, dtype="float16", gates=False),
    like(SMALL, "K192-V64-bfloat16", K=192, V=64, pool_dtype="bfloat16"),
    LONG,
    like(LONG, "long-bfloat16", pool_dtype="bfloat16", fresh=(0,)),
    like(LONG, "long-vk-crossed", kv_layout=False, crossed=True, padding=(1,)),
    MANY,
    like(MANY, "many-bfloat16", pool_dtype="bfloat16"),
)


def run(case: Case, x: dict, **more):
    """The call, compiled, in which nothing is known but shapes."""
    x = jax.tree.map(jnp.asarray, x | {"cu_seqlens": case.cu_seqlens})
    return jax.jit(partial(pool_prompts.serve, case, implementation="mosaic_gpu", **more))(x)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prefill(case, monkeypatch):
    """Near the oracle, and with the bits of states that are taken out of the pool and put back."""
    x = pool_prompts.draw(case)
    o, pool = run(case, x)
    pool_prompts.assert_right(case, x, o, pool)
    monkeypatch.setattr(states.StateKernels, "takes", lambda *call: False)
    for y, outside in zip((o, pool), run(case, x), strict=True):
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(outside, np.float32))


def test_pool_of_a_whole_model():
    """The second of three layers; the others keep their bits."""
    for case in (LONG, like(SMALL, "vk", kv_layout=False, pool_dtype="bfloat16")):
        x = pool_prompts.draw(case)
        pool = np.stack([np.zeros_like(x["pool"]), x["pool"], np.ones_like(x["pool"])], 1)
        o, new = run(case, x | {"pool": pool}, layer=1)
        assert not np.asarray(new[:, 0]).any() and (np.asarray(new[:, 2]) == 1).all()
        pool_prompts.assert_right(case, x, o, new[:, 1])


@pytest.mark.alone
def test_slots_past_four_gigabytes():
    """The bits of the same states in a small pool."""
    case = like(SMALL, "large", heads=(16, 32), padding=(), fresh=None)
    x = pool_prompts.draw(case)
    o, pool = run(case, x)
    slots = 2300  # of 2 MB
    read = slots - 1 - 40 * x["read_slots"]

    @partial(jax.jit, donate_argnums=0)
    def on_large(large, x):
        large = large.at[read].set(x["pool"][x["read_slots"]])
        call = x | {"pool": large, "read_slots": jnp.asarray(read)}
        return pool_prompts.serve(case, call, implementation="mosaic_gpu")

    x = jax.tree.map(jnp.asarray, x | {"cu_seqlens": case.cu_seqlens})
    large_o, large = on_large(jnp.zeros((slots, *x["pool"].shape[1:])), x)
    real = slice(0, case.cu_seqlens[-1])
    np.testing.assert_array_equal(
        np.asarray(large_o[:, real], np.float32), np.asarray(o[:, real], np.float32)
    )
    assert bool((large[read] == pool[x["read_slots"]]).all())
    assert not bool(large.at[read].set(0).any()), "another slot changed"


def test_a_given_pool_is_not_copied():
    """In one call, in segments, with slots of its own to write, and over the steps of a loop."""

    def once(pool, x, case):
        return pool_prompts.serve(case, x | {"pool": pool}, implementation="mosaic_gpu")

    def loop(pool, x, case):
        return lax.fori_loop(0, 3, lambda _, carry: once(carry[1], x, case), once(pool, x, case))

    for f, case in (
        (once, MANY),
        (once, like(LONG, "long", kv_layout=False)),
        (once, like(LONG, "crossed", crossed=True)),
        (loop, SMALL),
    ):
        x = pool_prompts.draw(case) | {"cu_seqlens": case.cu_seqlens}
        x = jax.tree.map(jnp.asarray, x)
        pool = x.pop("pool")
        pool = jnp.tile(pool, (4096 // len(pool), 1, 1, 1))
        assert_nothing_is_copied(partial(f, case=case), pool, x)


def test_a_hundred_repeats_are_equal():
    for case in (SMALL, LONG):
        x = jax.tree.map(jnp.asarray, pool_prompts.draw(case) | {"cu_seqlens": case.cu_seqlens})
        call = jax.jit(partial(pool_prompts.serve, case, implementation="mosaic_gpu"))
        first = call(x)
        for _ in range(100):
            for y, again in zip(first, call(x), strict=True):
                np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(again, np.float32))
