"""README.md, tasks/*.md and protocol.md of a folder of results, made of claims.json and the runs."""

import itertools
from collections.abc import Sequence
from typing import Any

from gdn_jax.findings import claims, rates
from gdn_jax.findings.ledger import LEDGER
from gdn_jax.findings.records import Results
from gdn_jax.findings.reproduce import beside
from gdn_jax.findings.verdicts import NOT_TESTED, Outcome, compare
from gdn_jax.findings.words import Words
from gdn_jax.sweeps.report import make_table
from gdn_jax.training.mixers import MIXERS


class Pages:
    """Makes the pages of a folder of results.

    Args:
      results: the runs.
      content: of claims.json.
    """

    def __init__(self, results: Results, content: dict[str, Any]):
        self.results, self.content = results, content
        self.outcomes = claims.outcomes(results, content)
        self.percent = claims.in_percent(results, content)
        self.words = Words(results, self.outcomes, self.percent)

    def all(self) -> dict[str, str]:
        """Every page by its path in the folder."""
        tasks = {f"tasks/{name}.md": self.task(name) for name in self.content["tasks"]}
        return {"README.md": self.readme(), **tasks, "protocol.md": self.protocol()}

    def readme(self) -> str:
        """The page of claims and cards."""
        page = self.content["page"]
        blocks = [f"# {page['title']}", *self._filled(page["asked"]), "## Claims"]
        blocks += [self._claims(), self._untested(page["untested"])]
        for number, card in enumerate(self.content["cards"], 1):
            blocks += [
                f"## {number}. {card['question']}",
                f"![{self.words.fill(card['picture'])}](figures/{card['id']}.png)",
                self.words.fill(" ".join(card["see"])),
                f"*But* {self.words.fill(card['caveat'])} *[Try](tasks/{card['task']}.md):* {card['exercise']}",
            ]
        blocks += [
            "## Differences from the papers",
            table(["", "papers", "here"], [self._filled(x) for x in page["differences"]]),
        ]
        blocks += ["## Repeat it", *self._filled(page["repeat"])]
        return joined(blocks)

    def task(self, name: str) -> str:
        """The page of one task: every sweep's table, with what it says and does not say."""
        task = self.content["tasks"][name]
        blocks = [f"# {task['title']}", "[Findings](../README.md), [protocol](../protocol.md)"]
        for block in task["blocks"]:
            if isinstance(block, str):
                blocks.append(self.words.fill(block))
            elif "table" in block:
                blocks.append(self._sweep_table(block["table"]))
            elif "ledger" in block:
                blocks += self._entry(block["ledger"], block["sweep"])
            elif "rates" in block:
                blocks.append(self._rates(block))
            elif "tables" in block:
                blocks += [self._sweep_table(name) for name in self.results.matching(block["tables"])]
            else:
                blocks.append(self._differences(block))
        return joined(blocks)

    def protocol(self) -> str:
        """How the runs were made."""
        blocks = []
        for block in self.content["protocol"]:
            blocks.append(self._runs() if block == "{runs}" else self.words.fill(block))
        return joined(blocks)

    def _filled(self, texts: Sequence[str]) -> list[str]:
        return [self.words.fill(text) for text in texts]

    def _claims(self) -> str:
        """The table of claims."""
        rows = []
        for claim in self.content["claims"]:
            here = "; ".join(filter(None, (self._here(claim, x) for x in claim["comparisons"])))
            if here:
                rows.append([claim["claim"], _source(claim), here, f"**{claim['verdict']}**"])
        return table(["claim", "source", "here", "verdict"], rows)

    def _untested(self, begin: str) -> str:
        """The claims without runs, in one paragraph."""
        said = []
        for claim in self.content["claims"]:
            if claim["verdict"] == NOT_TESTED:
                note = f"; {claim['note']}" if claim["note"] else ""
                said.append(f"{claim['claim']} ({_source(claim, seen_only=True)}{note})")
        return f"{begin} {'; '.join(said)}."

    def _here(self, claim: dict[str, Any], comparison: dict[str, Any]) -> str:
        """Our number of a comparison: both scores, the gain with its interval, pairs, and learned runs."""
        name = f"{claim['id']}.{comparison['name']}"
        outcome = self.outcomes[name]
        if outcome is None:
            return ""
        what = f"{comparison['name']} " if len(claim["comparisons"]) > 1 else ""
        learned = ":".join(f"{k}/{n}" for k, n in (outcome.of, outcome.than))
        if not outcome.gains:
            return f"{what}({learned})"
        percent = self.percent[name]
        one, two = (f"{x:.{0 if percent else 2}f}" for x in outcome.scores)
        # Where all runs of both arms count, their number is that of the pairs.
        pairs = "" if {outcome.of[1], outcome.than[1]} == {len(outcome.gains)} else f" n={len(outcome.gains)}"
        return f"{what}{one}:{two} ({learned}) {gain(outcome, percent)}{pairs}"

    def _sweep_table(self, name: str) -> str:
        """The first table of a sweep's table.md, with a link to it."""
        lines = make_table(*self.results.folder(name)).splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("|"))
        rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
        return "\n".join(rows) + f"\n\n{self._all_of_it(name)}"

    def _all_of_it(self, name: str) -> str:
        """Links to the table and the figure of a sweep."""
        place = self.results.places[name]
        return f"All of it: [{name}](../{place.table}), [figure](../{place.figure})."

    def _entry(self, name: str, sweep: str) -> list[str]:
        """An entry of the ledger: the paper's setting and ours, and its numbers beside those of some sweeps."""
        entry = LEDGER[name]
        said = (
            f"`gdn reproduce {name}`: [{entry.paper}]({entry.url}), {entry.where}. There: {entry.setting}. "
            f"Here: {entry.differs}."
        )
        names = self.results.matching(sweep)
        config, _ = self.results.folder(names[0])
        numbers = table(*beside(entry, config, self.results.lines(sweep), small=False))
        return [said, numbers, *(self._all_of_it(name) for name in names)]

    def _rates(self, block: dict[str, Any]) -> str:
        """The table of every learning rate of a sweep, perhaps with its figure."""
        rows, axis = rates.rows(self.results, self.words, block), self.results.about(block["rates"]).axis
        tried = sorted({lr for row in rows for lr in row.scores})
        lines = []
        for row in rows:
            apart = [f"{row.scores[lr]:.1f}" if lr in row.scores else "not run" for lr in tried]
            lines.append([row.label, str(row.scale), *(f"{x:.1f}" for x in row.best), *apart])
        heads = ["mixer", "scale", *(f"{at} {axis}, best" for at in block["at"])]
        heads += [f"{block['at'][-1]} at {tried[0]:g}", *(f"{lr:g}" for lr in tried[1:])]
        found = table(heads, lines)
        if "figure" in block:
            found += f"\n\n![{self.words.fill(block['figure']['title'])}](../{block['figure']['path']})"
        return found

    def _differences(self, block: dict[str, Any]) -> str:
        """Gains of a mixer over others at several sizes of the test."""
        sweep, of = block["differences"], block["of"]
        more = {name: block[name] for name in ("scale", "lr", "start") if name in block}
        percent = self.results.about(sweep).metric == "accuracy"
        rows = []
        for at in block["at"]:
            cells = []
            for other in block["than"]:
                arms = ({"sweep": sweep, "mixer": mixer, **more} for mixer in (of, other))
                outcome = compare(self.results, dict(zip(("of", "than"), arms, strict=True)) | {"at": at})
                assert outcome is not None
                cells.append(
                    f"{gain(outcome, percent, 1)} (n={len(outcome.gains)})" if outcome.gains else "-"
                )
            rows.append([str(at), *cells])
        heads = [f"{MIXERS[of].label}, gain over:", *(MIXERS[other].label for other in block["than"])]
        return table(heads, rows)

    def _runs(self) -> str:
        """The table of all sweeps."""
        rows = []
        for name in self.results.names:
            config, lines = self.results.folder(name)
            seconds = sum(line["wall"]["seconds"] for line in lines)
            device = config["versions"]["device"]
            made = ", ".join(f"`{commit}`" for commit in self.results.commits(name)) or "not named"
            rows.append(
                [
                    f"[{name}]({self.results.places[name].table})",
                    f"`{config['command']}`",
                    device,
                    made,
                    str(len(lines)),
                    f"{seconds:.0f}",
                ]
            )
        return table(["sweep", "command", "device", "commit", "runs", "seconds, added up"], rows)


def _source(claim: dict[str, Any], seen_only: bool = False) -> str:
    """Where a claim is from, and what it says there; perhaps only where that has a number."""
    source = claim["source"]
    if source is None:
        return "ours"
    shown = source["theirs"] and (not seen_only or any(x.isdigit() for x in source["theirs"]))
    theirs = f": {source['theirs']}" if shown else ""
    return f"[{source['paper']}]({source['url']}), {source['where']}{theirs}"


def gain(outcome: Outcome, percent: bool, more_digits: int = 0) -> str:
    """A mean gain with its 95 % t interval, bold where that excludes zero."""
    digits = (0 if percent else 3) + (more_digits if percent else 0)
    width = "" if outcome.interval is None else f"±{outcome.interval:.{digits}f}"
    said = f"{outcome.gain:+.{digits}f}{width}"
    return f"**{said}**" if outcome.excludes_zero else said


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def joined(blocks: Sequence[str]) -> str:
    """Blocks of a page, an empty line between them."""
    return "\n\n".join(blocks) + "\n"
