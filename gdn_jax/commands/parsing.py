"""Options of a command line. An error of tyro's becomes one line."""

import contextlib
import io
import keyword
import re
import shutil
import sys
import textwrap
from typing import Any

_WORDS = "|".join(keyword.kwlist)
_KEYWORD = re.compile(rf"^(--(?:{_WORDS}))(=|$)")
_FIELD = re.compile(rf"(--(?:{_WORDS}))_(?=\W)")
"""Options named by a word of Python, whose fields have a "_" behind it, as they are typed and as tyro knows them."""


class Usage(Exception):
    """A command line that cannot be parsed."""


class Help(Exception):
    """--help was printed."""


def parse(
    cls: Any,
    argv: list[str] | None,
    prog: str,
    default: Any,
    description: str | None,
    helped_by: str | None = None,
) -> Any:
    """Reads options of type cls off a command line.

    Args:
      cls: a dataclass.
      argv: the words after the command; None: the words of the process.
      prog: name of the command.
      default: values of what is not given.
      description: text above the options in --help.
      helped_by: name of the command whose --help has these options; None: the command itself.

    Raises:
      Usage: in one line, what is wrong.
      Help: --help was asked for and has been printed.
    """
    import tyro

    argv = [_KEYWORD.sub(r"\1_\2", word) for word in (sys.argv[1:] if argv is None else argv)]
    plain = io.StringIO()  # it has no encoding, so that tyro writes lines between its sections and no boxes
    try:
        with contextlib.redirect_stdout(plain), contextlib.redirect_stderr(plain):
            return tyro.cli(
                cls,
                args=argv,
                prog=prog,
                default=default,
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        text = _FIELD.sub(r"\1", plain.getvalue())
        if not stop.code:
            width = shutil.get_terminal_size().columns
            print(*(_wrapped(line, width) for line in text.splitlines()), sep="\n")
            raise Help from None
        _, message, *_ = re.split(r"\n *-+ *\n", text)
        raise Usage(f"{_with_values(' '.join(message.split()))} (see {helped_by or prog} --help)") from None


def _with_values(message: str) -> str:
    """Puts the values of options that there are not, which tyro lists as options, next to them."""
    said, unknown, words = message.partition("Unrecognized options: ")
    return said + unknown + re.sub(r", (?!-)", " ", words)


def _wrapped(line: str, width: int) -> str:
    """Breaks a line of text between words; the lines of a table of options, which are indented, stay."""
    return line if line.startswith(" ") else textwrap.fill(line, width, break_on_hyphens=False)
