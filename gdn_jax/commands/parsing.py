"""Command lines to options: tyro's framed messages become one line."""

import contextlib
import io
from typing import Any


class Usage(Exception):
    """A command line that cannot be parsed."""


class Help(Exception):
    """--help was printed."""


def parse(cls: Any, argv: list[str] | None, prog: str, default: Any, description: str | None) -> Any:
    """Options of type cls.

    Args:
      cls: a dataclass.
      argv: the words after the command; None: those of the process.
      prog: name of the command.
      default: values of what is not given.
      description: text above the options in --help.

    Raises:
      Usage: in one line, what is wrong.
      Help: --help was asked for and has been printed.
    """
    import tyro

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                cls,
                args=argv,
                prog=prog,
                default=default,
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise Help from None
        lines = [line.strip("│╭╰╮╯ ") for line in box.getvalue().splitlines()[1:]]
        rule = next((i for i, line in enumerate(lines) if line and set(line) == {"─"}), len(lines))
        raise Usage(f"{' '.join(lines[:rule])} (see {prog} --help)") from None
