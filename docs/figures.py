"""Draws docs/rule.svg, what a token does to a state, docs/family.svg, the same for every rule of the family, and
docs/gain.svg, times of a call as shares of others' times.

The times come from docs/times.py; without a file there that has other libraries, from docs/log/tables.md.

    python docs/figures.py

All are as wide as a phone and follow the reader's colours. Python alone is needed.
"""

import re
import runpy
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
WIDTH = 400
LOOK = """<style>
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 15px; fill: #24242c; }
.title { font-weight: 600; } .soft { fill: #5d5d6b; font-size: 13px; } .end { text-anchor: end; }
.page { fill: #ffffff; } .cell { fill: #e8710a; } .edge { fill: none; stroke: #c9c9d4; }
.mark { fill: none; stroke: #b3261e; }
.ours { fill: #3f51b5; } .other { fill: #dcdce6; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e4ec; } .soft { fill: #a9a9b8; } .page { fill: #1b1c22; } .edge { stroke: #4a4b58; }
  .mark { stroke: #ff8a80; }
  .ours { fill: #8c9eff; } .other { fill: #3a3b47; }
}
</style>"""
HEADS = "16, 32"
"""Query and key heads, and value heads: the row of the tables that is drawn."""
SIZES = {
    "Forward": ("1x32768", "1x8192", "4096x8", "1024x8"),
    "Backward": ("1x32768", "1x8192", "4096x8"),
}
KEYS = ("a", "b", "c")
STATE = ((0.70, 0.15, 0.50, 0.95), (0.90, 0.40, 0.10, 0.20), (0.20, 0.80, 0.45, 0.05))
"""A state of three keys at right angles, which are its rows."""
KEY, VALUE, ALPHA, BETA = (0.0, 1.0, 0.0), (0.05, 0.95, 0.30, 0.80), 0.6, 1.0
Matrix = tuple[tuple[float, ...], ...]


class Rule(NamedTuple):
    """What a token with key b does to a state by one of the family's rules."""

    name: str
    decays: tuple[float, float, float]
    """The factor of each key channel."""
    erases: dict[int, float]
    """The channels of the keys that are erased at, with their strengths."""
    writes: tuple[int, ...] = (1,)
    """The channels of the keys that are written at."""


NONE, ALIKE, EACH = (1.0, 1.0, 1.0), (0.6, 0.6, 0.6), (0.9, 0.6, 0.25)
FAMILY = (
    Rule("Linear attention", NONE, {}),
    Rule("Mamba2's decay", ALIKE, {}),
    Rule("GLA", EACH, {}),
    Rule("DeltaNet", NONE, {1: 1.0}),
    Rule("Gated DeltaNet", ALIKE, {1: 1.0}),
    Rule("DeltaProduct", ALIKE, {1: 1.0, 2: 1.0}, (1, 2)),
    Rule("Kimi Delta (KDA)", EACH, {1: 1.0}),
    Rule("Gated DeltaNet-2", EACH, {1: 0.5}),
    Rule("Erase-then-Delta", EACH, {0: 0.8, 1: 1.0}),
)


class Time(NamedTuple):
    """Milliseconds of one call."""

    size: str
    ours: float
    other: float


def times(passed: str) -> list[Time]:
    """Times of a pass, "Forward" or "Backward"."""
    if found := measured(passed):
        return [Time(x.size, x.ours, x.other.ms) for x in found]
    section = (DOCS / "log" / "tables.md").read_text().split(f"\n## {passed}\n")[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line
    ]
    header, row = rows[0], next(row for row in rows if row[0] == HEADS)
    cells = dict(zip(header, row, strict=True))
    return [Time(size, *(float(x) for x in re.findall(r"[\d.]+", cells[size]))) for size in SIZES[passed]]


def measured(passed: str) -> list[Any]:
    """What docs/times.py compares of a pass."""
    page = runpy.run_path(str(DOCS / "times.py"))
    return page["compared"](passed.lower(), page["devices"]())


def phases() -> list[Matrix]:
    """The state before a token, decayed, without what the key had stored, and with the new value."""
    decayed = tuple(tuple(ALPHA * x for x in row) for row in STATE)
    read = [sum(k * row[j] for k, row in zip(KEY, decayed, strict=True)) for j in range(len(VALUE))]
    erased = _changed(decayed, [-BETA * x for x in read])
    return [STATE, decayed, erased, _changed(erased, [BETA * x for x in VALUE])]


def _changed(state: Matrix, value: list[float]) -> Matrix:
    """The state plus the outer product of the key and a value."""
    return tuple(
        tuple(x + k * v for x, v in zip(row, value, strict=True)) for k, row in zip(KEY, state, strict=True)
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words from x on, or up to x with the kind "end"."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def picture(height: int, says: str, parts: list[str]) -> str:
    """A whole file; `says` is what a reader hears who does not see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(says)}</title>",
            LOOK,
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def rule() -> str:
    """Four panels, two beside each other: the state, and the three things that a token does to it."""
    names = ("1  State S", "2  Decay", "3  Erase", "4  Write")
    equations = ("one value a key", "S ← α S", "S ← S − β k (Sᵀk)ᵀ", "S ← S + β k vᵀ")
    parts = [text(16, 28, "A token with key b: its new value replaces", "title")]
    parts.append(text(16, 48, "the old one, and all else decays.", "title"))
    for number, state in enumerate(phases()):
        x, y = 16 + 196 * (number % 2), 84 + 168 * (number // 2)
        parts += [text(x, y, names[number], "title"), *_matrix(x, y + 10, state, number > 1)]
        parts.append(text(x + 22, y + 126, equations[number]))
    parts.append(text(16, 400, f"Here α = {ALPHA}, β = {BETA:g}, and the keys are at right angles.", "soft"))
    return picture(
        414, "One step of the gated delta rule: the state decays, key b is erased and written anew", parts
    )


def _matrix(x: float, y: float, state: Matrix, marked: bool) -> list[str]:
    """A state, darker where its numbers are larger, with the row of key b marked."""
    wide, high = 37, 33
    parts = []
    for i, row in enumerate(state):
        parts.append(text(x, y + high * i + 22, KEYS[i]))
        for j, number in enumerate(row):
            place = f'x="{x + 22 + wide * j:g}" y="{y + high * i:g}" width="{wide - 3}" height="{high - 3}" rx="3"'
            parts.append(f'<rect class="cell" {place} fill-opacity="{min(number, 1):.2f}"/>')
            parts.append(f'<rect class="edge" {place}/>')
    if marked:
        place = f'x="{x + 19:g}" y="{y + high - 3:g}" width="{4 * wide + 3}" height="{high + 3}" rx="5"'
        parts.append(f'<rect class="mark" {place} stroke-width="2"/>')
    return parts


def family() -> str:
    """A row for each rule: the state after the decay, after what is erased, and after the write."""
    parts = [
        text(16, 28, "What a token with key b takes out", "title"),
        text(16, 48, "of the state, and where it writes", "title"),
    ]
    places = (155, 237, 319)
    for x, words in zip(places, ("decayed", "erased", "written"), strict=True):
        parts.append(text(x, 76, words, "soft"))
    y = 84
    for rule in FAMILY:
        parts.append(text(16, y + 26, rule.name))
        decayed = tuple(tuple(a * x for x in row) for a, row in zip(rule.decays, STATE, strict=True))
        erased = tuple(tuple((1 - rule.erases.get(i, 0.0)) * x for x in row) for i, row in enumerate(decayed))
        written = tuple(
            tuple(x + 0.8 * v for x, v in zip(row, VALUE, strict=True)) if i in rule.writes else row
            for i, row in enumerate(erased)
        )
        panels = (decayed, ()), (erased, tuple(rule.erases)), (written, rule.writes)
        for x, (state, changed) in zip(places, panels, strict=True):
            parts += _small_matrix(x, y, state, changed)
        y += 54
    notes = (
        "A row is a key channel, a to c; darker is more. A frame",
        "is around what a step changes. DeltaProduct takes two",
        "steps, at b and at c. Gated DeltaNet-2 erases half as",
        "much as it writes. Erase-then-Delta erases at a key of its",
        "own, a, before it erases and writes at b.",
    )
    for note in notes:
        y += 18
        parts.append(text(16, y, note, "soft"))
    says = "Nine rules: which rows of a state decay, which are erased, and which are written"
    return picture(y + 16, says, parts)


def _small_matrix(x: float, y: float, state: Matrix, marked: tuple[int, ...]) -> list[str]:
    """A state of a row of `family`, with a frame around some of its rows."""
    wide, high, parts = 18, 14, []
    for i, row in enumerate(state):
        for j, number in enumerate(row):
            place = f'x="{x + wide * j:g}" y="{y + high * i:g}" width="{wide - 2}" height="{high - 2}" rx="2"'
            parts.append(f'<rect class="cell" {place} fill-opacity="{min(number, 1):.2f}"/>')
            parts.append(f'<rect class="edge" {place}/>')
    for i in marked:
        place = f'x="{x - 2:g}" y="{y + high * i - 2:g}" width="{4 * wide + 2}" height="{high + 2}" rx="3"'
        parts.append(f'<rect class="mark" {place} stroke-width="1.5"/>')
    return parts


def gain() -> str:
    """A bar for each size: the time of gdn-jax as a share of that of the best other library."""
    parts = [
        text(16, 28, "Time of a call, and of the best other", "title"),
        text(16, 48, "library (grey, 100 %)", "title"),
    ]
    left, whole, y = 100, 216, 66
    for passed in SIZES:
        y += 20
        parts.append(text(16, y, passed, "title"))
        for time in times(passed):
            y += 34
            share = time.ours / time.other
            parts += [
                text(16, y - 4, time.size),
                f'<rect class="other" x="{left}" y="{y - 20}" width="{whole}" height="22" rx="3"/>',
                f'<rect class="ours" x="{left}" y="{y - 16}" width="{whole * share:.1f}" height="14" rx="3"/>',
                text(384, y - 4, f"{100 * share:.0f} %", "title end"),
            ]
        y += 16
    found = measured("Forward")
    notes = (
        f"{found[0].device.kind if found else 'NVIDIA H200'}, 16 key and 32 value heads, K = V = 128,",
        "bfloat16. 4096x8: eight packed rows of 4096 tokens.",
        "Libraries and dates: docs/performance.md",
    )
    for note in notes:
        y += 18
        parts.append(text(16, y, note, "soft"))
    return picture(y + 16, "Time of gdn-jax as a share of the best other library's", parts)


FIGURES = {"rule.svg": rule, "family.svg": family, "gain.svg": gain}


def main() -> None:
    """Writes the figures beside this file."""
    for name, draw in FIGURES.items():
        temporary = DOCS / f"{name}.tmp"
        temporary.write_text(draw())
        temporary.replace(DOCS / name)


if __name__ == "__main__":
    main()
