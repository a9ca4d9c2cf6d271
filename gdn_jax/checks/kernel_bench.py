"""Times the kernels on a GPU, configuration by configuration.

    python -m pallas_kernels.bench [--backward] [--rows TEXT] [--variants TEXT] [--traced] [--seconds N] [--out FILE]

For each row and variant: the time of every kernel on the device (CUPTI, median), their sum, and the wall time of
a call among many calls in a row. `gdn bench` compares the public operation with other libraries; this is for tuning.
Rows and inputs are those of `bench_rows`.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from gdn_jax.checks import rows as bench_rows
from gdn_jax.checks.rows import Row
from pallas_kernels import backward, gdn

VARIANTS = {
    "auto": gdn.Config(),
    "full": gdn.Config(state_warpgroups=2, segment_chunks=0),
    "half": gdn.Config(state_warpgroups=1, segment_chunks=0),
    **{
        f"{name}, segments of {chunks}": gdn.Config(state_warpgroups=n, segment_chunks=chunks)
        for name, n in (("full", 2), ("half", 1))
        for chunks in (8, 16, 32, 64, 128, 256)
    },
}
"""Name -> configuration of the forward."""

BACKWARD_VARIANTS = {
    "auto": backward.Config(),
    "full": backward.Config(state_warpgroups=2),
    "half": backward.Config(state_warpgroups=1),
    **{f"{n} slices": backward.Config(head_slices=n) for n in (2, 4, 8)},
}
"""Name -> configuration of the backward."""


def forward_call(row: Row, config: gdn.Config, traced: bool) -> tuple[Callable, tuple]:
    """The forward as a compiled function, and its arguments. traced: lengths are not known while tracing."""
    x, known, cu = _arguments(row, traced)

    def run(tokens, h0, cu):
        borders = known if cu is None else cu
        primals: Any = (*tokens, h0)
        return gdn.forward(*primals, scale=row.width**-0.5, cu_seqlens=borders, config=config)[:2]

    return jax.jit(run), (x.tokens, x.initial_state, cu)


def backward_call(row: Row, config: backward.Config, traced: bool) -> tuple[Callable, tuple]:
    """The same for the backward, given what the forward leaves."""
    x, known, cu = _arguments(row, traced)
    scale = row.width**-0.5

    def saved(tokens, h0, cu):
        primals: Any = (*tokens, h0)
        return gdn.forward(*primals, scale=scale, cu_seqlens=known if cu is None else cu)[2]

    def run(tokens, h0, residuals, do, dh_T, cu):
        arguments: Any = (*tokens, h0, residuals, do, dh_T)
        borders = known if cu is None else cu
        return backward.backward(*arguments, scale=scale, cu_seqlens=borders, config=config)

    residuals = jax.jit(saved)(x.tokens, x.initial_state, cu)
    return jax.jit(run), (x.tokens, x.initial_state, residuals, x.do, x.dh_T, cu)


def _arguments(row: Row, traced: bool):
    cu = row.cu_seqlens
    return bench_rows.inputs(row), cu, jnp.asarray(cu) if traced and cu is not None else None


def measure(function: Callable, arguments: tuple, iterations: int = 7, calls: int = 30) -> dict:
    """Milliseconds of each kernel in order, their sum, wall time of a call, seconds of the first call."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    first = time.perf_counter() - start
    runs: Any = profiler.measure(function, aggregate=False, iterations=iterations)(*arguments)[1]
    kernels = [(name, statistics.median(run[i][1] for run in runs)) for i, (name, _) in enumerate(runs[0])]
    out = jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*arguments)
    jax.block_until_ready(out)
    wall = (time.perf_counter() - start) / calls * 1e3
    return dict(kernels=kernels, device=sum(t for _, t in kernels), wall=wall, first=first)


def main() -> None:
    """Prints one line for each row and variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backward", action="store_true", help="the backward instead of the forward")
    parser.add_argument("--rows", default="", help="rows whose name contains one of these (separated by ;)")
    parser.add_argument("--variants", default="auto", help="names, separated by ;")
    parser.add_argument(
        "--traced", action="store_true", help="lengths of packed rows are not known while tracing"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="starts nothing new after this time")
    parser.add_argument("--out", help="JSON file of all results")
    options = parser.parse_args()
    rows = bench_rows.BACKWARD if options.backward else bench_rows.FORWARD
    begin, results = time.perf_counter(), []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for row in rows:
        if not any(part in row.name for part in options.rows.split(";")):
            continue
        for name in options.variants.split(";"):
            if time.perf_counter() - begin > options.seconds:
                break
            label = f"{row.name:24} {name:22}"
            try:
                if options.backward:
                    call = backward_call(row, BACKWARD_VARIANTS[name], options.traced)
                else:
                    call = forward_call(row, VARIANTS[name], options.traced)
                result = measure(*call)
            except Exception as error:  # a configuration that does not fit must not end the table
                print(label, type(error).__name__, str(error).splitlines()[0][:150], flush=True)
                continue
            best = min(row.times.values(), default=float("nan"))
            times = " ".join(f"{t:.4f}" for _, t in result["kernels"])
            print(
                f"{label} {result['device']:.4f} wall {result['wall']:.4f} ratio {result['device'] / best:.2f} "
                f"first {result['first']:.1f}s | {times}",
                flush=True,
            )
            results.append(dict(row=row.name, variant=name, traced=options.traced, best=best, **result))
            if options.out:
                with open(options.out + ".tmp", "w") as file:
                    json.dump(results, file)
                os.replace(options.out + ".tmp", options.out)


if __name__ == "__main__":
    main()
