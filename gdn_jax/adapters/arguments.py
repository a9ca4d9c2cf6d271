"""Errors that speak of arguments as the caller calls them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gdn_jax.shapes import ArgumentError


@contextmanager
def named(**theirs: str) -> Iterator[None]:
    """Gives an argument in an error the name that the caller knows it by.

    Args:
      theirs: the caller's name of each of our arguments, where they differ.
    """
    try:
        yield
    except ArgumentError as error:
        name = theirs.get(error.name, error.name)
        raise ArgumentError(name, error.expected, error.got) from error


def refuse(reason: str, **arguments: Any) -> None:
    """Raises NotImplementedError for an argument that is given and cannot be used here.

    Args:
      reason: why not, and what to do.
      arguments: by name; None is one that is not given.
    """
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, {reason}")
