"""Run-time checks of every annotation of the packages, which are made when a function is first called.

To make them takes 1.5 ms a function, and no process of a test run calls each of the three thousand functions.
"""

import functools
import importlib.util
import types

import jaxtyping

ARE_ON = importlib.util.find_spec("beartype") is not None
_jaxtyped = jaxtyping.jaxtyped


def _checked(fn, *, typechecker):
    """As `jaxtyping.jaxtyped`, which the import hook puts on everything that is defined."""
    if not isinstance(fn, types.FunctionType):
        return _jaxtyped(fn, typechecker=typechecker)
    if not fn.__annotations__:
        return fn
    made = None

    @functools.wraps(fn)
    def checked(*args, **kwargs):
        __tracebackhide__ = True
        nonlocal made
        if made is None:
            made = _jaxtyped(fn, typechecker=typechecker)
        return made(*args, **kwargs)

    return checked


def install() -> None:
    """Must come before the first import of the packages."""
    jaxtyping.jaxtyped = lambda *fn, typechecker: (
        _checked(*fn, typechecker=typechecker) if fn else functools.partial(_checked, typechecker=typechecker)
    )
    jaxtyping.install_import_hook(["gdn_jax", "pallas_kernels"], "beartype.beartype")
