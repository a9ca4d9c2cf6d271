"""What a fault is."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: `find`, found exactly once, is replaced by `put`, and `test` must fail."""

    name: str
    find: str
    put: str
    test: str
