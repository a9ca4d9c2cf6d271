"""How a copy of a model for single tokens is called."""

from typing import NamedTuple


class Call(NamedTuple):
    """The calls that a part of a model is prepared for."""

    rows: int
    """Rows that have a token in every call."""
    from_stream: bool
    """Whether the part gets the residual stream and the norm before it, see `layers.blocks.from_stream`."""
