"""The rule with a decay of each channel by mma.sync without a GPU: values in the interpreter, generated code."""

import re
from typing import Any

import channel_kernels
import numpy as np
import pytest
from device_arrays import put
from generated_code import ptxas_report
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import assert_close, head_axis, tolerance

from gdn_jax.checks import cases, oracle
from gdn_jax.rule.kernels.channels import cotangents_of, prepared
from pallas_kernels.ampere import channel_backward, channel_rule, walk
from pallas_kernels.backward.rule import OutputCotangents

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def small(name: str, channel_g: str, **sizes: Any) -> cases.Case:
    """A case of few chunks and heads."""
    return cases.Case(name, channel_g=channel_g, **(dict[str, Any](B=1, heads=(1, 1, 1), K=64, V=64) | sizes))


CASES = [
    (small("kinds of gates, two heads", "kinds", T=70, heads=(1, 1, 2)), dict(config=walk.Config(1, 2))),
    pytest.param(
        small(
            "erase and write of each channel, packed",
            "mixed",
            T=80,
            lengths=(9, 0, 66),
            erase="channel",
            write="channel",
        ),
        dict(),
        marks=pytest.mark.crossed,
    ),
    pytest.param(
        small("pairs of warpgroups", "kinds", T=65, K=100, V=128, state_layout="vk"),
        dict(config=walk.Config(2)),
        marks=pytest.mark.crossed,
    ),
    pytest.param(small("three segments", "mild", T=130), dict(segment_chunks=1), marks=pytest.mark.crossed),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "how"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_both_passes_in_the_interpreter(case, how):
    x = cases.inputs(case, "bfloat16")
    truth = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    call, given = channel_kernels.call(case, x)
    static: dict[str, Any] = dict(scale=call.scale, state_layout=case.state_layout)
    static |= dict(config=how.get("config"), interpret=INTERPRET)
    arrays, dims = prepared(call, given)
    o, final, residuals = channel_rule.forward(
        arrays, dims, segment_chunks=how.get("segment_chunks"), **static
    )
    cotangents = OutputCotangents(put(x.do), put(x.dh_T))
    back = cotangents_of(
        call, given, channel_backward.backward(arrays, dims, residuals, cotangents, **static)
    )
    results = dict(
        o=o, final_state=final, dq=back.q, dk=back.k, dv=back.v, dg=back.g, dh_0=back.initial_state
    )
    results |= dict(dbeta=back.erase) if call.is_beta else dict(derase=back.erase, dwrite=back.write)
    for name, got in results.items():
        assert_close(truth[name], np.asarray(got), tolerance(name, "bfloat16"), name, head_axis(name))


MOST_SPILLED = {"mma_channel_prepare": 8, "mma_channel_gradients": 88}
"""Bytes of registers that a kernel spills at most; the others spill none."""


@pytest.mark.slow
def test_registers_that_are_spilled():
    """Compiled for the GPUs below 9.0, where gcc and ptxas are; `test_other_devices` has those above."""
    call = "mma by channels, erase, packed"
    text = ptxas_report("--only", call, "--capability", "8.0", "--also", "8.6", "8.9")
    found = [
        re.fullmatch(rf"{call}: (\w+)\S*( 8.\d)? +(\d+) +(\d+) +(\d+) *", x) for x in text.splitlines()[1:]
    ]
    assert all(found), text
    kernels = {line[1] for line in found if line}
    assert kernels == {"mma_outputs", "mma_states", "mma_adjoints", *MOST_SPILLED}
    assert all(int(line[4]) <= MOST_SPILLED.get(line[1], 0) for line in found if line), text
