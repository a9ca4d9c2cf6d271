"""Programs that are compiled at the same time: each is its own, and so is what goes wrong with it."""

import jax
import numpy as np
import pytest

from gdn_jax.bench.together import compiled_together


def test_each_has_its_own():
    """A program that cannot be lowered, or compiled, says so where it is asked for; the others are there."""

    def lower(factor):
        return jax.jit(lambda x: factor * x).lower(jax.ShapeDtypeStruct((3,), np.float32))

    def refuse():
        raise ValueError("no such mesh")

    todo = {2: (lambda: lower(2), {}), 5: (lambda: lower(5), {}), "lower": (refuse, {})}
    todo["compile"] = (lambda: lower(3), {"no_such_option": True})
    found = compiled_together(todo, 2)
    x = np.arange(3, dtype=np.float32)
    for factor in (2, 5):
        program = found[factor].result()
        np.testing.assert_array_equal(program.compiled(x), factor * x)
        assert program.lower_s > 0 and program.compile_s > 0
    with pytest.raises(ValueError, match="no such mesh"):
        found["lower"].result()
    with pytest.raises(Exception, match="no_such_option"):
        found["compile"].result()
