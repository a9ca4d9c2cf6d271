"""Computes numbers of the pages again from the stored runs: `python -m results.recompute [--count 20] [--seed 0]`.

It shares no code with the pages, and needs the standard library alone. It reads the tables of README.md, claims/*.md
and tasks/*.md and the sentences that findings rest on, draws numbers of them at random, computes each from the lines
of runs.jsonl, and fails if one differs.
"""

import argparse
import random
import sys

from results.recompute.claims import of_claims
from results.recompute.findings import of_findings
from results.recompute.printed import agrees
from results.recompute.sentences import of_sentences
from results.recompute.tasks import of_tasks


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="numbers that are drawn; 0: all of them")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the draw; without it another draw every time"
    )
    options = parser.parse_args(arguments)
    pool = [*of_claims(), *of_findings(), *of_tasks(), *of_sentences()]
    drawn = random.Random(options.seed).sample(pool, options.count) if options.count else pool
    wrong = 0
    for where, printed, value in drawn:
        right = agrees(printed, value)
        wrong += not right
        if options.count or not right:
            print(f"{'ok' if right else 'DIFFERS'}: {where}: {printed}, recomputed {value:.6g}")
    print(f"{len(drawn) - wrong} of {len(drawn)} numbers agree, of {len(pool)} in the pages")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
