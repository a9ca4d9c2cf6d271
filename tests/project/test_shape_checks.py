"""Annotations of the packages are checked in the test run, though a check is made only when it is needed."""

import inspect

import jaxtyping
import numpy as np
import pytest
import shape_checks
from jaxtyping import Float

from gdn_jax import gates

pytestmark = pytest.mark.skipif(not shape_checks.ARE_ON, reason="beartype is not installed")


def test_annotations_are_checked(monkeypatch):
    """Of arguments and results, at every call; signatures and what has no annotation stay as they are."""
    from beartype import beartype

    made, jaxtyped = [], shape_checks._jaxtyped

    def counted(fn, **options):
        made.append(fn.__name__)
        return jaxtyped(fn, **options)

    monkeypatch.setattr(shape_checks, "_jaxtyped", counted)

    @jaxtyping.jaxtyped(typechecker=beartype)
    def head(x: Float[np.ndarray, "3"], count: int = 1) -> Float[np.ndarray, "1"]:
        return x[:count]

    assert not made and str(inspect.signature(head)).startswith("(x: ")
    head(np.zeros(3, np.float32))
    for call in (lambda: head(np.zeros(2, np.float32)), lambda: head(np.zeros(3, np.float32), 2)):
        with pytest.raises(jaxtyping.TypeCheckError):
            call()
    assert made == ["head"]

    def bare(x):
        return x

    assert jaxtyping.jaxtyped(bare, typechecker=None) is bare


def test_beartype_checks_alone_where_no_array_is_annotated(monkeypatch):
    """Also names that are strings, and unless checks are switched off."""
    from beartype import beartype
    from beartype.roar import BeartypeCallHintViolation

    monkeypatch.setattr(shape_checks, "_jaxtyped", None)

    @jaxtyping.jaxtyped(typechecker=beartype)
    def twice(x: "int | None", *, names: tuple[str, ...] = ()) -> int:
        return x if names else 2 * x

    assert twice(3) == 6
    for call in (lambda: twice("x"), lambda: twice(3, names=(1,)), lambda: twice(None, names=("a",))):
        with pytest.raises(BeartypeCallHintViolation):
            call()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert twice("x") == "xx"


def test_public_functions_have_the_checks():
    with pytest.raises(jaxtyping.TypeCheckError):
        gates.l2norm("no array")
