"""Options carry their checks: none is without, each refuses what it says."""

import dataclasses
import importlib
import pkgutil
from typing import Annotated, get_args, get_type_hints

import pytest

from gdn_jax import bench, checks, inspect, sweeps, training
from gdn_jax.commands import fields
from gdn_jax.commands.errors import RunError
from gdn_jax.training import tasks


def option_classes():
    """Every class of options that a command line of these rooms has."""
    found = {}
    for room in (tasks, training, sweeps, inspect, checks, bench):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            names = vars(importlib.import_module(module.name)).values()
            found |= {x.__name__: x for x in names if isinstance(x, type) and dataclasses.is_dataclass(x)}
    return [cls for name, cls in sorted(found.items()) if name.endswith(("Options", "Benchmark"))]


def kinds(hint):
    """The types that a hint names, whatever they stand in."""
    return {hint}.union(*map(kinds, get_args(hint)))


@pytest.mark.parametrize("cls", option_classes(), ids=lambda cls: cls.__name__)
def test_every_number_has_a_range(cls):
    hints = get_type_hints(cls)
    for name, notes in fields.notes(cls).items():
        number = bool(kinds(hints[name]) & {int, float})
        assert any(isinstance(note, fields.Range) for note in notes) == number, (
            f"{cls.__name__}.{name}: a Range"
        )
        # Of a tuple that is empty unless it is given, none at all is a value too; one of two numbers has always two.
        several = cls.__dataclass_fields__[name].default != () and any(
            getattr(kind, "__origin__", None) is tuple and Ellipsis in get_args(kind)
            for kind in kinds(hints[name])
        )
        assert any(isinstance(note, fields.Several) for note in notes) == several, (
            f"{cls.__name__}.{name}: a Several"
        )
        assert all(isinstance(note, fields.Check | fields.Mark) for note in notes)


def test_classes_are_found():
    names = {cls.__name__ for cls in option_classes()}
    assert names > {
        "TextOptions",
        "CopyOptions",
        "RunOptions",
        "GridOptions",
        "EvalOptions",
        "GenerateOptions",
        "Benchmark",
        "DecodeBenchmark",
        "ScaleBenchmark",
    }


@dataclasses.dataclass(frozen=True)
class Some:
    none: Annotated[int | None, fields.Positive] = None
    size: Annotated[int, fields.MayChange, fields.Positive] = 1
    decay: Annotated[float, fields.NotNegative] = 0.0
    warmup: Annotated[float, fields.Fraction] = 0.0
    seed: Annotated[int, fields.Seed] = 0
    lengths: Annotated[tuple[int, ...], fields.Distinct, fields.Positive] = (1, 2)
    cases: Annotated[tuple[str, ...], fields.Repeated] = ("a", "a")
    free: Annotated[str, fields.PerStart] = "anything"


def test_marks_and_what_passes():
    fields.check(Some())
    fields.check(Some(none=2**31 - 1, warmup=0.999, seed=2**32 - 1, cases=("a",)))
    assert fields.marked(Some, fields.MayChange) == {"size"} and fields.marked(Some, fields.PerStart) == {
        "free"
    }


@pytest.mark.parametrize(
    "values, message",
    [
        ({"none": 0}, "--none: expected a number above 0, got 0"),
        ({"size": 2**31}, r"--size: expected less than 2\*\*31, got 2147483648"),
        ({"decay": -0.1}, "--decay: expected 0 or more, got -0.1"),
        ({"decay": float("inf")}, "--decay: expected a finite number, got inf"),
        ({"decay": float("nan")}, "--decay: expected a finite number, got nan"),
        (
            {"decay": 1e308},
            r"--decay: expected a number that float32 holds, 1.2e-38 to 3.4e\+38 or 0, got 1e\+308",
        ),
        ({"decay": 1e-320}, r"--decay: expected a number that float32 holds, .* got 1e-320"),
        ({"warmup": 1.0}, r"--warmup: expected a fraction in \[0, 1\), got 1.0"),
        ({"seed": -1}, r"--seed: expected 0 or more and less than 2\*\*32, got -1"),
        ({"seed": 2**32}, r"--seed: expected 0 or more and less than 2\*\*32, got 4294967296"),
        ({"lengths": ()}, "--lengths: expected different values, at least one, got none"),
        ({"lengths": (3, 3)}, "--lengths: expected different values, at least one, got 3 3"),
        ({"size": 10**2000}, rf"--size: expected less than 2\*\*31, got 1{'0' * 999}\.\.\."),
        ({"lengths": (3, 0)}, "--lengths: expected a number above 0, got 0"),
        ({"cases": ()}, "--cases: expected one value or more, got none"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(RunError, match=f"^{message}$"):
        fields.check(Some(**values))
