"""Errors of the commands: one that a user can act upon, and one line for any other."""

import unicodedata
from typing import Any, NoReturn

import jax

_SHOWN = 1000
"""Characters of a value that an error shows."""


class RunError(ValueError):
    """A wish that cannot be met; the command line prints it as one line and exits with 1."""


def flag(name: str) -> str:
    """Returns the name of an option as it is typed: the field of --from is `from_`, as Python has a word like it."""
    return "--" + name.removesuffix("_").replace("_", "-")


def fail(name: str, expected: str, got: object) -> NoReturn:
    """Raises RunError for the value of an option."""
    shown = str(got)
    raise RunError(
        f"{flag(name)}: expected {expected}, got {shown[:_SHOWN]}{'...' if len(shown) > _SHOWN else ''}"
    )


def one_line(error: BaseException) -> str:
    """Returns the kind and the beginning of an error, which may have no text, or pages of it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def brief(value: Any) -> str:
    """A value of a file in an error, which may be as long as the file."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def harmless(text: str) -> str:
    """Returns a text whose control characters, which a terminal would obey, are escapes, but lines and tabs.

    Marks that join characters or say how they run are part of many scripts, and stay.
    """
    return "".join(
        repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text
    )


def printable(text: str) -> str:
    """Returns a text in one line, and what a terminal would obey or cannot show as escapes of Python."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def os_line(error: OSError) -> str:
    """Returns the file and what the system says about it."""
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part is not None)


def out_of_memory(error: BaseException) -> bool:
    """Says whether an error means that the memory of the machine or of the device did not suffice."""
    full = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return full or isinstance(error, MemoryError)
