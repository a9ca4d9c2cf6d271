"""`gdn bench`: times the implementations of the rule on this device, after checking that they are right.

A time is that of the public call, everything between its arguments and its results: on a GPU on the device, as one
CUDA graph; elsewhere by the clock over chained calls. Where the kernels run and no problem size is given, the rows
are those on which other libraries' times are known, which stand beside ours with the hardware's floor; libraries that
are installed are timed in the same run. What is timed is first compared with the recurrence in float32, on the first
and last heads.

With --variants it times configurations of the kernels instead of the public call, each kernel by itself: for tuning.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from gdn_jax import supported_implementations
from gdn_jax.bench import kernels as kernel_bench
from gdn_jax.bench import passes, peers
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench.device_time import Timing
from gdn_jax.bench.rows import Inputs, Row
from gdn_jax.bench.table import LEFT, Result, grid, markdown, summary
from gdn_jax.commands.errors import check_seed, fail, one_line
from gdn_jax.commands.files import check_writable, write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions

PEER_SLACK = 4.0
"""Other libraries may be this much less accurate; with an argument misunderstood they are off by far more."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of `gdn bench`."""

    what: Literal["forward", "backward", "training", "both"] = "both"
    """forward; backward, given what the forward saved; training: the two together; both: forward and training
    (with --variants forward and backward)."""
    variants: str = ""
    """Times these configurations of the kernels instead, kernel by kernel, as in "auto;full;half, segments of 16"."""
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
    check_seed(options.seed)
    if options.json is not None:
        check_writable("json", options.json)
    any_call = jnp.zeros((1, 1, 1, 16), jnp.bfloat16)
    supported = supported_implementations(any_call, any_call, any_call)
    for name in options.implementations:
        if name not in supported:
            fail("implementations", f"names out of {', '.join(supported)}", name)
    second = "backward" if options.variants else "training"
    asked = ("forward", second) if options.what == "both" else (options.what,)
    no_kernels = supported["mosaic_gpu"]
    if options.variants:
        _check_variants(options, asked, no_kernels)
    if options.rows and not options.is_table:
        fail("rows", "no --heads, --lengths, --width or --dtype with it", " ".join(options.rows))
    if options.rows and no_kernels:
        fail("rows", f"a device for the kernels ({no_kernels})", " ".join(options.rows))
    if options.is_table and not no_kernels:
        rows = [
            (row if what != "training" else row._replace(published=()), what)
            for what in asked
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
        [(row, what) for what in asked],
        options.dtype or "float32",
        options.implementations or tuple(every),
    )


def _check_variants(options: BenchOptions, asked: tuple[str, ...], no_kernels: str | None) -> None:
    """Raises RunError unless the options fit --variants."""
    if no_kernels:
        fail("variants", f"a device for the kernels ({no_kernels})", options.variants)
    if not options.is_table or options.implementations:
        problem = "no --heads, --lengths, --width, --dtype or --implementations with it"
        fail("variants", problem, options.variants)
    if "training" in asked:
        fail("what", "forward, backward or both with --variants", options.what)
    for what in asked:
        known = kernel_bench.VARIANTS[what]
        for name in options.variants.split(";"):
            if name not in known:
                fail("variants", f"names out of {'; '.join(known)} for the {what}", name)


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
    expected = passes.reference(row, what, x)
    narrow, on_gpu = planned.dtype != "float32", jax.default_backend() == "gpu"
    measured = (
        time_peers(row, what, x, expected, planned.dtype, options, say) if narrow and options.peers else {}
    )
    floor = bench_rows.floor_ms(row, what) if narrow and on_gpu else math.nan
    for name in runnable:
        both = cu is not None and name == "mosaic_gpu"  # only the kernels look at known lengths
        for lengths in ("known", "traced") if both else ("",):
            result = Result(row, what, name, lengths, peers=measured, floor_ms=floor)
            known, traced = (row.cu_seqlens, None) if lengths == "known" else (None, cu)
            make = partial(passes.call, what, name, x, known, traced)
            yield passes.time_step(
                result, make, x, expected, planned.dtype, calls=options.calls, repeats=options.repeats
            )


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
            found = peers.measure(peer, x, row.cu_seqlens, what, passes.Part.of(row, what), options.repeats)
        except Exception as error:  # another library's, which must not end the table
            say(f"{row.name}: {peer.name} raised {one_line(error)}")
            continue
        if wrong := passes.miss(passes.errors(expected, found.results), x, dtype, PEER_SLACK):
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
    if options.peers and planned.dtype != "float32" and not options.variants:
        notes += [f"{peer.name}: {why}" for peer in peers.PEERS if (why := peers.missing(peer))]
    for i, (row, what) in enumerate(planned.rows):
        if time.monotonic() - started > 60 * options.max_minutes:
            notes.append(
                f"not timed, --max-minutes: {', '.join(f'{r.name} {w}' for r, w in planned.rows[i:])}"
            )
            break
        console.print(f"{i + 1}/{len(planned.rows)} {row.name} {what}", style="dim", highlight=False)
        if options.variants:
            results += kernel_bench.time_row(
                row, what, options.variants.split(";"), options.seed, options.repeats
            )
        else:
            results += time_row(row, what, planned, options, notes.append)
        if options.json is not None:
            write_json(options.json, options, device, results, notes)
    notes = list(dict.fromkeys(notes))
    for r in results:
        if r.failure:
            where = " ".join(filter(None, (r.row.name, r.what, r.implementation, r.variant, r.lengths)))
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
    """Entry of `gdn bench`; 0 when everything was right and timed, else 1.

    Raises:
      RunError: an option does not fit.
    """
    options = parse(BenchOptions, argv, "gdn bench", BenchOptions(), __doc__)
    console = Console(stderr=options.markdown)
    if not console.is_terminal:
        console.width = 240
    results = run(options, console)
    return int(any(result.failure for result in results))
