"""Weights that a token reads next, which the kernels of a row bring to the L2 cache behind their own."""

from typing import Any, Protocol

from jaxtyping import Array


class Reader(Protocol):
    """A part of a block that knows, in a copy for single tokens, what is read from it on."""

    ahead: tuple[Any, ...]
    """Parameters: its own, in the order in which its kernels read them, and then those of other parts. Any other
    copy has none."""

    def token_weights(self) -> list[Any]:
        """Parameters of its own that kernels of a token read, in their order; none where its kernels do not run."""
        ...


def read_ahead(part: Any, n: int) -> tuple[Array, ...]:
    """Weights that a token reads behind the first n of a part's own.

    Args:
      part: a `Reader`.
      n: how many of its own have been read.
    """
    return tuple(weight[...] for weight in part.ahead[n:])
