"""Times configurations of the rule's kernels, kernel by kernel, for tuning.

The call is one of `pallas_kernels` itself, without the public call around it. Its results are compared with the
recurrence, and its time is that of the device, as for the rule.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

import jax

from gdn_jax.bench import passes
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench.benchmark import Benchmark, Case, Result
from gdn_jax.bench.passes import Problem
from gdn_jax.bench.rows import Inputs, Row
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct
from gdn_jax.shapes import RuleArrays
from gdn_jax.training.kernels import device_reason
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


@dataclasses.dataclass(frozen=True)
class KernelBenchmark(Benchmark):
    """Configurations of the rule's kernels, kernel by kernel."""

    variants: Annotated[tuple[str, ...], Distinct] = ("auto", "full", "half")
    """Configurations, as in auto half "half, segments of 16"."""
    passes: Annotated[tuple[Literal["forward", "backward"], ...], Distinct] = ("forward", "backward")
    """forward; backward, given what the forward saved."""
    rows: tuple[str, ...] = ()
    """Only the rows whose name contains one of these, as in "16,32 1x"."""

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        if reason := device_reason():
            fail("variants", f"a device for the kernels ({reason})", " ".join(self.variants))
        for what in self.passes:
            for name in self.variants:
                if name not in VARIANTS[what]:
                    fail("variants", f"names out of {'; '.join(VARIANTS[what])} for the {what}", name)

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each row and pass."""
        for row, what in bench_rows.table_rows(self.rows, self.passes):
            yield Case({"row": row.name, "pass": what}, partial(self.time_row, row, what))

    def time_row(self, row: Row, what: str) -> Iterator[Result]:
        """Checks and times the variants on one row."""
        problem = Problem(row, what, "bfloat16", self.seed)
        for name in self.variants:
            make = partial(call, what, VARIANTS[what][name], problem.x)
            for result in problem.lines(name, make, {}, 1, self.repeats):
                if result.timing is not None:
                    each = " ".join(f"{1e3 * ms:.1f}" for _, ms in result.timing.kernels)
                    result = result._replace(numbers={"kernels us": each} | result.numbers)
                yield result

    def summary(self, results: list[Result]) -> list[str]:
        """Ratios to the fastest other library."""
        return passes.summary(results)
