"""The one error of the experiments that a user can act upon."""

from typing import NoReturn


class RunError(ValueError):
    """A wish that cannot be met; the command line prints it as one line and exits with 1."""


def flag(name: str) -> str:
    """Name of an option as typed."""
    return "--" + name.replace("_", "-")


def fail(name: str, expected: str, got: object) -> NoReturn:
    """Raises RunError for the value of an option."""
    raise RunError(f"{flag(name)}: expected {expected}, got {got}")
