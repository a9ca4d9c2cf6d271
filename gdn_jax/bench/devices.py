"""Checks what runs on this device against float64, and times it: the first run on a kind of GPU that is new to us.

The report is Markdown, to be pasted into an issue. It has a line for each case: the rule in both passes by every
implementation that the device supports, single tokens and drafts, prompts, the parts of a layer and the loss, a token
of one row by models, and at last the rule in the sizes of the table of docs/hardware.md. What the device does not run
is named below the table with its reason. A case that is wrong or raises is a line too, and does not end the others.

The rule, tokens and prompts are compared with a NumPy recurrence in float64 (`checks.oracle`), the rule in large
sizes and a token of a model with the recurrence in float32, and a part of a layer with itself in float64, which no
kernel takes. The column "error" is the largest relative rms error of a case.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np

from gdn_jax.bench import measure, one_token, passes
from gdn_jax.bench.benchmark import Benchmark, Case, Result, checked, wrong
from gdn_jax.bench.decode import DecodeBenchmark
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.model_parts import Part, parts
from gdn_jax.bench.passes import Problem
from gdn_jax.bench.prefill import PrefillBenchmark
from gdn_jax.bench.rows import Row
from gdn_jax.bench.rule import RuleBenchmark
from gdn_jax.bench.sizes import model_config
from gdn_jax.bench.table import table
from gdn_jax.checks import check
from gdn_jax.checks.accuracy import rms_ratio
from gdn_jax.rule.implementations import IMPLEMENTATIONS
from gdn_jax.training import kernels

PART_BOUND = 2e-2
"""Largest error of a result or gradient of a part. Those of a SwiGLU have passed three arrays in bfloat16 and miss
float64 by 1.1e-2 in plain JAX on a CPU, all others by less."""


class Plan(NamedTuple):
    """The cases of a report.

    cases: names of cases of the rule.
    dtypes: their dtypes.
    decode, prefill: tokens and prompts.
    model: its parts are called, on a row of this number of tokens.
    of_one_row: models of which a token of one row is compared.
    table: rows of the rule that are timed, each with its pass.
    """

    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    decode: DecodeBenchmark
    prefill: PrefillBenchmark
    model: tuple[str, int]
    of_one_row: tuple[str, ...]
    table: tuple[tuple[Row, str], ...]


PLANS = {
    "full": Plan(
        (*check.QUICK, "channels-fast-and-slow", "channels-packed", "K128-l2norm"),
        ("bfloat16", "float16"),
        DecodeBenchmark(batches=(1, 32), gates=("head", "channel")),
        PrefillBenchmark(tokens=(8192,), requests=(1, 8), pools=("float32",)),
        ("0.4b", 2048),
        ("0.4b", "qwen3.5-0.8b", "kda-0.4b"),
        (
            (Row(16, 64, (32768,)), "forward"),
            (Row(16, 32, (4096,) * 8), "forward"),
            (Row(2, 8, (32768,)), "forward"),
            (Row(16, 32, (32768,)), "training"),
            (Row(2, 8, (32768,)), "training"),
            (Row(16, 16, (8192,), gates="uniform"), "forward"),
            (Row(16, 16, (8192,), gates="uniform"), "training"),
        ),
    ),
    "small": Plan(
        ("slow-decay", "channels-mild"),
        ("bfloat16",),
        DecodeBenchmark(
            batches=(2,), heads=(1, 2), width=16, tokens=(1,), deferred=(1, 4), pools=("float32",)
        ),
        PrefillBenchmark(tokens=(128,), requests=(2,), heads=(1, 2), width=16, pools=("float32",)),
        ("tiny", 64),
        ("tiny",),
        ((Row(1, 2, (128,), width=16), "training"),),
    ),
}


@dataclasses.dataclass(frozen=True)
class DevicesBenchmark(Benchmark):
    """A report of what runs on this device, checked and timed."""

    on_cpu: ClassVar[dict[str, Any]] = {"plan": "small", "repeats": 3}

    plan: Literal["full", "small"] = "full"
    """Sizes of models, for a GPU with 16 GB or more, or sizes that a CPU computes in a minute."""

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """The cases of other benchmarks one after the other, those that are checked alone first."""
        plan = PLANS[self.plan]
        if line := kernels.note():
            note(line)
        for dtype in plan.dtypes:
            about = {"what": "rule, both passes", "case": dtype}
            yield Case(about, partial(self.compare, dtype, note))
        for what, benchmark in (("tokens", plan.decode), ("prompts", plan.prefill)):
            own = dataclasses.replace(benchmark, repeats=self.repeats, seed=self.seed)
            for case in own.cases(note):
                yield _named(what, case)
        model, tokens = plan.model
        for part in parts(model_config(model, dtype="bfloat16"), 1, tokens):
            yield Case({"what": "part", "case": part.name}, partial(self.check_part, part))
        for name in plan.of_one_row:
            yield Case({"what": "token of one row", "case": name}, partial(self.compare_token, name))
        rule = RuleBenchmark(repeats=self.repeats, peers=False)
        for row, what in plan.table:
            problem = Problem(row, what, "bfloat16", self.seed)
            run = partial(self.time_row, rule, problem, note)
            yield _named("rule, timed", Case({"row": row.name, "pass": what}, run))

    def compare(self, dtype: str, note: Callable[[str], None]) -> Iterator[Result]:
        """The comparisons of `gdn check`, in a dtype."""
        found = check.compare(PLANS[self.plan].cases, (dtype,), self.seed)
        for reason in found.not_run:
            note(f"not run: {reason}")
        for row in found.rows:
            about = {"what": "rule, both passes", "case": f"{row.case}, {dtype}", "by": row.implementation}
            errors = {name: row.errors[name] for name in row.bounds}
            failure = f"raised {row.failure}" if row.failure else wrong(errors, row.bounds)
            yield Result(about, errors=errors, failure=failure)

    def compare_token(self, name: str) -> Iterator[Result]:
        """A token of a model, which is not timed."""
        token = one_token.compare(name, self.seed)
        about = {"what": "token of one row", "case": name, "by": ", ".join(token.kernels) or "plain JAX"}
        failure = wrong(token.errors, token.bounds)
        yield Result(about, errors=token.errors, failure=failure)

    def check_part(self, part: Part) -> Iterator[Result]:
        """Results of a part and, where it has a backward, its gradients, next to those in float64."""
        rng = np.random.default_rng(self.seed)

        def normal(like: jax.ShapeDtypeStruct) -> np.ndarray:
            x = rng.standard_normal(like.shape, np.float32)
            # A matrix is one of weights, or what a projection multiplies: its products are of size one.
            return (x / np.sqrt(like.shape[-1]) if x.ndim == 2 else x).astype(like.dtype)

        def call(x, cotangents):
            if part.backward_bytes is None:
                return part.call(*x)
            results, vjp = jax.vjp(part.call, *x)
            return results, vjp(cotangents)

        x = [normal(like) for like in part.arguments]
        cotangents = jax.tree.map(normal, jax.eval_shape(part.call, *x))
        given = jax.device_put((x, cotangents))
        names = one_token.kernel_names(jax.jit(call).lower(*given).as_text())
        program = measure.compiled(call, *given)
        got = [np.asarray(y) for y in jax.tree.leaves(program(*given))]
        with jax.enable_x64(True):
            wide = [y.astype(np.float64) for y in x]
            results = jax.eval_shape(part.call, *wide)
            changed = jax.tree.map(lambda y, like: y.astype(like.dtype), cotangents, results)
            expected = [np.asarray(y) for y in jax.tree.leaves(jax.jit(call)(wide, changed))]
        pairs = zip(expected, got, strict=True)
        errors = {f"result {i}": rms_ratio(want, y) for i, (want, y) in enumerate(pairs)}
        about = {"what": "part", "case": part.name, "by": ", ".join(names) or "plain JAX"}

        def timed() -> tuple[Timing, dict[str, Any]]:
            return measure.measure(lambda: program(*given), self.repeats), {}

        yield checked(about, errors, dict.fromkeys(errors, PART_BOUND), timed)

    def time_row(
        self, rule: RuleBenchmark, problem: Problem, note: Callable[[str], None]
    ) -> Iterable[Result]:
        """A row of the table by every implementation that runs it, but the recurrence."""
        supported = passes.supported_implementations(problem.x, problem.cu_seqlens)
        names = (name for name in IMPLEMENTATIONS if supported[name] is None and name != "recurrent")
        return rule.time_row(problem.row, problem.what, problem.dtype, tuple(names), note)

    def report(self, results: list[Result], width: int | None) -> str:
        """Markdown on a terminal too, with the device above it."""
        lines = []
        for result in results:
            values = result.values()
            failure = (result.failure or "ok").replace("|", "/")
            numbers = {name: values.get(name) for name in ("error", "ms", "fastest", "slowest")}
            lines.append(result.about | {"result": failure} | numbers)
        failed = sum(result.failure is not None for result in results)
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", None)
        gpu = (
            f"\n- compute capability {capability}, {device.core_count} multiprocessors" if capability else ""
        )
        title = f"### gdn bench devices: {f'{failed} of {len(results)} failed' if failed else 'ok'}"
        keys = ["what", "case", "by", "result"]
        return f"{title}\n\n{check.heading()}{gpu}\n\n{table(keys, lines)}\n"


def _named(what: str, case: Case) -> Case:
    """A case of another benchmark, whose results say what they are about in the columns of this one."""

    def about(of: dict[str, Any]) -> dict[str, Any]:
        told = ", ".join(f"{name} {x}" for name, x in of.items() if name != "by" and x not in (None, ""))
        return {"what": what, "case": told, "by": of.get("by") or ""}

    def run() -> Iterator[Result]:
        for result in case.run():
            yield result._replace(about=about(result.about))

    return Case(about(case.about), run)
