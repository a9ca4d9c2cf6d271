"""What a comparison of runs gives, and the rule by which a claim gets its verdict.

A comparison takes two arms seed by seed: a gain is what the arm that the claim favours has more (of bits per byte and
of steps: less). Its interval is the 95 % interval of the mean gain by Student's t, its p-value is that of the same
test, two-sided. A gain is significant where its p-value passes the procedure of Benjamini and Hochberg at 5 % over
all tests of the pages.

No test is made of three kinds of comparisons: of one seed at several learning rates, because rates are no replicates;
of seeds that were added after a look at the first, where fewer than three were added (else those alone are tested);
and of a measure that was chosen after the runs were seen (`post_hoc`), which is shown with its interval.

A comparison is at the floor where no run of either arm gets further than a tenth of the way from a guess to a perfect
score. The verdict of a claim of a paper is the first of these that holds:

    not tested              no comparison has runs
    at the floor            every comparison is at the floor: nobody learned what is asked
    contradicted            some gain is significant and negative ("in part" where another one is significant and
                            positive)
    reproduced              every gain that has seeds is significant and positive, none is at the floor, and the
                            setting is one that the claim names
    reproduced in sign      the same in another setting; or the gain of every single pair of seeds is positive, of at
                            least two in each comparison
    contradicted in one seed     at every learning rate of the one seed the favoured arm is behind (or the rule that
                            should fail does not), in some comparison of one seed, and in none of them the opposite
    undecided               all else

A contradiction in another setting than that of the claim says what differs. The verdict of a question of our own:

    exploratory             every comparison was chosen after the runs were seen
    the opposite is shown   some gain is significant and negative, none is significant and positive
    shown                   every gain is significant and positive
    shown in part           every gain is positive, and some are significant
    shown at first, not confirmed    every gain is positive, of the first seeds with an interval that excludes zero
                            and of those that were added without significance
    not shown               all else
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scipy.special import stdtr

from gdn_jax.sweeps.summary import interval
from results.pages.stored import HALF, Arm, Results

NOT_TESTED, AT_FLOOR = "not tested", "at the floor"
CONTRADICTED, IN_PART, IN_ONE_SEED = "contradicted", "contradicted in part", "contradicted in one seed"
REPRODUCED, IN_SIGN, UNDECIDED = "reproduced", "reproduced in sign", "undecided"
SHOWN, SHOWN_IN_PART, NOT_SHOWN = "shown", "shown in part", "not shown"
OPPOSITE, EXPLORATORY, NOT_CONFIRMED = "the opposite is shown", "exploratory", "shown at first, not confirmed"

FALSE_DISCOVERIES = 0.05
"""Expected part of the significant gains that are none, at most."""
FLOOR = 0.1
"""Part of the way from a guess to a perfect score up to which nothing has been learned."""
FEWEST_ADDED = 3
"""Seeds added after a look at the first ones that are tested by themselves."""


class Gains(NamedTuple):
    """Result of a comparison seed by seed.

    Fields:
      of, than: learned runs and all runs of the favoured arm and of the other one.
      scores: mean scores of the pairs that count, favoured arm first.
      gains: of the pairs that count.
      earlier: gains of the seeds that were there before those that count were added.
      tested: whether the gains are tested.
      at_floor: whether both arms are at the floor.
    """

    of: tuple[int, int]
    than: tuple[int, int]
    scores: tuple[float, float]
    gains: tuple[float, ...]
    earlier: tuple[float, ...] = ()
    tested: bool = True
    at_floor: bool = False

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
        return self.tested and self.interval is not None and abs(self.gain) > self.interval

    def sign(self, largest_p: float) -> int:
        """1 or -1 for a gain that is significant, else 0; `largest_p` is that of `threshold`."""
        if not self.tested or self.p is None or self.p > largest_p or not self.gain:
            return 0
        return 1 if self.gain > 0 else -1

    @property
    def all_positive(self) -> bool:
        """Whether the gain of every single pair is positive, of at least two."""
        return len(self.earlier + self.gains) > 1 and min(self.earlier + self.gains) > 0


class Rates(NamedTuple):
    """Result of a comparison of one seed at several learning rates.

    Fields:
      of, than: learned runs and all runs of the favoured arm and of the other one.
      scores: both scores by learning rate, favoured arm first.
      lower_is_better: of bits per byte.
      at_floor: whether both arms are at the floor.
    """

    of: tuple[int, int]
    than: tuple[int, int]
    scores: dict[float, tuple[float, float]]
    lower_is_better: bool = False
    at_floor: bool = False

    @property
    def best(self) -> tuple[float, float]:
        """The best score of each arm, whatever its rate: the rule of papers that show their best run."""
        one, other = zip(*self.scores.values(), strict=True)
        choose = min if self.lower_is_better else max
        return choose(one), choose(other)

    @property
    def everywhere(self) -> int:
        """1 where the favoured arm is ahead at every rate, -1 where it is behind at every one, else 0."""
        better = -1 if self.lower_is_better else 1
        gains = [better * (one - other) for one, other in self.scores.values()]
        return 1 if min(gains) > 0 else -1 if max(gains) < 0 else 0


Outcome = Gains | Rates


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two arms of the same seeds.

    Fields:
      name: what is compared, in words.
      of, than: the arm that the claim favours, and the other one.
      at: size of the test, "validation", or `HALF` for the steps after which half of the first kind is right, of
        seeds that come to that in both arms.
      every_seed: count the seeds that have learned nothing, too: where learning is the question.
      first: number of seeds that were there before others were added; None: all were run at once.
      post_hoc: the measure was chosen after the runs were seen.
    """

    name: str
    of: Arm
    than: Arm
    at: int | str
    every_seed: bool = False
    first: int | None = None
    post_hoc: bool = False

    def outcome(self, results: Results) -> Gains | None:
        """Compares the arms; None where one has no runs."""
        one, other = (results.scores(arm, str(self.at)) for arm in (self.of, self.than))
        if not one or not other:
            return None
        learned = [results.learned(arm) for arm in (self.of, self.than)]
        counts = [(sum(x.values()), len(x)) for x in learned]
        seeds = [seed for seed in one if seed in other]
        if not self.every_seed:
            seeds = [seed for seed in seeds if all(which[seed] for which in learned)]
        if self.at == HALF:
            seeds = [seed for seed in seeds if math.isfinite(one[seed]) and math.isfinite(other[seed])]
        better = -1 if self.at == HALF or results.about(self.of.sweep).metric == "bpb" else 1
        tested, earlier = not self.post_hoc, []
        if self.first is not None:
            before, added = seeds[: self.first], seeds[self.first :]
            if len(added) >= FEWEST_ADDED:
                earlier, seeds = before, added
            else:
                tested = False
        means = [statistics.fmean(x[seed] for seed in seeds) if seeds else math.nan for x in (one, other)]
        gains, of_earlier = (
            tuple(better * (one[seed] - other[seed]) for seed in part) for part in (seeds, earlier)
        )
        floor = self.at != HALF and at_floor(results, self.of.sweep, [*one.values(), *other.values()])
        return Gains(counts[0], counts[1], (means[0], means[1]), gains, of_earlier, tested, floor)


@dataclasses.dataclass(frozen=True)
class Fails:
    """An arm of one seed at several learning rates, of which a claim says that it fails: by halfway from a guess.

    Its outcome has the score halfway from a guess to 100 % in the place of the favoured arm.
    """

    name: str
    than: Arm
    at: int | str

    def outcome(self, results: Results) -> Rates | None:
        """Puts the arm beside the halfway mark, rate by rate; None where it has no runs."""
        halfway = 50 + 50 * max(results.about(self.than.sweep).baselines.values())
        scores = {
            lr: (halfway, score)
            for lr in results.rates(self.than)
            for score in results.scores(self.than._replace(lr=lr), str(self.at)).values()
        }
        return Rates((0, 0), (len(scores), len(scores)), scores) if scores else None


@dataclasses.dataclass(frozen=True)
class OneSeed:
    """Two arms of one seed, at several learning rates; the fields are as of `Comparison`."""

    name: str
    of: Arm
    than: Arm
    at: int | str

    def outcome(self, results: Results) -> Rates | None:
        """Puts the arms beside each other, rate by rate; None where one has no runs."""
        found: list[dict[float, float]] = []
        counts: list[tuple[int, int]] = []
        for arm in (self.of, self.than):
            rates = {}
            learned = 0
            for lr in results.rates(arm):
                scores = results.scores(arm._replace(lr=lr), str(self.at))
                if len(scores) != 1:
                    raise ValueError(f"{self.name}: expected one seed a rate, got {[*scores]} at {lr}")
                [rates[lr]] = scores.values()
                learned += sum(results.learned(arm._replace(lr=lr)).values())
            found.append(rates)
            counts.append((learned, len(rates)))
        one, other = found
        both = {lr: (score, other[lr]) for lr, score in one.items() if lr in other}
        if not both:
            return None
        floor = at_floor(results, self.of.sweep, [x for pair in both.values() for x in pair])
        lower = results.about(self.of.sweep).metric == "bpb"
        return Rates(counts[0], counts[1], both, lower, floor)


def at_floor(results: Results, sweep: str, scores: Sequence[float]) -> bool:
    """Whether no score gets further than a tenth of the way from a guess to 100 %; losses have no floor."""
    about = results.about(sweep)
    if not about.percent:
        return False
    guess = 100 * max(about.baselines.values())
    return max(scores) <= guess + FLOOR * (100 - guess)


def threshold(p_values: Iterable[float]) -> float:
    """The largest p-value that passes the procedure of Benjamini and Hochberg, 0 where none does."""
    ordered = sorted(p_values)
    passing = (p for i, p in enumerate(ordered, 1) if p <= FALSE_DISCOVERIES * i / len(ordered))
    return max(passing, default=0.0)


def verdict(outcomes: Sequence[Outcome], same_setting: bool, largest_p: float, differs: str = "") -> str:
    """The verdict of a claim, by the rule that the file begins with.

    Args:
      outcomes: of its comparisons that have runs.
      same_setting: whether these were made in a setting that the claim itself names.
      largest_p: `threshold` of all tests of the pages.
      differs: what is otherwise in ours, in a few words.
    """
    if not outcomes:
        return NOT_TESTED
    if all(x.at_floor for x in outcomes):
        return AT_FLOOR
    signs = [0 if x.at_floor else x.sign(largest_p) for x in outcomes if isinstance(x, Gains)]
    if -1 in signs:
        setting = "" if same_setting else f" in another setting: {differs}"
        return (IN_PART if 1 in signs else CONTRADICTED) + setting
    if signs and all(sign == 1 for sign in signs):
        return REPRODUCED if same_setting else IN_SIGN
    if signs and all(x.all_positive and not x.at_floor for x in outcomes if isinstance(x, Gains)):
        return IN_SIGN
    everywhere = [x.everywhere for x in outcomes if isinstance(x, Rates) and not x.at_floor]
    if 1 not in signs and -1 in everywhere and 1 not in everywhere:
        return IN_ONE_SEED + ("" if same_setting else f", another setting: {differs}")
    return UNDECIDED


def own_verdict(outcomes: Sequence[Outcome], largest_p: float, post_hoc: bool = False) -> str:
    """The verdict of a question of our own, by the same rule; the arguments are those of `verdict`."""
    if not outcomes:
        return NOT_TESTED
    if all(x.at_floor for x in outcomes):
        return AT_FLOOR
    if post_hoc:
        return EXPLORATORY
    gains = [x for x in outcomes if isinstance(x, Gains)]
    signs = [0 if x.at_floor else x.sign(largest_p) for x in gains]
    if -1 in signs and 1 not in signs:
        return OPPOSITE
    if gains and all(sign == 1 for sign in signs):
        return SHOWN
    if not gains or not all(x.gains and x.gain > 0 for x in gains):
        return NOT_SHOWN
    if 1 in signs:
        return SHOWN_IN_PART
    at_first = all(len(x.earlier) > 1 and statistics.fmean(x.earlier) > interval(x.earlier) for x in gains)
    return NOT_CONFIRMED if at_first else NOT_SHOWN
