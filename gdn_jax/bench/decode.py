"""`gdn bench --what decode`: tokens a second of serving over batch sizes, after a check of what is computed.

A step is one token of every request, or several drafts, of which all are accepted, or of a tree the path to its last
one: from the projections' outputs, with gates and norms inside, from states in a pool to states in the same
pool, in place. With deferred writes it is the mean over a period between two writes of a state. Bytes are those of
the states alone, which a step has to move: once in and once for each token out, or with deferred writes once in and
once in a period out.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from gdn_jax import serving
from gdn_jax.bench import device_time
from gdn_jax.bench.device_time import GRAPH_OPTIONS
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import worst_ratio
from gdn_jax.commands.errors import check_seed, fail, one_line
from gdn_jax.commands.files import check_writable, write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions

BOUNDS = {"bfloat16": 1e-2, "float32": 1e-5}
"""Largest error of an output, by the dtype of the inputs."""
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class DecodeBenchOptions:
    """Options of `gdn bench --what decode`."""

    what: Literal["decode"] = "decode"
    """A step of every running request."""
    batches: tuple[int, ...] = (1, 8, 32, 128, 512)
    """Requests of a step, one line of the table for each."""
    pools: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """dtypes of the pool of states."""
    deferred: tuple[int, ...] = (1, 16)
    """Tokens between two writes of a state; 1 is a plain pool."""
    tokens: tuple[int, ...] = (1, 4)
    """Tokens of a step: 1 is `serving.decode`, more are `serving.verify`."""
    drafts: tuple[Literal["chain", "tree"], ...] = ("chain",)
    """Whether each of a step's tokens follows the one before, or token t token (t - 1) // 2."""
    heads: tuple[int, int] = (16, 32)
    """Key heads (and query heads) and value heads."""
    width: int = 128
    """Width K = V of a head."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of q, k, v, a and b, and of the keys and values in a ring."""
    state_layout: Literal["kv", "vk"] = "kv"
    """Layout of the states."""
    implementations: tuple[Literal["mosaic_gpu", "xla"], ...] = ()
    """Implementations to time, "mosaic_gpu" for the kernels. If none is named: what runs unasked."""
    repeats: int = 20
    """Timed steps, or periods."""
    seed: int = 0
    """Seed of the inputs."""
    json: Path | None = None
    """File for all numbers, rewritten after every line."""


class Line(NamedTuple):
    """What one line of the table is about."""

    implementation: str | None
    tokens: int
    pool: str
    deferred: int
    batch: int
    drafts: str = "chain"

    @property
    def parents(self) -> np.ndarray:
        """Of a step's tokens [T]."""
        t = np.arange(self.tokens, dtype=np.int32)
        return t - 1 if self.drafts == "chain" else (t + 1) // 2 - 1

    @property
    def accepted(self) -> list[int]:
        """Which of a step's tokens are accepted."""
        path, parents = [self.tokens - 1], self.parents
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        return path

    @property
    def steps(self) -> int:
        """Steps of a period: as many as a ring takes, whose room is for all drafts of a step."""
        return max(1, (self.deferred - self.tokens) // len(self.accepted) + 1)


class Result(NamedTuple):
    """One line."""

    implementation: str | None
    tokens: int
    pool: str
    deferred: int
    batch: int
    drafts: str = "chain"
    error: float = math.nan
    tokens_per_second: float = math.nan
    step_us: float = math.nan
    fastest_us: float = math.nan
    slowest_us: float = math.nan
    terabytes_per_second: float = math.nan
    failure: str | None = None


class _Problem(NamedTuple):
    """Inputs of a period on the host: tokens [B, steps * T, ...], parameters of the gates and states."""

    tokens: tuple[np.ndarray, ...]
    A_log: np.ndarray
    dt_bias: np.ndarray
    states: np.ndarray
    slots: np.ndarray


def _draw(options: DecodeBenchOptions, line: Line) -> _Problem:
    rng = np.random.default_rng(options.seed)
    (Hk, HV), D, batch = options.heads, options.width, line.batch

    def normal(*shape: int) -> np.ndarray:
        x = rng.standard_normal((batch, line.steps * line.tokens, *shape), np.float32)
        return x.astype(DTYPES[options.dtype])

    tokens = (normal(Hk, D), normal(Hk, D), normal(HV, D), normal(HV), normal(HV))
    A_log = np.log(rng.uniform(0.1, 16, HV)).astype(np.float32)
    dt_bias = rng.uniform(-6, -2, HV).astype(np.float32)
    states = rng.standard_normal((batch, HV, D, D), np.float32).astype(DTYPES[line.pool])
    return _Problem(tokens, A_log, dt_bias, states, rng.permutation(batch).astype(np.int32))


def _error(x: _Problem, line: Line, periods: list[np.ndarray], state_layout: str) -> float:
    """Error of the accepted outputs of the first and last request against float64; every period has the same
    tokens."""
    rows = np.unique([0, len(x.slots) - 1])[:, None]
    accepted = (np.arange(line.steps)[:, None] * line.tokens + line.accepted).ravel()
    o = np.concatenate([y[rows, accepted] for y in periods], 1)
    tokens = (y[rows, accepted].astype(np.float64) for y in x.tokens)
    q, k, v, a, b = (np.tile(y, (1, 2, *(1,) * (y.ndim - 2))) for y in tokens)
    g = -np.exp(x.A_log.astype(np.float64)) * np.logaddexp(a + x.dt_bias, 0)
    options = {"use_qk_l2norm": True, "state_layout": state_layout}
    want, _ = oracle.forward(
        q, k, v, g, 1 / (1 + np.exp(-b)), initial_state=x.states[x.slots[rows[:, 0]]], **options
    )
    return worst_ratio(want, o, 2)


def _pool(options: DecodeBenchOptions, line: Line, x: _Problem) -> tuple[Any, np.ndarray]:
    """The pool, and where the requests are in it: slots [B], or [B, T] with a state for each of several tokens."""
    if line.deferred > 1:
        ring: dict[str, Any] = {
            "num_key_heads": options.heads[0],
            "length": line.deferred,
            "dtype": DTYPES[options.dtype],
            "trees": line.drafts == "tree",
        }
        states = jnp.asarray(x.states)
        return serving.make_ring_pool(states, state_layout=options.state_layout, **ring), x.slots
    if line.tokens == 1:
        return jnp.asarray(x.states), x.slots
    # A step goes on from the state after its last token.
    T = line.tokens
    slots = x.slots[:, None] * T + np.arange(T, dtype=np.int32)
    return jnp.repeat(jnp.asarray(x.states), T, 0), slots


def measure(options: DecodeBenchOptions, line: Line) -> Result:
    """Checks and times one line."""
    x = _draw(options, line)
    pool, slots = _pool(options, line, x)
    steps, T = line.steps, line.tokens
    tokens = jax.device_put(
        [tuple(y[:, i * T : i * T + T] if T > 1 else y[:, i] for y in x.tokens) for i in range(steps)]
    )
    common: dict[str, Any] = {"A_log": jnp.asarray(x.A_log), "dt_bias": jnp.asarray(x.dt_bias)}
    common |= {"state_layout": options.state_layout, "implementation": line.implementation}
    slots, last_accepted = jnp.asarray(slots), jnp.full(line.batch, T, jnp.int32)
    parents = jnp.tile(line.parents, (line.batch, 1)) if line.drafts == "tree" else None

    def step(pool, token):
        q, k, v, a, b = token
        if T > 1:
            spans = {"state_slots": slots, "num_accepted_tokens": last_accepted, "parents": parents}
            o, pool = serving.verify(q, k, v, a, b, pool, **spans, **common)
            return pool, o
        o, pool = serving.decode(q, k, v, a, b, pool, read_slots=slots, **common)
        return pool, o[:, None]

    def all_tokens(pool, tokens):
        # Inputs and outputs of a step are arrays of their own, as in a server: to take them out of larger ones, or
        # put them there, would be timed too. The loop of a scan would wait for the host in every step.
        outputs = []
        for token in tokens:
            pool, o = step(pool, token)
            outputs.append(o)
        return pool, outputs

    on_gpu = jax.default_backend() == "gpu"
    compiler_options = GRAPH_OPTIONS if on_gpu else {}
    run = jax.jit(all_tokens, donate_argnums=0).lower(pool, tokens).compile(compiler_options=compiler_options)
    outputs = []
    for _ in range(2):  # the second period begins with what the first one left
        pool, o = run(pool, tokens)
        outputs.append(np.concatenate([np.asarray(y) for y in o], 1))
    error = _error(x, line, outputs, options.state_layout)
    result = Result(*line, error)
    if not error <= BOUNDS[options.dtype]:
        return result._replace(failure=f"wrong: error {error:.1e}, allowed {BOUNDS[options.dtype]:.1e}")

    def once() -> None:
        nonlocal pool
        pool, o = run(pool, tokens)
        jax.block_until_ready((pool, o))

    timing = device_time.of_calls(once, options.repeats)
    us = timing.median_ms * 1e3 / steps
    writes = T if line.deferred == 1 else 1 / steps
    return result._replace(
        tokens_per_second=line.batch * len(line.accepted) / us * 1e6,
        step_us=us,
        fastest_us=timing.fastest_ms * 1e3 / steps,
        slowest_us=timing.slowest_ms * 1e3 / steps,
        terabytes_per_second=x.states.nbytes * (1 + writes) / us * 1e-6,
    )


def check_options(options: Any, *counts: str) -> None:
    """Checks what the benchmarks of serving share, and the options of these names, each some numbers.

    Raises:
      RunError: for the first option that cannot be used.
    """
    for name in (*counts, "heads"):
        for value in getattr(options, name):
            if value < 1:
                fail(name, "numbers of at least 1", value)
    if options.heads[1] % options.heads[0]:
        fail("heads", "a number of value heads that the key heads divide", " ".join(map(str, options.heads)))
    if not 1 <= options.width <= 256:
        fail("width", "1 to 256", options.width)
    if options.repeats < 1:
        fail("repeats", "at least 1", options.repeats)
    check_seed(options.seed)
    if options.json is not None:
        check_writable("json", options.json)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each implementation, number of tokens, dtype of the pool, length of the ring, batch and kind
    of drafts."""
    options = parse(DecodeBenchOptions, argv, "gdn bench --what decode", DecodeBenchOptions(), __doc__)
    check_options(options, "batches", "deferred", "tokens")
    if any(1 < ring < most for ring in options.deferred for most in options.tokens):
        fail("tokens", "no more than a ring holds", " ".join(map(str, options.tokens)))
    console, results = Console(), []
    console.print(", ".join(f"{name} {value}" for name, value in versions().items()), highlight=False)
    implementations = options.implementations or (None,)
    lines = itertools.starmap(
        Line,
        itertools.product(
            implementations, options.tokens, options.pools, options.deferred, options.batches, options.drafts
        ),
    )
    for line in lines:
        if line.tokens == 1 and line.drafts != options.drafts[0]:
            continue  # one token alone follows no other
        try:
            result = measure(options, line)
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            # Out of memory, or nothing for the kernels: the other lines may fit.
            result = Result(*line, failure=one_line(error))
        results.append(result)
        what = f"{result.tokens_per_second:.0f} tokens/s" if result.failure is None else result.failure
        name = "" if line.implementation is None else f"{line.implementation}, "
        kind = "a tree, " if line.drafts == "tree" else ""
        sizes = (
            f"{kind}tokens {line.tokens}, batch {line.batch}, {line.pool} pool, a write in {line.deferred}"
        )
        console.print(f"{name}{sizes}: {what}", highlight=False)
        if options.json is not None:
            content = {"versions": versions(), "results": [result._asdict() for result in results]}
            write_text(options.json, json.dumps(content, indent=1))
    console.print(_table(results))
    return 1 if any(result.failure for result in results) else 0


COLUMNS = ("by", "tokens", "drafts", "pool", "write", "batch", "tokens/s", "us", "spread", "TB/s", "error")
"""Tokens and time are those of a step; write: in how many tokens a state is written."""


def _table(results: list[Result]) -> Table:
    """The lines that were timed."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for r in results:
        if r.failure is None:
            table.add_row(
                r.implementation or "",
                str(r.tokens),
                r.drafts,
                r.pool,
                str(r.deferred),
                str(r.batch),
                f"{r.tokens_per_second:.0f}",
                f"{r.step_us:.1f}",
                f"{r.fastest_us:.1f}-{r.slowest_us:.1f}",
                f"{r.terabytes_per_second:.2f}",
                f"{r.error:.1e}",
            )
    return table
