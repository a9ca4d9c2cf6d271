"""The rule by mma.sync on a GPU: the public call, and the kernels in the device's code and that of 8.0."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import missed
import numpy as np
import pytest
from harness import named, truth
from tolerances import head_axis, kernel_tolerance, worst_ratio

import gdn_jax
from gdn_jax.bench.measure import compiled
from gdn_jax.checks import cases, oracle
from gdn_jax.checks.accuracy import NAMES
from gdn_jax.checks.check import value_and_gradients
from gdn_jax.shapes import RuleArrays
from pallas_kernels.ampere import backward, walk
from pallas_kernels.ampere import rule as mma_rule
from pallas_kernels.backward.rule import OutputCotangents
from pallas_kernels.device.needs import capabilities
from pallas_kernels.tools.compiling import lowering_for

pytestmark = pytest.mark.gpu(*capabilities(mma_rule.NEEDS))

BY_MMA = functools.partial(gdn_jax.gated_delta_rule, implementation="mosaic_mma")


VALUES = ("slow-decay", "mixed-decay", "reset-at-some-tokens", "beta-0-at-some-tokens", "correlated-keys")
CHECKS = [
    *((name, dtype, None) for dtype in ("bfloat16", "float16") for name in VALUES),
    ("packed-reset", "bfloat16", None),
    ("groupings-that-do-not-nest", "bfloat16", None),
    ("packed-K128", "bfloat16", walk.Config(2)),
    ("packed-K128", "bfloat16", walk.Config(1, 2)),
]


def kernels(options: dict[str, Any], primals, cotangents, cu_seqlens):
    """Outputs and gradients of the kernels by mma.sync."""
    x = RuleArrays(*primals, cu_seqlens, None)
    backwards = {name: option for name, option in options.items() if name != "segment_chunks"}
    o, final, residuals = mma_rule.forward(x, **options)
    return o, final, *backward.backward(x, residuals, OutputCotangents(*cotangents), **backwards)


def made(function: Callable[..., Any], arguments: tuple, as_8_0: bool) -> Callable[[], Any]:
    """A call of a function, compiled as one CUDA graph."""
    with lowering_for("8.0") if as_8_0 else contextlib.nullcontext():
        program = compiled(function, *arguments)
    return lambda: program(*arguments)


def checked(name: str, dtype: str, config: Any, as_8_0: bool) -> str:
    """Errors of a case, over their bounds."""
    case = cases.CASES[name]
    x = cases.inputs(case, dtype)
    truth = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    options = dict(scale=case.K**-0.5 if case.scale is None else case.scale, state_layout=case.state_layout)
    arguments = jax.tree.map(jnp.asarray, (x[:6], (x.do, x.dh_T), x.cu_seqlens))
    call = made(functools.partial(kernels, options | {"config": config}), arguments, as_8_0)
    results = jax.device_get(call())
    parts = {
        key: worst_ratio(truth[key], got, head_axis(key)) / kernel_tolerance(key, dtype, case)
        for key, got in zip(NAMES, results, strict=True)
        if got is not None
    }
    again = (jax.device_get(call()) for _ in range(20))
    same = all(np.array_equal(a, b) for y in again for a, b in zip(y, results, strict=True) if b is not None)
    text = " ".join(f"{key} {part:.2f}" for key, part in parts.items())
    verdict = "ok" if max(parts.values()) <= 1 and same else "FAIL"
    return f"{verdict}: {text}; 20 repeats {'equal' if same else 'DIFFER'}"


@pytest.mark.parametrize("as_8_0", [False, True], ids=["", "as 8.0"])
@pytest.mark.parametrize(("name", "dtype", "config"), CHECKS)
def test_both_passes(name, dtype, config, as_8_0):
    verdict = checked(name, dtype, config, as_8_0)
    assert verdict.startswith("ok"), verdict


TABLE = [case for case in cases.TABLE if case.chunk_size == 64 and max(case.K, case.V) <= 128]
CALLS = [(case, dtype) for dtype, some in (("bfloat16", TABLE), ("float16", TABLE[::3])) for case in some]


@functools.cache
def both_passes(options: tuple):
    """The public call and its gradients, compiled once for all cases of the same options and shapes."""
    return jax.jit(value_and_gradients("mosaic_mma", dict(options)))


@pytest.mark.parametrize(("case", "dtype"), CALLS, ids=lambda x: getattr(x, "name", x))
def test_public_call(case, dtype):
    """Every case that the kernels take, with all gradients."""
    x = cases.inputs(case, dtype)
    call = both_passes(tuple(case.options.items()))
    got = named(call(x[:6], (x.do, x.dh_T), x.cu_seqlens, x.segment_ids))
    missed.check(case, dtype, truth(case.options, x), got, missed.MMA)


@pytest.mark.parametrize("lengths", [(64,) * 4, (72,) * 4, (100, 0, 60)], ids=["chunks", "equal", "uneven"])
def test_lengths_known_while_tracing(lengths):
    """cu_seqlens as a constant: sequences of one length run as a batch, with the same numbers."""
    case = cases.Case("known", T=sum(lengths), B=1, heads=(1, 1, 2), K=64, V=64, lengths=lengths)
    x = cases.inputs(case, "bfloat16")
    call = value_and_gradients("mosaic_mma", case.options)
    got = named(jax.jit(lambda *y: call(*y, x.cu_seqlens, None))(x[:6], (x.do, x.dh_T)))
    missed.check(case, "bfloat16", truth(case.options, x), got, missed.MMA)


@pytest.mark.parametrize("segment_chunks", [1, 4, 0])
def test_segments(segment_chunks):
    """Both passes without decay, so that the map of every segment counts; of one chunk, of several, and none."""
    case = cases.Case("segments", T=700, B=2, heads=(1, 1, 2), K=128, V=128, g="zero", state_layout="vk")
    x = cases.inputs(case, "bfloat16")
    options = dict(scale=case.K**-0.5, state_layout="vk", segment_chunks=segment_chunks)
    arguments = jax.tree.map(jnp.asarray, (x[:6], (x.do, x.dh_T), None))
    results = made(functools.partial(kernels, options), arguments, False)()
    got = dict(zip(NAMES, map(np.asarray, results), strict=True))
    missed.check(case, "bfloat16", truth(case.options, x), got, missed.MMA)


def test_few_heads_are_cut():
    """By the public call, which chooses segments for these."""
    case = cases.Case("few heads", T=6000, B=1, heads=(1, 1, 1), K=64, V=128)
    x = cases.inputs(case, "bfloat16")
    assert mma_rule.chosen_segment(RuleArrays(*x[:6], None, None).dims, None)
    got = named(both_passes(tuple(case.options.items()))(x[:6], (x.do, x.dh_T), None, None))
    missed.check(case, "bfloat16", truth(case.options, x), got, missed.MMA)


def test_vmap():
    """Of rows, with the norm: the numbers of a batch."""
    case = cases.Case("rows", T=100, B=3, heads=(1, 1, 2), K=128, V=128, keys="any", use_qk_l2norm=True)
    x = cases.inputs(case, "bfloat16")
    one = value_and_gradients("mosaic_mma", case.options)
    apart = jax.tree.map(lambda y: jnp.asarray(y)[:, None], (x[:6], (x.do, x.dh_T)))
    mapped = jax.jit(jax.vmap(lambda *y: one(*y, None, None)))(*apart)
    got = named(jax.tree.map(lambda y: y[:, 0], mapped))
    missed.check(case, "bfloat16", truth(case.options, x), got, missed.MMA)


def test_garbage_next_door_does_not_leak():
    """NaN in the padding past cu[-1], and in memory that the outputs are allocated from."""
    lengths = (0, 1, 64, 300, 0, 640, 63, 129)
    case = cases.Case("wide-packed", T=1500, B=1, heads=(1, 1, 2), K=128, V=128, lengths=lengths)
    x = cases.inputs(case, "bfloat16")
    arrays, end = [jnp.asarray(y) for y in x[:6]], int(x.cu_seqlens[-1])
    run = jax.jit(lambda arrays: BY_MMA(*arrays[:5], initial_state=arrays[5], cu_seqlens=x.cu_seqlens))
    expected = run(arrays)
    arrays[:5] = [y.at[:, end:].set(jnp.nan) for y in arrays[:5]]
    poison = jnp.full((256, 1024, 1024), jnp.nan)
    poison.block_until_ready()
    del poison  # the allocator hands this memory out next
    jax.tree.map(np.testing.assert_array_equal, expected, run(arrays))


def test_tokens_of_no_strength_leave_the_state_alone():
    """30,000 of them, bit for bit."""
    case = cases.Case("strengths", T=30_000, B=1, heads=(1, 1, 2), K=128, V=128, g="zero", beta="0")
    x = cases.inputs(case, "bfloat16")
    _, final = jax.jit(lambda *y: BY_MMA(*y[:5], initial_state=y[5]))(*x[:6])
    np.testing.assert_array_equal(final, x.initial_state)


def test_repeats_are_equal():
    """A hundred, of both passes on rows of many heads."""
    case = cases.Case("repeats", T=1000, B=2, heads=(4, 4, 8), K=128, V=128)
    x = jax.device_put(cases.inputs(case, "bfloat16"))
    run = both_passes(())
    first = run(x[:6], (x.do, x.dh_T), None, None)
    different = jax.jit(
        lambda a, b: sum(jnp.any(y != z) for y, z in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    )
    count = sum(different(first, run(x[:6], (x.do, x.dh_T), None, None)) for _ in range(100))
    assert int(count) == 0
