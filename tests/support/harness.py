"""Runs an implementation on a case, forward and backward in one compiled function, once per case and dtype; which
cases are quick tests, and which are slow ones."""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import numpy as np
import pytest
from tolerances import GRADIENTS, STATES, STRENGTHS, assert_close, form_tolerance, head_axis

from gdn_jax.checks import cases, oracle
from gdn_jax.checks.check import rule, value_and_gradients

__all__ = ["rule", "value_and_gradients"]

IMPLEMENTATIONS = ("recurrent", "chunked")
PRIMALS = ("q", "k", "v", "g", "beta", "initial_state")
"""The first ones of `cases.Inputs.primals`."""

Results = dict[str, np.ndarray | None]


@functools.cache
def _compiled(implementation: str, options: tuple):
    return jax.jit(value_and_gradients(implementation, dict(options)))


def named(results: tuple) -> Results:
    """What a function of value_and_gradients returns, by name."""
    outputs, gradients = results
    pairs = zip(STATES + GRADIENTS + STRENGTHS, (*outputs, *gradients), strict=False)
    return {name: None if y is None else np.asarray(y) for name, y in pairs}


def evaluate(implementation: str, options: dict, x: cases.Inputs) -> Results:
    """Outputs and gradients by name: o, final_state, dq, dk, dv, dg, dbeta, dh_0; derase, dwrite where they count."""
    options = dict(options)
    if implementation == "recurrent":
        options.pop("chunk_size", None)  # has no effect: do not compile again for it
    call = _compiled(implementation, tuple(sorted(options.items())))
    results = named(call(x.primals, (x.do, x.dh_T), x.cu_seqlens, x.segment_ids))
    for primal, name in zip(x.primals, GRADIENTS + STRENGTHS, strict=False):
        assert primal is None or results[name].dtype == primal.dtype, (
            f"{name} has not the dtype of its primal"
        )
    return results


def run(implementation: str, case: cases.Case, dtype: str) -> Results:
    """evaluate on the inputs of a case. In float64 the caller is inside jax.enable_x64(True)."""
    return evaluate(implementation, case.options, cases.inputs(case, dtype))


def truth(options: dict, x: cases.Inputs) -> Results:
    """The oracle's outputs and gradients by name."""
    options = {name: value for name, value in options.items() if name != "chunk_size"}
    return oracle.evaluate(**x.arguments, **options, do=x.do, dh_T=x.dh_T)


def check(case: cases.Case, x: cases.Inputs, dtype: str, got: Results, *, form: str = "chunked") -> None:
    """Every output and gradient of a form in plain JAX within its tolerance, over the tensor and per head; all misses
    are told at once."""
    misses = []
    expected = truth(case.options, x)
    for name, reference in expected.items():
        y = got.get(name)
        if reference is None or y is None:
            assert reference is None and y is None, f"{name}: {y}, expected {reference}"
            continue
        try:
            assert_close(reference, y, form_tolerance(name, dtype, case, form), name, head_axis(name))
        except AssertionError as error:
            misses.append(str(error).splitlines()[0])
    assert not misses, f"{case.name} {dtype}: " + "; ".join(misses)


def parameters(*tuples: Iterable[cases.Case]) -> list:
    """Cases as pytest parameters."""
    return [pytest.param(case, id=case.name) for some in tuples for case in some]


CHUNKED_FIRST = [pytest.param("recurrent", marks=pytest.mark.crossed), "chunked"]
"""Both implementations, for properties of packed rows, layouts and transformations, and bits that repeat: of the
recurrent form, which has one step and no chunks, the gate has every case of the table against the oracle."""


def tiers(parameters: Iterable, quick: Iterable[str], slow: Iterable[str] | None = None) -> list:
    """pytest parameters: cases, tuples that begin with one, or names. The names in quick are quick.

    slow: the other names that the gate runs, every one of them if not given. What is left is crossed.
    """
    found, quick = [], set(quick)
    slow = None if slow is None else set(slow)
    for values in parameters:
        values = values if isinstance(values, tuple) else (values,)
        name = values[0] if isinstance(values[0], str) else values[0].name
        if name in quick:
            marks = ()
        else:
            marks = pytest.mark.slow if slow is None or name in slow else pytest.mark.crossed
        found.append(pytest.param(*values, id=name, marks=marks))
    assert quick | (slow or set()) <= {parameter.id for parameter in found}, "a test that there is not"
    return found


QUICK = (
    "one-token",
    "chunk-and-one-l2norm-K96-V192",
    "no-gates-no-initial-state",
    "packed",
    "packed-nothing",
    "packed-one-long",
    "packed-reset",
    "packed-strong-decay",
    "segments",
    "segments-of-one-token",
    "segments-one-each",
    "segments-reset",
)
"""Cases of the table that quick tests run in one dtype: each program once that has something of its own."""


def _shares_a_program(case: cases.Case, first: cases.Case) -> bool:
    """Whether a case differs from its table's first one in values only: it needs no compilation then."""
    plain = dict(name="", g="slow", channel_g=None, beta="sigmoid", keys="unit", ill_conditioned=False)
    same = dataclasses.replace(case, **plain) == dataclasses.replace(first, **plain)
    of_one_kind = (case.channel_g is None) == (first.channel_g is None)
    return same and of_one_kind and case.g is not None and case.beta is not None


IN_ONE_DTYPE = (
    "one-token",
    "seven-tokens-no-beta",
    "chunk-less-one-no-g-K60-V100",
    "one-chunk-one-key-head",
    "values-grouped-over-two-chunk-32",
    "queries-fewer-than-keys-chunk-16",
    "groupings-that-do-not-nest",
    "K1-V1",
    "scale-0",
    "packed-3000",
)
"""Cases of the table for lengths, groupings and sizes alone, on which no rounding and no conversion hangs. The cases
left for every dtype have each option: absent gates and state, L2 norm, scale, layout, two groupings, packed rows and
segments, and all values."""
CROSSED = (
    "float32-scale-0",
    "float32-seven-tokens-no-beta",
    "float32-K256-V256",
    "bfloat16-no-gates-no-initial-state",
    "bfloat16-packed-vk-l2norm-scale-1-no-state",
    "float32-one-chunk-one-key-head",
    "float32-values-grouped-over-two-chunk-32",
    "float32-queries-fewer-than-keys-chunk-16",
    "bfloat16-K256-V256",
    "bfloat16-chunk-and-two-chunk-128-K100-V60",
    "bfloat16-segments-no-state-three-groupings",
    "float32-segments-no-state-three-groupings",
    "float32-chunk-and-two-chunk-128-K100-V60",
    "bfloat16-chunk-and-one-l2norm-K96-V192",
    *(f"bfloat16-segments{of}" for of in ("", "-of-one-token", "-one-each", "-reset")),
)
"""More groupings of heads than the others and `test_pairwise.py` have; groupings, sizes and segments crossed with
dtypes (packed rows are there in every one)."""


def table(dtypes: tuple[str, ...]) -> list:
    """pytest parameters (case, dtype): the whole table in the first dtype, all but IN_ONE_DTYPE in the others. Cases
    of one program are quick in every dtype, those of QUICK in the first one."""
    found = []
    for dtype in dtypes:
        for case in cases.TABLE:
            if dtype != dtypes[0] and case.name in IN_ONE_DTYPE:
                continue
            quick = _shares_a_program(case, cases.TABLE[0]) or (case.name in QUICK and dtype == dtypes[0])
            name = f"{dtype}-{case.name}"
            marks = () if quick else pytest.mark.crossed if name in CROSSED else pytest.mark.slow
            found.append(pytest.param(case, dtype, id=name, marks=marks))
    return found


CHANNELS = {case.name for case in cases.CHANNELS}
VALUES_OF_CHANNELS = {case.name for case in cases.CHANNELS if _shares_a_program(case, cases.CHANNELS[0])}
QUICK_CHANNELS = {*VALUES_OF_CHANNELS, "erase-and-write-a-channel", "erase-0", "write-0"}
LONG_CHUNKS = {*QUICK_CHANNELS, "packed-vk-erase-a-channel", "K100-V60-chunk-128"}
"""Cases in chunks as users have them. The others take a program of fewer levels, with more borders in their rows."""
CROSSED_CHANNELS = {
    "K64-chunk-16", "K256", "K60-V100-chunk-less-one", "K100-V60-chunk-128", "channels-groupings-that-do-not-nest",
    "seven-tokens", "channels-packed",
}  # fmt: skip
"""Chunks, widths, lengths and groupings of which other cases have their like, or the table of gates of each head."""
TIERS_OF_CHANNELS = {
    ("chunked", "float32"): (QUICK_CHANNELS, CHANNELS - CROSSED_CHANNELS - {"K128-l2norm"}),
    ("chunked", "bfloat16"): ((), {*QUICK_CHANNELS, "K128-l2norm"}),
    ("recurrent", "float32"): (
        ("channels-of-every-kind",),
        {
            *VALUES_OF_CHANNELS, "erase-2", "gate-of-a-head-erase-a-channel", "seven-tokens", "no-state-no-strengths",
            "packed-vk-erase-a-channel", "channels-segments",
        },
    ),
}  # fmt: skip
"""Form and dtype -> names of quick cases and of slow ones. In bfloat16 these are all values of the gates, erase
and write apart, and the L2 norm; of the definition, which has one step, all values, and every option once."""
CHANNELS_IN_ONE_DTYPE = {
    "channels-one-token", "seven-tokens", "K60-V100-chunk-less-one", "K100-V60-chunk-128", "K64-chunk-16",
}  # fmt: skip
"""Cases for lengths, sizes and chunks alone, on which no rounding and no conversion hangs."""


def channels(form: str) -> list:
    """pytest parameters (case, dtype) of the table with gates of each channel, and with erase and write apart."""
    found = []
    for (of, dtype), (quick, slow) in TIERS_OF_CHANNELS.items():
        for case in cases.CHANNELS if of == form else ():
            if dtype != "float32" and case.name in CHANNELS_IN_ONE_DTYPE:
                continue
            marks = pytest.mark.slow if case.name in slow else pytest.mark.crossed
            marks = () if case.name in quick else marks
            C = case.chunk_size if case.name in LONG_CHUNKS else 16
            case = dataclasses.replace(case, chunk_size=C)
            found.append(pytest.param(case, dtype, id=f"{dtype}-{case.name}", marks=marks))
    return found
