"""Times the implementations of the rule, after checking that they are right.

A time is that of the public call, everything between its arguments and its results: on a GPU on the device, as one
CUDA graph; elsewhere by the clock over chained calls. Where the kernels run and no problem size is given, the rows
are those on which other libraries' times are known. These stand beside ours with the hardware's floor, and libraries
that are installed are timed in the same run. Results are first compared with the recurrence in float32, on the first
and last heads.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from gdn_jax.bench import passes, peers
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench.benchmark import Benchmark, Case, Result, Width
from gdn_jax.bench.measure import Timing, on_gpu
from gdn_jax.bench.passes import Problem
from gdn_jax.bench.rows import Row
from gdn_jax.commands.errors import fail, one_line
from gdn_jax.commands.fields import Distinct, Positive, Repeated
from gdn_jax.rule.implementations import IMPLEMENTATIONS, PLAIN
from gdn_jax.training.kernels import device_reason, rule_implementation

if TYPE_CHECKING:
    Implementation = str
else:
    Implementation = Literal[IMPLEMENTATIONS]  # for the command line


@dataclasses.dataclass(frozen=True)
class RuleBenchmark(Benchmark):
    """The implementations of the rule."""

    passes: Annotated[tuple[Literal["forward", "backward", "training"], ...], Distinct] = (
        "forward",
        "training",
    )
    """forward; backward, given what the forward saved; training: the two together."""
    rows: tuple[str, ...] = ()
    """Only the rows of the table whose name contains one of these, as in "16,32 1x". On a GPU that the kernels do not
    run on they are the table's only rows."""
    gates: Annotated[tuple[Literal["head", "uniform", "mixed", "erase"], ...], Distinct] = ("head",)
    """A decay of each head; or of each channel, all drawn alike, or slow and fast channels mixed; or all drawn alike
    with an erasure before each write, by `erase_then_delta_rule`. The decays of each channel have a table of their
    own."""
    implementations: tuple[Implementation, ...] = ()
    """Implementations to time. If none is named: the fastest that runs for the table, else all (no "recurrent" on a
    GPU)."""
    heads: Annotated[tuple[int, int] | None, Positive] = None
    """Key heads (and query heads) and value heads, instead of the table; (4, 4) if any other size is given."""
    lengths: Annotated[tuple[int, ...] | None, Repeated, Positive] = None
    """Lengths of the packed sequences, instead of the table; else 2048."""
    width: Annotated[int | None, Width] = None
    """Width K = V of a head, instead of the table; else 64."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of q, k, v, instead of the table; else float32."""
    peers: bool = True
    """Times other libraries too, if they are installed."""
    calls: Annotated[int, Positive] = 8
    """Calls in a row in one measurement, where there is no GPU."""

    @property
    def is_table(self) -> bool:
        """Whether no problem size is given."""
        return self.heads is self.lengths is self.width is self.dtype is None

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        if self.rows and not self.is_table:
            fail("rows", "no --heads, --lengths, --width or --dtype with it", " ".join(self.rows))
        if self.rows and not on_gpu() and (reason := device_reason()):
            fail("rows", f"a GPU ({reason})", " ".join(self.rows))
        Hk, HV = self.heads or (4, 4)
        if HV % Hk:
            fail("heads", "value heads that are a multiple of the key heads", f"{Hk} {HV}")

    def plan(self) -> tuple[list[tuple[Row, str]], str, tuple[str, ...]]:
        """Rows with their passes, the dtype and the implementations."""
        fastest = rule_implementation()
        if self.is_table and (self.rows or fastest not in PLAIN):
            rows = bench_rows.table_rows(self.rows, self.passes, self.gates)
            return rows, "bfloat16", self.implementations or (fastest,)
        lengths = (2048,) if self.lengths is None else self.lengths
        row = Row(*self.heads or (4, 4), lengths, width=64 if self.width is None else self.width)
        every = tuple(name for name in IMPLEMENTATIONS if name != "recurrent" or not on_gpu())
        kinds = [row._replace(gates=gates) for gates in self.gates]
        return (
            [(row, what) for what in self.passes for row in kinds],
            self.dtype or "float32",
            self.implementations or every,
        )

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each row and pass."""
        rows, dtype, implementations = self.plan()
        for peer in peers.PEERS if self.peers and dtype != "float32" else ():
            if {*peer.gates} & {*self.gates} and (why := peers.reason(peer)):
                note(f"{peer.name}: {why}")
        for row, what in rows:
            run = partial(self.time_row, row, what, dtype, implementations, note)
            yield Case({"row": row.name, "pass": what}, run)

    def time_row(
        self, row: Row, what: str, dtype: str, implementations: tuple[str, ...], note: Callable[[str], None]
    ) -> Iterator[Result]:
        """Checks and times every implementation and other library on one row."""
        problem = Problem(row, what, dtype, self.seed)
        supported = passes.supported_implementations(problem.x, problem.cu_seqlens)
        for name in implementations:
            if supported[name] is not None:
                note(f"{row.name}: {name} cannot run: {supported[name]}")
        runnable = [name for name in implementations if supported[name] is None]
        if not runnable:
            return
        measured = self.time_peers(problem, note) if self.peers and dtype != "float32" else {}
        for name in runnable:
            make = partial(passes.call, what, name, problem.x)
            yield from problem.lines(name, make, measured, self.calls, self.repeats)

    def time_peers(self, problem: Problem, note: Callable[[str], None]) -> dict[str, Timing]:
        """Times of the other libraries that are installed and right."""
        row, measured = problem.row, {}
        for peer in peers.PEERS:
            if peers.reason(peer) or not peer.takes(row):
                continue
            if problem.what != "forward" and not peer.has_backward:
                continue
            try:
                timing, results = peer.measure(problem, self.repeats)
            except Exception as error:  # another library's, which must not end the table
                note(f"{row.name}: {peer.name} raised {one_line(error)}")
                continue
            if failure := peers.miss(problem, results):
                note(f"{row.name}: {peer.name} is not counted, {failure}")
            else:
                note(f"{row.name}, {problem.what}, by {peer.name}: {timing.ms:.4g} ms")
                measured[peer.name] = timing
        return measured

    def summary(self, results: list[Result]) -> list[str]:
        """Ratios to the fastest other library."""
        return passes.summary(results)
