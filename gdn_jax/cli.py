"""The `gdn` command.

It imports what it needs after it knows what is asked: help is fast, and a missing package is one line.
"""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdn_jax.commands.parsing import Help, Usage, parse

USAGE = """usage: gdn COMMAND ...

  gdn train TASK   train a model on a task
  gdn sweep TASK   compare token mixers on a task: every mixer with several seeds and learning rates
  gdn check        compare the implementations of the rule on this device with the definition
  gdn bench        time the implementations of the rule on this device, or (--what step) a whole training step

  tasks: bytes         next-byte modelling of real text (train only)
         recall        multi-query associative recall
         needle        a few values in a haystack of noise or text, at lengths beyond training
         parity        parity of the bits so far, at lengths beyond training
         permutation   product of the permutations so far, at lengths beyond training
         copy          repeating a sequence

Every command has --help.
"""

_NEEDED = {
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "tyro": "tyro",
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; returns its exit status.

    0 done, 1 what was asked cannot be done, 2 misuse, 130 Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except Usage as error:
        return _complain(str(error), 2)
    except Help:
        return 0
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
    if command not in ("train", "sweep", "check", "bench"):
        raise Usage(f"expected a command train, sweep, check or bench, got {command} (see gdn --help)")
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        return _complain(
            f'{", ".join(missing)} not found; install with: pip install "gdn-jax[experiments]"', 1
        )
    if command == "bench" and _is_step(rest):
        from gdn_jax.experiments import step_bench

        return _run(lambda _, argv: step_bench.main(argv), "", rest)
    if command == "bench":
        from gdn_jax.checks import bench

        return bench.main(rest) or 0
    if command == "check":
        from gdn_jax.checks import check

        return check.main(rest) or 0
    if rest and rest[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0

    from gdn_jax.experiments.options import TASKS

    tasks = [name for name in TASKS if command == "train" or name != "bytes"]
    if not rest or rest[0] not in tasks:
        names = f"{', '.join(tasks[:-1])} or {tasks[-1]}"
        raise Usage(f"gdn {command}: expected a task {names}, got {rest[0] if rest else 'none'}")
    return _run(_train if command == "train" else _sweep, rest[0], rest[1:])


def _is_step(argv: list[str]) -> bool:
    """Whether `gdn bench` is asked for the training step, which is another room's."""
    return "--what=step" in argv or ("--what", "step") in itertools.pairwise(argv)


def _run(start: Callable[[str, list[str]], int], task: str, argv: list[str]) -> int:
    from gdn_jax.commands.errors import RunError

    try:
        return start(task, argv)
    except RunError as error:
        return _complain(str(error), 1)


def _train(task: str, argv: list[str]) -> int:
    from rich.console import Console

    from gdn_jax.experiments import options as options_lib

    default = options_lib.TASKS[task]
    options = _parse(options_lib.TrainOptions, default, argv, f"gdn train {task}")
    options_lib.check(options)
    if options.run.resume:
        config = _stored(task, options.run.out)
        stored = options_lib.from_json(task, config["options"], options.run)
        options = _parse(options_lib.TrainOptions, stored, argv, f"gdn train {task}")
        options_lib.check(options)
        options_lib.check_same(options_lib.to_json(stored), options_lib.to_json(options))
    from gdn_jax.experiments.training import train

    return train(options, Console())


def _sweep(task: str, argv: list[str]) -> int:
    from rich.console import Console

    from gdn_jax.experiments import options as options_lib
    from gdn_jax.experiments.sweeps import options as sweep_options

    prog, presets = f"gdn sweep {task}", sweep_options.PRESETS[task]
    options = _parse(sweep_options.SweepOptions, presets["small"], argv, prog)
    if options.sweep.resume:
        sweep_options.check(options)
        config = _stored(f"sweep {task}", options.sweep.out)
        stored = sweep_options.from_json(task, config["options"], options.sweep)
        options = _parse(sweep_options.SweepOptions, stored, argv, prog)
        sweep_options.check(options)
        options_lib.check_same(options_lib.to_json(stored), options_lib.to_json(options))
    else:
        options = _parse(sweep_options.SweepOptions, presets[options.sweep.size], argv, prog)
        sweep_options.check(options)
    from gdn_jax.experiments.sweeps.sweep import sweep

    return sweep(options, Console(), " ".join(["gdn sweep", task, *argv]))


def _stored(task: str, out: Path | None) -> dict[str, Any]:
    """config.json of the run to resume."""
    from gdn_jax.commands.errors import RunError
    from gdn_jax.experiments.runs import RunFolder

    _, config = RunFolder.open(out)
    if config.get("task") != task:
        raise RunError(f"--resume: expected a run of the task {task}, got {config.get('task')} in {out}")
    return config


def _parse(cls: Any, default: Any, argv: list[str], prog: str) -> Any:
    """Options cls[task] of a command line."""
    task = type(default.task)
    return parse(cls[task], argv, prog, default, task.__doc__)


if __name__ == "__main__":
    sys.exit(main())
