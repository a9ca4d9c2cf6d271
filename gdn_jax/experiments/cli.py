"""The `gdn` command.

It imports what it needs after it knows what is asked: help is fast, and a missing package is one line.
"""

import contextlib
import importlib.util
import io
import sys
from typing import Any

USAGE = """usage: gdn COMMAND ...

  gdn train bytes    train a byte-level language model on real text
  gdn train recall   train on multi-query associative recall
  gdn bench          time the implementations of the rule on this device

Every command has --help.
"""

_NEEDED = {
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "tyro": "tyro",
}


class Usage(Exception):
    """A command line that cannot be parsed."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; returns its exit status.

    0 done, 1 what was asked cannot be done, 2 misuse, 130 Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except Usage as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _complain(message: str, status: int) -> int:
    print("gdn: " + " ".join(message.split()), file=sys.stderr)
    return status


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command not in ("train", "bench"):
        raise Usage(f"expected a command train or bench, got {command} (see gdn --help)")
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        return _complain(
            f'{", ".join(missing)} not found; install with: pip install "gdn-jax[experiments]"', 1
        )
    if command == "bench":
        from gdn_jax.experiments import bench

        return bench.main(rest) or 0
    if rest and rest[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if not rest or rest[0] not in ("bytes", "recall"):
        raise Usage(f"gdn train: expected a task bytes or recall, got {rest[0] if rest else 'none'}")
    return _train(rest[0], rest[1:])


def _train(task: str, argv: list[str]) -> int:
    from rich.console import Console

    from gdn_jax.experiments import options as options_lib
    from gdn_jax.experiments.errors import RunError

    cls = options_lib.TASKS[task]
    try:
        try:
            options = _parse(cls, argv, f"gdn train {task}")
        except _Help:
            return 0
        options_lib.check(options)
        if options.run.resume:
            stored = _stored(task, options)
            options = _parse(cls, argv, f"gdn train {task}", stored)
            options_lib.check(options)
            options_lib.check_same(stored, options)
        from gdn_jax.experiments.training import train

        return train(options, Console())
    except RunError as error:
        return _complain(str(error), 1)


def _stored(task: str, asked: Any) -> Any:
    from gdn_jax.experiments import options as options_lib
    from gdn_jax.experiments.errors import RunError
    from gdn_jax.experiments.runs import RunFolder

    _, config = RunFolder.open(asked.run.out)
    if config.get("task") != task:
        raise RunError(
            f"--resume: expected a run of the task {task}, got {config.get('task')} in {asked.run.out}"
        )
    return options_lib.from_json(task, config["options"], asked.run)


class _Help(Exception):
    """--help was printed."""


def _parse(cls: type, argv: list[str], prog: str, default: Any = None) -> Any:
    """Options of a command line; tyro's framed message becomes one line."""
    import tyro

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                cls, args=argv, prog=prog, default=default or cls(), config=(tyro.conf.OmitArgPrefixes,)
            )
    except SystemExit as stop:
        if not stop.code:
            raise _Help from None
        lines = [line.strip("│╭╰╮╯ ") for line in box.getvalue().splitlines()[1:]]
        rule = next((i for i, line in enumerate(lines) if line and set(line) == {"─"}), len(lines))
        raise Usage(f"{' '.join(lines[:rule])} (see {prog} --help)") from None


if __name__ == "__main__":
    sys.exit(main())
