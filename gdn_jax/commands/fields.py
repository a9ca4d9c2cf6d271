"""Checks of options, each beside its field: `lr: Annotated[float, Positive] = 3e-3`.

The notes of a field are checks, which look at the value, and marks, which hold for every value.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_type_hints

from gdn_jax.commands.errors import fail

_LEAST, _MOST = 1.2e-38, 3.4e38
"""The smallest and the largest number of float32 that are whole: what is computed with would be 0 or infinite."""


class Check:
    """A condition that a value has to meet."""

    def check(self, name: str, value: Any) -> None:
        """Raises RunError where the option of that name cannot have the value, which is not None."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Range(Check):
    """The numbers that an option can be. Of an option of several numbers, each has to be one of them.

    Fields:
      expected: these numbers in words.
      accepts: whether a number is one of them.
      bits: a whole number is less than 2 to the power of it.
    """

    expected: str
    accepts: Callable[[float], bool]
    bits: int = 31

    def check(self, name: str, value: Any) -> None:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                fail(name, "a finite number", number)
            if isinstance(number, float) and number and not _LEAST <= abs(number) <= _MOST:
                fail(name, f"a number that float32 holds, {_LEAST} to {_MOST} or 0", number)
            if not self.accepts(number):
                fail(name, self.expected, number)
            if isinstance(number, int) and number >= 2**self.bits:
                fail(name, f"less than 2**{self.bits}", number)


@dataclasses.dataclass(frozen=True)
class Several(Check):
    """One value or more.

    Fields:
      repeats: how often a value stands there means something; without it the values differ.
    """

    repeats: bool = False

    def check(self, name: str, value: Any) -> None:
        if not (value and (self.repeats or len(set(value)) == len(value))):
            expected = "one value or more" if self.repeats else "different values, at least one"
            fail(name, expected, " ".join(map(str, value)) or "none")


@dataclasses.dataclass(frozen=True)
class Mark:
    """A property of an option, whatever its value is, in words."""

    meaning: str


Positive = Range("a number above 0", lambda x: x > 0)
NotNegative = Range("0 or more", lambda x: x >= 0)
Fraction = Range("a fraction in [0, 1)", lambda x: 0 <= x < 1)
Seed = Range("0 or more and less than 2**32", lambda x: 0 <= x < 2**32, bits=32)
Distinct = Several()
Repeated = Several(repeats=True)
PerStart = Mark("It belongs to one start of a run and is not stored.")
Later = Mark("Runs of earlier versions have not stored it, and had the default.")
MayChange = Mark("A resumed run may have another value than the stored one.")
NotInStep = Mark("The training step is the same program for all values.")


def notes(cls: type) -> dict[str, tuple[Any, ...]]:
    """Returns the checks and marks of each field of a dataclass, by the field's name."""
    hints = get_type_hints(cls, include_extras=True)
    names = (field.name for field in dataclasses.fields(cls))
    return {name: getattr(hints[name], "__metadata__", ()) for name in names}


def marked(cls: type, mark: Mark) -> set[str]:
    """Returns the names of the fields of a dataclass that carry a mark."""
    return {name for name, beside in notes(cls).items() if mark in beside}


def check(options: Any) -> None:
    """Raises RunError for the first option of a dataclass that its own checks refuse, whatever the others are."""
    for name, beside in notes(type(options)).items():
        value = getattr(options, name)
        for note in beside:
            if isinstance(note, Check) and value is not None:
                note.check(name, value)
