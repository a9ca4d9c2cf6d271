"""Collectives of a compiled program, and the bytes that they send, read from its text."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "ragged-all-to-all",
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(
    rf"= (?P<type>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)"
)
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\] *\{([^}]*)\})")
_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\(\d+\)(\d+))?")


class Traffic(NamedTuple):
    """The operations by which one device sends, and their bytes."""

    count: dict[str, int]
    """Operations by kind; in a loop whose length the compiler knows, as often as it runs."""
    sent: dict[str, int]
    """Bytes that a device sends, by kind."""

    @property
    def total(self) -> int:
        """Bytes that a device sends."""
        return sum(self.sent.values())


def traffic(program: str) -> Traffic:
    """Reads from a compiled program what one device sends in a run of it.

    Bytes are those of the cheapest known algorithm for n devices and an array of N bytes on each: N for
    `collective-permute`, (n - 1) N for `all-gather` of parts of N, (n - 1) / n N for `reduce-scatter` and
    `all-to-all`, 2 (n - 1) / n N for `all-reduce`.

    Args:
      program: `jax.jit(f).lower(...).compile().as_text()`.
    """
    found = re.search(r"num_partitions=(\d+)", program)
    devices = int(found.group(1)) if found else 1
    own: dict[str, list[tuple[str, int]]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    name = entry = ""
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            name = found.group(1)
            own[name], calls[name] = [], []
            if line.startswith("ENTRY"):
                entry = name
        elif found := _OPERATION.search(line):
            own[name].append((found["kind"], _sent(found, devices)))
        elif "=" in line and name:
            trips = int(found.group(1)) if " while(" in line and (found := _TRIPS.search(line)) else 1
            called = [
                *_CALLS.findall(line),
                *(x.strip(" %") for b in _BRANCHES.findall(line) for x in b.split(",")),
            ]
            calls[name] += [(other, trips) for other in called]
    count: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def walk(name: str, times: int) -> None:
        for kind, size in own.get(name, ()):
            count[kind] += times
            sent[kind] += times * size
        for other, trips in calls.get(name, ()):
            walk(other, times * trips)

    walk(entry, 1)
    return Traffic(dict(count), dict(sent))


def _sent(found: re.Match, devices: int) -> int:
    kind = found["kind"]
    shapes = [_size(*shape) for shape in _SHAPE.findall(found["type"])]
    if found["start"]:  # operands, then results
        shapes = [x for x in shapes if x > 4] or shapes  # without the counters of collective-permute-start
        shapes = shapes[len(shapes) // 2 :] if found["type"].startswith("(") and len(shapes) > 1 else shapes
    size = sum(shapes)
    if kind == "collective-permute":
        return size
    n = _group_size(found["rest"]) or devices
    factor = {"all-reduce": 2.0, "reduce-scatter": float(n)}.get(kind, 1.0)  # sizes are those of results
    return math.ceil(factor * (n - 1) / n * size)


def _group_size(rest: str) -> int | None:
    """Devices that take part together, from the operation's replica_groups; None where all do."""
    groups = _GROUPS.search(rest)
    if groups is None:
        return None
    listed, size, mesh, axes = groups.groups()
    if mesh:
        sizes = {name: int(n) for name, n, _ in _AXIS.findall(mesh)}
        return math.prod(int(part) if part else sizes[name] for name, _, part in _AXIS.findall(axes))
    return int(size) if size else len(listed.split(",")) if listed else None


def _size(dtype: str, dimensions: str) -> int:
    return _BYTES.get(dtype, 0) * math.prod(int(n) for n in dimensions.split(",") if n)
