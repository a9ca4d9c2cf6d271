"""`python -m results.pages`: makes the pages, tables and figures of results/ again from the stored runs.

python -m results.pages [--no-figures] [RESULTS]
"""

import sys
from pathlib import Path

from gdn_jax.commands.files import write_text
from gdn_jax.sweeps import report
from results.pages import evidence, figures, protocol, readme
from results.pages.numbers import Numbers
from results.pages.tasks import needle, parity, recall, text, words

PAGES = {
    "README.md": readme.page,
    "protocol.md": protocol.page,
    "tasks/needle.md": needle.page,
    "tasks/parity.md": parity.page,
    "tasks/recall.md": recall.page,
    "tasks/text.md": text.page,
    "tasks/words.md": words.page,
} | evidence.PAGES
"""Pages by their path in the results."""


def main(arguments: list[str]) -> int:
    """Writes everything that follows from the runs; returns the exit status."""
    draw = "--no-figures" not in arguments
    [root] = [Path(x) for x in arguments if x != "--no-figures"] or [Path("results")]
    numbers = Numbers(root)
    for path, made in (numbers.tables() | {path: page(numbers) for path, page in PAGES.items()}).items():
        (root / path).parent.mkdir(exist_ok=True)
        write_text(root / path, made)
    for name, place in numbers.places.items() if draw else ():
        if place.figure not in figures.DRAWN:
            report.draw(root / place.figure, *numbers.folder(name))
    for path, drawn in figures.DRAWN.items() if draw else ():
        (root / path).parent.mkdir(exist_ok=True)
        drawn(numbers, root / path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
