"""Numbers of the stored runs, and the words in which pages say them."""

import functools
import math
import statistics
from pathlib import Path
from typing import Any

from gdn_jax.inspect.analysis import memory_horizon
from results.pages.claim import Claim
from results.pages.claims import CLAIMS
from results.pages.questions import OWN
from results.pages.stored import Arm, Results, begins
from results.pages.verdicts import Comparison, Fails, Gains, OneSeed, Outcome, own_verdict, threshold, verdict


class Numbers(Results):
    """The stored runs, with what pages say of them.

    Scores are in % or in bits per byte. Arguments are those of `Arm`, and `at` is the size of a test.
    """

    def __init__(self, root: Path):
        super().__init__(root)
        self.outcomes = {
            f"{claim.id}.{key}": comparison.outcome(self)
            for claim in (*CLAIMS, *OWN)
            for key, comparison in claim.comparisons.items()
        }

    def seeds(self, sweep: str, mixer: str, at: int | str, scale=1, lr=None, start=None) -> list[float]:
        """Scores of the seeds."""
        return [*self.scores(Arm(sweep, mixer, scale, lr, start), str(at)).values()]

    def ascending(self, *which: Any) -> list[float]:
        """Scores of the seeds, the lowest first."""
        return sorted(self.seeds(*which))

    def lowest(self, *which: Any) -> float:
        """The lowest score of the seeds."""
        return min(self.seeds(*which))

    def highest(self, *which: Any) -> float:
        """The highest score of the seeds."""
        return max(self.seeds(*which))

    def learned_seeds(
        self, sweep: str, mixer: str, at: int | str, scale=1, lr=None, start=None
    ) -> list[float]:
        """Scores of the seeds that have learned something."""
        arm = Arm(sweep, mixer, scale, lr, start)
        learned = super().learned(arm)
        return [x for seed, x in self.scores(arm, str(at)).items() if learned[seed]]

    def mean(self, *which: Any) -> float:
        """The mean of `learned_seeds`."""
        return statistics.fmean(self.learned_seeds(*which))

    def count_learned(self, sweep: str, mixer: str, scale=1, lr=None, start=None) -> int:
        """How many seeds have learned something."""
        return sum(self.learned(Arm(sweep, mixer, scale, lr, start)).values())

    def runs(self, sweep: str, mixer: str | None = None, scale=1, lr=None, start=None) -> int:
        """How many seeds there are, or runs in all of a sweep."""
        if mixer is None:
            return len(self.lines(sweep))
        return len(self.records(Arm(sweep, mixer, scale, lr, start)))

    def curves(self, sweep: str) -> int:
        """How many runs of a sweep have a learning curve."""
        return sum("curve" in line for line in self.lines(sweep))

    def halves(self, sweep: str, mixer: str, scale=1, lr=None, start=None) -> list[float]:
        """The first step at which each seed had half of the first kind right, infinite for never."""
        row = self.row(Arm(sweep, mixer, scale, lr, start))
        return [math.inf if x is None else float(x) for x in row.halfway()]

    def half(self, *which: Any) -> str:
        """The median of `halves`, in words."""
        return steps(statistics.median(self.halves(*which)))

    def option(self, sweep: str, name: str) -> Any:
        """An option of a sweep."""
        return self.folder(sweep)[0]["options"][name]

    def parameters(self, sweep: str, mixer: str) -> int:
        """Parameters of a mixer's model."""
        return next(x["parameters"] for x in self.folder(sweep)[1] if x["mixer"] == mixer)

    def trained_bytes(self, sweep: str) -> int:
        """Bytes or tokens that each run of a sweep is trained on."""
        o = self.folder(sweep)[0]["options"]
        return o["steps"] * o["batch_size"] * o["length"]

    def run(self, sweep: str, mixer: str, lr: float, seed: int, start=None) -> dict[str, Any]:
        """A line of runs.jsonl."""
        return self.records(Arm(sweep, mixer, lr=lr, start=start))[seed]

    def by_rate(self, sweep: str, mixer: str, at: int | str, scale=1, start=None) -> dict[float, float]:
        """The score of the one seed of each learning rate."""
        arm = Arm(sweep, mixer, scale, start=start)
        return {lr: self.seeds(sweep, mixer, at, scale, lr, start)[0] for lr in self.rates(arm)}

    def best(self, sweep: str, mixer: str, at: int | str, scale=1, start=None) -> float:
        """The best score of all runs, whatever their rate and seed: the rule of papers that show their best run."""
        arm = Arm(sweep, mixer, scale, start=start)
        return max(x for lr in self.rates(arm) for x in self.seeds(sweep, mixer, at, scale, lr, start))

    def baseline(self, sweep: str, name: str = "") -> float:
        """The metric of a simple method, the first whose name begins like this."""
        baselines = self.about(sweep).baselines
        return next(value for method, value in baselines.items() if method.startswith(name))

    def outcome(self, name: str) -> Outcome:
        """What a comparison of a claim gave, by "claim.comparison"."""
        outcome = self.outcomes[name]
        if outcome is None:
            raise ValueError(f"expected a comparison with runs, got {name}")
        return outcome

    def compared(self, name: str) -> Gains:
        """What a comparison over seeds gave."""
        outcome = self.outcome(name)
        if not isinstance(outcome, Gains):
            raise ValueError(f"expected a comparison over seeds, got {name}")
        return outcome

    def gains(self, name: str) -> tuple[float, ...]:
        """The gains of all seeds of a comparison, also of those that were there before others were added."""
        outcome = self.compared(name)
        return outcome.earlier + outcome.gains

    def tests(self) -> list[float]:
        """The p-values of all tests."""
        found = (x for x in self.outcomes.values() if isinstance(x, Gains) and x.tested)
        return [x.p for x in found if x.p is not None]

    @functools.cached_property
    def largest_p(self) -> float:
        """The largest p-value of a significant gain."""
        return threshold(self.tests())

    def made(self, claim: Claim) -> list[tuple[str, Comparison | OneSeed | Fails, Outcome]]:
        """The comparisons of a claim that have runs, with their keys."""
        found = ((key, x, self.outcomes[f"{claim.id}.{key}"]) for key, x in claim.comparisons.items())
        return [(key, x, outcome) for key, x, outcome in found if outcome is not None]

    def verdict(self, claim: Claim) -> str:
        """The verdict of a claim."""
        outcomes = [outcome for _, _, outcome in self.made(claim)]
        if claim.source is None:
            post_hoc = all(getattr(x, "post_hoc", False) for x in claim.comparisons.values())
            return own_verdict(outcomes, self.largest_p, post_hoc)
        return verdict(outcomes, claim.same_setting, self.largest_p, claim.differs)

    def grids(self) -> tuple[int, int, int]:
        """Cells (sweep, mixer, scale and start) that tried one rate, that chose an edge of several, and an inner one."""
        one = edge = 0
        cells = {
            Arm(name, line["mixer"], line["scale"], start=begins(line))
            for name in self.names
            for line in self.lines(name)
        }
        for arm in cells:
            tried, [lr] = self.rates(arm), {line["lr"] for line in self.records(arm).values()}
            one += len(tried) == 1
            edge += len(tried) > 1 and lr in (tried[0], tried[-1])
        return one, edge, len(cells) - one - edge

    def percent(self, sweep: str) -> bool:
        """Whether scores of a sweep are in %."""
        return self.about(sweep).percent

    def told(self, name: str) -> str:
        """Whether the favoured arm of a comparison over seeds is ahead, in words, with the interval."""
        outcome = self.compared(name)
        claim, key = name.split(".", 1)
        [comparison] = [x.comparisons[key] for x in (*CLAIMS, *OWN) if x.id == claim]
        assert isinstance(comparison, Comparison)
        digits, unit, better, worse = 0, " points", "ahead", "behind"
        if not self.percent(comparison.of.sweep):
            digits, unit, better, worse = 3, " bits", "lower", "higher"
        if outcome.interval is None:
            return "not compared"
        if abs(outcome.gain) > outcome.interval:
            width = f"{abs(outcome.gain):.{digits}f} ± {outcome.interval:.{digits}f}{unit}"
            return f"{better if outcome.gain > 0 else worse} by {width}"
        return f"not significantly apart ({outcome.gain:.{digits}f} ± {outcome.interval:.{digits}f}{unit})"

    def grid(self, arm: Arm) -> str:
        """Where the learning rate of an arm lies in those that its mixer tried."""
        tried, [lr] = self.rates(arm), {x["lr"] for x in self.records(arm).values()}
        if len(tried) == 1:
            return f"{lr:g}, the only one tried"
        if arm.lr is not None:
            return f"{lr:g}, fixed"
        if tried[0] < lr < tried[-1]:
            return f"{lr:g}, inside the {len(tried)} tried"
        return f"{lr:g}, at the {'lower' if lr == tried[0] else 'upper'} edge of {len(tried)}"


def at_least(value: float, digits: int = 0) -> str:
    """A number rounded down, in words."""
    unit = 10**digits
    return f"at least {math.floor(value * unit) / unit:.{digits}f}"


def steps(count: float) -> str:
    """A number of steps in words."""
    return f"{count:.0f}" if math.isfinite(count) else "never"


def half_life(width: int, beta: float) -> float:
    """Tokens after which writes of a strength have erased half of a state, with keys of this many numbers."""
    return float(memory_horizon(width, beta=beta))
