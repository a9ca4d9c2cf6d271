"""Tables: on a console as wide as a terminal, in a file or a pipe as wide as they need to be; and in Markdown."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_WIDEST = 10_000  # characters of a line


def print_whole(console: Console, table: Table | str) -> None:
    """Prints a table, or the text in its place; what is no terminal takes a table whose cells are whole."""
    if not console.is_terminal:
        needed = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
        console.width = max(console.width, needed)
    console.print(table, highlight=False, soft_wrap=isinstance(table, str))


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
