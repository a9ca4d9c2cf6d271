"""Random calls: legal ones against the float64 oracle, and illegal ones, which must say what is wrong.

Among the legal ones are the family's, products and the adapters'. Offsets, ids and slots have integer dtypes of all
widths.

    python tests/fuzz/run.py [--seed 0] [--legal 1000] [--served 300] [--illegal 500] [--implementation mosaic_gpu]

Prints every finding with the seed that repeats it, and a summary; the status is 1 where anything was found. The legal
calls, to which those over pools come, take a quarter of a second each on two cores, and the illegal ones a
millisecond. On a GPU of compute capability 9.0 the implementation "mosaic_gpu" runs the kernels, and there and on the
others that have them "mosaic_mma" those by mma.sync, which no pool has.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.illegal import illegal
from fuzz.legal import legal
from fuzz.served import served


def _run(kind: str, calls: Iterator[tuple[str, list[str]]]) -> int:
    """Prints what was found and returns how many calls found something."""
    start, count, found = time.perf_counter(), 0, 0
    for name, wrong in calls:
        count += 1
        if wrong:
            found += 1
            print(f"{name}\n    " + "\n    ".join(wrong), flush=True)
    print(f"{kind}: {count} calls, {found} with findings, {time.perf_counter() - start:.0f} s", flush=True)
    return found


def main() -> int:
    """The campaign; how many calls found something, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--legal", type=int, default=1000, help="calls of the rule, its family and adapters")
    parser.add_argument("--served", type=int, default=300, help="calls over pools")
    parser.add_argument("--illegal", type=int, default=500)
    parser.add_argument("--implementation", choices=["plain", "mosaic_gpu", "mosaic_mma"], default="plain")
    o = parser.parse_args()
    forms = ("chunked", "recurrent") if o.implementation == "plain" else (o.implementation,)
    found = _run("illegal", illegal(o.seed, o.illegal))
    found += _run("legal", legal(o.seed, o.legal, forms))
    found += _run("served", served(o.seed, o.served, o.implementation == "mosaic_gpu"))
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
