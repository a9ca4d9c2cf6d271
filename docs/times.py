"""Makes docs/performance.md and the table of README.md of the files of `gdn bench all` in docs/times.

    gdn bench all --json docs/times/h100.json    # on the GPU
    python docs/times.py                         # then python docs/figures.py for the picture

A file has the name of its GPU, such as h100.json. Python alone is needed.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
PAGE, README = DOCS / "performance.md", DOCS.parent / "README.md"
PLACE = re.compile(r"(?s)(<!-- times: made by docs/times\.py -->\n\n).*?(\n\n<!-- end of times -->)")
"""Where the README has its table."""
HEADS = "16,32"
"""Key and value heads of the rows that README and figure have."""
IN_README = ("1x32768", "1024x8")
"""Sequences of the README's rows: where we are ahead, and where we are not."""
HOLDER = "H200"
"""The GPU for which other libraries' times are published."""

HEADER = """# Performance

This page answers how long the rule, a training step, a generated token and a served request take. One command
measures all of it, on one GPU in one run:

    gdn bench all --json times.json

It took 274 s on an H200 (2026-11-29, one run), most of it compiling. Tests on the machine's other card kept the cores
of the host busy from about the middle of the first training step on, with a load of 34 on 32 cores. The
training step and all later parts shared the host with them, which their slowest calls show. The command
checks results before it times them. `gdn bench all --help` names its parts, and `gdn bench --help` the
benchmarks with more sizes. [Tables of earlier versions](log/tables.md) have more shapes, memory, and what single
changes gained; the [log](log/README.md) has what was tried.

## How to read the tables

- `4096x8` is eight packed sequences of 4096 tokens. K = V = 128 and bfloat16 everywhere.
- A time is a median, in milliseconds where no other unit stands. A time of the rule counts all kernels of one public
  call.
- "Other" is the fastest other library. The ratio is our time divided by its time: below 1 we are faster. A star marks
  a published time, measured on another H200. Without a star the library ran in the same run on the same inputs.
"""
NONE = """
## The newest numbers

No file of `gdn bench all` is stored in `docs/times` yet. These are the newest numbers of the
[tables of earlier versions](log/tables.md), where each has its command, its spread and more sizes.

| what | time | other library | GPU, date |
|---|---|---|---|
| forward, 16 and 32 heads, 1x32768 | 0.652 ms | 0.826 (FlashInfer) | H200, 2026-11-23 |
| forward, 16 and 32 heads, 4096x8 | 0.382 ms | 0.383 (FlashInfer) | H200, 2026-11-26 |
| forward, 16 and 32 heads, 1024x8 | 0.121 ms | 0.113 (FlashInfer) | H200, 2026-11-26 |
| backward, 16 and 32 heads, 1x32768 | 1.442 ms | 2.515 (FlashQLA) | H200, 2026-11-23 |
| per-channel decay, 16 heads, 1x8192, forward | 0.329 ms | 0.492 (jax-linear-attention) | H100, 2026-11-26 |
| the same, forward and backward | 1.009 ms | 1.798 (jax-linear-attention) | H100, 2026-11-26 |
| training step of 0.4b, 65,536 tokens in rows of 8192 | 309.6 ms, 211,700 tokens a second | | H200, 2026-11-23 |
| 0.4b with FP8 products, 32,768 tokens | 153.7 ms, 213,200 tokens a second | | H100, 2026-11-26 |
| a prompt of 32,768 tokens, 0.4b | 51.8 ms | | H200, 2026-11-28 |
| a token of 0.4b, one row | 0.501 ms | | H200, 2026-11-28 |
| a token of qwen3.5-0.8b, one row | 0.760 ms | | H200, 2026-11-28 |
| a token of qwen3.5-4b, one row | 2.699 ms | | H200, 2026-11-28 |
| a token of qwen3.5-0.8b, 32 rows | 1.597 ms | | H200, 2026-11-28 |
| one layer's rule for a token of 128 requests, float32 states | 132.7 us | | H200, 2026-11-23 |
"""


class Device(NamedTuple):
    """What one GPU measured."""

    name: str
    parts: dict[str, Any]
    kind: str

    def results(self, part: str) -> list[dict[str, Any]]:
        """The results of a part that have times."""
        found = self.parts.get(part, {}).get("results", [])
        return [x for x in found if "ms" in x]

    def source(self, part: str) -> str:
        """Date and versions of a part."""
        x = self.parts[part]
        told = [f"{name} {version}" for name, version in x.get("libraries", {}).items() if name != "torch"]
        versions = x["versions"]
        told = [f"jax {versions['jax']}", *([f"driver {d}"] if (d := versions.get("driver")) else []), *told]
        return f"{self.name}: {self.kind}, {x['date']}, {', '.join(told)}"


def devices(folder: Path = DOCS / "times") -> list[Device]:
    """The devices that have files, by name."""
    found = ((path.stem.upper(), json.loads(path.read_text())) for path in sorted(folder.glob("*.json")))
    return [Device(name, content["parts"], content["device"]) for name, content in found]


class Other(NamedTuple):
    """The fastest other library of a row."""

    ms: float
    name: str
    published: bool


def other(device: Device, result: dict[str, Any]) -> Other | None:
    """The fastest one of the same run; on the GPU that has published times, the fastest published one else."""
    here = [Other(x["ms"], name, False) for name, x in result.get("peers", {}).items()]
    published = [Other(ms, name, True) for name, ms in result.get("published", {}).items()]
    return min(here or (published if device.name == HOLDER else []), default=None)


Column = tuple[str, Callable[[Device, dict[str, Any]], str]]
"""The name of a column, and its cell for a result."""


def section(
    title: str,
    text: str,
    of: list[Device],
    part: str,
    label: Callable[[dict[str, Any]], str | None],
    head: str,
    columns: Iterable[Column],
) -> list[str]:
    """A table with columns for each device and its caption; nothing where no device has the part.

    Args:
      label: the first cell of a result; None leaves it out.
      head: the name of the first column.
      columns: of each device; one that no result has is left out.
    """
    some = [device for device in of if part in device.parts]
    rows: dict[str, list[str]] = {}
    columns = [*columns]
    for at, device in enumerate(some):
        for result in device.results(part):
            if (name := label(result)) is None:
                continue
            cells = rows.setdefault(name, [""] * len(columns) * len(some))
            begin = at * len(columns)
            cells[begin : begin + len(columns)] = [cell(device, result) for _, cell in columns]
    if not rows:
        return []
    heads = [f"{device.name}: {name}" for device in some for name, _ in columns]
    kept = [i for i in range(len(heads)) if any(cells[i] for cells in rows.values())]
    heads = [head, *(heads[i] for i in kept)]
    caption = "; ".join(device.source(part) for device in some)
    return [
        f"## {title}",
        "",
        text,
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *(f"| {' | '.join((name, *(cells[i] for i in kept)))} |" for name, cells in rows.items()),
        "",
        f"*{caption}.*",
        "",
    ]


def number(name: str, digits: int = 3, factor: float = 1.0) -> Callable[[Device, dict[str, Any]], str]:
    """A cell with a number of a result, with that many significant digits, in groups of thousands."""

    def cell(device: Device, result: dict[str, Any]) -> str:
        x = result.get(name)
        if x is None:
            return ""
        x = float(f"{x * factor:.{digits}g}")
        return f"{x:,.0f}" if x >= 1000 else f"{x:g}"

    return cell


def _other(device: Device, result: dict[str, Any]) -> str:
    found = other(device, result)
    return f"{found.ms:.3g} {found.name}{' *' if found.published else ''}" if found else ""


def _ratio(device: Device, result: dict[str, Any]) -> str:
    found = other(device, result)
    return f"{result['ms'] / found.ms:.2f}" if found else ""


RULE: tuple[Column, ...] = (("ms", number("ms")), ("other", _other), ("ratio", _ratio))


def sequences(result: dict[str, Any]) -> str:
    """The lengths of a row of the rule, such as 1x32768."""
    return result["row"].split()[1]


def _lengths(result: dict[str, Any]) -> str:
    told = " (lengths known only at run time)" if result.get("lengths") == "traced" else ""
    return f"{sequences(result)}{told}"


def _channel(result: dict[str, Any]) -> str:
    return {"forward": "forward", "training": "forward and backward"}[result["pass"]]


def page(of: list[Device]) -> str:
    """The whole page."""
    first = (
        f"The gated delta rule, `gated_delta_rule`, with {HEADS.replace(',', ' key heads and ')} value heads."
    )
    model = {part: x["model"] for device in of for part, x in device.parts.items() if "model" in x}
    written = (("ms a token", number("ms")), ("ms of the bytes", number("ms of bytes")))
    lines = [
        *section("Forward", first, of, "forward", _lengths, "sequences", RULE),
        *section(
            "Backward",
            "The gradients, given what the forward has kept.",
            of,
            "backward",
            _lengths,
            "sequences",
            RULE,
        ),
        *section(
            "Per-channel decay",
            "`delta_rule` with 16 heads and one sequence of 8192 tokens: Kimi Delta Attention.",
            of,
            "channels",
            _channel,
            "pass",
            RULE,
        ),
        *section(
            "Training a model",
            "A whole step as `gdn train` takes it, in bfloat16, 32,768 tokens a step. The share is our part of "
            "989 TFLOP/s. The first step includes tracing and compiling.",
            of,
            "step",
            lambda x: f"{model['step']}, rows of {x['length']}",
            "model",
            (
                ("ms", number("ms", 4)),
                ("tokens a second", number("tokens/s", 4)),
                ("of the peak, %", number("of peak", 3, 100)),
                ("first step, s", number("first s", 2)),
            ),
        ),
        *section(
            "Generation",
            "Tokens that `generate` writes after 128 others. The bytes of a token are its weights, states and cached "
            "keys and values; their time is worked out from the memory's published speed.",
            of,
            "generate",
            lambda x: f"{model['generate']}, batch {x['batch']}" if x["what"] == "token" else None,
            "model",
            (*written, ("tokens a second", number("tokens/s", 4))),
        ),
        *section(
            "Generation by a larger model",
            "As above.",
            of,
            "larger",
            lambda x: f"{model['larger']}, batch {x['batch']}",
            "model",
            (*written, ("tokens a second", number("tokens/s", 4))),
        ),
        *section(
            "Reading a prompt",
            "The time of a call of `generate` that reads one row and writes one token.",
            of,
            "generate",
            lambda x: f"{model['generate']}, {x['context']:,} tokens" if x["what"] == "prompt" else None,
            "model",
            (("ms", number("ms")), ("tokens a second", number("tokens/s", 4))),
        ),
        *section(
            "One token of many requests",
            "`serving.decode` from a pool of states, with 16 key and 32 value heads.",
            of,
            "decode",
            lambda x: f"{x['batch']} in {x['pool']}",
            "requests",
            (("us", number("ms", 3, 1000)), ("TB/s", number("TB/s"))),
        ),
        *section(
            "A server under traffic",
            "A `serving.Server` with requests that come and go: prompts of 16 to 2048 tokens, answers of 16 to 512. "
            "The loop is the share of the time in which the host did not wait for the GPU, and idle the share in "
            "which the GPU had nothing to do.",
            of,
            "serve",
            lambda x: f"{x['model']}, {x['requests']} requests",
            "model",
            (
                ("ms a step", number("ms")),
                ("new tokens a second", number("tokens/s", 4)),
                ("first token, ms", number("first ms")),
                ("loop, %", number("loop %", 2)),
                ("idle, %", number("idle %", 2)),
            ),
        ),
    ]
    return HEADER + ("\n" + "\n".join(lines).rstrip() + "\n" if lines else NONE)


class Compared(NamedTuple):
    """One row of README and figure: milliseconds of a call, and those of the fastest other library."""

    device: Device
    size: str
    ours: float
    other: Other


def compared(passed: str, of: list[Device]) -> list[Compared]:
    """The rows of a pass that have another library, of the device that has most of them; lengths known in tracing."""
    every = []
    for device in of:
        results = (x for x in device.results(passed) if x.get("lengths") != "traced")
        pairs = ((x, other(device, x)) for x in results if x["row"].startswith(f"{HEADS} "))
        every.append([Compared(device, sequences(x), x["ms"], y) for x, y in pairs if y is not None])
    return max(every, key=len, default=[])


def short(of: list[Device]) -> str | None:
    """The lines of the README; None where no device has times of other libraries."""
    rows = [(passed, x) for passed in ("forward", "backward") for x in compared(passed, of)]
    if not rows:
        return None
    device = rows[0][1].device
    star = "A star marks published times of an H200. " if any(x.other.published for _, x in rows) else ""
    mean = statistics.geometric_mean(x.ours / x.other.ms for _, x in rows)
    return "\n".join(
        [
            f"Milliseconds of one call on an {device.kind}, {device.parts['forward']['date']}: 16 key heads,",
            "32 value heads, K = V = 128, bfloat16, lengths known while tracing.",
            f"{star}The geometric mean of the ratios of all sizes is {mean:.2f}.",
            "`gdn bench all --json FILE` measures this, and more.",
            "",
            "| pass | sequences | gdn-jax | fastest other library | ratio |",
            "|---|---|---|---|---|",
            *(
                f"| {passed} | {x.size} | {x.ours:.3f} | {_other(device, _raw(x))} | {x.ours / x.other.ms:.2f} |"
                for passed, x in rows
                if x.size in IN_README
            ),
        ]
    )


def _raw(x: Compared) -> dict[str, Any]:
    """A result of which `other` gives the library of a row again."""
    key, value = ("published", x.other.ms) if x.other.published else ("peers", {"ms": x.other.ms})
    return {key: {x.other.name: value}}


def made() -> dict[Path, str]:
    """The two files and what they should hold."""
    of, readme = devices(), README.read_text()
    if (lines := short(of)) is not None:
        readme = PLACE.sub(lambda found: f"{found[1]}{lines}{found[2]}", readme)
    return {PAGE: page(of), README: readme}


def main() -> None:
    """Writes the page and the README."""
    for path, text in made().items():
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(text)
        temporary.replace(path)


if __name__ == "__main__":
    main()
