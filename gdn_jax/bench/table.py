"""Results of `gdn bench`: beside the times of other libraries and the floor, as a table and as a summary."""

import math
import statistics
from typing import Any, NamedTuple

from gdn_jax.bench.device_time import Timing
from gdn_jax.bench.rows import Row


class Result(NamedTuple):
    """One implementation on one row."""

    row: Row
    what: str
    implementation: str
    lengths: str = ""
    """Packed sequences: whether their lengths are "known" while tracing or "traced"."""
    timing: Timing | None = None
    first_s: float = math.nan
    temporary_mib: float = math.nan
    errors: dict[str, float] = {}  # noqa: RUF012
    peers: dict[str, Timing] = {}  # noqa: RUF012
    floor_ms: float = math.nan
    failure: str | None = None
    """Why there is no time."""
    variant: str = ""
    """Name of the kernels' configuration, where those are timed and not the public call."""

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest other library, published or measured here, and its milliseconds."""
        known = [(ms, name) for name, ms in self.row.times.items()]
        known += [(timing.median_ms, f"{name} (here)") for name, timing in self.peers.items()]
        return min(known)[::-1] if known else None

    @property
    def ratio(self) -> float | None:
        """Time over that of the fastest other library."""
        return self.timing.median_ms / self.best[1] if self.timing and self.best else None

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        fields = self._asdict() | {"row": self.row.name, "published": self.row.times, "ratio": self.ratio}
        fields["best"] = self.best
        fields["timing"] = self.timing and self.timing._asdict()
        fields["peers"] = {name: timing._asdict() for name, timing in self.peers.items()}
        return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in fields.items()}


COLUMNS = (
    "row",
    "pass",
    "implementation",
    "variant",
    "lengths",
    "median ms",
    "spread ms",
    "kernels us",
    "best peer",
    "its ms",
    "ratio",
    "floor ms",
    "% of floor",
    "first call s",
    "temporary MiB",
    "error",
)
"""Of the table; those of peers that were timed follow."""
LEFT = ("row", "pass", "implementation", "variant", "lengths", "best peer", "error")
"""Columns of text."""


def cells(result: Result) -> dict[str, str]:
    """One line of the table, by column."""

    def number(x: float | None, digits: int) -> str:
        return "" if x is None or math.isnan(x) else f"{x:.{digits}f}"

    line = {"row": result.row.name, "pass": result.what, "implementation": result.implementation}
    line |= {"variant": result.variant, "lengths": result.lengths, "first call s": number(result.first_s, 1)}
    line |= {"temporary MiB": number(result.temporary_mib, 1), "floor ms": number(result.floor_ms, 3)}
    if result.best:
        line |= {"best peer": result.best[0], "its ms": number(result.best[1], 3)}
    line["error"] = f"{max(result.errors.values()):.1e}" if result.errors else ""
    if result.timing:
        timing = result.timing
        line["median ms"] = number(timing.median_ms, 4)
        line["spread ms"] = f"{timing.fastest_ms:.4f} to {timing.slowest_ms:.4f}"
        if result.variant:
            line["kernels us"] = " ".join(number(1e3 * ms, 1) for _, ms in timing.kernels)
        line |= {"ratio": number(result.ratio, 3)}
        line["% of floor"] = number(100 * result.floor_ms / timing.median_ms, 0)
    if result.failure:
        line["error"] = f"FAILED {line['error']}".strip()
    line |= {f"{name} here": number(timing.median_ms, 3) for name, timing in result.peers.items()}
    return {name: text for name, text in line.items() if text}


def grid(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Columns that hold anything, and the lines."""
    lines = [cells(result) for result in results]
    names = dict.fromkeys((*COLUMNS, *(name for line in lines for name in line)))
    columns = [name for name in names if any(name in line for line in lines)]
    return columns, [[line.get(name, "") for name in columns] for line in lines]


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    """A Markdown table; numbers to the right."""
    rule = ["---" if name in LEFT else "---:" for name in columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *lines))


def summary(results: list[Result]) -> list[str]:
    """Geometric mean and worst of the ratios to the fastest other library, for each pass and kind of lengths."""
    lines = []
    for what, name in dict.fromkeys((r.what, r.variant or r.implementation) for r in results):
        for kind in ("known", "traced"):
            group = [r for r in results if (r.what, r.variant or r.implementation) == (what, name)]
            packed = any(r.lengths == kind for r in group)
            ratios = {r.row.name: r.ratio for r in group if r.lengths in ("", kind) and r.ratio is not None}
            if not ratios or not (packed or kind == "known"):
                continue
            worst = max(ratios, key=lambda row: ratios[row])
            lines.append(
                f"{what}, {name}, packed lengths {kind}: ratio to the fastest other library over {len(ratios)} rows: "
                f"geometric mean {statistics.geometric_mean(ratios.values()):.3f}, "
                f"worst {ratios[worst]:.3f} ({worst})"
            )
    return lines
