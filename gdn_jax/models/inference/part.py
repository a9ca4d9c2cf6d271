"""Parts of blocks in a copy for single tokens: what they are prepared for, how they are called, what they read."""

from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array


class Call(NamedTuple):
    """The calls that a part of a model is prepared for."""

    rows: int
    """Rows that have a token in every call."""
    from_stream: bool
    """Whether the part gets the residual stream and the norm before it, see `layers.blocks.from_stream`."""
    in_parts: bool = False
    """Whether its results may be parts of a sum, see `layers.blocks.whole`."""


def cache_alone(options: dict[str, Any]) -> Any:
    """The cache of a call of a mixer, if no other option says where tokens are; else None."""
    others = [value for name, value in options.items() if name not in ("cache", "return_cache")]
    return options.get("cache") if all(value is None for value in others) else None


class Reader(nnx.Module):
    """A part of a block that knows what a token reads from it on, which its kernels bring to the L2 cache."""

    ahead: tuple[nnx.Param, ...] = ()
    """Parameters: its own, in the order in which its kernels read them, and then other parts'; of a copy for
    one row, else none."""

    def token_weights(self) -> list[nnx.Param]:
        """Parameters of its own that kernels of a token read, in their order; none where its kernels do not run."""
        raise NotImplementedError

    def after(self, n: int) -> tuple[Array, ...]:
        """Weights that a token reads after the first n of the part's own."""
        return tuple(weight[...] for weight in self.ahead[n:])
