"""Pieces of pages: prose, tables of sweeps, gains, published settings beside ours."""

import itertools
import textwrap
from collections.abc import Callable, Sequence

from gdn_jax.commands.tables import markdown as table
from gdn_jax.sweeps.report import make_table
from gdn_jax.sweeps.reproduce import beside
from gdn_jax.sweeps.settings import ENTRIES
from gdn_jax.training.mixers import MIXERS
from results.pages.numbers import Numbers
from results.pages.stored import Arm
from results.pages.verdicts import Comparison, Gains

Section = Callable[[Numbers], list[str]]


def page_of(title: str, r: Numbers, sections: Sequence[Section]) -> str:
    """A page of results/tasks/: its title, links, and sections."""
    blocks = [f"# {title}", "[Findings](../README.md), [claims](../claims.md), [protocol](../protocol.md)"]
    return joined([*blocks, *itertools.chain.from_iterable(section(r) for section in sections)])


def joined(blocks: Sequence[str]) -> str:
    """Blocks of a page, an empty line between them."""
    return "\n\n".join(blocks) + "\n"


def prose(text: str) -> str:
    """Paragraphs, each on a line of its own; lines of tables and of lists keep theirs."""
    paragraphs = []
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        lines: list[str] = []
        for line in paragraph.splitlines():
            apart = not lines or line.startswith(("|", "- "))
            lines = [*lines, line] if apart else [*lines[:-1], f"{lines[-1]} {line.strip()}"]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def gain_of(outcome: Gains, digits: int, with_interval: bool = True) -> str:
    """A mean gain with its 95 % t interval, bold where that excludes zero and is tested."""
    width = f" ± {outcome.interval:.{digits}f}" if with_interval and outcome.interval is not None else ""
    said = f"{outcome.gain:+.{digits}f}{width}"
    return f"**{said}**" if outcome.excludes_zero else said


def sweep_table(r: Numbers, name: str) -> str:
    """The first table of a sweep's table.md, with a link to it."""
    lines = make_table(*r.folder(name)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return "\n".join(rows) + f"\n\n{all_of_it(r, name)}"


def sweep_tables(r: Numbers, pattern: str) -> list[str]:
    """`sweep_table` of every sweep that a name with a * means."""
    return [sweep_table(r, name) for name in r.matching(pattern)]


def all_of_it(r: Numbers, name: str) -> str:
    """Links to the table and the figure of a sweep."""
    place = r.places[name]
    return f"All of it: [{name}](../{place.table}), [figure](../{place.figure})."


def entry(r: Numbers, name: str, sweep: str) -> list[str]:
    """A published setting: the paper's and ours, and its numbers beside those of some sweeps."""
    published = ENTRIES[name]
    said = (
        f"`gdn reproduce {name}`: [{published.paper}]({published.url}), {published.where}. "
        f"There: {published.setting}. Here: {published.differs}."
    )
    names = r.matching(sweep)
    config, _ = r.folder(names[0])
    numbers = table(*beside(published, config, r.lines(sweep), small=False))
    return [said, numbers, *(all_of_it(r, name) for name in names)]


def by_rate(
    r: Numbers,
    sweep: str,
    mixers: Sequence[str],
    at: Sequence[int],
    starts: Sequence[tuple[str, float]] = (),
) -> str:
    """The table of every learning rate of a sweep of one seed, for papers that show their best run.

    Args:
      r: the runs.
      sweep: its name, with a * of several.
      mixers: whose runs are shown, in this order.
      at: sizes of the test; the rates apart are at the last of them.
      starts: sweeps of some of the mixers from another write strength, with that strength.
    """
    axis, rows, tried = r.about(sweep).axis, [], r.rates(Arm(sweep, mixers[0], r.lines(sweep)[0]["scale"]))
    for mixer in mixers:
        scales = sorted({line["scale"] for line in r.lines(sweep) if line["mixer"] == mixer})
        for scale, (name, start) in itertools.product(scales, ((sweep, None), *starts)):
            if not r.rates(Arm(name, mixer, scale, start=start)):
                continue
            label = MIXERS[mixer].label + ("" if start is None else f" from {start:g}")
            best = [f"{r.best(name, mixer, size, scale, start):.1f}" for size in at]
            scores = r.by_rate(name, mixer, at[-1], scale, start)
            apart = [f"{scores[lr]:.1f}" if lr in scores else "not run" for lr in tried]
            rows.append([label, str(scale), *best, *apart])
    heads = ["mixer", "scale", *(f"{size} {axis}, best" for size in at)]
    return table([*heads, f"{at[-1]} at {tried[0]:g}", *(f"{lr:g}" for lr in tried[1:])], rows)


def differences(
    r: Numbers, sweep: str, *, of: str, than: Sequence[str], at: Sequence[int | str], scale: int = 1
) -> str:
    """Gains of a mixer over others at several sizes of the test."""
    rows = []
    for size in at:
        cells = []
        for other in than:
            outcome = Comparison("", Arm(sweep, of, scale), Arm(sweep, other, scale), size).outcome(r)
            assert outcome is not None
            said = gain_of(outcome, 1 if r.percent(sweep) else 3) if outcome.gains else "-"
            cells.append(said + (f" (n={len(outcome.gains)})" if outcome.gains else ""))
        rows.append([str(size), *cells])
    return table([f"{MIXERS[of].label}, gain over:", *(MIXERS[other].label for other in than)], rows)
