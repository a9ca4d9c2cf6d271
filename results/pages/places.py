"""Sections of finding 1 on accuracy by place, and the figure of other keys."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gdn_jax.sweeps import figure
from gdn_jax.sweeps.figure import Panel
from results.pages.further import eighths
from results.pages.markdown import prose, table
from results.pages.numbers import Numbers
from results.pages.starts import ONE_SEED

RULES = {
    "linear_attention": "linear attention",
    "mamba2": "Mamba2's decay",
    "delta_net": "DeltaNet",
    "gated_delta_net": "Gated DeltaNet",
}
DELTA_RULES = ("delta_net", "gated_delta_net")
HEAD = ["mixers", "rule", "rate", "64 pairs, %", "recalled of 256, each seed", "by eighth, first to last, %"]
KEYS = {32: 1, 128: 4}
"""The scale of a sweep by the numbers in a key."""
KNOWN, LEFT = 0.95, 0.25
"""Accuracy at 64 pairs from which a run counts, and what a run that has stopped has of its first quarter's accuracy in
its last half, at most; both were fixed before the runs with other keys."""
Lines = list[dict[str, Any]]


def runs(r: Numbers, sweep: str, rule: str, scale: int = 2, lr: float | None = None) -> Lines:
    """The runs of a rule in sweeps of `recall/place`, at one rate or at all."""
    lines = [x for x in r.lines(f"recall/place/{sweep}") if (x["mixer"], x["scale"]) == (rule, scale)]
    return [line for line in lines if lr in (None, line["lr"])]


def parts_of(lines: Lines) -> list[list[float]]:
    """Accuracy at 256 pairs in % of each run, by eighths of the pairs as written."""
    return [eighths(line, "256") for line in lines]


def rows_of(r: Numbers, mixers: str, sweep: str, scale: int = 2) -> list[list[str]]:
    """Rows of a table with `HEAD`, one for each rule and rate."""
    rows = []
    for rule, name in RULES.items():
        for lr in sorted({line["lr"] for line in runs(r, sweep, rule, scale)}):
            lines = runs(r, sweep, rule, scale, lr)
            recalled = sorted(256 * x["test_accuracy"]["256"] for x in lines)
            trained = [100 * x["test_accuracy"]["64"] for x in lines]
            means = (statistics.fmean(part) for part in zip(*parts_of(lines), strict=True))
            learned = f"{min(trained):.1f} to {max(trained):.1f}"
            rows.append([mixers, name, f"{lr:g}", learned, _said(recalled), _said(means)])
    return rows


def _said(values: Iterable[float]) -> str:
    return " ".join(f"{x:.0f}" for x in values)


def accuracy_by_place(r: Numbers) -> list[str]:
    """Two mixers and one, keys of 64 numbers."""
    two = {rule: parts_of(runs(r, "two*", rule)) for rule in RULES}
    nearly = [max(part) - min(part) for rule in RULES for part in parts_of(runs(r, "one*", rule))]
    first, later = (
        [x for rule, parts in two.items() if rule != "mamba2" for part in parts for x in part[where]]
        for where in (slice(1), slice(4, None))
    )
    decay = sorted(parts_of(runs(r, "two*", "mamba2", lr=0.0032)), key=lambda part: part[-1])
    pairs = [32 * sum(part) / 100 for part in decay]
    stops = parts_of(runs(r, "two*", "linear_attention", lr=0.0032))
    linear = [x for part in stops for x in part[4:]]
    closed, alone = (
        [32 * sum(part) / 100 for part in parts]
        for parts in (stops, parts_of(runs(r, "one*", "linear_attention", lr=0.01)))
    )
    return [
        "### Accuracy by place",
        "![Accuracy by the place of a pair, with two mixers and with one](figures/place.png)",
        prose("""
        *What was done.* The same setting with keys of 64 numbers again, three seeds each, scored by the place
        of the asked pair among the 256 that are written, in eighths: once with two mixers, as above, and once
        with one, so that no layer can count the pairs for another one.
        """),
        table(HEAD, rows_of(r, "two", "two*") + rows_of(r, "one", "one*")),
        prose(f"""
        *Result.* In models of two mixers DeltaNet, Gated DeltaNet and linear attention have nearly all of the
        first 32 pairs (at least {min(first):.0f} %, each run) and nearly none of the later ones: from the
        fifth eighth on no run has more than {max(later):.0f} %, and linear attention, whose state forgets and
        erases nothing, has at most {max(linear):.1f} %. In models of one mixer the rules recall about as many
        pairs from every eighth: within a run the best and the worst eighth differ by {min(nearly):.0f} to
        {max(nearly):.0f} points. There the delta rules hold the last pairs about as well as the first,
        Mamba2's decay and linear attention worse. Linear attention recalls {min(alone):.0f} to {max(alone):.0f}
        pairs with one mixer, more than any other rule, and {min(closed):.0f} to {max(closed):.0f} with two. So the memory of a model of two mixers is not full: a state that is too small loses
        pairs of every place, or the oldest.

        Mamba2's decay shows that the seed decides: at one learning rate two seeds recall {pairs[2]:.0f} and
        {pairs[1]:.0f} of 256 pairs, from every eighth, and the third recalls {pairs[0]:.0f} and none of the
        last quarter ({decay[0][-1]:.1f} % of the last eighth). All three recall the 64 pairs of training. The
        same rule with the same state can hold the larger number, so the smaller one is what that model has
        learned to store, and not its capacity. A ranking of rules by 256 pairs ranks such accidents.

        *What is missing.* The second learning rate of Mamba2's decay and of linear attention with two mixers,
        and of linear attention with one. The rates differ between the two settings, because one mixer does not learn 64 pairs at the lower ones.

        *What would refute it.* Accuracy by place that is flat in models of two mixers of the delta rules with
        other seeds.
        """),
    ]


def counts(line: dict[str, Any]) -> bool:
    """Whether a run knows the pairs of its training."""
    return line["test_accuracy"]["64"] >= KNOWN


def stopped(line: dict[str, Any]) -> bool:
    """Whether a run has stopped storing, by the rule that was fixed."""
    part = eighths(line, "256")
    return statistics.fmean(part[4:]) < LEFT * statistics.fmean(part[:2])


def other_keys(r: Numbers) -> list[str]:
    """Keys of 32 and of 128 numbers, two mixers and one."""
    rows = []
    for keys, scale in KEYS.items():
        for mixers in ("two", "one"):
            rows += rows_of(r, f"{mixers}, keys of {keys}", f"sizes_{mixers}*", scale)

    def of(rules: Iterable[str], keys: int, mixers: str = "two") -> Lines:
        return [line for rule in rules for line in runs(r, f"sizes_{mixers}*", rule, KEYS[keys])]

    def recalled(rule: str, mixers: str) -> str:
        pairs = sorted(256 * line["test_accuracy"]["256"] for line in of([rule], 128, mixers))
        return f"{pairs[0]:.0f} to {pairs[-1]:.0f}"

    wide, alone = of(DELTA_RULES, 128), of(DELTA_RULES, 128, "one")
    narrow, narrow_alone = of(RULES, 32), of(RULES, 32, "one")
    assert all(map(counts, wide + of(RULES, 128, "one"))) and not any(map(counts, narrow + narrow_alone))
    assert not any(map(stopped, of(RULES, 128, "one")))
    spread, flat = (
        sorted(max(part) - min(part) for part in parts_of(lines))
        for lines in (of(RULES, 128, "one"), narrow_alone)
    )
    sloped = max(parts_of(of(["mamba2"], 128, "one")), key=lambda part: max(part) - min(part))
    assert sloped[0] - sloped[-1] == spread[-1]
    correcting, plain = (
        [line["test_accuracy"]["256"] for line in of(rules, 128, "one")]
        for rules in (DELTA_RULES, ("linear_attention", "mamba2"))
    )
    assert max(correcting) < min(plain)
    last = [part[-1] for part in parts_of(wide)]
    closed = max(x for part in parts_of(narrow) for x in part[4:])
    known, known_alone = (
        [100 * line["test_accuracy"]["64"] for line in lines] for lines in (narrow, narrow_alone)
    )
    delta = of(["delta_net"], 32)
    same = sorted(int(n) * line["test_accuracy"][n] for line in delta for n in ("64", "128", "256"))
    rules = ("linear_attention", *DELTA_RULES)
    first = min(x for part in parts_of(of(rules, 128)) for x in part[:2])
    absent = {
        f"of keys of {keys} with {mixers} mixer{'s' * (mixers == 'two')}": [
            name for rule, name in RULES.items() if not of([rule], keys, mixers)
        ]
        for keys in KEYS
        for mixers in ("two", "one")
    }
    missing = "; ".join(f"{where} {' and '.join(names)}" for where, names in absent.items() if names)
    return [
        "### Accuracy by place with other keys",
        prose("""
        *Question.* Do models of two mixers stop with narrower and with wider keys, too?
        """),
        "![Accuracy by the place of a pair, with keys of 32 and of 128 numbers](figures/place_keys.png)",
        prose("""
        *What was done.* The same training with keys of 32 and of 128 numbers, seeds 10 to 12, 6000 steps instead of
        22,500, two mixers at the learning rate 0.0032 and one mixer at 0.01. Before the runs we fixed what to count (in commit `c9a1dc7`, which the commit of the runs with one mixer contains): a run that knows at least 95 % of 64 pairs
        has stopped if of 256 pairs the last half has less than a quarter of the accuracy of the first quarter. We
        expected each run of a delta rule with two mixers to have stopped, and none with one mixer. The finding would
        be refuted for a size of keys if most of the delta rules' runs with two mixers had not stopped, or most with one had.
        """),
        table(HEAD, rows),
        prose(f"""
        *Result.* **Keys of 128**: all runs know their 64 pairs. With two mixers {sum(map(stopped, wide))} of the {len(wide)} runs of the delta
        rules have stopped: most, where we had expected each. With one mixer {sum(map(stopped, alone))} of {len(alone)} have, as expected. So the
        finding is not refuted for these keys. With two mixers the stop is no edge: every run of them and of linear attention has at least {first:.1f} % of the first
        quarter, the 64 pairs of training, and the delta rules' accuracy falls from there to {min(last):.0f} to {max(last):.0f} % of the last
        eighth. With one mixer no run of the four rules has stopped. In {len(spread) - 1} of these {len(spread)} runs the best and the worst eighth differ by
        {spread[0]:.0f} to {spread[-2]:.0f} points; in the other, a seed of Mamba2's decay, accuracy falls from {sloped[0]:.0f} % of the first eighth to
        {sloped[-1]:.0f} % of the last.

        With half of the state, models of one mixer recall as many of 256 pairs or more, and linear attention by far: it recalls
        {recalled(rules[0], "one")}, with two mixers {recalled(rules[0], "two")}; DeltaNet {recalled(rules[1], "one")} and {recalled(rules[1], "two")}; Gated DeltaNet
        {recalled(rules[2], "one")} and {recalled(rules[2], "two")}. Mamba2's decay recalls {recalled("mamba2", "one")} with one mixer: each run of a rule without
        a correction recalls more than each of the delta rules there. So what the models of two mixers recall is not what their states can hold.

        **Keys of 32**: after 6000 steps no run knows 95 % of 64 pairs (with two mixers {min(known):.0f} to {max(known):.0f} %, with one
        {min(known_alone):.0f} to {max(known_alone):.0f} %), so by our rule none counts, and nothing is decided. They look like runs with keys of 64:
        with two mixers no run has more than {closed:.1f} % of any eighth after the fourth, and DeltaNet recalls {same[0]:.0f} to {same[-1]:.0f}
        pairs whether it is asked for 64, 128 or 256; with one mixer the eighths of a run differ by at most {max(flat):.1f} points, and the
        runs lose pairs of every place.

        *What weakens it.* One learning rate for each number of mixers, and not the same; a quarter of the steps, too few for keys of 32.

        *What would refute it.* Keys of 32 with more steps that know 64 pairs and recall later ones as well; models of one mixer that
        stop, with keys of any size.

        *What is missing.* {missing[0].upper() + missing[1:]}; keys of 32 with 22,500 steps. What was fixed holds for them.
        """),
    ]


def draw_other_keys(r: Numbers, path: Path) -> None:
    """Accuracy at 256 pairs by place, with keys of 32 and of 128 numbers."""
    panels = []
    for keys, scale in KEYS.items():
        for mixers in ("two", "one"):
            curves = []
            for rule in RULES:
                parts = [
                    [x / 100 for x in part] for part in parts_of(runs(r, f"sizes_{mixers}*", rule, scale))
                ]
                if parts:
                    curves.append((rule, {i + 1: [*part] for i, part in enumerate(zip(*parts, strict=True))}))
            title = f"keys of {keys}, {mixers} mixer{'s' * (mixers == 'two')}"
            if curves:
                panels.append(
                    Panel(title, "eighth of the pairs, as written", curves, (2, "trained"), even=True)
                )
    figure.draw_panels(
        path,
        panels,
        label="recalled of 256 pairs",
        title="With other keys, too, models of two mixers lose the pairs after the 64 of training",
        caption="Zoology's MQAR, trained on 4 to 64 pairs for 6000 steps, asked for 256, in eighths of the pairs as written, "
        f"three seeds. {ONE_SEED}",
    )
