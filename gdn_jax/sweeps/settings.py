"""Settings of sweeps, which are files of the folder `configs`: the defaults of each task, and what papers ran.

    sizes.toml             what all tasks have in common: small for two CPU cores, full for one GPU
    tasks/TASK.toml        the options of each size in which a task differs from that
    published/PAPER.toml   tables and figures of a paper: what it says, its numbers, and how the options that run
                           it here differ from those of its task

Options have the names that they have in the config.json of a sweep.
"""

import functools
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from gdn_jax.commands.errors import RunError, fail
from gdn_jax.commands.files import parse_json, read_file
from gdn_jax.sweeps.options import GridOptions, SweepOptions
from gdn_jax.training import options as options_lib

_FOLDER = Path(__file__).with_name("configs")

TASKS = tuple(task for task in options_lib.TASKS if task != "tokens")
"""Tasks that have sweeps: those whose models are fresh."""
SIZES = ("small", "full")


def stored(task: str, values: dict[str, Any], start: GridOptions) -> SweepOptions:
    """Options of a task of which all are known, as those of a config.json; see `training.options.from_json`."""
    return options_lib.from_json(SweepOptions(type(options_lib.TASKS[task].task)()), values, start)


def made(task: str, size: str, changes: dict[str, Any], start: GridOptions) -> SweepOptions:
    """The defaults of a task in a size, with changes; where the sweep lies comes from `start`."""
    return stored(task, options_lib.to_json(preset(task, size)) | changes | {"size": size}, start)


@functools.cache
def preset(task: str, size: str) -> SweepOptions:
    """The defaults of a task in a size."""
    default = options_lib.to_json(SweepOptions(type(options_lib.TASKS[task].task)()))
    values = default | _read("sizes")[size] | _read(f"tasks/{task}")[size] | {"size": size}
    return stored(task, values, GridOptions())


def from_file(task: str, path: Path, grid: GridOptions) -> SweepOptions:
    """Options that a file gives, in the place of the defaults of its "size"; where the sweep lies comes from `grid`.

    Raises:
      RunError: the file cannot be read, is of another task, or names an option that there is not.
    """
    try:
        content = parse_json(read_file(path))
    except OSError as error:
        raise RunError(f"--config: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"--config: expected JSON in {path}, got {error}") from None
    if not isinstance(content, dict) or not isinstance(options := content.get("options"), dict):
        fail("config", 'an object with "task" and "options"', path)
    if content.get("task") != f"sweep {task}":
        fail("config", f"a file of the task sweep {task}", f"{content.get('task')} in {path}")
    size = options.get("size", "small")
    if size not in SIZES:
        fail("config", "the size small or full", size)
    return made(task, size, options, grid)


class Published(NamedTuple):
    """A number of a paper.

    Fields:
      rule: its name there.
      at: where it was asked there.
      here: size of our test next to it, and that of the small version.
      value: accuracy in %, or what the entry's `unit` says; None: not confirmed.
      mixer: ours next to it, None where there is none.
    """

    rule: str
    at: str
    here: tuple[int, int]
    value: float | None = None
    mixer: str | None = None


class Entry(NamedTuple):
    """A table or figure of a paper.

    Numbers and settings are those that were read in the paper. Others are None, "not confirmed", and `differs` says
    which of the options are of this project.

    Fields:
      paper, url, where: what it is from.
      claim: what it says.
      setting: of the paper.
      differs: what is otherwise here, and what is not confirmed.
      task: of `gdn sweep`.
      full, small: options in the place of the defaults of `gdn sweep TASK --size full`, or small.
      published: its numbers.
      best_run: the paper shows its best run, and so do we, by what is asked; else means stand next to its numbers.
      unit: of its numbers.
    """

    paper: str
    url: str
    where: str
    claim: str
    setting: str
    differs: str
    task: str
    full: dict[str, Any]
    small: dict[str, Any]
    published: tuple[Published, ...]
    best_run: bool = False
    unit: str = "%"


def _entries(path: Path) -> dict[str, Entry]:
    """The entries of a paper. One that is `like` another has its facts and options, but for those that it states."""
    paper = _read(f"published/{path.stem}")
    found: dict[str, dict[str, Any]] = {}
    for name, own in paper.pop("entries").items():
        like = found[own.pop("like")] if "like" in own else {"full": {}, "small": {}}
        found[name] = like | own | {size: like[size] | own[size] for size in SIZES}

    def numbers(entry: dict[str, Any]) -> tuple[Published, ...]:
        return tuple(Published(**x | {"here": tuple(x["here"])}) for x in entry["published"])

    return {
        f"{path.stem}/{name}": Entry(**paper | entry | {"published": numbers(entry)})
        for name, entry in found.items()
    }


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


ENTRIES: dict[str, Entry] = {
    name: entry
    for path in sorted((_FOLDER / "published").glob("*.toml"))
    for name, entry in _entries(path).items()
}
"""Published settings by name: the paper's file, and the entry in it."""
