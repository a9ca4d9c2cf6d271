"""Numbers as the pages print them."""

from collections.abc import Iterator
from pathlib import Path

Checks = Iterator[tuple[str, str, float]]
"""What a number is, as it is printed, and what the runs give."""


def tables(path: Path) -> Iterator[tuple[list[str], list[list[str]], str]]:
    """Head and rows of every table of a page, and the text after it."""
    blocks = path.read_text().split("\n\n")
    for block, after in zip(blocks, [*blocks[1:], ""], strict=True):
        if block.startswith("|"):
            head, _, *rows = (
                [cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()
            )
            yield head, rows, after


def numbers(text: str) -> list[str]:
    return text.split()


def agrees(printed: str, value: float) -> bool:
    """Whether a number as it is printed is a value, rounded."""
    if "e" in printed:
        return f"{value:.2g}" == printed
    digits = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10**-digits + 1e-9
