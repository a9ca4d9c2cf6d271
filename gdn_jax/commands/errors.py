"""The one error of the commands that a user can act upon, and one line for any other."""

from typing import NoReturn


class RunError(ValueError):
    """A wish that cannot be met; the command line prints it as one line and exits with 1."""


def flag(name: str) -> str:
    """Name of an option as typed."""
    return "--" + name.replace("_", "-")


def fail(name: str, expected: str, got: object) -> NoReturn:
    """Raises RunError for the value of an option."""
    raise RunError(f"{flag(name)}: expected {expected}, got {got}")


def one_line(error: Exception) -> str:
    """Kind and beginning of an error, for a table: it may have no text, or pages of it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
