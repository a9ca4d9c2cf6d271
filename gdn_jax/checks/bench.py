"""`gdn bench`: times the implementations of the rule on this device, after checking that they are right.

A time is that of the public call, everything between its arguments and its results: on a GPU on the device, as one
CUDA graph; elsewhere by the clock over chained calls. Where the kernels run and no problem size is given, the rows
are those on which other libraries' times are known, which stand beside ours with the hardware's floor; libraries that
are installed are timed in the same run. What is timed is first compared with the recurrence in float32, on the first
and last heads.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from gdn_jax import gated_delta_rule, supported_implementations
from gdn_jax.checks import device_time, peers
from gdn_jax.checks import rows as bench_rows
from gdn_jax.checks.accuracy import GRADIENTS, NAMES, STATES, bound, head_axis, worst_ratio
from gdn_jax.checks.bench_table import LEFT, Result, grid, markdown, summary
from gdn_jax.checks.device_time import Timing
from gdn_jax.checks.rows import Inputs, Row
from gdn_jax.commands.errors import RunError, fail, one_line
from gdn_jax.commands.files import write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions

PASSES = {"both": ("forward", "training")}
"""What is timed for a value of --what that is not one pass."""

PEER_SLACK = 4.0
"""Other libraries may be this much less accurate; with an argument misunderstood they are off by far more."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of `gdn bench`."""

    what: Literal["forward", "backward", "training", "both"] = "both"
    """forward; backward, given what the forward saved; training: the two together; both: forward and training."""
    rows: tuple[str, ...] = ()
    """Of the table, only the rows whose name contains one of these, as in "16,32 1x"."""
    implementations: tuple[str, ...] = ()
    """Implementations to time. If none is named: the kernels for the table, else all (no "recurrent" on a GPU)."""
    heads: tuple[int, int] | None = None
    """Key heads (and query heads) and value heads, instead of the table; (4, 4) if any other size is given."""
    lengths: tuple[int, ...] | None = None
    """Lengths of the packed sequences, instead of the table; else 2048."""
    width: int | None = None
    """Width K = V of a head, instead of the table; else 64."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of q, k, v, instead of the table; else float32."""
    peers: bool = True
    """Times other libraries too, if they are installed."""
    calls: int = 8
    """Calls chained in one program, where there is no GPU."""
    repeats: int = 9
    """Timed runs."""
    max_minutes: float = math.inf
    """Starts no row after this time."""
    seed: int = 0
    """Seed of the inputs."""
    json: Path | None = None
    """File for all numbers, rewritten after every row."""
    markdown: bool = False
    """Prints Markdown."""

    @property
    def is_table(self) -> bool:
        """Whether no problem size is given."""
        return self.heads is self.lengths is self.width is self.dtype is None


class Plan(NamedTuple):
    """What is timed: rows with the pass, and how."""

    rows: list[tuple[Row, str]]
    dtype: str
    implementations: tuple[str, ...]


def plan(options: BenchOptions) -> Plan:
    """What the options ask for on this device.

    Raises:
      RunError: an option does not fit the others or this device.
    """
    for name in ("calls", "repeats"):
        if getattr(options, name) < 1:
            fail(name, "at least 1", getattr(options, name))
    any_call = jnp.zeros((1, 1, 1, 16), jnp.bfloat16)
    supported = supported_implementations(any_call, any_call, any_call)
    for name in options.implementations:
        if name not in supported:
            fail("implementations", f"names out of {', '.join(supported)}", name)
    passes = PASSES.get(options.what, (options.what,))
    no_kernels = supported["mosaic_gpu"]
    if options.rows and not options.is_table:
        fail("rows", "no --heads, --lengths, --width or --dtype with it", " ".join(options.rows))
    if options.rows and no_kernels:
        fail("rows", f"a device for the kernels ({no_kernels})", " ".join(options.rows))
    if options.is_table and not no_kernels:
        rows = [
            (row if what != "training" else row._replace(published=()), what)
            for what in passes
            for row in (bench_rows.FORWARD if what == "forward" else bench_rows.BACKWARD)
            if any(part in row.name for part in options.rows or ("",))
        ]
        if not rows:
            fail("rows", f"parts of names such as {bench_rows.FORWARD[0].name}", " ".join(options.rows))
        return Plan(rows, "bfloat16", options.implementations or ("mosaic_gpu",))
    Hk, HV = options.heads or (4, 4)
    lengths = (2048,) if options.lengths is None else options.lengths
    width = 64 if options.width is None else options.width
    if Hk < 1 or HV < 1 or HV % Hk:
        fail("heads", "value heads that are a multiple of the key heads", f"{Hk} {HV}")
    if not lengths or min(lengths) < 1:
        fail("lengths", "one or more lengths of at least 1", " ".join(map(str, lengths)))
    if not 1 <= width <= 256:
        fail("width", "1 to 256", width)
    row = Row(Hk, HV, lengths, width=width)
    every = [name for name in supported if name != "recurrent" or jax.default_backend() != "gpu"]
    return Plan(
        [(row, what) for what in passes],
        options.dtype or "float32",
        options.implementations or tuple(every),
    )


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


def _miss(errors: dict[str, float], row: Row, dtype: str, slack: float = 1.0) -> str | None:
    """What is off by more than allowed."""
    bounds = {name: slack * bound(name, dtype, cancelling=row.HV > 3 or not row.decay) for name in errors}
    misses = [f"{name} {e:.1e} > {bounds[name]:.1e}" for name, e in errors.items() if not e <= bounds[name]]
    return f"wrong: {', '.join(misses)}" if misses else None


def time_row(
    row: Row, what: str, planned: Plan, options: BenchOptions, say: Callable[[str], None]
) -> Iterator[Result]:
    """Checks and times every implementation and other library on one row; say is told what was not timed."""
    x = bench_rows.inputs(row, planned.dtype, options.seed)
    cu = None if row.cu_seqlens is None else jnp.asarray(row.cu_seqlens)
    supported = supported_implementations(*x.tokens, initial_state=x.initial_state, cu_seqlens=cu)
    runnable = [name for name in planned.implementations if supported[name] is None]
    for name in planned.implementations:
        if supported[name] is not None:
            say(f"{row.name}: {name} cannot run: {supported[name]}")
    if not runnable:
        return
    expected = reference(row, what, x)
    narrow, on_gpu = planned.dtype != "float32", jax.default_backend() == "gpu"
    measured = (
        time_peers(row, what, x, expected, planned.dtype, options, say) if narrow and options.peers else {}
    )
    floor = bench_rows.floor_ms(row, what) if narrow and on_gpu else math.nan
    for name in runnable:
        both = cu is not None and name == "mosaic_gpu"  # only the kernels look at known lengths
        for lengths in ("known", "traced") if both else ("",):
            result = Result(row, what, name, lengths, peers=measured, floor_ms=floor)
            try:
                yield time_one(result, x, expected, planned.dtype, options)
            except Exception as error:  # whatever it is, it belongs into the table
                yield result._replace(failure=f"raised {one_line(error)}")


def time_one(result: Result, x: Inputs, expected: dict, dtype: str, options: BenchOptions) -> Result:
    """The result with errors, and times if those are within their bounds."""
    row, what, part = result.row, result.what, Part.of(result.row, result.what)
    if result.lengths == "known":
        known, traced = row.cu_seqlens, None
    else:
        known, traced = None, None if row.cu_seqlens is None else jnp.asarray(row.cu_seqlens)
    step, args = call(what, result.implementation, x, known, traced)
    program = device_time.compile_step(step, *args)
    got = {name: part(name, y) for name, y in named(what, program.results).items()}
    result = result._replace(
        errors=errors(expected, got), first_s=program.first_s, temporary_mib=program.temporary_mib
    )
    if wrong := _miss(result.errors, row, dtype):
        return result._replace(failure=wrong)
    timing = device_time.measure(program, *args, calls=options.calls, repeats=options.repeats)
    return result._replace(timing=timing)


def time_peers(
    row: Row,
    what: str,
    x: Inputs,
    expected: dict,
    dtype: str,
    options: BenchOptions,
    say: Callable[[str], None],
) -> dict[str, Timing]:
    """Times of the other libraries that are installed and right."""
    measured = {}
    for peer in peers.PEERS:
        if peers.missing(peer) or (what != "forward" and not peer.has_backward):
            continue
        try:
            found = peers.measure(peer, x, row.cu_seqlens, what, Part.of(row, what), options.repeats)
        except Exception as error:  # another library's, which must not end the table
            say(f"{row.name}: {peer.name} raised {one_line(error)}")
            continue
        if wrong := _miss(errors(expected, found.results), row, dtype, PEER_SLACK):
            say(f"{row.name}: {peer.name} is not counted, {wrong}")
        else:
            measured[peer.name] = found.timing
    return measured


def caption() -> str:
    """Device and versions, above the table."""
    v = versions()
    driver = f", driver {v['driver']}" if "driver" in v else ""
    return f"{v['device']}, {v['system']}{driver}, jax {v['jax']}, jaxlib {v['jaxlib']}"


def write_json(
    path: Path, options: BenchOptions, device: str, results: list[Result], notes: list[str]
) -> None:
    """All numbers so far."""
    content = {
        "device": device,
        "options": {name: str(x) for name, x in dataclasses.asdict(options).items()},
        "results": [result.to_json() for result in results],
        "summary": summary(results),
        "notes": notes,
    }
    write_text(path, json.dumps(content, indent=1))


def run(options: BenchOptions, console: Console) -> list[Result]:
    """Times what the options ask for, prints the table and returns its numbers.

    Raises:
      RunError: an option does not fit.
    """
    planned = plan(options)
    device, started = caption(), time.monotonic()
    results: list[Result] = []
    notes: list[str] = []
    if options.peers and planned.dtype != "float32":
        notes += [f"{peer.name}: {why}" for peer in peers.PEERS if (why := peers.missing(peer))]
    for i, (row, what) in enumerate(planned.rows):
        if time.monotonic() - started > 60 * options.max_minutes:
            notes.append(
                f"not timed, --max-minutes: {', '.join(f'{r.name} {w}' for r, w in planned.rows[i:])}"
            )
            break
        console.print(f"{i + 1}/{len(planned.rows)} {row.name} {what}", style="dim", highlight=False)
        results += time_row(row, what, planned, options, notes.append)
        if options.json is not None:
            write_json(options.json, options, device, results, notes)
    notes = list(dict.fromkeys(notes))
    for r in results:
        if r.failure:
            where = " ".join(filter(None, (r.row.name, r.what, r.implementation, r.lengths)))
            notes.append(f"{where}: {r.failure}")
    title = f"{device}; {planned.dtype}"
    columns, lines = grid(results)
    if options.markdown:
        print("\n\n".join([f"{title}:", markdown(columns, lines), *summary(results), *notes]))
    else:
        table = Table(title=title)
        for name in columns:
            table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        console.print(table)
        for text in (*summary(results), *notes):
            console.print(text, highlight=False, markup=False)
    if options.json is not None:
        write_json(options.json, options, device, results, notes)
    return results


def main(argv: list[str] | None = None) -> int:
    """Entry of `gdn bench`; 0 when everything was right and timed, else 1."""
    options = parse(BenchOptions, argv, "gdn bench", BenchOptions(), __doc__)
    console = Console(stderr=options.markdown)
    if not console.is_terminal:
        console.width = 240
    try:
        results = run(options, console)
    except RunError as error:
        print(f"gdn: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return int(any(result.failure for result in results))
