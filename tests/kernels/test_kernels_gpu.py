"""The rule by wgmma on a GPU of compute capability 9.0: the public call with decays of heads and of channels, values
and gradients; with decays of heads configurations, repeats, garbage next to the data. Runs without beartype too, then
without run-time checks of shapes."""

from functools import partial

import channel_kernels
import jax
import jax.numpy as jnp
import missed
import numpy as np
import pytest
from channel_kernels import wide
from harness import evaluate, parameters, rule, truth
from tolerances import STATES

from gdn_jax.checks import cases
from gdn_jax.shapes import RuleArrays
from pallas_kernels.forward import rule as forward_rule

pytestmark = pytest.mark.gpu

WIDE = (
    cases.Case("wide", T=2048, B=1, heads=(1, 1, 2), K=128, V=128),
    cases.Case(
        "wide-packed", T=1500, B=1, heads=(1, 1, 2), K=128, V=128, lengths=(0, 1, 64, 300, 0, 640, 63, 129)
    ),
)
ODD = (
    cases.Case("K192-V192", T=300, B=1, heads=(1, 1, 1), K=192, V=192),
    cases.Case(
        "eight-heads-rows-not-of-chunks", T=100, B=3, heads=(2, 2, 8)
    ),  # rows past T are the next row's
    cases.Case("three-heads-one-chunk", T=64, B=3, heads=(1, 1, 3)),  # heads past HO are the next row's
    cases.Case("twelve-heads-one-token", T=1, B=4, heads=(3, 3, 12)),
)
CONFIGS = (
    forward_rule.Config(),
    forward_rule.Config(state_warpgroups=2, segment_chunks=0),
    forward_rule.Config(state_warpgroups=1, segment_chunks=0),
    forward_rule.Config(segment_chunks=4),
)

TABLE = [case for case in cases.TABLE if case.chunk_size == 64]


def forward(case: cases.Case, config: forward_rule.Config | None = None):
    """The kernels' forward of a case as a compiled function of its array arguments."""
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    options["scale"] = case.K**-0.5 if case.scale is None else case.scale

    @jax.jit
    def run(arrays, cu_seqlens, segment_ids):
        x = RuleArrays(*arrays, cu_seqlens, segment_ids)
        return forward_rule.forward(x, **options, config=config)[:2]

    return run


def check_outputs(case: cases.Case, x: cases.Inputs, dtype: str, outputs) -> None:
    """o and the final state against the oracle."""
    missed.check(case, dtype, truth(case.options, x), dict(zip(STATES, outputs, strict=True)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", parameters(TABLE, WIDE, ODD, channel_kernels.TABLE, channel_kernels.WIDE))
def test_public_call(case, dtype):
    x = cases.inputs(case, dtype)
    run = jax.jit(partial(rule, **case.options, implementation="mosaic_gpu"))
    check_outputs(case, x, dtype, run(x.primals, cu_seqlens=x.cu_seqlens, segment_ids=x.segment_ids))


HEADS = *TABLE[::3], cases.CASES["scale-0"], *WIDE[1:]
CHANNELS = (
    *channel_kernels.TABLE,
    *channel_kernels.WIDE,
    wide("wide-packed-erase", T=600, lengths=(100, 129, 300), erase="channel", write="channel"),
    wide("wide-many", "mild", T=1024, heads=(2, 2, 2), lengths=(7,) * 140),
    wide("wide-ids", "kinds", T=700, segments=((300, 400),)),
    wide("wide-vk", T=300, state_layout="vk"),
)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(pytest.param(case, "bfloat16", id=case.name) for case in (*HEADS, *CHANNELS)),
        pytest.param(CHANNELS[0], "float16", id="the derivative in plain JAX"),
    ],
)
def test_gradients_of_the_public_call(case, dtype):
    """Outputs too; more gradients with decays of heads are in test_kernels_backward_gpu.py."""
    x = cases.inputs(case, dtype)
    missed.check(case, dtype, truth(case.options, x), evaluate("mosaic_gpu", case.options, x))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", parameters(WIDE))
def test_configurations(case, config):
    x = cases.inputs(case, "bfloat16")
    check_outputs(case, x, "bfloat16", forward(case, config)(x[:6], x.cu_seqlens, x.segment_ids))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("widths", [(64, 64), (128, 64), (64, 128), (192, 64)])
def test_many_segments(widths, chunks):
    """Without decay, so that every segment's transition counts."""
    case = cases.Case("many-segments", T=700, B=1, heads=(1, 1, 2), K=widths[0], V=widths[1], g="zero")
    x = cases.inputs(case, "bfloat16")
    check_outputs(
        case, x, "bfloat16", forward(case, forward_rule.Config(segment_chunks=chunks))(x[:6], None, None)
    )


@pytest.mark.parametrize(
    "case",
    parameters(
        [c for c in TABLE if c.lengths is not None],
        [cases.Case("equal", T=512, B=1, heads=(1, 1, 2), lengths=(128,) * 4)],
        [cases.Case("whole chunks", T=700, B=1, heads=(1, 1, 2), lengths=(64, 512, 124))],
    ),
)
def test_lengths_known_while_tracing(case):
    """cu_seqlens as a constant: other tables, another split, the same numbers."""
    x = cases.inputs(case, "bfloat16")
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    options["scale"] = case.K**-0.5 if case.scale is None else case.scale
    known = jax.jit(
        lambda arrays: forward_rule.forward(RuleArrays(*arrays, x.cu_seqlens, None), **options)[:2]
    )
    check_outputs(case, x, "bfloat16", known(x[:6]))


@pytest.mark.parametrize("config", CONFIGS[1:])
@pytest.mark.parametrize("case", parameters(WIDE, ODD[1:3]))
def test_a_thousand_repeats_are_equal(case, config):
    x = cases.inputs(case, "bfloat16")
    arguments = jax.device_put((x[:6], x.cu_seqlens, x.segment_ids))
    if case.V < 128:
        config = forward_rule.Config()
    run = forward(case, config)
    first = run(*arguments)
    different = jax.jit(lambda a, b: sum(jnp.any(y != z) for y, z in zip(a, b, strict=True)))
    count = jnp.int32(0)
    for _ in range(1000):
        count += different(first, run(*arguments))
    assert int(count) == 0


@pytest.mark.parametrize("case", parameters(WIDE, ODD))
def test_garbage_next_door_does_not_leak(case):
    """NaN in the padding past cu[-1], and in memory that the outputs are allocated from."""
    x = cases.inputs(case, "bfloat16")
    arrays = [jnp.asarray(y) for y in x[:6]]
    run = forward(case)
    expected = run(arrays, x.cu_seqlens, None)
    if x.cu_seqlens is not None:
        end = int(x.cu_seqlens[-1])
        arrays[:5] = [y.at[:, end:].set(jnp.nan) for y in arrays[:5]]
    poison = jnp.full((256, 1024, 1024), jnp.nan)
    poison.block_until_ready()
    del poison  # the allocator hands this memory out next
    for a, b in zip(expected, run(arrays, x.cu_seqlens, None), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("segment_chunks", [None, 0])
def test_tokens_of_no_strength_leave_the_state_alone(segment_chunks):
    """30,000 of them, bit for bit."""
    case = cases.Case("strengths", T=30_000, B=1, heads=(1, 1, 2), K=128, V=128, g="zero", beta="0")
    x = cases.inputs(case, "bfloat16")
    _, final = forward(case, forward_rule.Config(segment_chunks=segment_chunks))(x[:6], None, None)
    np.testing.assert_array_equal(final, x.initial_state)


def test_65536_sequences():
    lengths = tuple(int(n) for n in np.random.default_rng(0).integers(0, 4, 65_536))
    case = cases.Case("65536", T=sum(lengths) + 11, B=1, heads=(1, 1, 1), K=8, V=8, lengths=lengths)
    x = cases.inputs(case, "bfloat16")
    outputs = forward(case)(x[:6], x.cu_seqlens, None)
    check_outputs(case, x, "bfloat16", outputs)
    assert not np.asarray(outputs[0], np.float32)[:, -11:].any()
