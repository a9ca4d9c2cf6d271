"""The rule by which a claim gets its verdict, and the statistics under it.

A comparison takes two arms seed by seed: a gain is what the arm that the claim favours has more (of bits per byte:
less). It counts the seeds that have learned something in both arms, unless it says `every_seed`. Its interval is the
95 % interval of the mean gain by Student's t, and its p-value that of the same test, two-sided. A comparison is sure
where its p-value passes the procedure of Benjamini and Hochberg at 5 % over all comparisons of the page.

The verdict of a claim, the first of these that holds:

    not tested             no comparison has runs
    not learned by any     no run of any of its comparisons has learned something
    reproduced             every comparison is sure and its gain positive, in a setting that the claim itself names
    reproduced in sign     every comparison is sure and its gain positive, in another setting; or the gain of every
                           single pair of seeds is positive, and there are at least two
    another setting that says little       all else

That of a question of this project:

    shown here             every comparison is sure and its gain positive
    shown in part          every gain is positive, and some comparison is sure
    not shown here         all else
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy.special import stdtr

from gdn_jax.findings.records import Arm, Results
from gdn_jax.sweeps.summary import interval

NOT_TESTED, NOT_LEARNED = "not tested", "not learned by any"
REPRODUCED, IN_SIGN = "reproduced", "reproduced in sign"
SAYS_LITTLE = "another setting that says little"
VERDICTS = (REPRODUCED, IN_SIGN, SAYS_LITTLE, NOT_LEARNED, NOT_TESTED)
SHOWN, SHOWN_IN_PART, NOT_SHOWN = "shown here", "shown in part", "not shown here"
OWN_VERDICTS = (SHOWN, SHOWN_IN_PART, NOT_SHOWN)

FALSE_DISCOVERIES = 0.05
"""Expected part of the sure comparisons that are none, at most."""


class Outcome(NamedTuple):
    """Result of a comparison.

    Fields:
      of, than: learned runs and all runs of the favoured arm and of the other one.
      scores: mean scores of the pairs that count, favoured arm first.
      gains: seed by seed.
    """

    of: tuple[int, int]
    than: tuple[int, int]
    scores: tuple[float, float]
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The mean gain."""
        return statistics.fmean(self.gains)

    @property
    def interval(self) -> float | None:
        """Half of the 95 % t interval of the mean gain, or None for fewer than two pairs."""
        return interval(self.gains) if len(self.gains) > 1 else None

    @property
    def p(self) -> float | None:
        """Two-sided p-value of Student's t test that the mean gain is zero, or None for fewer than two pairs."""
        if len(self.gains) < 2:
            return None
        spread = statistics.stdev(self.gains)
        t = abs(self.gain) * math.sqrt(len(self.gains)) / spread if spread else math.inf
        return float(2 * stdtr(len(self.gains) - 1, -t))

    @property
    def excludes_zero(self) -> bool:
        """Whether the 95 % t interval of the mean gain has no zero in it: such gains are bold."""
        return self.interval is not None and abs(self.gain) > self.interval

    def stored(self) -> dict[str, Any]:
        """The numbers of it that claims.json keeps."""
        kept: dict[str, Any] = {
            "learned": [f"{k} of {n}" for k, n in (self.of, self.than)],
            "pairs": len(self.gains),
        }
        if self.gains:
            kept |= {"scores": [round(x, 4) for x in self.scores], "gain": round(self.gain, 4)}
            kept["positive"] = sum(x > 0 for x in self.gains)
        if self.interval is not None and self.p is not None:
            kept |= {"interval": round(self.interval, 4), "p": float(f"{self.p:.3g}")}
        return kept


def compare(results: Results, comparison: Mapping[str, Any]) -> Outcome | None:
    """Computes a comparison of claims.json; None where an arm has no runs."""
    of, than = ([Arm.of(x) for x in as_list(comparison[side])] for side in ("of", "than"))
    counts, scores, gains = [[0, 0], [0, 0]], ([], []), []
    for pair in zip(of, than, strict=True):
        found = [results.scores(arm, arm.at or str(comparison["at"])) for arm in pair]
        learned = [results.learned(arm) for arm in pair]
        if not all(found):
            continue
        for count, which in zip(counts, learned, strict=True):
            count[0] += sum(which.values())
            count[1] += len(which)
        seeds = [seed for seed in found[0] if seed in found[1]]
        if not comparison.get("every_seed"):
            seeds = [seed for seed in seeds if all(which[seed] for which in learned)]
        better = -1 if results.about(pair[0].sweep).metric == "bpb" else 1
        for side, values in zip(scores, found, strict=True):
            side.extend(values[seed] for seed in seeds)
        gains += [better * (found[0][seed] - found[1][seed]) for seed in seeds]
    if not counts[0][1]:
        return None
    (k, n), (other, all_other) = counts
    means = tuple(statistics.fmean(x) if x else math.nan for x in scores)
    return Outcome((k, n), (other, all_other), (means[0], means[1]), tuple(gains))


def as_list(value: Any) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return value if isinstance(value, list) else [value]


def threshold(p_values: Iterable[float]) -> float:
    """The largest p-value that passes the procedure of Benjamini and Hochberg, 0 where none does."""
    ordered = sorted(p_values)
    passing = (p for i, p in enumerate(ordered, 1) if p <= FALSE_DISCOVERIES * i / len(ordered))
    return max(passing, default=0.0)


def verdict(outcomes: Sequence[Outcome], same_setting: bool, largest_p: float) -> str:
    """The verdict of a claim, by the rule that the file begins with.

    Args:
      outcomes: of its comparisons that have runs.
      same_setting: whether these were made in a setting that the claim itself names.
      largest_p: `threshold` of all comparisons of the page.
    """
    if not outcomes:
        return NOT_TESTED
    if not any(x.of[0] or x.than[0] for x in outcomes):
        return NOT_LEARNED
    if all(_sure(x, largest_p) for x in outcomes):
        return REPRODUCED if same_setting else IN_SIGN
    if all(len(x.gains) > 1 and min(x.gains) > 0 for x in outcomes):
        return IN_SIGN
    return SAYS_LITTLE


def own_verdict(outcomes: Sequence[Outcome], largest_p: float) -> str:
    """The verdict of a question of this project, by the same rule; the arguments are those of `verdict`."""
    if not outcomes:
        return NOT_TESTED
    sure = [_sure(x, largest_p) for x in outcomes]
    if all(sure):
        return SHOWN
    return SHOWN_IN_PART if any(sure) and all(x.gains and x.gain > 0 for x in outcomes) else NOT_SHOWN


def _sure(outcome: Outcome, largest_p: float) -> bool:
    """Whether a gain is surely positive."""
    return outcome.p is not None and outcome.p <= largest_p and outcome.gain > 0
