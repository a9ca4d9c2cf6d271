"""The same inputs give the same bits."""

import dataclasses

import harness
import jax
import numpy as np
import pytest

from gdn_jax.checks import cases


@pytest.mark.usefixtures("compile_as_users_do")
@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
@pytest.mark.parametrize("name", harness.tiers(("slow-decay", "packed"), (), ()))
def test_bit_equal_repeats(implementation, name):
    """A hundred calls of one function, compiled as users compile it: outputs and gradients."""
    case = cases.CASES[name]
    x = cases.inputs(case)
    call = jax.jit(harness.value_and_gradients(implementation, case.options))
    first = call(x[:6], (x.do, x.dh_T), x.cu_seqlens, x.segment_ids)
    harness.check(case, x, "float32", harness.named(first))
    for _ in range(100):
        again = call(x[:6], (x.do, x.dh_T), x.cu_seqlens, x.segment_ids)
        jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_as_users_do")
@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_compiling_again_gives_the_same_bits(implementation):
    case = cases.Case("again", T=70)
    x = cases.inputs(case)
    compiled = [jax.jit(harness.value_and_gradients(implementation, case.options)) for _ in range(2)]
    first = compiled[0](x[:6], (x.do, x.dh_T), None, None)
    for call in (compiled[1], *100 * compiled[:1]):  # and the same program again
        jax.tree.map(np.testing.assert_array_equal, first, call(x[:6], (x.do, x.dh_T), None, None))


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_rows_do_not_change_each_others_bits(implementation):
    """A row of the batch has the same bits whatever the other rows hold."""
    case = cases.CASES["slow-decay"]
    x = cases.inputs(case)
    other = cases.inputs(dataclasses.replace(case, name="other row"))
    mixed = {}
    for name in (*harness.PRIMALS, "do", "dh_T"):
        mixed[name] = getattr(x, name).copy()
        mixed[name][1:] = getattr(other, name)[1:]
    first = harness.evaluate(implementation, case.options, x)
    again = harness.evaluate(implementation, case.options, x._replace(**mixed))
    for name, y in first.items():
        np.testing.assert_array_equal(y[0], again[name][0], name)
