"""Times the forward kernels on a GPU, configuration by configuration.

    python -m pallas_kernels.bench [--rows TEXT] [--variants TEXT] [--packed] [--seconds N] [--out FILE]

For each row and variant: the time of every kernel on the device (CUPTI, median), their sum, and the wall time of
a call among many calls in a row. `gdn bench` compares the public operation with other libraries; this is for tuning.
Inputs are those of FlashQLA's benchmark: unit keys and queries in bf16, g = logsigmoid(randn) / 16 with a quarter of
the heads without decay, beta = sigmoid(randn), a random initial state.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import gdn

WIDTH = 128
"""K and V."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Key and value heads, lengths of the sequences, and the best other library's milliseconds on an H200."""

    Hk: int
    HV: int
    lengths: tuple[int, ...]
    best: float

    @property
    def name(self) -> str:
        """Heads and lengths."""
        same = len(set(self.lengths)) == 1
        lengths = f"{self.lengths[0]}x{len(self.lengths)}" if same else "+".join(map(str, self.lengths))
        return f"{self.Hk},{self.HV} {lengths}"


_LENGTHS = ((32768,), (8192,), (2048,), (16384, 16384), (1024, 7168), (4096,) * 8, (1024,) * 8)
_BEST = {
    (16, 64): (1.527, 0.395, 0.112, 0.804, 0.324, 0.837, 0.234),
    (8, 32): (0.811, 0.236, 0.084, 0.766, 0.250, 0.424, 0.118),
    (2, 8): (0.244, 0.113, 0.062, 0.247, 0.114, 0.200, 0.060),
    (16, 32): (0.826, 0.240, 0.085, 0.773, 0.255, 0.432, 0.120),
}
ROWS = [
    Row(*heads, lengths, best)
    for heads, column in _BEST.items()
    for lengths, best in zip(_LENGTHS, column, strict=True)
]
"""The rows of the forward table, H200, 2026-11-20, best of FlashQLA 0.1.3, fla 0.6.0 and FlashInfer 0.7.2."""


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
"""Name -> configuration."""


def inputs(row: Row, packed: bool, seed: int = 0):
    """q, k, v, g, beta, initial_state and cu_seqlens (None unless packed; then lengths lie in one row)."""
    lengths = row.lengths
    packed = packed or len(set(lengths)) > 1
    B, T = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    keys = jax.random.split(jax.random.key(seed), 6)

    def unit(key):
        x = jax.random.normal(key, (B, T, row.Hk, WIDTH))
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    v = jax.random.normal(keys[2], (B, T, row.HV, WIDTH)).astype(jnp.bfloat16)
    g = jax.nn.log_sigmoid(jax.random.normal(keys[3], (B, T, row.HV))) / 16
    g = g * (jnp.arange(row.HV) % 4 != 0)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, row.HV)))
    h0 = jax.random.normal(keys[5], (len(lengths), row.HV, WIDTH, WIDTH))
    cu = jnp.asarray(np.cumsum((0, *lengths)), jnp.int32) if packed else None
    return unit(keys[0]), unit(keys[1]), v, g, beta, h0, cu


def call(config: gdn.Config) -> Callable:
    """The forward as a compiled function of the arrays of `inputs`."""

    def run(q, k, v, g, beta, h0, cu):
        outputs = gdn.forward(q, k, v, g, beta, h0, scale=WIDTH**-0.5, cu_seqlens=cu, config=config)
        return outputs[:2]

    return jax.jit(run)


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
    parser.add_argument("--rows", default="", help="rows whose name contains one of these (separated by ;)")
    parser.add_argument("--variants", default="auto", help="names, separated by ;")
    parser.add_argument("--packed", action="store_true", help="equal lengths too go through cu_seqlens")
    parser.add_argument("--seconds", type=float, default=1e9, help="starts nothing new after this time")
    parser.add_argument("--out", help="JSON file of all results")
    options = parser.parse_args()
    begin, results = time.perf_counter(), []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for row in ROWS:
        if not any(part in row.name for part in options.rows.split(";")):
            continue
        arguments = inputs(row, options.packed)
        for name in options.variants.split(";"):
            if time.perf_counter() - begin > options.seconds:
                break
            label = f"{row.name:18} {name:22}"
            try:
                result = measure(call(VARIANTS[name]), arguments)
            except Exception as error:  # a configuration that does not fit must not end the table
                print(label, type(error).__name__, str(error).splitlines()[0][:150], flush=True)
                continue
            ratio = result["device"] / row.best
            times = " ".join(f"{t:.4f}" for _, t in result["kernels"])
            print(
                f"{label} {result['device']:.4f} wall {result['wall']:.4f} ratio {ratio:.2f} "
                f"first {result['first']:.1f}s | {times}",
                flush=True,
            )
            results.append(dict(row=row.name, variant=name, packed=options.packed, best=row.best, **result))
            if options.out:
                with open(options.out, "w") as file:
                    json.dump(results, file)


if __name__ == "__main__":
    main()
