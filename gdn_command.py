"""The `gdn` command as it is installed: it answers help and wrong first words at once, and Ctrl-C with one line.

It lies next to the packages because importing anything inside `gdn_jax` imports JAX first, which takes seconds.
"""

import difflib
import importlib.util
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

TASKS = {
    "bytes": "next-byte modelling of real text",
    "tokens": "fine-tuning of a Hugging Face checkpoint, --from FOLDER, on real text; gdn train alone",
    "recall": "multi-query associative recall",
    "needle": "a few values in a haystack of noise or text, at lengths beyond training",
    "sentence": "a sentence in a long text that says what is asked for at its end, in bytes",
    "parity": "parity of the bits so far, at lengths beyond training",
    "permutation": "product of the permutations so far, at lengths beyond training",
    "copy": "repeating a sequence",
    "palindrome": "repeating a sequence backwards",
    "stack": "what is popped off several stacks",
    "scope": "names whose values go when their scope closes",
    "eviction": "names whose values go when other names get one",
}
"""What `gdn train` trains on, in words. A sweep has fresh models, and so all tasks but tokens."""
_LISTED = "\n".join(f"         {name:13} {words}" for name, words in TASKS.items())

USAGE = f"""usage: gdn COMMAND ...

  gdn train TASK     train a model on a task
  gdn generate PATH  continue a prompt with the model of a run folder of gdn train bytes, or with a Hugging Face
                     checkpoint of a hybrid model
  gdn info PATH      layers, parameters, cache and costs of such a checkpoint, of the model of a run or of a preset
  gdn eval RUN       bits per byte of a text under the model of such a run
  gdn sweep TASK     compare token mixers on a task: every mixer with several seeds and learning rates
  gdn reproduce NAME run a published setting, with the paper's numbers next to ours; without NAME, what there is
  gdn check          compare the implementations of the rule on this device with the definition
  gdn bench NAME     time a part of the library on this device, the rule without NAME; names: gdn bench --help

  tasks:{_LISTED.removeprefix("        ")}

Every command has --help. gdn --version prints the version.
"""

BENCHMARKS = {
    "rule": "rule",
    "kernels": "kernels",
    "parts": "parts",
    "step": "step",
    "generate": "generate",
    "decode": "decode",
    "prefill": "prefill",
    "serve": "serve",
    "scale": "scale",
    "devices": "devices",
    "all": "whole",
}
"""What `gdn bench` times, and the module of `gdn_jax.bench` whose first line says what that is."""

FIRST_WORDS = {
    "train": (*TASKS,),
    "generate": "a run folder",
    "info": "a run folder",
    "eval": "a run folder",
    "sweep": tuple(task for task in TASKS if task != "tokens"),
    "reproduce": None,
    "check": None,
    "bench": (*BENCHMARKS,),
}
"""The commands with their first words: one of several names, a thing in words, or None: the command checks it."""


def main() -> int:
    """Runs the command line of this process; see `gdn_jax.commands.cli`."""
    status = answer(sys.argv[1:])
    if status is not None:
        return status
    before = signal.signal(signal.SIGINT, _leave)
    from gdn_jax.commands import cli

    return cli.main(begins=lambda: signal.signal(signal.SIGINT, before))


def answer(argv: list[str]) -> int | None:
    """Answers what needs no package: help, the version, and first words that cannot be.

    Returns:
      the exit status, or None: the command line is for `gdn_jax.commands.cli`.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv == ["--version"]:
        print(f"gdn-jax {_version()}")
        return 0
    command, first = argv[0], argv[1] if len(argv) > 1 else None
    if command not in FIRST_WORDS:
        return _refuse(f"gdn: expected a command {_named(FIRST_WORDS, command)} (see gdn --help)")
    expected, wants_help = FIRST_WORDS[command], bool({"-h", "--help"} & {*argv})
    if command == "bench":
        if first in ("-h", "--help"):
            print(_benchmarks(), end="")
            return 0
        if first is not None and not first.startswith("-") and first not in BENCHMARKS:
            return _refuse(f"gdn bench: expected a benchmark {_named(BENCHMARKS, first)}")
    elif isinstance(expected, tuple):
        if first in ("-h", "--help"):
            print(USAGE, end="")
            return 0
        if first not in expected:
            return _refuse(f"gdn {command}: expected a task {_named(expected, first)}")
    elif isinstance(expected, str):
        if first is None:
            return _refuse(f"gdn {command}: expected {expected}, got none (see gdn {command} --help)")
        if first.startswith("-") and not wants_help:
            return _refuse(f"gdn {command}: expected the run folder before the options, got {first}")
    rest = argv[1:] if command == "check" or first is None or first.startswith("-") else argv[2:]
    if unknown := "" if wants_help else _unknown(rest):
        named = [command, first] if isinstance(expected, tuple) else [command]
        if command == "bench" and rest == argv[1:]:
            named[1] = "rule"
        return _refuse(f"gdn: Unrecognized options: {unknown} (see gdn {' '.join(named)} --help)")
    return None


def _benchmarks() -> str:
    """The help of `gdn bench`: every name with the first line of its module, which is read and not imported."""
    lines = []
    for name, module in BENCHMARKS.items():
        with (_package() / "bench" / f"{module}.py").open(encoding="utf-8") as text:
            lines.append(f"  {name:9} {text.readline().strip().strip('"')}\n")
    every = "".join(lines)
    return f"""usage: gdn bench [NAME] ...

{every}
Without NAME it is rule. gdn bench NAME --help has the options of each.
"""


def _unknown(words: list[str]) -> str:
    """Options of a command line that no command has, with their values, and words before the first option.

    An option is a field of a class of the package. This function does not ask which class a command reads, so an
    option of another command is refused after the imports.
    """
    starts = [at for at, word in enumerate(words) if word.startswith("--")]
    stray = words[: starts[0]] if starts else words
    wrong = [] if any(word.startswith("-") for word in stray) else stray
    typed = [words[at:end] for at, end in zip(starts, [*starts[1:], None], strict=False)]
    if not typed:
        return ", ".join(wrong)
    files = (file.read_text(encoding="utf-8") for file in _package().rglob("*.py"))
    names = {name for text in files for name in re.findall(r"^    ([a-z]\w*): ", text, re.MULTILINE)}
    known = {name.rstrip("_").replace("_", "-") for name in names}
    for option in typed:
        name = option[0].partition("=")[0].removeprefix("--").replace("_", "-")
        if not {name, name.removeprefix("no-")} & known:
            wrong.append(" ".join(option))
    return ", ".join(wrong)


def _package() -> Path:
    """The folder of the package that would be imported, installed or not, found without importing it."""
    spec = importlib.util.find_spec("gdn_jax")
    assert spec is not None and spec.origin is not None, "gdn_jax is installed with this module"
    return Path(spec.origin).parent


def _version() -> str:
    """The `__version__` of that package."""
    text = (_package() / "__init__.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return version


def _named(names: Any, got: str | None) -> str:
    """What a word may be, what it is, and the name that it nearly is."""
    *others, last = names
    near = difflib.get_close_matches(got or "", names, 1, 0.75)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{', '.join(others)} or {last}, got {got or 'none'}{meant}"


def _refuse(message: str) -> int:
    """Prints misuse in one line, with escapes of Python for what a terminal would obey; returns the exit status."""
    print(
        "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split())), file=sys.stderr
    )
    return 2


def _leave(number: int, frame: Any) -> None:
    """Ends the process at once: nothing has begun, and an exception may get lost in what imports call back."""
    print("gdn: interrupted while importing", file=sys.stderr, flush=True)
    os._exit(130)
