"""`python -m gdn_jax.findings`: makes the pages and figures of results/ again.

    python -m gdn_jax.findings [--no-figures] [RESULTS]

Results and verdicts of claims.json are computed from the runs; README.md, tasks/ and protocol.md follow from it.
table.md and figure.png of each sweep are made again, too.
"""

import json
import sys
from pathlib import Path

from gdn_jax.commands.files import write_text
from gdn_jax.findings import claims, figures
from gdn_jax.findings.pages import Pages
from gdn_jax.findings.records import Results
from gdn_jax.sweeps import report


def main(arguments: list[str]) -> int:
    """Writes everything that follows from runs and claims; returns the exit status."""
    draw = "--no-figures" not in arguments
    [root] = [Path(x) for x in arguments if x != "--no-figures"] or [Path("results")]
    results = Results(root)
    for table, text in results.tables().items():
        write_text(root / table, text)
    for name, place in results.places.items() if draw else ():
        report.draw(root / place.figure, *results.folder(name))
    path = root / "claims.json"
    content = claims.refresh(results, json.loads(path.read_text()))
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    pages = Pages(results, content)
    for name, text in pages.all().items():
        (root / name).parent.mkdir(exist_ok=True)
        write_text(root / name, text)
        print(f"{root / name}: {len(text.split())} words")
    if draw:
        for card in content["cards"]:
            (root / "figures").mkdir(exist_ok=True)
            figures.draw(results, pages.words, card, root / "figures" / f"{card['id']}.png")
        for block in (x for task in content["tasks"].values() for x in task["blocks"]):
            if isinstance(block, dict) and "rates" in block and "figure" in block:
                figures.draw_rates(results, pages.words, block, root)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
