"""PYTHONPATH=$PWD python .gpu/findings/page.py RESULT...: the rows of results/README.md that a merged folder gives, and every
difference between its mixers in standard errors with the comment that derives it. Run from the repository root."""
import sys
sys.path.insert(0, "tests")
import itertools
import numpy as np
import test_results as t
from gdn_jax.experiments.mixers import MIXERS

for name in sys.argv[1:]:
    config, lines = t.folder(name)
    mixers = [m for m in MIXERS if m in config["options"]["mixers"]]
    scores = t.scores(name)
    sizes = [n for n in scores[mixers[0], 1] if n != "validation"]
    print(f"\n| sweep | asked at | {' | '.join(MIXERS[m].label for m in mixers)} |\n|{'---|' * (len(mixers) + 2)}")
    for n in sizes:
        print(f"| [full]({name}/table.md) | {n} | " + " | ".join(t.cell(scores[m, 1][n], 1) for m in mixers) + " |")
    run = f"{sum(x['wall']['seconds'] for x in lines):.0f}"
    print(f"\n| [{name}]({name}/table.md) | `{config['command']}` | H200 | {len(lines)} | {run} |\n")
    for n, (a, b) in itertools.product(sizes, itertools.combinations(mixers, 2)):
        d = t.differences(name, a, b, n)
        with np.errstate(all="ignore"):
            s = np.mean(d) / t.error(d)
        sure = "SURE" if abs(s) > 3 else ""
        print(f"{n:>5} {a} - {b}: {np.mean(d):6.1f} ± {t.error(d):.1f} {sure} seeds {[round(float(x), 1) for x in d]} <!-- {abs(s):.1f}: sigmas({[name, a, b, int(n)]!r}) -->".replace("sigmas([", "sigmas(").replace("])", ")").replace("'", '"'))
