"""`gdn bench`: times the implementations of the rule on this device, after checking that they are right.

Every number is the time of one public call, in milliseconds, from a program that makes several calls one after
another, each with the state the last one left (so that none can be dropped or overlapped): median and spread
over repeats, compilation and warm-up left out. Inputs are fresh random numbers, never zeros: q and k of unit
length, v normal, g = logsigmoid(normal) / 16 with g = 0 on a quarter of the heads, beta = sigmoid(normal), a
random float32 initial state.
"""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from gdn_jax import gated_delta_rule, l2norm, supported_implementations
from gdn_jax.experiments.errors import RunError

# rms error against the recurrence in float32 that a timed implementation may have: the project's bfloat16 bound,
# and for float32 the bound of its float32 tests.
_ERROR_BOUND = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 1e-5}


class Row(NamedTuple):
    """One problem size; sequences of `lengths` tokens are packed into one row."""

    key_heads: int
    value_heads: int
    lengths: tuple[int, ...]
    width: int = 128

    def __str__(self) -> str:
        first, count = self.lengths[0], len(self.lengths)
        same = all(length == first for length in self.lengths)
        lengths = f"{first}x{count}" if same else "+".join(map(str, self.lengths))
        return f"({self.key_heads}, {self.value_heads}) {lengths} D={self.width}"


@dataclass(frozen=True)
class BenchOptions:
    """Options of `gdn bench`."""

    what: Literal["forward", "training", "both"] = "both"
    """forward; training (forward and backward); or both."""
    implementations: tuple[str, ...] = ("chunked", "recurrent")
    """Implementations to time; those that cannot run are listed with their reason."""
    heads: tuple[int, int] = (4, 4)
    """Key heads (and query heads) and value heads."""
    lengths: tuple[int, ...] = (2048,)
    """Lengths of the packed sequences."""
    width: int = 64
    """Width K = V of a head."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of q, k, v."""
    calls: int = 8
    """Calls chained in one program."""
    repeats: int = 9
    """Timed runs of that program."""
    seed: int = 0
    """Seed of the inputs."""
    json: Path | None = None
    """File to write the numbers to."""


class Inputs(NamedTuple):
    """Arguments of one call."""

    tokens: tuple[jax.Array, ...]
    """q, k, v, g, beta."""
    state: jax.Array
    cu_seqlens: jax.Array | None


def inputs(row: Row, dtype: str, seed: int) -> Inputs:
    """Random arguments of the rule for one row, with the distribution of the module docstring."""
    H, HV, T, D, N = row.key_heads, row.value_heads, sum(row.lengths), row.width, len(row.lengths)
    keys = jax.random.split(jax.random.key(seed), 6)
    normal = jax.random.normal
    g = jax.nn.log_sigmoid(normal(keys[3], (1, T, HV))) / 16
    q, k = (l2norm(normal(key, (1, T, H, D))).astype(dtype) for key in keys[:2])
    v = normal(keys[2], (1, T, HV, D)).astype(dtype)
    beta = jax.nn.sigmoid(normal(keys[4], (1, T, HV)))
    cu_seqlens = None if N == 1 else jnp.cumsum(jnp.array([0, *row.lengths]))
    return Inputs(
        (q, k, v, g * (jnp.arange(HV) >= HV // 4), beta), normal(keys[5], (N, HV, D, D)), cu_seqlens
    )


def forward(implementation: str, cu_seqlens: jax.Array | None, state, q, k, v, g, beta):
    """One call: (o, final state)."""
    return gated_delta_rule(
        q, k, v, g, beta, initial_state=state, cu_seqlens=cu_seqlens, implementation=implementation
    )


def training(implementation: str, cu_seqlens: jax.Array | None, state, *args):
    """One call and its backward pass from o and the final state: (gradients of args, gradient of the state)."""
    out, vjp = jax.vjp(partial(forward, implementation, cu_seqlens), state, *args)
    dstate, *dargs = vjp(out)
    return dargs, dstate


def check(implementation: str, row: Row, dtype: str, seed: int) -> float:
    """rms error of o against the float32 recurrence, relative, on a short row of the same heads and width."""
    lengths = tuple(min(length, 200) for length in row.lengths[:2])
    x = inputs(row._replace(lengths=lengths), dtype, seed)
    o, _ = jax.jit(partial(forward, implementation, x.cu_seqlens))(x.state, *x.tokens)
    wide = [a.astype(jnp.float32) for a in x.tokens]
    ref, _ = jax.jit(partial(forward, "recurrent", x.cu_seqlens))(x.state, *wide)
    return float(jnp.sqrt(jnp.mean((o.astype(jnp.float32) - ref) ** 2) / jnp.mean(ref**2)))


class Timing(NamedTuple):
    """Result of timing one program."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    compile_s: float
    temporary_mib: float


def time_calls(step: Callable, args: tuple, state: jax.Array, calls: int, repeats: int) -> Timing:
    """Times `calls` chained calls of step(state, *args) -> (results, new state) per call.

    Temporary memory is that of a program with one call, by the compiler's own account.
    """

    def chained(state, *args):
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state, *args)[0])

        def call(_, carry):
            results, new = step(carry[1], *args)
            # The next state is the call's own, pulled to the first one's size so that it never grows.
            return results, (state + new / (1 + jnp.abs(new))).astype(state.dtype)

        return jax.lax.fori_loop(0, calls, call, (results, state))

    started = time.perf_counter()
    single = jax.jit(step).lower(state, *args).compile()
    compile_s = time.perf_counter() - started
    memory = single.memory_analysis()
    program = jax.jit(chained).lower(state, *args).compile()
    times = []
    for i in range(repeats + 2):
        started = time.perf_counter()
        jax.block_until_ready(program(state, *args))
        if i >= 2:
            times.append((time.perf_counter() - started) / calls * 1e3)
    return Timing(
        float(np.median(times)),
        min(times),
        max(times),
        compile_s,
        memory.temp_size_in_bytes / 2**20 if memory else float("nan"),
    )


def versions() -> str:
    """Device and versions, for the table's caption."""
    device = jax.devices()[0]
    cpu = f", {platform.processor() or platform.machine()}" if device.platform == "cpu" else ""
    return f"{device.device_kind}{cpu}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"


def run(options: BenchOptions, rows: list[Row], console: Console) -> list[dict]:
    """Times every implementation on every row, prints a table and returns its numbers."""
    steps = {"forward": forward, "training": training}
    steps = steps if options.what == "both" else {options.what: steps[options.what]}
    table = Table(title=f"{versions()}; {options.dtype}")
    columns = (
        "row",
        "pass",
        "implementation",
        "median ms",
        "spread ms",
        "compile s",
        "temporary MiB",
        "error",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right", no_wrap=True)
    results = []
    for row in rows:
        x = inputs(row, options.dtype, options.seed)
        supported = supported_implementations(*x.tokens, initial_state=x.state, cu_seqlens=x.cu_seqlens)
        for implementation in options.implementations:
            if implementation not in supported:
                names = ", ".join(supported)
                raise RunError(f"--implementations: expected names out of {names}, got {implementation}")
            if supported[implementation] is not None:
                console.print(f"{row}: {implementation} cannot run: {supported[implementation]}")
                continue
            error = check(implementation, row, options.dtype, options.seed + 1)
            if not error <= _ERROR_BOUND[options.dtype]:
                raise RunError(f"{row}: {implementation} is wrong, rms error {error:.1e}; not timed")
            for name, step in steps.items():
                step = partial(step, implementation, x.cu_seqlens)
                t = time_calls(step, x.tokens, x.state, options.calls, options.repeats)
                table.add_row(
                    str(row),
                    name,
                    implementation,
                    f"{t.median_ms:.3f}",
                    f"{t.fastest_ms:.3f}, {t.slowest_ms:.3f}",
                    f"{t.compile_s:.1f}",
                    f"{t.temporary_mib:.1f}",
                    f"{error:.1e}",
                )
                results.append(
                    {"row": str(row), "pass": name, "implementation": implementation, **t._asdict()}
                )
    console.print(table)
    return results


def main(argv: list[str] | None = None) -> None:
    """Entry of `gdn bench`."""
    options = tyro.cli(BenchOptions, args=argv, prog="gdn bench", description=__doc__)
    console = Console(width=max(120, Console().width))
    rows = [Row(*options.heads, options.lengths, options.width)]
    results = run(options, rows, console)
    if options.json is not None:
        temporary = options.json.with_name(options.json.name + ".tmp")
        temporary.write_text(json.dumps({"device": versions(), "results": results}, indent=1))
        temporary.replace(options.json)
