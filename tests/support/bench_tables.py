"""What a benchmark prints."""

import io

from rich.console import Console

from gdn_jax.bench import benchmark


def run(bench, **console):
    """Exit status, table and progress."""
    out, progress = (Console(file=io.StringIO(), **x) for x in (console, {}))
    return benchmark.run(bench, out, progress), out.file.getvalue(), progress.file.getvalue()


def cells(text):
    """The rows of the Markdown table in a text."""
    lines = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
