"""Every learning rate of sweeps with one seed, for papers that show their best run.

A block of a page that asks for them has

    rates      a sweep (see `Arm`)
    starts     perhaps sweeps of some of its mixers from another write strength: pairs of name and strength
    mixers     whose runs are shown, in this order
    at         sizes of the test; the rates apart are at the last of them
    figure     perhaps `path`, `title` and `caption` of a picture
"""

import itertools
from typing import Any, NamedTuple

from gdn_jax.findings.records import Results
from gdn_jax.findings.words import Words
from gdn_jax.training.mixers import MIXERS


class Rates(NamedTuple):
    """The runs of a mixer at a scale, which differ in their learning rate.

    Fields:
      mixer, scale, start: as in `Arm`.
      best: best score of all rates at each size of the test.
      scores: score by learning rate at the last size.
    """

    mixer: str
    scale: int
    start: float | None
    best: list[float]
    scores: dict[float, float]

    @property
    def label(self) -> str:
        """The mixer, and where its writes start if that is not where they usually do."""
        return MIXERS[self.mixer].label + ("" if self.start is None else f" from {self.start:g}")


def rows(results: Results, words: Words, block: dict[str, Any]) -> list[Rates]:
    """Makes the rows that a block asks for; other starts stand below those of the same mixer and scale."""
    sweeps: list[tuple[str, float | None]] = [(block["rates"], None), *map(tuple, block.get("starts", ()))]
    found = []
    for mixer, (sweep, start) in itertools.product(block["mixers"], sweeps):
        lines = [line for line in results.lines(sweep) if line["mixer"] == mixer]
        for scale in sorted({line["scale"] for line in lines}):
            best = [words.best(sweep, mixer, at, scale, start) for at in block["at"]]
            rates = sorted({line["lr"] for line in lines if line["scale"] == scale})
            scores = {lr: words.seeds(sweep, mixer, block["at"][-1], scale, lr, start)[0] for lr in rates}
            found.append(Rates(mixer, scale, start, best, scores))
    return sorted(found, key=lambda row: (block["mixers"].index(row.mixer), row.scale))
