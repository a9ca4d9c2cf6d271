"""The `gdn` command.

It imports what it needs after it knows what is asked: a missing package is one line. `gdn_command` answers help.
"""

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gdn_command
from gdn_jax.commands.errors import RunError, one_line, os_line, out_of_memory, printable
from gdn_jax.commands.interrupts import INTERRUPTED, answered
from gdn_jax.commands.parsing import Help, Usage, parse

_NEEDED = {
    "filelock": "filelock",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "tyro": "tyro",
}


def main(argv: list[str] | None = None, begins: Callable[[], object] = lambda: None) -> int:
    """Runs a command line; returns its exit status.

    0 done, 1 what was asked cannot be done, 2 misuse, 130 Ctrl-C.

    Args:
      argv: the words after `gdn`; None: the words of the process.
      begins: called when everything is imported and the command begins.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv, begins)
    except Help:
        return 0
    except Usage as error:
        return _complain(str(error), 2)
    except (RunError, NotImplementedError) as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except OSError as error:
        return _complain(os_line(error), 1)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return _complain(f"out of memory, a smaller model or batch may fit ({one_line(error)})", 1)


def _complain(message: str, status: int) -> int:
    name = (
        "" if message.startswith("gdn ") else "gdn: "
    )  # not where the message begins with the whole command
    print(name + printable(message), file=sys.stderr)
    return status


def _dispatch(argv: list[str], begins: Callable[[], object]) -> int:
    status = gdn_command.answer(argv)
    if status is not None:
        return status
    command, rest = argv[0], argv[1:]
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RunError(f"{', '.join(missing)} not found; install with: pip install 'gdn-jax[experiments]'")
    module, run = _COMMANDS[command]
    if not {"-h", "--help"} & set(rest):  # help needs the options alone
        importlib.import_module(module)
    begins()
    with answered("leaving after what is being computed"):
        return run(rest)


def _bench(argv: list[str]) -> int:
    from gdn_jax.bench import command

    return command.main(argv)


def _check(argv: list[str]) -> int:
    from gdn_jax.checks import check

    return check.main(argv)


def _on_task(start: Callable[[str, list[str]], int], argv: list[str]) -> int:
    """Runs a command whose first word is a task."""
    return start(argv[0], argv[1:])


def _on_path(cls: Any, prog: str, argv: list[str], about: str | None = None) -> tuple[Path, Any]:
    """Reads the path, which is the first word, and options cls; without a path where help is asked for."""
    path, words = (Path(), argv) if argv[0] in ("-h", "--help") else (Path(argv[0]), argv[1:])
    return path, parse(cls, words, prog, cls(), about or cls.__doc__)


def _generate(argv: list[str]) -> int:
    from gdn_jax.inspect.generate import GenerateOptions, generate

    return generate(*_on_path(GenerateOptions, "gdn generate PATH", argv))


def _info(argv: list[str]) -> int:
    from rich.console import Console

    from gdn_jax.inspect.info import ABOUT, InfoOptions, info

    return info(*_on_path(InfoOptions, "gdn info PATH", argv, ABOUT), Console())


def _eval(argv: list[str]) -> int:
    from gdn_jax.inspect.evaluate import EvalOptions, evaluate

    return evaluate(*_on_path(EvalOptions, "gdn eval RUN", argv))


def _train(task: str, argv: list[str]) -> int:
    from rich.console import Console

    from gdn_jax.training import options as options_lib

    default, prog = options_lib.TASKS[task], f"gdn train {task}"
    options = _parse(options_lib.TrainOptions, default, argv, prog)
    run, stored = options.run, None
    if run.resume:
        stored = options_lib.from_json(default, _stored(task, run.out)["options"], run)
        options = _parse(options_lib.TrainOptions, stored, argv, prog)
    elif run.init_from is not None:
        begun = options_lib.from_json(default, _stored(task, run.init_from, "--init-from")["options"], run)
        options = _parse(options_lib.TrainOptions, options_lib.after(begun), argv, prog)
    options_lib.check(options)
    if stored is not None:
        again = f"; a new run from its weights may differ: gdn train {task} --init-from {run.out}"
        options_lib.check_same(stored, options, again)
    from gdn_jax.training.train import train

    return train(options, Console())


def _sweep(task: str, argv: list[str]) -> int:
    from rich.console import Console

    from gdn_jax.sweeps import options as sweep_options
    from gdn_jax.sweeps import settings
    from gdn_jax.training import options as options_lib

    prog = f"gdn sweep {task}"
    options = _parse(sweep_options.SweepOptions, settings.preset(task, "small"), argv, prog)
    given, stored = options.sweep, None
    if given.resume:
        sweep_options.check(options)
        default = stored = settings.stored(task, _stored(f"sweep {task}", given.out)["options"], given)
    elif given.config is not None:
        default = settings.from_file(task, given.config, given)
    else:
        default = settings.preset(task, given.size)
    options = _parse(sweep_options.SweepOptions, default, argv, prog)
    sweep_options.check(options)
    if stored is not None:
        options_lib.check_same(stored, options)
    from gdn_jax.sweeps.sweep import sweep

    return sweep(options, Console(), shlex.join(["gdn", "sweep", task, *argv]))


def _reproduce(argv: list[str]) -> int:
    from rich.console import Console

    from gdn_jax.sweeps.reproduce import ReproduceOptions, reproduce, show_entries

    if not argv:
        return show_entries(Console())
    help_alone = argv[0] in ("-h", "--help")
    if argv[0].startswith("-") and not help_alone:
        raise Usage(f"gdn reproduce: expected the entry before the options, got {argv[0]}")
    words = argv if help_alone else argv[1:]
    doc = ReproduceOptions.__doc__
    options = parse(ReproduceOptions, words, "gdn reproduce NAME", ReproduceOptions(), doc)
    return reproduce(argv[0], options, Console(), shlex.join(["gdn", "reproduce", *argv]))


def _stored(task: str, out: Path | None, flag: str = "--resume") -> dict[str, Any]:
    """Reads config.json of the run that an option names."""
    from gdn_jax.training.runs import RunFolder

    _, config = RunFolder.open(out)
    if config.get("task") != task:
        raise RunError(f"{flag}: expected a run of the task {task}, got {config.get('task')} in {out}")
    return config


def _parse(cls: Any, default: Any, argv: list[str], prog: str) -> Any:
    """Reads options cls[task] off a command line."""
    task = type(default.task)
    return parse(cls[task], argv, prog, default, task.__doc__)


_COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "train": ("gdn_jax.training.train", partial(_on_task, _train)),
    "generate": ("gdn_jax.inspect.generate", _generate),
    "info": ("gdn_jax.inspect.info", _info),
    "eval": ("gdn_jax.inspect.evaluate", _eval),
    "sweep": ("gdn_jax.sweeps.sweep", partial(_on_task, _sweep)),
    "reproduce": ("gdn_jax.sweeps.reproduce", _reproduce),
    "check": ("gdn_jax.checks.check", _check),
    "bench": ("gdn_jax.bench.command", _bench),
}
"""Commands: the module that takes longest to import, and the function that runs what `gdn_command.answer` leaves."""


if __name__ == "__main__":
    sys.exit(main())
