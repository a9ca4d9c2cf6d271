"""`gdn bench --what prefill`: prompts over a pool of states beside the rule alone on the same tokens.

A call is one row of packed prompts of uneven lengths that go on from their slots of a pool, in place. The rule alone
is `gated_delta_rule` from the same states outside of a pool, forward. Neither program knows the lengths, which change
with every call of a server. What the pool costs is the difference: states lie in its slots, and prompts without one
are padding. The outputs of both are compared, and the rule's with float64.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import gdn_jax
from gdn_jax import serving
from gdn_jax.bench import device_time
from gdn_jax.bench.decode import BOUNDS, DTYPES, check_options
from gdn_jax.bench.device_time import GRAPH_OPTIONS, Timing
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import worst_ratio
from gdn_jax.commands.errors import fail, one_line
from gdn_jax.commands.files import write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions

CHECKED = 128
"""Tokens of the last prompt that are compared with float64."""


@dataclasses.dataclass(frozen=True)
class PrefillBenchOptions:
    """Options of `gdn bench --what prefill`."""

    what: Literal["prefill"] = "prefill"
    """Prompts of requests that are served."""
    tokens: tuple[int, ...] = (8192, 32768)
    """Tokens of all prompts of a call, one line of the table for each."""
    requests: tuple[int, ...] = (1, 8, 64)
    """Prompts of a call."""
    pools: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """dtypes of the pool of states."""
    heads: tuple[int, int] = (16, 32)
    """Key heads (and query heads) and value heads."""
    width: int = 128
    """Width K = V of a head."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of q, k and v."""
    state_layout: Literal["kv", "vk"] = "kv"
    """Layout of the states."""
    implementation: Literal["mosaic_gpu", "chunked"] | None = None
    """Implementation of the rule; by default what runs unasked."""
    repeats: int = 20
    """Timed calls."""
    seed: int = 0
    """Seed of the inputs."""
    json: Path | None = None
    """File for all numbers, rewritten after every line."""


class Line(NamedTuple):
    """What one line of the table is about."""

    tokens: int
    requests: int
    pool: str


class Result(NamedTuple):
    """One line."""

    tokens: int
    requests: int
    pool: str
    error: float = math.nan
    """Of the rule's outputs, against float64."""
    difference: float = math.nan
    """Between the outputs of the two."""
    prefill_us: float = math.nan
    rule_us: float = math.nan
    failure: str | None = None

    @property
    def more(self) -> float:
        """What part more the pool costs."""
        return self.prefill_us / self.rule_us - 1


class _Problem(NamedTuple):
    """Inputs on the host: q, k, v, g, beta of one packed row, offsets, a pool, and where the prompts are in it."""

    tokens: tuple[np.ndarray, ...]
    cu_seqlens: np.ndarray
    pool: np.ndarray
    slots: np.ndarray


def _draw(options: PrefillBenchOptions, line: Line) -> _Problem:
    rng = np.random.default_rng(options.seed)
    (Hk, HV), D, T, N = options.heads, options.width, line.tokens, line.requests

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((1, T, *shape), np.float32)

    q, k, v = (normal(heads, D).astype(DTYPES[options.dtype]) for heads in (Hk, Hk, HV))
    g, beta = -np.abs(normal(HV)) / 8, 1 / (1 + np.exp(-normal(HV)))
    cuts = np.sort(rng.choice(np.arange(1, T), N - 1, replace=False))
    pool = rng.standard_normal((2 * N, HV, D, D), np.float32).astype(DTYPES[line.pool])
    slots = rng.permutation(2 * N)[:N].astype(np.int32)
    return _Problem((q, k, v, g, beta), np.r_[0, cuts, T].astype(np.int32), pool, slots)


def _error(x: _Problem, o: np.ndarray, state_layout: str) -> float:
    """Error of the first tokens of the last prompt."""
    start = x.cu_seqlens[-2]
    some = slice(start, start + CHECKED)
    options = {"use_qk_l2norm": True, "state_layout": state_layout}
    want, _ = oracle.forward(*(y[:, some] for y in x.tokens), initial_state=x.pool[x.slots[-1:]], **options)
    return worst_ratio(want, o[:, some], 2)


def measure(options: PrefillBenchOptions, line: Line) -> Result:
    """Checks and times one line."""
    x = _draw(options, line)
    tokens, cu, slots = jax.device_put((x.tokens, x.cu_seqlens, x.slots))
    common: dict[str, Any] = {"state_layout": options.state_layout, "use_qk_l2norm": True}
    common |= {"implementation": options.implementation}

    def prefill(pool, tokens, cu):
        q, k, v, g, beta = tokens
        o, pool = serving.prefill(q, k, v, g, beta, cu, pool, read_slots=slots, **common)
        return pool, o

    def rule(states, tokens, cu):
        o, states = gdn_jax.gated_delta_rule(*tokens, initial_state=states, cu_seqlens=cu, **common)
        return states, o

    def run(f, states, in_place: bool) -> tuple[np.ndarray, Timing]:
        """The first outputs, and the time of a call that goes on from the states of the call before."""
        compiler_options = GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
        compiled = (
            jax.jit(f, donate_argnums=0 if in_place else ())
            .lower(states, tokens, cu)
            .compile(compiler_options=compiler_options)
        )
        states, o = compiled(states, tokens, cu)

        def once() -> None:
            nonlocal states
            states, o = compiled(states, tokens, cu)
            jax.block_until_ready((states, o))

        return np.asarray(o), device_time.of_calls(once, options.repeats)

    o, rule_time = run(rule, jnp.asarray(x.pool[x.slots], jnp.float32), in_place=False)
    over_pool, prefill_time = run(prefill, jnp.asarray(x.pool), in_place=True)
    result = Result(*line, _error(x, o, options.state_layout), worst_ratio(o, over_pool, 2))
    bound = BOUNDS[options.dtype]
    for name, error in (("error", result.error), ("difference", result.difference)):
        if not error <= bound:
            return result._replace(failure=f"wrong: {name} {error:.1e}, allowed {bound:.1e}")
    return result._replace(prefill_us=prefill_time.median_ms * 1e3, rule_us=rule_time.median_ms * 1e3)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each number of tokens, number of prompts and dtype of the pool."""
    options = parse(PrefillBenchOptions, argv, "gdn bench --what prefill", PrefillBenchOptions(), __doc__)
    check_options(options, "tokens", "requests")
    if max(options.requests) > min(options.tokens):
        fail("requests", "no more than there are tokens", " ".join(map(str, options.requests)))
    console, results = Console(), []
    console.print(", ".join(f"{name} {value}" for name, value in versions().items()), highlight=False)
    for line in itertools.starmap(Line, itertools.product(options.tokens, options.requests, options.pools)):
        try:
            result = measure(options, line)
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            # Out of memory, or nothing for the kernels: the other lines may fit.
            result = Result(*line, failure=one_line(error))
        results.append(result)
        times = f"{result.prefill_us:.1f} us over a pool, {result.rule_us:.1f} us the rule alone"
        what = result.failure or f"{times}: {result.more:+.1%}"
        console.print(
            f"tokens {line.tokens}, requests {line.requests}, {line.pool} pool: {what}", highlight=False
        )
        if options.json is not None:
            lines = [result._asdict() | {"more": result.more} for result in results]
            write_text(options.json, json.dumps({"versions": versions(), "results": lines}, indent=1))
    console.print(_table(results))
    return 1 if any(result.failure for result in results) else 0


COLUMNS = ("tokens", "requests", "pool", "prefill us", "rule us", "more", "error")


def _table(results: list[Result]) -> Table:
    """The lines that were timed."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for r in results:
        if r.failure is None:
            times = f"{r.prefill_us:.1f}", f"{r.rule_us:.1f}", f"{r.more:+.1%}"
            table.add_row(str(r.tokens), str(r.requests), r.pool, *times, f"{r.error:.1e}")
    return table
