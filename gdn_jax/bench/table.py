"""The table of results: text that fits a terminal, or Markdown."""

from typing import Any


def table(keys: list[str], rows: list[dict[str, Any]], width: int | None = None) -> str:
    """A table of the rows, with a column for each text or number in them, in the order in which they come.

    Args:
      keys: names of values that say what a row is about; they come first, aligned to the left.
      rows: values by name; not every row needs all. Lists and the like are left out.
      width: of the terminal. A table that is wider is cut into several with the same keys, and keys that are the same
        in all rows are said once above it. None: the whole table as Markdown.
    """
    names = dict.fromkeys(name for row in rows for name in (*keys, *row))
    cells = {name: [_cell(row.get(name)) for row in rows] for name in names}
    cells = {name: column for name, column in cells.items() if any(column)}
    said, keys = [], [name for name in keys if name in cells]
    if width is not None and len(rows) > 1:
        same = [name for name in keys if len(set(cells[name])) == 1]
        said = [", ".join(f"{name} {cells.pop(name)[0]}" for name in same)] if same else []
        keys = [name for name in keys if name not in same]
    sizes = {name: max(3, *map(len, (name, *column))) for name, column in cells.items()}
    blocks = [[*keys]]
    for name in (name for name in cells if name not in keys):
        wide = sum(sizes[x] + 2 for x in (*blocks[-1], name)) - 2
        if width is not None and wide > width and len(blocks[-1]) > len(keys):
            blocks.append([*keys])
        blocks[-1].append(name)

    def line(block: list[str], texts: tuple[str, ...]) -> str:
        pairs = zip(block, texts, strict=True)
        padded = [x.ljust(sizes[name]) if name in keys else x.rjust(sizes[name]) for name, x in pairs]
        return f"| {' | '.join(padded)} |" if width is None else "  ".join(padded).rstrip()

    def text(block: list[str]) -> str:
        rule = tuple("-" * sizes[name] if name in keys else "-" * (sizes[name] - 1) + ":" for name in block)
        body = zip(*(cells[name] for name in block), strict=True)
        return "\n".join(line(block, x) for x in (tuple(block), *([rule] if width is None else ()), *body))

    return "\n\n".join([*said, *map(text, blocks)])


def _cell(x: Any) -> str:
    """Numbers with four digits, and two of those that are very small."""
    if isinstance(x, float):
        return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.4g}" if abs(x) >= 1e-3 or x == 0 else f"{x:.1e}"
    return str(x) if isinstance(x, int | str) else ""
