"""A call whose kernels the tools look at: a function, and arrays that are written as text.

Arrays are written such as "bf16[64,1024] f32[1024] -", where "-" is None.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from pallas_kernels.device.needs import Needs

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32"}
DTYPES |= {"i8": "int8", "f8": "float8_e4m3fn"}


class Call(NamedTuple):
    """A function, and the shapes of its positional and its keyword arguments."""

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    needs: Needs = Needs.TMA | Needs.WGMMA
    """Features of a GPU that its kernels need."""

    def lower(self) -> jax.stages.Lowered:
        """The call lowered for an NVIDIA GPU; without one JAX assumes compute capability 9.0."""
        traced = jax.jit(self.function).trace(*self.positional, **self.keywords)
        return traced.lower(lowering_platforms=("cuda",))


def shapes(text: str) -> list[Any]:
    """The arrays of a text."""

    def shape(text: str) -> jax.ShapeDtypeStruct | None:
        if text == "-":
            return None
        dtype, sizes = text.removesuffix("]").split("[")
        return jax.ShapeDtypeStruct(tuple(map(int, filter(None, sizes.split(",")))), DTYPES[dtype])

    return [shape(part) for part in text.split()]


def call(
    function: Callable[..., Any], positional: str, needs: Needs | None = None, /, **keywords: str
) -> Call:
    """A call of arrays that are written as text.

    Args:
      needs: of the kernels; None: what the file of the function says.
    """
    if needs is None:
        inner = function
        while isinstance(inner, partial):  # one that is given a kernel calls that
            inner = inner.args[0] if inner.args and callable(inner.args[0]) else inner.func
        needs = sys.modules[inner.__module__].NEEDS
    return Call(function, (*shapes(positional),), {name: shapes(x)[0] for name, x in keywords.items()}, needs)
