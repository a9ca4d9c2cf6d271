"""What is timed: a pass of the rule as a step, compared with the recurrence before its time counts."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import gated_delta_rule
from gdn_jax.bench import device_time
from gdn_jax.bench.rows import Inputs, Row
from gdn_jax.bench.table import Result
from gdn_jax.checks.accuracy import GRADIENTS, NAMES, STATES, bound, cancelling, head_axis, worst_ratio
from gdn_jax.commands.errors import one_line


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
        heads = self.key if name in ("q", "k", "dq", "dk") else self.value
        return x[:, heads] if name in ("initial_state", "dh_T", "final_state", "dh_0") else x[:, :, heads]


def _rule(implementation: str, known: np.ndarray | None, tokens, state, cu_seqlens):
    """The public call; known: lengths that it sees while it is traced."""
    cu_seqlens = cu_seqlens if known is None else known
    return gated_delta_rule(
        *tokens, initial_state=state, cu_seqlens=cu_seqlens, implementation=implementation
    )


def _forward(rule: Callable, state, tokens, cu_seqlens):
    return rule(tokens, state, cu_seqlens)


def _saved(rule: Callable, state, tokens, cu_seqlens):
    """The function from cotangents to gradients, with what it saved: arrays, so that it can be an argument."""
    return jax.vjp(lambda tokens, state: rule(tokens, state, cu_seqlens), tokens, state)[1]


def _backward(dh_T, vjp, do):
    return vjp((do, dh_T))


def _training(rule: Callable, state, tokens, cu_seqlens, do, dh_T):
    outputs, vjp = jax.vjp(lambda tokens, state: rule(tokens, state, cu_seqlens), tokens, state)
    dtokens, dstate = vjp((do, dh_T))
    return (*outputs, *dtokens), dstate


def call(what: str, implementation: str, x: Inputs, known, cu_seqlens) -> tuple[Callable, tuple]:
    """A step(state, *rest) -> (results, new state) of one pass, and its arguments."""
    rule = partial(_rule, implementation, known)
    if what == "forward":
        return partial(_forward, rule), (x.initial_state, x.tokens, cu_seqlens)
    if what == "backward":
        vjp = jax.jit(partial(_saved, rule))(x.initial_state, x.tokens, cu_seqlens)
        return _backward, (x.dh_T, vjp, x.do)
    return partial(_training, rule), (x.initial_state, x.tokens, cu_seqlens, x.do, x.dh_T)


def named(what: str, results: tuple) -> dict[str, Any]:
    """What a step returns, by the names of `accuracy`."""
    first, last = results
    first = (first,) if what == "forward" else first
    names = {"forward": STATES, "backward": GRADIENTS, "training": NAMES}[what]
    return dict(zip(names, (*first, last), strict=True))


@partial(jax.jit, static_argnums=0)
def _reference(what: str, x: Inputs, cu_seqlens):
    wide = Inputs(*(a.astype(jnp.float32) for a in x))
    rule = partial(_rule, "recurrent", None)
    if what == "forward":
        return _forward(rule, wide.initial_state, wide.tokens, cu_seqlens)
    return _training(rule, wide.initial_state, wide.tokens, cu_seqlens, wide.do, wide.dh_T)


def reference(row: Row, what: str, x: Inputs) -> dict[str, np.ndarray]:
    """The recurrence's results in float32 on the heads of `Part`, by name."""
    part = Part.of(row, what)
    few = Inputs(*(part(name, a) for name, a in x._asdict().items()))
    kind = "forward" if what == "forward" else "training"
    return {name: np.asarray(y) for name, y in named(kind, _reference(kind, few, row.cu_seqlens)).items()}


def errors(expected: dict[str, np.ndarray], got: dict[str, Any]) -> dict[str, float]:
    """Relative rms errors of what there is, the larger of the tensor's and every head's."""
    return {name: worst_ratio(expected[name], y, head_axis(name)) for name, y in got.items()}


def miss(errors: dict[str, float], x: Inputs, dtype: str, slack: float = 1.0) -> str | None:
    """What is off by more than allowed."""
    cancels = cancelling(x.g, x.k)
    bounds = {name: slack * bound(name, dtype, cancelling=cancels) for name in errors}
    misses = [f"{name} {e:.1e} > {bounds[name]:.1e}" for name, e in errors.items() if not e <= bounds[name]]
    return f"wrong: {', '.join(misses)}" if misses else None


def time_step(
    result: Result,
    make: Callable[[], tuple[Callable, tuple]],
    x: Inputs,
    expected: dict[str, np.ndarray],
    dtype: str,
    *,
    calls: int,
    repeats: int,
) -> Result:
    """The result with the errors of a step, and its times if those are within their bounds; or why there are none.

    Args:
      result: what is timed, without numbers.
      make: makes the step and its arguments, as `call` does; what the step returns has the names of `named`.
      x: inputs of the row; expected: their `reference`.
      calls, repeats: of `device_time.measure`.
    """
    part = Part.of(result.row, result.what)
    try:
        step, args = make()
        program = device_time.compile_step(step, *args)
        got = {name: part(name, y) for name, y in named(result.what, program.results).items()}
        result = result._replace(
            errors=errors(expected, got), first_s=program.first_s, temporary_mib=program.temporary_mib
        )
        if wrong := miss(result.errors, x, dtype):
            return result._replace(failure=wrong)
        return result._replace(timing=device_time.measure(program, *args, calls=calls, repeats=repeats))
    except Exception as error:  # whatever it is, it belongs into the table
        return result._replace(failure=f"raised {one_line(error)}")
