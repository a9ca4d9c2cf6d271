"""Tables of sentences, of which style.css makes cards on a narrow screen: each cell gets the name of its column."""

import html
import itertools
import re

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CELL = r"<{}\b[^>]*>(.*?)</{}>"
LONG = 60
"""Letters of the longest cell from which on a table is one of sentences."""


def named_cells(page: str) -> str:
    """The HTML of a page: tables of sentences have the attribute data-sentences, and their cells data-column."""
    return TABLE.sub(lambda match: _named(match[0]), page)


def _named(table: str) -> str:
    columns, cells = (
        [_words(x) for x in re.findall(CELL.format(tag, tag), table, re.DOTALL)] for tag in ("th", "td")
    )
    if len(columns) < 3 or max(map(len, cells), default=0) < LONG:
        return table
    names = itertools.cycle(columns)
    named = re.sub(r"<td\b", lambda _: f'<td data-column="{html.escape(next(names))}"', table)
    return named.replace("<table", "<table data-sentences", 1)


def _words(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()
