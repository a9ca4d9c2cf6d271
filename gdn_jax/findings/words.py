"""Text of the page with numbers in it that are computed from the runs.

    {= mean("parity/full_far", "delta_net", 512) | 1}     a number with so many digits behind the point
    {at least min(seeds(...)) | 0}                    "at least" and the number rounded down
    {at most max(seeds(...)) | 0}                     "at most" and the number rounded up
    {= told("start")}                                 words

A name in quotes is a folder of runs (see `Arm`), a mixer, or a comparison of claims.json.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from scipy.special import stdtrit

from gdn_jax.analysis import memory_horizon
from gdn_jax.findings.records import Arm, Results
from gdn_jax.findings.verdicts import Outcome, threshold
from gdn_jax.sweeps.summary import interval

PLACE = re.compile(r"\{(=|at least|at most) (.*?)(?: \| (\d))?\}")


class Words:
    """Fills the places of texts.

    Args:
      results: runs that the numbers are of.
      outcomes: comparisons by name, None for one without runs.
      units: whether scores of these comparisons are in % (else bits per byte), by name.
    """

    def __init__(self, results: Results, outcomes: Mapping[str, Outcome | None], units: Mapping[str, bool]):
        self.results, self.outcomes, self.units = results, outcomes, units
        safe = (min, max, sum, len, sorted, abs, zip, range, round, int)
        self._names: dict[str, Any] = {f.__name__: f for f in safe}
        own = (self.seeds, self.learned_seeds, self.mean, self.learned, self.runs, self.halves, self.told)
        own += (self.run, self.best, self.baseline, self.option, self.exists, self.parameters)
        own += (self.trained_bytes, self.p, self.curves)
        own += (self.comparisons, self.largest_p, self.config_names, choose, steps)
        self._names |= {f.__name__: f for f in own}
        self._names |= {
            "median": statistics.median,
            "mean_of": statistics.fmean,
            "interval": interval,
            "horizon": _horizon,
            "t": _t,
        }
        self._names["gain"] = self.gains

    def fill(self, text: str) -> str:
        """Returns a text with every place filled.

        Raises:
          ValueError: a place cannot be computed; says which and why.
        """
        return PLACE.sub(lambda place: self._value(*place.groups()), text)

    def _value(self, bound: str, expression: str, digits: str | None) -> str:
        try:
            value = eval(expression, {"__builtins__": {}, **self._names})  # of a file of this project
            return self._said(value, bound, digits)
        except Exception as error:  # whatever it is, its text has to name the place
            raise ValueError(f"{{{bound} {expression}}}: {type(error).__name__}: {error}") from error

    def _said(self, value: Any, bound: str, digits: str | None) -> str:
        if isinstance(value, str):
            return value
        unit = 10 ** int(digits or 0)
        rounded: dict[str, Callable[[float], float]] = {
            "=": lambda x: x,
            "at least": math.floor,
            "at most": math.ceil,
        }
        if bound != "=":
            value = rounded[bound](value * unit) / unit
        said = f"{value:.{int(digits or 0)}f}"
        return said if bound == "=" else f"{bound} {said}"

    def seeds(self, sweep: str, mixer: str, at: int | str, scale=1, lr=None, start=None) -> list[float]:
        """Scores of the seeds."""
        return [*self.results.scores(Arm(sweep, mixer, scale, lr, start), str(at)).values()]

    def learned_seeds(
        self, sweep: str, mixer: str, at: int | str, scale=1, lr=None, start=None
    ) -> list[float]:
        """Scores of the seeds that have learned something."""
        arm = Arm(sweep, mixer, scale, lr, start)
        learned = self.results.learned(arm)
        return [x for seed, x in self.results.scores(arm, str(at)).items() if learned[seed]]

    def mean(self, *which: Any) -> float:
        """The mean of `learned_seeds`."""
        return statistics.fmean(self.learned_seeds(*which))

    def learned(self, sweep: str, mixer: str, scale=1, lr=None, start=None) -> int:
        """How many seeds have learned something."""
        return sum(self.results.learned(Arm(sweep, mixer, scale, lr, start)).values())

    def runs(self, sweep: str, mixer: str | None = None, scale=1, lr=None, start=None) -> int:
        """How many seeds there are, or runs in all of a sweep."""
        if mixer is None:
            return len(self.results.lines(sweep))
        return len(self.results.records(Arm(sweep, mixer, scale, lr, start)))

    def curves(self, sweep: str) -> int:
        """How many runs of a sweep have a learning curve."""
        return sum("curve" in line for line in self.results.lines(sweep))

    def exists(self, sweep: str) -> bool:
        """Whether a sweep has a folder."""
        return bool(self.results.matching(sweep))

    def halves(self, sweep: str, mixer: str, scale=1, lr=None, start=None) -> list[float]:
        """Steps after which each seed has half of the first kind right, infinite for never."""
        row = self.results.row(Arm(sweep, mixer, scale, lr, start))
        return [math.inf if x is None else float(x) for x in row.halfway()]

    def option(self, sweep: str, name: str) -> Any:
        """An option of a sweep."""
        return self.results.folder(sweep)[0]["options"][name]

    def parameters(self, sweep: str, mixer: str) -> int:
        """Parameters of a mixer's model."""
        return next(x["parameters"] for x in self.results.folder(sweep)[1] if x["mixer"] == mixer)

    def trained_bytes(self, sweep: str) -> int:
        """Bytes or tokens that each run of a sweep is trained on."""
        o = self.results.folder(sweep)[0]["options"]
        return o["steps"] * o["batch_size"] * o["length"]

    def run(self, sweep: str, mixer: str, lr: float, seed: int, start=None) -> dict[str, Any]:
        """A line of runs.jsonl."""
        return self.results.records(Arm(sweep, mixer, lr=lr, start=start))[seed]

    def best(self, sweep: str, mixer: str, at: int | str, scale: int = 1, start=None) -> float:
        """The best score of all runs, whatever their rate and seed: the rule of papers that show their best run."""
        lines = self.results.lines(sweep)
        rates = {x["lr"] for x in lines if (x["mixer"], x["scale"]) == (mixer, scale)}
        return max(x for lr in rates for x in self.seeds(sweep, mixer, at, scale, lr, start))

    def baseline(self, sweep: str, name: str) -> float:
        """The metric of a simple method, the first whose name begins like this."""
        baselines = self.results.about(sweep).baselines
        return next(value for method, value in baselines.items() if method.startswith(name))

    def comparisons(self) -> int:
        """How many comparisons have a p-value."""
        return sum(x is not None and x.p is not None for x in self.outcomes.values())

    def largest_p(self) -> float:
        """The largest p-value of a sure comparison."""
        return threshold([x.p for x in self.outcomes.values() if x is not None and x.p is not None])

    def config_names(self) -> str:
        """Names of all files of options."""
        return ", ".join(f"`{path.stem}`" for path in sorted((self.results.root / "configs").iterdir()))

    def gains(self, name: str) -> tuple[float, ...]:
        """The gains of a comparison, seed by seed."""
        outcome = self.outcomes[name]
        return () if outcome is None else outcome.gains

    def p(self, name: str) -> float:
        """The p-value of a comparison of at least two pairs."""
        outcome = self.outcomes[name]
        if outcome is None or outcome.p is None:
            raise ValueError(f"expected a comparison of at least two pairs, got {name}")
        return outcome.p

    def told(self, name: str) -> str:
        """Whether the favoured arm of a comparison is ahead, in words, with the interval."""
        outcome = self.outcomes[name]
        if outcome is None or outcome.interval is None:
            return "not compared"
        digits, unit, better, worse = (0, " points", "ahead", "behind")
        if not self.units[name]:
            digits, unit, better, worse = (3, " bits", "lower", "higher")
        width = f"{abs(outcome.gain):.{digits}f} ± {outcome.interval:.{digits}f}{unit}"
        if outcome.excludes_zero:
            return f"{better if outcome.gain > 0 else worse} by {width}"
        return f"not surely apart ({outcome.gain:.{digits}f} ± {outcome.interval:.{digits}f}{unit})"


def choose(condition: bool, yes: str, no: str) -> str:
    """One of two texts."""
    return yes if condition else no


def steps(count: float) -> str:
    """A number of steps in words."""
    return f"{count:.0f}" if math.isfinite(count) else "never"


def _t(seeds: int) -> float:
    """How many standard errors the 95 % interval of a mean of so many seeds goes to either side."""
    return float(stdtrit(seeds - 1, 0.975))


def _horizon(width: int, beta: float) -> float:
    return float(memory_horizon(width, beta=beta))
