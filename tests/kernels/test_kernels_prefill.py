"""Prefill by kernels that read and write states in the slots of a pool, without a GPU, through the public call: right
and free of races when interpreted, in place when lowered; and which calls are left to states outside the pool."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pool_prompts
import pytest
from device_arrays import put
from jax.experimental.pallas import mosaic_gpu as plgpu
from pool_prompts import Case
from test_kernels_decode import in_place
from tolerances import assert_close

from gdn_jax.checks.accuracy import BOUNDS
from gdn_jax.serving.call import interpreted as interpreted_calls
from gdn_jax.shapes import Dims
from pallas_kernels.chunks import inverse
from pallas_kernels.forward import pools, rule

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
KERNELS = {"implementation": "mosaic_gpu"}


@pytest.fixture
def interpreted(monkeypatch, hopper):
    """A function that makes public calls interpret the kernels in a configuration."""

    def configured(**config):
        small = rule.Config(inverse=inverse.Config(warpgroups=2, ctas=1), **config)
        monkeypatch.setattr(rule, "forward", partial(rule.forward, config=small))
        monkeypatch.setattr(rule, "known_lengths", lambda cu_seqlens: None)  # as under jit

    with interpreted_calls(INTERPRET):
        yield configured


WHOLE = Case("whole", (70, 0, 5, 40, 1), padding=(3,), fresh=(2,))
CUT = Case("segments", (140, 1, 0, 20), fresh=(), pool_dtype="bfloat16", kv_layout=False)


def slow(case: Case, **config):
    return pytest.param(case, config, marks=pytest.mark.slow, id=case.name)


def crossed(case: Case, **config):
    return pytest.param(case, config, marks=pytest.mark.crossed, id=case.name)


def like(case: Case, name: str, **change) -> Case:
    return dataclasses.replace(case, name=name, **change)


CASES = (
    crossed(
        like(WHOLE, "bfloat16 vk", pool_dtype="bfloat16", kv_layout=False, fresh=(1, 2), padding=(0, 4)),
        segment_chunks=0,
    ),
    crossed(
        like(WHOLE, "bfloat16", pool_dtype="bfloat16", null_slot=4, gates=False, fresh=None), segment_chunks=0
    ),
    slow(like(WHOLE, "crossed", crossed=True, fresh=(1,), dropped=(4,)), segment_chunks=0),
    crossed(CUT, segment_chunks=2),
    crossed(like(CUT, "segments, new", kv_layout=True, fresh=(0,), padding=(3,)), segment_chunks=1),
    slow(
        like(CUT, "segments crossed", crossed=True, padding=(0,), dropped=(2,)),
        segment_chunks=1,
    ),
    crossed(
        Case("full head", (30, 40), heads=(1, 2), K=128, V=128, pool_dtype="bfloat16", behind=0),
        segment_chunks=0,
        state_warpgroups=2,
    ),
    crossed(Case("wide", (66, 3), K=192, V=64, dtype="float16"), segment_chunks=0),
)


@pytest.mark.parametrize(("case", "config"), CASES)
def test_in_the_interpreter(case, config, interpreted):
    """Near the oracle, and near plain JAX in every slot: what one leaves alone, the other does."""
    x = pool_prompts.draw(case)
    # The plain form is not told about garbage.
    clean = x | {"tokens": jax.tree.map(lambda y: np.where(np.isnan(y), 0, y).astype(y.dtype), x["tokens"])}
    with interpreted_calls(None):  # compiled
        plain = pool_prompts.serve(case, clean, implementation="chunked")
    interpreted(**config)
    o, pool = pool_prompts.serve(case, x, **KERNELS)
    pool_prompts.assert_right(case, x, o, pool)
    bound = BOUNDS[case.dtype][0]
    assert_close(*(np.asarray(y).astype(np.float64) for y in (plain[0], o)), 2 * bound["o"], "o")
    changed = np.asarray((pool != x["pool"]) & ~np.isnan(x["pool"])).any((1, 2, 3))
    assert (changed <= np.asarray(plain[1] != x["pool"]).any((1, 2, 3))).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, None),
        ({"dtype": "float16"}, "the pool is float16"),
        ({"slots": 0}, "no slots"),
        ({"V": 96}, "V = 96"),
        ({"scale": 20.0}, "scale is 20.0"),
    ],
)
def test_refusals_say_why(change, reason):
    call = {"dtype": "float32", "slots": 3, "V": 64, "scale": 0.1} | change
    dims = Dims(B=1, T=9, N=2, Hq=1, Hk=1, HV=2, HO=2, K=64, V=call["V"])
    pool = jax.ShapeDtypeStruct((call["slots"], 2, 64, call["V"]), call["dtype"])
    got = pools.check_supported(dims, pool, call["scale"])
    assert got is None if reason is None else reason in str(got)


@pytest.mark.slow
@pytest.mark.parametrize("to_others", [True, pytest.param(False, marks=pytest.mark.crossed)])
def test_pool_of_a_whole_model(to_others, interpreted):
    """The second of three layers; the others keep their bits."""
    interpreted(segment_chunks=0)
    case = like(WHOLE, "layers", crossed=to_others)
    x = pool_prompts.draw(case)
    pool = np.stack([np.zeros_like(x["pool"]), x["pool"], np.ones_like(x["pool"])], 1)
    o, new = pool_prompts.serve(case, x | {"pool": pool}, layer=put(1, "int32"), **KERNELS)
    assert not np.asarray(new[:, 0]).any() and (np.asarray(new[:, 2]) == 1).all()
    pool_prompts.assert_right(case, x, o, new[:, 1])


@pytest.mark.crossed
def test_slots_of_any_dtype(interpreted):
    """Numbers outside of the pool, and an unsigned -1, are padding: nothing is written, and all outputs are 0."""
    interpreted(segment_chunks=0)
    case = Case("all-padding", (3, 4, 1))
    x = pool_prompts.draw(case)
    for numbers in (np.full(3, -1, np.int8), np.full(3, 2**32 - 1, np.uint32), put([9, -5, 2**31 - 1])):
        o, pool = pool_prompts.serve(case, x | {"read_slots": put(numbers)}, **KERNELS)
        assert not np.asarray(o).any()
        assert (np.asarray(pool) == x["pool"]).all()


def lowered(case: Case, **more) -> str:
    """A call, lowered for a GPU, with the pool given away, and not copied."""
    x = pool_prompts.draw(case)
    pool = put(x.pop("pool"))
    if "layer" in more:
        pool = jnp.stack([pool] * 2, 1)

    def call(pool, x):
        return pool_prompts.serve(case, x | {"pool": pool}, **more)

    return in_place(call, pool, jax.tree.map(put, x) | {"cu_seqlens": put(case.cu_seqlens)})


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_pools_are_updated_in_place():
    """Unasked; whole prompts, and cut into segments, for which there are more kernels; in a pool of a whole model."""
    whole = Case("whole", (20,) * 20, heads=(8, 16), K=128, V=128, fresh=(1,))
    cut = Case("cut", (8192,), heads=(1, 2), K=128, V=128, pool_dtype="bfloat16")
    for case, more, kernels in (
        (cut, {}, 5),
        (like(cut, "crossed", crossed=True), {}, 5),
        (whole, {"layer": 1}, 3),
    ):
        text = lowered(case, **more)
        assert text.count("custom_call @mosaic_gpu") == kernels, case.name
        assert text.count("#stablehlo.output_operand_alias<") == 1, case.name


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "more", "references"),
    [
        ({}, {}, 1),
        pytest.param({"K": 96}, {}, 0, marks=pytest.mark.slow),
        pytest.param({"pool_dtype": "float16"}, {}, 0, marks=pytest.mark.slow),
        pytest.param({}, {"scale": 0.0}, 0, marks=pytest.mark.slow),
        pytest.param({}, {"scale": 0.5}, 1, marks=pytest.mark.slow),
        pytest.param({}, {"batch_invariant": True}, 0, marks=pytest.mark.slow),
        pytest.param(
            {}, {"checkpoint_every": 64, "checkpoint_slots": np.full((2, 1), -1)}, 0, marks=pytest.mark.slow
        ),
        ({}, {"implementation": "chunked"}, 0),
        pytest.param(
            {"crossed": True}, {}, 0, marks=pytest.mark.slow
        ),  # in segments alone all is read before any is written
        ({"dtype": "float32"}, {}, 0),
    ],
)
def test_which_calls_write_in_their_slots(change, more, references):
    """The others are computed on states that are taken out of the pool, or put there afterwards. A kernel is given
    a reference to what it writes in place; what becomes of it when lowered: `test_pools_are_updated_in_place`."""
    case = Case("some", (100, 30), **change)
    x = jax.tree.map(put, pool_prompts.draw(case))
    program = str(jax.jit(partial(pool_prompts.serve, case, **more)).trace(x).jaxpr)
    assert ("mpmd_map[" in program) == (more.get("implementation") is None and case.dtype == "bfloat16")
    assert program.count("new_ref[") == references
