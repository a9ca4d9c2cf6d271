"""`gdn bench --variants`: times configurations of the kernels, kernel by kernel.

What is timed is a call of `pallas_kernels` itself, without the public call around it. Its results are compared with
the recurrence and its time is that of the device, as for everything that `gdn bench` times.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax.bench import passes
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench.rows import Inputs, Row
from gdn_jax.bench.table import Result
from gdn_jax.shapes import RuleArrays
from pallas_kernels.backward import rule as backward
from pallas_kernels.forward import rule as forward_rule

FORWARD = {
    "auto": forward_rule.Config(),
    "full": forward_rule.Config(state_warpgroups=2, segment_chunks=0),
    "half": forward_rule.Config(state_warpgroups=1, segment_chunks=0),
    **{
        f"{name}, segments of {chunks}": forward_rule.Config(state_warpgroups=n, segment_chunks=chunks)
        for name, n in (("full", 2), ("half", 1))
        for chunks in (8, 16, 32, 64, 128, 256)
    },
}
BACKWARD = {
    "auto": backward.Config(),
    "full": backward.Config(state_warpgroups=2),
    "half": backward.Config(state_warpgroups=1),
}
VARIANTS: dict[str, dict[str, Any]] = {"forward": FORWARD, "backward": BACKWARD}
"""Pass -> name -> configuration."""


def call(what: str, config: Any, x: Inputs, known, cu_seqlens) -> tuple[Callable, tuple]:
    """A step(state, *rest) -> (results, new state) of the kernels, and its arguments, as `passes.call` for the rule.

    Args:
      what: "forward", or "backward" given what the forward leaves.
      config: one of VARIANTS[what].
      known: lengths that are known while tracing; cu_seqlens: those that are not; None for a single sequence.
    """
    scale = x.q.shape[-1] ** -0.5

    def arrays(state, tokens, cu_seqlens):
        return RuleArrays._make((*tokens, state, known if cu_seqlens is None else cu_seqlens, None))

    def forward(state, tokens, cu_seqlens, config=None):
        return forward_rule.forward(arrays(state, tokens, cu_seqlens), scale=scale, config=config)

    def forward_step(state, tokens, cu_seqlens):
        return forward(state, tokens, cu_seqlens, config)[:2]

    def backward_step(dh_T, tokens, state, residuals, do, cu_seqlens):
        cotangents = backward.OutputCotangents(do, dh_T)
        call = arrays(state, tokens, cu_seqlens)
        out = backward.backward(call, residuals, cotangents, scale=scale, config=config)
        return out[:5], out.dh_0

    if what == "forward":
        return forward_step, (x.initial_state, x.tokens, cu_seqlens)
    residuals = jax.jit(lambda *args: forward(*args)[2])(x.initial_state, x.tokens, cu_seqlens)
    return backward_step, (x.dh_T, x.tokens, x.initial_state, residuals, x.do, cu_seqlens)


def time_row(row: Row, what: str, names: Sequence[str], seed: int, repeats: int) -> Iterator[Result]:
    """Checks and times the variants of these names on one row."""
    x = bench_rows.inputs(row, seed=seed)
    expected = passes.reference(row, what, x)
    cu = None if row.cu_seqlens is None else jnp.asarray(row.cu_seqlens)
    floor = bench_rows.floor_ms(row, what) if jax.default_backend() == "gpu" else math.nan
    for name in names:
        for lengths in ("",) if cu is None else ("known", "traced"):
            result = Result(row, what, "mosaic_gpu", lengths, floor_ms=floor, variant=name)
            known, traced = (row.cu_seqlens, None) if lengths == "known" else (None, cu)
            make = partial(call, what, VARIANTS[what][name], x, known, traced)
            yield passes.time_step(result, make, x, expected, "bfloat16", calls=1, repeats=repeats)
