"""Figures of the cards, and of every learning rate of a sweep, as claims.json asks for them.

A card's `figure` has a `kind`, a `title`, a `caption`, and

    scores    `panels`: `title`, `arms` (see `Arm`), `sizes` or None for all of them
    gains     the same, with `than`, the mixer that scores are counted from, and its name `zero` in each panel, and
              the `label` of what is counted
    curves    `arms`, whose learning curves are drawn
"""

from pathlib import Path
from typing import Any

from gdn_jax.findings import rates
from gdn_jax.findings.records import Arm, Results
from gdn_jax.findings.words import Words
from gdn_jax.sweeps import figure
from gdn_jax.sweeps.report import stored_options, trained_size


def draw(results: Results, words: Words, card: dict[str, Any], path: Path) -> None:
    """Draws the figure of a card into a PNG file."""
    asked = card["figure"]
    title, caption = (words.fill(asked[name]) for name in ("title", "caption"))
    if asked["kind"] == "curves":
        arms = [arm for x in asked["arms"] if results.records(arm := Arm.of(x))]
        about = results.about(arms[0].sweep)
        shown = dict(axis=about.axis, label=about.label, answers=about.answers, title=title, caption=caption)
        figure.draw_curves(path, [results.row(arm) for arm in arms], **shown)
        return
    about = results.about(asked["panels"][0]["arms"][0]["sweep"])
    percent = about.metric == "accuracy"
    panels = [_panel(results, panel) for panel in asked["panels"]]
    label = f"{about.label} {asked['label']}" if asked["kind"] == "gains" else about.label
    learned = {}
    if len(panels) == 1 and about.answers is not None:
        rows = [results.row(Arm.of(x)) for x in asked["panels"][0]["arms"]]
        learned = {row.mixer: figure.k_of_n(row, about.answers) for row in rows}
    shown = dict(title=title, caption=caption, percent=percent, learned=learned)
    figure.draw_panels(path, panels, label=label, **shown)


def draw_rates(results: Results, words: Words, block: dict[str, Any], root: Path) -> None:
    """Draws the figure of `rates.rows`: scores by learning rate, a panel for each size of the keys and each start.

    Args:
      results, words: as for `draw`.
      block: of a page, see `rates`.
      root: folder of the results.
    """
    panels: dict[tuple[Any, ...], list[tuple[str, dict[float, list[float]]]]] = {}
    for row in rates.rows(results, words, block):
        scores = {lr: [score / 100] for lr, score in row.scores.items()}
        panels.setdefault((row.scale, row.start is not None, row.start), []).append((row.mixer, scores))
    width, drawn = words.option(results.matching(block["rates"])[0], "head_dim"), []
    for (scale, _, start), curves in sorted(panels.items()):
        begins = "" if start is None else f", write start {start:g}"
        drawn.append(figure.Panel(f"keys of {width * scale}{begins}", "learning rate", curves))
    about, asked = results.about(block["rates"]), block["figure"]
    title, caption = (words.fill(asked[name]) for name in ("title", "caption"))
    figure.draw_panels(root / asked["path"], drawn, label=about.label, title=title, caption=caption)


def _panel(results: Results, panel: dict[str, Any]) -> figure.Panel:
    """Scores or gains of arms, by the size of the test."""
    curves, arms = [], [Arm.of(x) for x in panel["arms"]]
    for arm in arms:
        scores = results.row(arm).scores
        if "than" in panel:
            # Of the seeds that both have: the same batches, and the same text at each place.
            one, other = results.records(arm), results.records(arm._replace(mixer=panel["than"]))
            metric = f"test_{results.about(arm.sweep).metric}"
            both = [seed for seed in one if seed in other]
            scores = {n: [one[s][metric][str(n)] - other[s][metric][str(n)] for s in both] for n in scores}
        sizes = panel.get("sizes") or [*scores]
        curves.append((arm.mixer, {n: scores[n] for n in sizes}))
    about, task = results.about(arms[0].sweep), _task(results, arms[0])
    percent = about.metric == "accuracy"
    below = f"{about.axis} of a test" if percent else f"place in a row, up to so many {about.axis}"
    chance = {panel["zero"]: 0.0} if "than" in panel else about.baselines
    return figure.Panel(panel["title"], below, curves, (trained_size(task), "trained"), chance)


def _task(results: Results, arm: Arm) -> Any:
    """Options of the task of an arm's sweep."""
    return stored_options(results.folder(results.matching(arm.sweep)[0])[0]).task
