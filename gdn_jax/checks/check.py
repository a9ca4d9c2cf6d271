"""`gdn check`: compares every implementation that runs on this device with the definition, and prints the errors.

Each case is one call and its backward pass from cotangents of both outputs. The definition is a NumPy float64
recurrence and its adjoint (`oracle`), given the same rounded inputs. Errors are rms(truth - x) / rms(truth), the
largest of the tensor's and every head's; bounds are those of the project's tests (`accuracy`). The output is
Markdown, to be pasted into an issue. Exit status 1 when an error is above its bound.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import NAMES, bound, head_axis, worst_ratio
from gdn_jax.commands.errors import one_line
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class CheckOptions:
    """Options of `gdn check`."""

    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """dtypes of q, k, v."""
    full: bool = False
    """More cases: further shapes and head groupings, and sequences of thousands of tokens."""
    seed: int = 0
    """Seed of the inputs."""


class Case(NamedTuple):
    """One call of the rule. heads is (Hq, Hk, HV); lengths are packed sequences, the rest of T being padding."""

    name: str
    T: int = 200
    heads: tuple[int, int, int] = (2, 2, 4)
    K: int = 64
    V: int = 64
    g: Literal["slow", "none", "strong", "resets"] = "slow"
    largest_beta: float = 1.0
    correlated_keys: bool = False
    lengths: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def cancelling(self) -> bool:
        """Whether the wider of the two bfloat16 bounds applies: see `accuracy`."""
        return self.correlated_keys or self.g == "none"


QUICK = (
    Case("random keys"),
    Case("no decay", g="none"),
    Case("strong decay", g="strong"),
    Case("resets (g = -inf)", g="resets"),
    Case("keys of cosine 0.9", correlated_keys=True),
    Case("beta up to 2", largest_beta=2.0),
    Case("packed", T=250, K=128, V=128, heads=(1, 1, 2), lengths=(0, 1, 64, 0, 65, 100, 1)),
)
FULL = (
    *QUICK,
    Case("one token", T=1),
    Case("grouped queries, vk state", T=65, heads=(4, 2, 2), options=(("state_layout", "vk"),)),
    Case("K = 96, V = 192, l2norm inside", T=130, K=96, V=192, options=(("use_qk_l2norm", True),)),
    Case("K = V = 256", T=66, K=256, V=256, heads=(1, 1, 1)),
    Case("4096 tokens", T=4096, K=128, V=128, heads=(1, 1, 2)),
    Case("4096 tokens, no decay", T=4096, K=128, V=128, heads=(1, 1, 2), g="none"),
)


class Inputs(NamedTuple):
    """Arguments of one call, and the cotangents of its two outputs."""

    primals: dict[str, Any]
    """q, k, v, g, beta, initial_state, in this order."""
    cu_seqlens: np.ndarray | None
    do: np.ndarray
    dh_T: np.ndarray

    @property
    def arguments(self) -> dict[str, Any]:
        """Array arguments of gated_delta_rule, and of the oracle."""
        return {**self.primals, "cu_seqlens": self.cu_seqlens}


def inputs(case: Case, dtype: str, seed: int) -> Inputs:
    """Random inputs of a case: unit q and k, normal v, cotangents and state; gates and states in float32."""
    rng = np.random.default_rng(seed)
    (Hq, Hk, HV), T, K, V = case.heads, case.T, case.K, case.V
    HO, N = max(Hq, HV), 1 if case.lengths is None else len(case.lengths)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    shape = (1, T, HO)
    g = -np.logaddexp(0, -rng.standard_normal(shape)) / 16  # logsigmoid(normal) / 16, as trained gates look
    if case.g == "resets":
        g[rng.random(shape) < 0.1] = -np.inf
    g = {"none": np.zeros(shape), "strong": np.full(shape, -20.0)}.get(case.g, g)
    beta = case.largest_beta / (1 + np.exp(-rng.standard_normal(shape)))
    k = rng.standard_normal((1, T, Hk, K))
    if case.correlated_keys:
        k = np.sqrt(0.1) * k + np.sqrt(0.9) * rng.standard_normal((1, 1, Hk, K))
    state_shape = (N, HO, V, K) if dict(case.options).get("state_layout") == "vk" else (N, HO, K, V)
    q, v = rng.standard_normal((1, T, Hq, K)), rng.standard_normal((1, T, HV, V))
    h_0, do, dh_T = (rng.standard_normal(s) for s in (state_shape, (1, T, HO, V), state_shape))
    narrow, wide = np.dtype(dtype), np.float32
    primals = {"q": unit(q).astype(narrow), "k": unit(k).astype(narrow), "v": v.astype(narrow)}
    primals |= {"g": g.astype(wide), "beta": beta.astype(wide), "initial_state": h_0.astype(wide)}
    cu = None if case.lengths is None else np.cumsum((0, *case.lengths)).astype(np.int32)
    return Inputs(primals, cu, do.astype(narrow), dh_T.astype(wide))


def value_and_gradients(implementation: str, options: tuple[tuple[str, Any], ...]) -> Callable:
    """Function of the fields of `Inputs` for (outputs, gradients by name)."""

    def call(primals, cu_seqlens, do, dh_T):
        def rule(primals):
            packing: dict[str, Any] = {"cu_seqlens": cu_seqlens, **dict(options)}
            return gdn_jax.gated_delta_rule(**primals, **packing, implementation=implementation)

        outputs, vjp = jax.vjp(rule, primals)
        return outputs, vjp((do, dh_T))[0]

    return call


class Row(NamedTuple):
    """Errors of one implementation on one case. failure: what it raised, if it did not return."""

    case: Case
    dtype: str
    implementation: str
    errors: dict[str, float]
    failure: str | None = None

    @property
    def bounds(self) -> dict[str, float]:
        """Allowed errors."""
        return {name: bound(name, self.dtype, cancelling=self.case.cancelling) for name in NAMES}

    @property
    def misses(self) -> set[str]:
        """Names of the results that are off by more than allowed."""
        return {name for name, error in self.errors.items() if not error <= self.bounds[name]}


class Report(NamedTuple):
    """What was compared, and why the rest was not."""

    rows: list[Row]
    not_run: list[str]

    @property
    def ok(self) -> bool:
        """Whether every implementation stayed within every bound."""
        return bool(self.rows) and not any(row.misses for row in self.rows)


def compare(cases: tuple[Case, ...], dtypes: tuple[str, ...], seed: int = 0) -> Report:
    """Runs every implementation that this device supports on every case."""
    compiled = cache(
        lambda *arguments: jax.jit(value_and_gradients(*arguments))
    )  # once for cases of one shape
    rows, not_run = [], {}
    for dtype, case in product(dtypes, cases):
        x = inputs(case, dtype, seed)
        expected = oracle.evaluate(**x.arguments, **dict(case.options), do=x.do, dh_T=x.dh_T)
        on_device = jax.tree.map(jnp.asarray, x)
        support = gdn_jax.supported_implementations(**on_device.arguments, **dict(case.options))
        for implementation, reason in support.items():
            if reason is not None:
                not_run.setdefault(f"`{implementation}`, {dtype}: {reason}", []).append(case.name)
                continue
            try:
                call = compiled(implementation, case.options)
                outputs, gradients = call(*on_device)
                got = zip(NAMES, (*outputs, *(gradients[name] for name in x.primals)), strict=True)
                errors = {name: worst_ratio(expected[name], y, head_axis(name)) for name, y in got}
                rows.append(Row(case, dtype, implementation, errors))
            except Exception as error:  # whatever it is, it belongs into the report
                infinite = dict.fromkeys(NAMES, np.inf)
                rows.append(Row(case, dtype, implementation, infinite, one_line(error)))
    named = {
        why: "" if len(where) == len(cases) else f" ({', '.join(where)})" for why, where in not_run.items()
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
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
            lines.append(
                [case.name, dtype, f"`{row.implementation}`", *cells, "FAIL" if row.misses else "ok"]
            )
        lines.append([case.name, dtype, "bound", *(_number(b) for b in group[0].bounds.values()), ""])
    return _table(("case", "dtype", "implementation", *_COLUMNS, "result"), lines)


def worst_table(report: Report) -> str:
    """The largest errors over all cases that share a bound."""
    groups = {}
    for row in report.rows:
        same = row.bounds == {
            name: bound(name, row.dtype, cancelling=not row.case.cancelling) for name in NAMES
        }
        kind = "" if same else ", alike keys or no decay" if row.case.cancelling else ", random keys"
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
        f"- `{r.implementation}` on {r.case.name} ({r.dtype}) raised {r.failure}"
        for r in report.rows
        if r.failure
    ]
    parts += ["\n".join(raised)] if raised else []
    parts += ["Not run:\n\n" + "\n".join(f"- {line}" for line in report.not_run)] if report.not_run else []
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Entry of `gdn check`; 0 when every error is within its bound, else 1."""
    options = parse(CheckOptions, argv, "gdn check", CheckOptions(), __doc__)
    report = compare(FULL if options.full else QUICK, options.dtypes, options.seed)
    print(markdown(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
