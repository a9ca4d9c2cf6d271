"""Passes of the rule as steps, compared with the recurrence before their times count."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax
from gdn_jax import delta_rule, erase_then_delta_rule, gated_delta_rule
from gdn_jax.bench import measure
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench.benchmark import Result, wrong
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.rows import Inputs, Row
from gdn_jax.checks.accuracy import (
    ERASURE,
    GRADIENTS,
    NAMES,
    STATES,
    bound,
    cancelling,
    head_axis,
    worst_ratio,
)
from gdn_jax.commands.errors import one_line
from gdn_jax.rule.implementations import IMPLEMENTATIONS, PLAIN
from gdn_jax.training.kernels import device_reason


class Part(NamedTuple):
    """Heads on which results are compared: enough for what is compared to depend on nothing else."""

    key: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, row: Row, what: str) -> "Part":
        """First and last value head; with gradients, first and last key head with all their value heads."""
        group = row.HV // row.Hk
        if what == "forward":
            value = np.unique([0, row.HV - 1])
            return cls(value // group, value)
        key = np.unique([0, row.Hk - 1])
        return cls(key, (key[:, None] * group + np.arange(group)).ravel())

    def __call__(self, name: str, x: Any) -> Any:
        """The part of an argument or result."""
        heads = self.key if name.removeprefix("d") in ("q", "k", "erase_key") else self.value
        return x[:, heads] if name in ("initial_state", "dh_T", "final_state", "dh_0") else x[:, :, heads]


def public(x: Inputs) -> Callable:
    """The public call that takes these inputs."""
    if x.erase_key is not None:
        return erase_then_delta_rule
    return gated_delta_rule if x.g.ndim == 3 else delta_rule


def call(what: str, implementation: str, x: Inputs, known, cu_seqlens) -> tuple[Callable, tuple]:
    """A step(state, *rest) -> (results, new state) of one pass of the public call, and its arguments.

    Args:
      what: "forward", "backward" given what the forward saved, or "training", the two together.
      known: borders of the sequences that are known while tracing; cu_seqlens: those that are not.
    """

    def rule(tokens, state, cu_seqlens):
        borders = cu_seqlens if known is None else known
        return public(x)(*tokens, initial_state=state, cu_seqlens=borders, implementation=implementation)

    return steps(what, rule, x, cu_seqlens)


def steps(what: str, rule: Callable, x: Inputs, *borders: Any) -> tuple[Callable, tuple]:
    """`call` of any rule(tokens, state, *borders) -> (o, final state)."""

    def forward(state, tokens, *borders):
        return rule(tokens, state, *borders)

    def saved(state, tokens, *borders):
        # The function from cotangents to gradients holds what it saved in arrays, so that it can be an argument.
        return jax.vjp(lambda tokens, state: rule(tokens, state, *borders), tokens, state)[1]

    if what == "forward":
        return forward, (x.initial_state, x.tokens, *borders)
    if what == "backward":
        vjp = jax.jit(saved)(x.initial_state, x.tokens, *borders)
        return lambda dh_T, vjp, do: vjp((do, dh_T)), (x.dh_T, vjp, x.do)
    return partial(training, rule), (x.initial_state, x.tokens, x.do, x.dh_T, *borders)


def training(rule: Callable, state, tokens, do, dh_T, *known):
    """Outputs and gradients of rule(tokens, state, *known), in the order of `named` but for the last: (all, dh_0)."""
    outputs, vjp = jax.vjp(lambda *x: rule(*x, *known), tokens, state)
    dtokens, dstate = vjp((do, dh_T))
    return (*outputs, *dtokens), dstate


def named(what: str, results: tuple) -> dict[str, Any]:
    """Results of a step by the names of `accuracy`."""
    first, last = results
    first = (first,) if what == "forward" else first
    names = {"forward": STATES, "backward": GRADIENTS, "training": NAMES}[what]
    if len(first) == len((*names, *ERASURE)) - 1:
        names = *names[:-1], *ERASURE, names[-1]
    return dict(zip(names, (*first, last), strict=True))


def supported_implementations(x: Inputs, cu_seqlens: jax.Array | None) -> dict[str, str | None]:
    """Why each implementation cannot run a call on these inputs; None where it can."""
    options = dict(initial_state=x.initial_state, cu_seqlens=cu_seqlens)
    if x.g.ndim == 3:
        return gdn_jax.supported_implementations(*x.tokens, **options)
    reasons: dict[str, str | None] = {}
    for name in IMPLEMENTATIONS:
        try:
            jax.eval_shape(
                lambda tokens, name=name: public(x)(*tokens, implementation=name, **options), x.tokens
            )
            reasons[name] = None
        except NotImplementedError as error:
            reasons[name] = str(error).removeprefix(f"implementation {name!r}: ")
    return reasons


def reference(row: Row, what: str, x: Inputs) -> dict[str, np.ndarray]:
    """Results of the recurrence in float32 on the heads of `Part`, by name."""
    part = Part.of(row, what)
    arrays = {name: a for name, a in x._asdict().items() if a is not None}
    few = Inputs(**{name: part(name, a).astype(jnp.float32) for name, a in arrays.items()})
    kind = "forward" if what == "forward" else "training"
    step, args = call(kind, "recurrent", few, None, row.cu_seqlens)
    return {name: np.asarray(y) for name, y in named(kind, jax.jit(step)(*args)).items()}


def errors(expected: dict[str, np.ndarray], got: dict[str, Any]) -> dict[str, float]:
    """Relative rms errors of the results that there are, the larger of the tensor's and every head's."""
    return {name: worst_ratio(expected[name], y, head_axis(name)) for name, y in got.items()}


def miss(errors: dict[str, float], x: Inputs, dtype: str, slack: float = 1.0) -> str | None:
    """The errors that are above their bounds; slack: factor on the bounds."""
    cancels = cancelling(x.g, x.k)
    return wrong(errors, {name: slack * bound(name, dtype, cancelling=cancels) for name in errors})


@dataclasses.dataclass(frozen=True)
class Problem:
    """One pass on one row, with random inputs."""

    row: Row
    what: str
    dtype: str
    seed: int

    @cached_property
    def x(self) -> Inputs:
        """Inputs on the device."""
        return bench_rows.inputs(self.row, self.dtype, self.seed)

    @cached_property
    def cu_seqlens(self) -> jax.Array | None:
        """Borders of the sequences on the device; None for a single one."""
        return None if self.row.cu_seqlens is None else jnp.asarray(self.row.cu_seqlens)

    @cached_property
    def expected(self) -> dict[str, np.ndarray]:
        """Results of the recurrence on the heads of `Part`."""
        return reference(self.row, self.what, self.x)

    def lines(
        self, by: str, make: Callable[..., Any], peers: dict[str, Timing], calls: int, repeats: int
    ) -> Iterator[Result]:
        """A result for lengths that are known while tracing, at which kernels alone look, and one for others.

        Args: as for `timed` and `beside`; make takes the known borders, and then the unknown ones.
        """
        kinds: dict[str, tuple[Any, Any]] = {"": (None, self.cu_seqlens)}
        if self.cu_seqlens is not None and by not in PLAIN:
            kinds = {"known": (self.row.cu_seqlens, None), "traced": (None, self.cu_seqlens)}
        for lengths, borders in kinds.items():
            about = {"row": self.row.name, "pass": self.what, "by": by, "lengths": lengths}
            yield self.beside(self.timed(about, partial(make, *borders), calls, repeats), peers)

    def timed(
        self, about: dict[str, Any], make: Callable[[], tuple[Callable, tuple]], calls: int, repeats: int
    ) -> Result:
        """The errors of a step and, if those are within their bounds, its times; or why there are none.

        Args:
          make: makes the step and its arguments, as `call` does. The results have the names of `named`.
          calls: calls in a row where there is no GPU, each with the state that the last one left, so that none
            overlaps another.
        """
        part = Part.of(self.row, self.what)
        result = Result(about)
        try:
            step, args = make()
            started = time.perf_counter()
            program = measure.compiled(step, *args)
            results = jax.block_until_ready(program(*args))
            numbers = {
                "first s": time.perf_counter() - started,
                "temp GiB": measure.temporary_gib(program),
            }
            got = {name: part(name, y) for name, y in named(self.what, results).items()}
            result = result._replace(numbers=numbers, errors=errors(self.expected, got))
            if failure := miss(result.errors, self.x, self.dtype):
                return result._replace(failure=failure)
            state = args[0]

            def once() -> Any:
                nonlocal state
                results, new = program(state, *args[1:])
                state = state if measure.on_gpu() else new
                return results, new

            return result._replace(timing=measure.measure(once, repeats, calls))
        except Exception as error:  # whatever it is, it belongs into the table
            return result._replace(failure=f"raised {one_line(error)}")

    def beside(self, result: Result, peers: dict[str, Timing]) -> Result:
        """The result with the fastest other library, published or timed here, and the hardware's floor.

        Published times and the floor exist for Hopper only: another GPU has neither.
        """
        another_gpu = measure.on_gpu() and device_reason() is not None
        published = {} if another_gpu else self.row.times
        known = [(ms, name) for name, ms in published.items()]
        known += [(timing.ms, f"{name} (here)") for name, timing in peers.items()]
        numbers: dict[str, Any] = dict(zip(("its ms", "best peer"), min(known), strict=True)) if known else {}
        if measure.on_gpu() and not another_gpu and self.dtype != "float32":
            numbers["floor ms"] = bench_rows.floor_ms(self.row, self.what)
        for name, other in (("ratio", "its ms"), ("x floor", "floor ms")):
            if result.timing is not None and other in numbers:
                numbers[name] = result.timing.ms / numbers[other]
        numbers |= {"published": published, "peers": {name: t._asdict() for name, t in peers.items()}}
        return result._replace(numbers=numbers | result.numbers)


def summary(results: list[Result]) -> list[str]:
    """Geometric mean and worst of the ratios to the fastest other library, for each pass and kind of lengths."""
    lines = []
    for what, name in dict.fromkeys((r.about["pass"], r.about["by"]) for r in results):
        group = [r for r in results if (r.about["pass"], r.about["by"]) == (what, name)]
        for kind in ("known", "traced"):
            packed = any(r.about["lengths"] == kind for r in group)
            same = [r for r in group if r.about["lengths"] in ("", kind) and "ratio" in r.numbers]
            ratios = {r.about["row"]: r.numbers["ratio"] for r in same}
            if not ratios or not (packed or kind == "known"):
                continue
            worst = max(ratios, key=lambda row: ratios[row])
            lines.append(
                f"{what}, {name}, packed lengths {kind}: ratio to the fastest other library over {len(ratios)} rows: "
                f"geometric mean {statistics.geometric_mean(ratios.values()):.3f}, "
                f"worst {ratios[worst]:.3f} ({worst})"
            )
    return lines
