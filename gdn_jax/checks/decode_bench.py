"""`gdn bench --what decode`: tokens a second of serving over batch sizes, after a check of what is computed.

A step is one token of every request: from the projections' outputs, with gates and norms inside, from states in a
pool to states in the same pool, in place. With deferred writes it is the mean over a period between two writes of a
state. Bytes are those of the states alone, which a step has to move: once in and once out, or with deferred writes
once in and once in a period out.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from gdn_jax import serving
from gdn_jax.checks import device_time, oracle
from gdn_jax.checks.accuracy import worst_ratio
from gdn_jax.checks.device_time import GRAPH_OPTIONS, WARM_UP, Timing
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
    """One token of every running request."""
    batches: tuple[int, ...] = (1, 8, 32, 128, 512)
    """Requests of a step, one line of the table for each."""
    pools: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """dtypes of the pool of states."""
    deferred: tuple[int, ...] = (1, 16)
    """Tokens between two writes of a state; 1 is a plain pool."""
    heads: tuple[int, int] = (16, 32)
    """Key heads (and query heads) and value heads."""
    width: int = 128
    """Width K = V of a head."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of q, k, v, a and b, and of the keys and values in a ring."""
    state_layout: Literal["kv", "vk"] = "kv"
    """Layout of the states."""
    implementation: Literal["mosaic_gpu", "xla"] | None = None
    """None: the fastest that can run."""
    repeats: int = 20
    """Timed steps, or periods."""
    seed: int = 0
    """Seed of the inputs."""
    json: Path | None = None
    """File for all numbers, rewritten after every line."""


class Result(NamedTuple):
    """One line."""

    batch: int
    pool: str
    deferred: int
    error: float = math.nan
    tokens_per_second: float = math.nan
    step_us: float = math.nan
    fastest_us: float = math.nan
    slowest_us: float = math.nan
    terabytes_per_second: float = math.nan
    failure: str | None = None


class _Problem(NamedTuple):
    """Inputs of a period on the host: tokens [B, L, ...], parameters of the gates and states."""

    tokens: tuple[np.ndarray, ...]
    A_log: np.ndarray
    dt_bias: np.ndarray
    states: np.ndarray
    slots: np.ndarray


def _draw(options: DecodeBenchOptions, batch: int, pool: str, period: int) -> _Problem:
    rng = np.random.default_rng(options.seed)
    (Hk, HV), D = options.heads, options.width

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((batch, period, *shape), np.float32).astype(DTYPES[options.dtype])

    tokens = (normal(Hk, D), normal(Hk, D), normal(HV, D), normal(HV), normal(HV))
    A_log = np.log(rng.uniform(0.1, 16, HV)).astype(np.float32)
    dt_bias = rng.uniform(-6, -2, HV).astype(np.float32)
    states = rng.standard_normal((batch, HV, D, D), np.float32).astype(DTYPES[pool])
    return _Problem(tokens, A_log, dt_bias, states, rng.permutation(batch).astype(np.int32))


def _error(x: _Problem, o: np.ndarray, state_layout: str) -> float:
    """Error of the outputs of the first and last request against float64."""
    rows = np.unique([0, len(x.slots) - 1])
    q, k, v, a, b = (y[rows].astype(np.float64) for y in x.tokens)
    g = -np.exp(x.A_log.astype(np.float64)) * np.logaddexp(a + x.dt_bias, 0)
    options = {"use_qk_l2norm": True, "state_layout": state_layout}
    want, _ = oracle.forward(
        q, k, v, g, 1 / (1 + np.exp(-b)), initial_state=x.states[x.slots[rows]], **options
    )
    return worst_ratio(want, o[rows], 2)


def measure(options: DecodeBenchOptions, batch: int, pool_dtype: str, period: int) -> Result:
    """Checks and times one line."""
    x = _draw(options, batch, pool_dtype, period)
    pool: Any = jnp.asarray(x.states)
    if period > 1:
        ring = {"num_key_heads": options.heads[0], "length": period, "dtype": DTYPES[options.dtype]}
        pool = serving.make_ring_pool(pool, state_layout=options.state_layout, **ring)
    tokens = jax.device_put(tuple(np.moveaxis(y, 1, 0) for y in x.tokens))
    gates = {"A_log": jnp.asarray(x.A_log), "dt_bias": jnp.asarray(x.dt_bias)}
    slots = jnp.asarray(x.slots)

    def step(pool, token):
        q, k, v, a, b = token
        o, pool = serving.decode(
            q,
            k,
            v,
            a,
            b,
            pool,
            **gates,
            read_slots=slots,
            state_layout=options.state_layout,
            implementation=options.implementation,
        )
        return pool, o

    def all_tokens(pool, tokens):
        if period > 1:
            return jax.lax.scan(step, pool, tokens)
        pool, o = step(pool, tuple(y[0] for y in tokens))
        return pool, o[None]

    on_gpu = jax.default_backend() == "gpu"
    compiler_options = GRAPH_OPTIONS if on_gpu and period == 1 else {}
    run = jax.jit(all_tokens, donate_argnums=0).lower(pool, tokens).compile(compiler_options=compiler_options)
    pool, o = run(pool, tokens)
    error = _error(x, np.moveaxis(np.asarray(o), 0, 1), options.state_layout)
    result = Result(batch, pool_dtype, period, error)
    if not error <= BOUNDS[options.dtype]:
        return result._replace(failure=f"wrong: error {error:.1e}, allowed {BOUNDS[options.dtype]:.1e}")

    def once() -> None:
        nonlocal pool
        pool, o = run(pool, tokens)
        jax.block_until_ready((pool, o))

    timing = _time(once, options.repeats, on_gpu)
    us = timing.median_ms * 1e3 / period
    moved = x.states.nbytes * (1 + 1 / period)
    return result._replace(
        tokens_per_second=batch / us * 1e6,
        step_us=us,
        fastest_us=timing.fastest_ms * 1e3 / period,
        slowest_us=timing.slowest_ms * 1e3 / period,
        terabytes_per_second=moved / us * 1e-6,
    )


def _time(once: Callable[[], None], repeats: int, on_gpu: bool) -> Timing:
    """On a GPU the span of the kernels of a call, else the clock."""
    for _ in range(WARM_UP):
        once()
    if on_gpu:
        return device_time.device_timing(device_time.profile(once, repeats), repeats)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        once()
        times.append((time.perf_counter() - started) * 1e3)
    return Timing.of(times)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each batch size, dtype of the pool and length of the ring."""
    options = parse(DecodeBenchOptions, argv, "gdn bench --what decode", DecodeBenchOptions(), __doc__)
    for name in ("batches", "deferred", "heads"):
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
    console, results = Console(), []
    console.print(", ".join(f"{name} {value}" for name, value in versions().items()), highlight=False)
    lines = [
        (b, pool, period) for pool in options.pools for period in options.deferred for b in options.batches
    ]
    for batch, pool, period in lines:
        try:
            result = measure(options, batch, pool, period)
        except jax.errors.JaxRuntimeError as error:  # out of memory, among others: the other lines may fit
            result = Result(batch, pool, period, failure=one_line(error))
        results.append(result)
        what = f"{result.tokens_per_second:.0f} tokens/s" if result.failure is None else result.failure
        console.print(f"batch {batch}, {pool} pool, a write in {period}: {what}", highlight=False)
        if options.json is not None:
            content = {"versions": versions(), "results": [result._asdict() for result in results]}
            write_text(options.json, json.dumps(content, indent=1))
    console.print(_table(results))
    return 1 if any(result.failure for result in results) else 0


def _table(results: list[Result]) -> Table:
    table = Table()
    for name in ("batch", "pool", "tokens a write", "tokens/s", "step us", "spread us", "TB/s", "error"):
        table.add_column(name, justify="right")
    for r in results:
        numbers = [r.failure] + [""] * 3
        if r.failure is None:
            spread = f"{r.fastest_us:.1f} to {r.slowest_us:.1f}"
            numbers = [
                f"{r.tokens_per_second:.0f}",
                f"{r.step_us:.1f}",
                spread,
                f"{r.terabytes_per_second:.2f}",
            ]
        table.add_row(str(r.batch), r.pool, str(r.deferred), *numbers, f"{r.error:.1e}")
    return table
