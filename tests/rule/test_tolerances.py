"""The metric and the computed bounds: what they must catch, and that exceptions are earned."""

import re

import harness
import missed
import numpy as np
import pytest
import tolerances
from tolerances import GRADIENTS, STATES, bound, kernel_tolerance, tolerance, worst_ratio

from gdn_jax.checks import cases

NAMES = STATES + GRADIENTS


def test_a_quiet_head_is_not_hidden():
    x = np.ones((2, 10, 2, 4))
    x[:, :, 1] *= 1e-3
    wrong = x.copy()
    wrong[:, :, 1] *= 1.1
    assert worst_ratio(x, wrong) < 1e-3
    assert worst_ratio(x, wrong, 2) == pytest.approx(0.1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_bad_number_is_infinitely_wrong(value):
    x = np.ones((2, 10, 2, 4))
    wrong = x.copy()
    wrong[0, 0, 0, 0] = value
    assert worst_ratio(x, wrong, 2) == np.inf


def test_zeros_are_compared_as_they_are():
    assert worst_ratio(np.zeros(8), np.full(8, 1e-3)) == pytest.approx(1e-3)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in cases.TABLE if c.ill_conditioned])
def test_wider_bounds_are_earned(case):
    """The rounded recurrence misses the plain bounds on these cases, so rounding operands cannot hold them."""
    plain = {name: tolerance(name, "bfloat16", case) for name in NAMES}
    wider = {name: kernel_tolerance(name, "bfloat16", case) for name in NAMES}
    assert any(wider[name] > plain[name] for name in NAMES)
    assert all(plain[name] <= wider[name] < 0.2 for name in NAMES)


@pytest.mark.parametrize(
    "name", ["slow-decay", "no-decay", "correlated-keys", "beta-up-to-2", "segments-reset"]
)
def test_plain_bounds_are_fair(name):
    """Elsewhere the rounded recurrence holds them, in every output and gradient."""
    case = cases.CASES[name]
    errors = tolerances.rounded_recurrence(case, "bfloat16")
    assert all(errors[name] <= tolerance(name, "bfloat16", case) for name in NAMES)
    assert errors["o"] > 2e-3  # and it does round


def test_condition_of_equal_keys():
    """With decay 1, strength 2 and 64 keys of one direction |A| |I + kkt| is known: A = I + 2 (-1)^(i - j)."""
    entries = np.tril(np.full((64, 64), 2.0), -1) + np.eye(64)
    expected = (entries @ entries).sum(1).max()
    assert tolerances.condition(cases.CASES["repeated-keys-beta-2"]) == pytest.approx(expected)
    assert tolerance("o", "float32", cases.CASES["slow-decay"]) == bound("o", "float32")


def test_known_misses_are_of_cases_that_are_run():
    for known, table in ((missed.HEADS, cases.TABLE), (missed.CHANNELS, cases.CHANNELS)):
        assert all(missed.known_of(case) is known for case in table)
        for name, dtype, output in known.errors:
            assert cases.CASES[name] in table and cases.CASES[name].chunk_size == 64
            assert dtype in ("bfloat16", "float16") and output in NAMES


@pytest.mark.parametrize("case", sorted({case for case, *_ in missed.HEADS.errors}))
def test_zeros_are_no_known_miss(case):
    """Also where more than all of a result is lost, and so a larger error is expected."""
    case = cases.CASES[case]
    x = cases.inputs(case)
    expected = harness.truth(case.options, x)
    for dtype in ("bfloat16", "float16"):
        zeros = {name: None if y is None else np.zeros_like(y) for name, y in expected.items()}
        told = missed.misses(case, dtype, expected, zeros)
        assert len(told) == sum(y is not None and np.any(y) for y in expected.values())


def test_known_misses_have_a_floor_and_a_ceiling():
    """All that is wrong is told at once: a miss that is not known, one that is no more, and one that has grown."""
    case = cases.CASES["slow-decay"]
    bounds = {name: kernel_tolerance(name, "bfloat16", case) for name in NAMES}
    known = missed.Known({("slow-decay", "bfloat16", name): 3 * bounds[name] for name in ("dq", "dk", "dv")})
    expected = {name: np.ones((2, 4, 2, 8)) for name in NAMES} | {"dg": None, "dbeta": None}
    errors = {"o": 0.9, "final_state": 1.1, "dq": 0.9, "dk": 3.6, "dv": 3.9}
    got = {name: np.full((2, 4, 2, 8), 1 + factor * bounds[name]) for name, factor in errors.items()}
    got |= {"dg": np.ones((2, 4, 2)), "dbeta": None, "dh_0": np.full((2, 4, 2, 8), np.nan)}
    lines = missed.misses(case, "bfloat16", expected, got, known)
    wrong = (
        r"'final_state'\): ",
        r"'dq'\): .* no longer missed",
        r"'dv'\): .* more than 1.25",
        "dg is there",
        r"'dh_0'\): inf",
    )
    assert len(lines) == len(wrong)
    for line, pattern in zip(lines, wrong, strict=True):
        assert re.search(pattern, line), line
    with pytest.raises(AssertionError, match="final_state"):
        missed.check(case, "bfloat16", expected, got, known)


def test_forms_in_plain_jax_are_held_to_less():
    """What a rounded state or gradient would miss is no longer hidden by the bounds of kernels."""
    plain, packed = cases.CASES["slow-decay"], cases.CASES["packed"]
    for name in NAMES:
        for form in tolerances.FORMS:
            for case in (plain, packed):
                bound = tolerances.form_tolerance(name, "bfloat16", case, form)
                assert bound <= tolerance(name, "bfloat16", case)
    for name in ("final_state", "dg", "dbeta", "dh_0"):
        assert tolerances.form_tolerance(name, "bfloat16", packed, "recurrent") <= 1e-5
    for case in (plain, packed):
        assert tolerances.form_tolerance("final_state", "bfloat16", case, "chunked") <= 1e-5
