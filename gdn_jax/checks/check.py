"""`gdn check`: compares every implementation that runs on this device with the definition, and prints the errors.

Each case is one call and its backward pass from cotangents of both outputs. The definition is a NumPy float64
recurrence and its adjoint (`oracle`), given the same rounded inputs. Errors are rms(truth - x) / rms(truth), the
largest of the tensor's and every head's; bounds are those of the project's tests (`accuracy`). The output is
Markdown, to be pasted into an issue. Exit status 1 when an error is above its bound.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import gdn_jax
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import NAMES, bound, cancelling, head_axis, worst_ratio
from gdn_jax.checks.cases import CASES, Inputs, inputs
from gdn_jax.commands import fields
from gdn_jax.commands.errors import one_line
from gdn_jax.commands.fields import Distinct, Seed
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class CheckOptions:
    """Options of `gdn check`."""

    dtypes: Annotated[tuple[DType, ...], Distinct] = ("float32", "bfloat16")
    """dtypes of q, k, v."""
    full: bool = False
    """More cases: further shapes and head groupings, and sequences of thousands of tokens."""
    seed: Annotated[int, Seed] = 0
    """Seed of the inputs."""


QUICK = (
    "slow-decay-K64",
    "no-decay-K64",
    "strong-decay-K64",
    "reset-at-some-tokens-K64",
    "correlated-keys-K64",
    "beta-up-to-2-K64",
    "packed-K128",
)
"""Names of the cases."""
FULL = (
    *QUICK,
    "one-token-K64",
    "queries-grouped-vk-K64",
    "l2norm-K96-V192",
    "K256-V256",
    "long-K128",
    "long-no-decay-K128",
)
"""Names of the cases with --full."""


def rule(primals: tuple, **options: Any) -> tuple[jax.Array, jax.Array]:
    """The public call of the primals of `cases.Inputs`."""
    q, k, v, g, beta, h_0, *apart = primals
    if not apart and (g is None or g.ndim == 3):
        return gdn_jax.gated_delta_rule(q, k, v, g, beta, initial_state=h_0, **options)
    options |= dict(zip(("erase", "write"), apart, strict=False))
    return gdn_jax.delta_rule(q, k, v, g, beta, initial_state=h_0, **options)


def value_and_gradients(implementation: str, options: dict) -> Callable:
    """Function of (primals, cotangents, cu_seqlens, segment_ids) for (outputs, gradients of the primals).

    `cases.Inputs.primals` says what the primals are.
    """

    def call(primals, cotangents, cu_seqlens, segment_ids):
        static: dict[str, Any] = dict(options, implementation=implementation)
        packing = dict(cu_seqlens=cu_seqlens, segment_ids=segment_ids)
        outputs, vjp = jax.vjp(lambda *primals: rule(primals, **packing, **static), *primals)
        return outputs, vjp(cotangents)

    return call


def supported_implementations(x: Inputs, options: dict) -> dict[str, str | None]:
    """Why each implementation cannot run the call of `rule` on these inputs; None where it can."""
    if x.g is None or x.g.ndim == 3:
        return gdn_jax.supported_implementations(**x.arguments, state_layout=options["state_layout"])
    reasons = gdn_jax.supported_implementations(*x.primals[:3])
    packing = dict(cu_seqlens=x.cu_seqlens, segment_ids=x.segment_ids)
    for name in reasons:
        try:
            jax.eval_shape(
                lambda *x, name=name: rule(x, **packing, **options, implementation=name), *x.primals
            )
            reasons[name] = None
        except NotImplementedError as error:
            reasons[name] = str(error).removeprefix(f"implementation {name!r}: ")
    return reasons


class Row(NamedTuple):
    """Errors of one implementation on one case, given by its name.

    cancelling: see `accuracy.cancelling`; failure: what it raised, if it did not return.
    """

    case: str
    dtype: str
    implementation: str
    cancelling: bool
    errors: dict[str, float]
    failure: str | None = None

    @property
    def bounds(self) -> dict[str, float]:
        """Allowed errors."""
        return {name: bound(name, self.dtype, cancelling=self.cancelling) for name in NAMES}

    @property
    def misses(self) -> set[str]:
        """Names of the results that are off by more than allowed."""
        return {name for name, error in self.errors.items() if not error <= self.bounds[name]}


class Report(NamedTuple):
    """The comparisons that were made, and why others were not."""

    rows: list[Row]
    not_run: list[str]

    @property
    def ok(self) -> bool:
        """Whether every implementation stayed within every bound."""
        return bool(self.rows) and not any(row.misses for row in self.rows)


def compare(
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Runs the implementations that this device supports on these cases; say takes a line before each case."""

    @cache
    def compiled(implementation: str, options: tuple) -> Callable:  # once for cases of one shape
        return jax.jit(value_and_gradients(implementation, dict(options)))

    rows, not_run = [], {}
    for i, (dtype, name) in enumerate(product(dtypes, names), 1):
        say(f"{i}/{len(dtypes) * len(names)} {name} {dtype}")
        case = CASES[name]
        x = inputs(case, dtype, seed)
        cancels = cancelling(x.g, x.k)
        expected = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
        on_device = jax.tree.map(jnp.asarray, x)
        support = supported_implementations(on_device, case.rule_options)
        for implementation, reason in support.items():
            if reason is not None:
                not_run.setdefault(f"`{implementation}`, {dtype}: {reason}", []).append(name)
                continue
            try:
                call = compiled(implementation, tuple(case.rule_options.items()))
                outputs, gradients = call(
                    on_device.primals,
                    (on_device.do, on_device.dh_T),
                    on_device.cu_seqlens,
                    on_device.segment_ids,
                )
                got = zip(NAMES, (*outputs, *gradients), strict=True)
                errors = {part: worst_ratio(expected[part], y, head_axis(part)) for part, y in got}
                rows.append(Row(name, dtype, implementation, cancels, errors))
            except Exception as error:  # whatever it is, it belongs into the report
                infinite = dict.fromkeys(NAMES, np.inf)
                rows.append(Row(name, dtype, implementation, cancels, infinite, one_line(error)))
    named = {
        why: "" if len(where) == len(names) else f" ({', '.join(where)})" for why, where in not_run.items()
    }
    return Report(rows, [why + where for why, where in named.items()])


def heading() -> str:
    """Versions and device, as a Markdown list."""
    v = versions()
    packages = ", ".join(f"{name} {v[name]}" for name in ("gdn-jax", "jax", "jaxlib", "numpy"))
    driver = f", driver {v['driver']}" if "driver" in v else ""
    return f"- {packages}, Python {v['python']}, {v['system']}\n- device: {v['device']}{driver}"


def _number(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-")


def _table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    cells = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


_COLUMNS = tuple("state" if name == "final_state" else name for name in NAMES)


def errors_table(report: Report) -> str:
    """Every error, the bounds below those they belong to; misses in bold."""
    lines = []
    groups = dict.fromkeys((row.dtype, row.case) for row in report.rows)
    for dtype, case in groups:
        group = [row for row in report.rows if (row.dtype, row.case) == (dtype, case)]
        for row in group:
            cells = [
                f"**{_number(e)}**" if name in row.misses else _number(e) for name, e in row.errors.items()
            ]
            lines.append([case, dtype, f"`{row.implementation}`", *cells, "FAIL" if row.misses else "ok"])
        lines.append([case, dtype, "bound", *(_number(b) for b in group[0].bounds.values()), ""])
    return _table(("case", "dtype", "implementation", *_COLUMNS, "result"), lines)


def worst_table(report: Report) -> str:
    """The largest errors over all cases that share a bound."""
    groups = {}
    for row in report.rows:
        same = row.bounds == {name: bound(name, row.dtype, cancelling=not row.cancelling) for name in NAMES}
        kind = "" if same else ", alike keys or no decay" if row.cancelling else ", random keys"
        groups.setdefault(row.dtype + kind, []).append(row)
    lines = []
    for label, rows in groups.items():
        for implementation in dict.fromkeys(row.implementation for row in rows):
            own = [row.errors for row in rows if row.implementation == implementation]
            worst = (max(errors[name] for errors in own) for name in NAMES)
            lines.append([f"`{implementation}`, {label}", *(_number(e) for e in worst)])
        lines.append([f"bound, {label}", *(_number(b) for b in rows[0].bounds.values())])
    return _table(("worst of all cases", *_COLUMNS), lines)


def markdown(report: Report) -> str:
    """The whole report."""
    parts = [
        f"### gdn check: {'ok' if report.ok else 'FAIL'}",
        heading(),
        "Relative rms error against a float64 recurrence, the larger of tensor and every head.",
        errors_table(report),
        worst_table(report),
    ]
    raised = [
        f"- `{r.implementation}` on {r.case} ({r.dtype}) raised {r.failure}" for r in report.rows if r.failure
    ]
    parts += ["\n".join(raised)] if raised else []
    parts += ["Not run:\n\n" + "\n".join(f"- {line}" for line in report.not_run)] if report.not_run else []
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Entry of `gdn check`; 0 when every error is within its bound, else 1.

    Raises:
      RunError: an option cannot be used.
    """
    options = parse(CheckOptions, argv, "gdn check", CheckOptions(), __doc__)
    fields.check(options)
    console = Console(stderr=True)  # the report alone goes where it can be piped
    say = partial(console.print, style="dim", highlight=False, soft_wrap=True)
    report = compare(FULL if options.full else QUICK, options.dtypes, options.seed, say)
    print(markdown(report))
    return 0 if report.ok else 1
