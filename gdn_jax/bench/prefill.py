"""Prompts over a pool of states, next to the rule alone on the same tokens.

A call is one row of packed prompts of uneven lengths that go on from their slots of a pool, in place. The rule alone
is `gated_delta_rule` from the same states outside of a pool, forward. Neither program knows the lengths, which change
with every call of a server. The pool costs the difference: states lie in its slots, and prompts without one are
padding. The outputs of both are compared, and the rule's with float64.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax
from gdn_jax import serving
from gdn_jax.bench import measure
from gdn_jax.bench.benchmark import Case, Result, checked
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.serving import BOUNDS, DTYPES, ServingBenchmark
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import worst_ratio
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive

CHECKED = 128
"""Tokens of the last prompt that are compared with float64."""


class Line(NamedTuple):
    """The case of one line: tokens of a call, its prompts, dtype of the pool."""

    tokens: int
    requests: int
    pool: str


class Problem(NamedTuple):
    """Inputs on the host: q, k, v, g, beta of one packed row, offsets, a pool, and where the prompts are in it."""

    tokens: tuple[np.ndarray, ...]
    cu_seqlens: np.ndarray
    pool: np.ndarray
    slots: np.ndarray


@dataclasses.dataclass(frozen=True)
class PrefillBenchmark(ServingBenchmark):
    """Prompts of requests that are served."""

    on_cpu: ClassVar[dict[str, Any]] = {
        "tokens": (512,),
        "requests": (1, 8),
        "heads": (2, 4),
        "width": 64,
        "repeats": 5,
    }

    tokens: Annotated[tuple[int, ...], Distinct, Positive] = (8192, 32768)
    """Tokens of all prompts of a call, one line of the table for each."""
    requests: Annotated[tuple[int, ...], Distinct, Positive] = (1, 8, 64)
    """Prompts of a call."""
    implementation: Literal["mosaic_gpu", "chunked"] | None = None
    """Implementation of the rule; by default the one that runs unasked."""

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        if max(self.requests) > min(self.tokens):
            fail("requests", "no more than there are tokens", " ".join(map(str, self.requests)))

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each number of tokens, number of prompts and dtype of the pool."""
        for line in itertools.starmap(Line, itertools.product(self.tokens, self.requests, self.pools)):
            yield Case(line._asdict(), partial(self.time_line, line))

    def time_line(self, line: Line) -> Iterator[Result]:
        """Checks and times one line."""
        x = _draw(self, line)
        tokens, cu, slots = jax.device_put((x.tokens, x.cu_seqlens, x.slots))
        common: dict[str, Any] = {"state_layout": self.state_layout, "use_qk_l2norm": True}
        common |= {"implementation": self.implementation}

        def prefill(pool, tokens, cu):
            q, k, v, g, beta = tokens
            o, pool = serving.prefill(q, k, v, g, beta, cu, pool, read_slots=slots, **common)
            return pool, o

        def rule(states, tokens, cu):
            o, states = gdn_jax.gated_delta_rule(*tokens, initial_state=states, cu_seqlens=cu, **common)
            return states, o

        def run(f, states, in_place: bool) -> tuple[np.ndarray, Timing]:
            """The first outputs, and the time of a call that goes on from the states of the call before."""
            program = measure.compiled(f, states, tokens, cu, donate=(0,) if in_place else ())
            once = measure.going_on(program, states, tokens, cu)
            return np.asarray(once()[1]), measure.measure(once, self.repeats)

        o, alone = run(rule, jnp.asarray(x.pool[x.slots], jnp.float32), in_place=False)
        over_pool, timing = run(prefill, jnp.asarray(x.pool), in_place=True)
        errors = {"rule": _error(x, o, self.state_layout), "difference": worst_ratio(o, over_pool, 2)}
        numbers = {"rule ms": alone.ms, "more": timing.ms / alone.ms - 1}
        bounds = dict.fromkeys(errors, BOUNDS[self.dtype])
        yield checked(line._asdict(), errors, bounds, lambda: (timing, numbers))


def _draw(options: PrefillBenchmark, line: Line) -> Problem:
    rng = np.random.default_rng(options.seed)
    (Hk, HV), D, T, N = options.heads, options.width, line.tokens, line.requests

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((1, T, *shape), np.float32)

    q, k, v = (normal(heads, D).astype(DTYPES[options.dtype]) for heads in (Hk, Hk, HV))
    g, beta = -np.abs(normal(HV)) / 8, 1 / (1 + np.exp(-normal(HV)))
    cuts = np.sort(rng.choice(np.arange(1, T), N - 1, replace=False))
    pool = rng.standard_normal((2 * N, HV, D, D), np.float32).astype(DTYPES[line.pool])
    slots = rng.permutation(2 * N)[:N].astype(np.int32)
    return Problem((q, k, v, g, beta), np.r_[0, cuts, T].astype(np.int32), pool, slots)


def _error(x: Problem, o: np.ndarray, state_layout: str) -> float:
    """Error of the first tokens of the last prompt."""
    start = x.cu_seqlens[-2]
    some = slice(start, start + CHECKED)
    options = {"use_qk_l2norm": True, "state_layout": state_layout}
    want, _ = oracle.forward(*(y[:, some] for y in x.tokens), initial_state=x.pool[x.slots[-1:]], **options)
    return worst_ratio(want, o[:, some], 2)
