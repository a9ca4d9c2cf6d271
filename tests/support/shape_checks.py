"""Run-time checks of every annotation of the packages, made when a function is first called.

To make them takes 1.5 ms a function, and no process of a test run calls each of the three thousand functions. Where
no array is annotated, beartype checks alone: jaxtyping, which binds the shapes of a call, takes 20 us more.
"""

import functools
import importlib.util
import types
import typing

import jaxtyping

ARE_ON = importlib.util.find_spec("beartype") is not None
_jaxtyped = jaxtyping.jaxtyped


def _is_plain(hint) -> bool:
    """Whether an annotation is made of classes and literals that are no arrays of jaxtyping."""
    if isinstance(hint, list | tuple):  # arguments of a Callable
        return all(map(_is_plain, hint))
    if parts := typing.get_args(hint):
        return typing.get_origin(hint) is typing.Literal or all(map(_is_plain, parts))
    if hint in (None, ..., typing.Any):
        return True
    return isinstance(hint, type) and not type(hint).__module__.startswith("jaxtyping")


def _made(fn, typechecker):
    """The function with its checks."""
    try:
        hints = typing.get_type_hints(fn, include_extras=True)
    except NameError:  # a name that exists for type checkers alone
        return _jaxtyped(fn, typechecker=typechecker)
    if not all(map(_is_plain, hints.values())):
        return _jaxtyped(fn, typechecker=typechecker)
    plain = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    plain.__kwdefaults__, plain.__annotations__ = fn.__kwdefaults__, hints
    plain.__qualname__, plain.__module__ = fn.__qualname__, fn.__module__
    checked = typechecker(plain)
    return lambda *args, **kwargs: (fn if jaxtyping.config.jaxtyping_disable else checked)(*args, **kwargs)


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
            made = _made(fn, typechecker)
        return made(*args, **kwargs)

    return checked


def install() -> None:
    """Must come before the first import of the packages."""
    jaxtyping.jaxtyped = lambda *fn, typechecker: (
        _checked(*fn, typechecker=typechecker) if fn else functools.partial(_checked, typechecker=typechecker)
    )
    jaxtyping.install_import_hook(["gdn_jax", "pallas_kernels"], "beartype.beartype")
