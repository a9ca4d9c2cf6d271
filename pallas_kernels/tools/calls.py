"""A call whose kernels the tools look at: a function, and the shapes of its arguments from text."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32"}


class Call(NamedTuple):
    """A function of positional arguments and of keyword arguments, with their shapes."""

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    keywords: dict[str, Any]

    def lower(self) -> jax.stages.Lowered:
        """The call lowered for an NVIDIA GPU; without one JAX assumes compute capability 9.0."""
        traced = jax.jit(self.function).trace(*self.positional, **self.keywords)
        return traced.lower(lowering_platforms=("cuda",))


def call(function: Callable[..., Any], positional: str, **keywords: str) -> Call:
    """A call from text such as "bf16[64,1024] f32[1024] -", where "-" is None."""
    return Call(
        function, tuple(map(_shape, positional.split())), {name: _shape(x) for name, x in keywords.items()}
    )


def _shape(text: str) -> jax.ShapeDtypeStruct | None:
    if text == "-":
        return None
    dtype, sizes = re.fullmatch(r"(\w+)\[([\d,]+)\]", text).groups()  # pyrefly: ignore
    return jax.ShapeDtypeStruct(tuple(map(int, sizes.split(","))), DTYPES[dtype])
