"""The section of finding 1 on models that are trained on more pairs: what could have refuted it."""

import json
import statistics

from results.pages.markdown import prose, table
from results.pages.numbers import Numbers

FACTORS = ("0.5", "1", "2")


def trained_further(r: Numbers) -> list[str]:
    """Small models that are trained on as many pairs as are asked, next to those of a quarter of them."""
    further, stopped = (
        json.loads((r.root / f"recall/first_mixer/{name}.json").read_text())["runs"]
        for name in ("further", "runs")
    )
    seeds = {run["seed"] for run in further}
    stopped = [run for run in stopped if run["rule"] == "delta_net" and run["seed"] in seeds]

    def recalled(run: dict, factor: str) -> float:
        return 32 * statistics.fmean(run["place"][factor])

    rows = []
    for most, runs in (("8 pairs", stopped), ("32 pairs", further)):
        eighths = (statistics.fmean(x) for x in zip(*(run["place"]["1"] for run in runs), strict=True))
        cells = (" ".join(f"{recalled(run, factor):.1f}" for run in runs) for factor in FACTORS)
        rows.append([most, *cells, " ".join(f"{100 * x:.0f}" for x in eighths)])
    before, after = (" and ".join(f"{recalled(run, '1'):.1f}" for run in runs) for runs in (stopped, further))
    apart = [100 * (max(run["place"]["1"]) - min(run["place"]["1"])) for run in further]
    losses = [run["loss"] for run in further]
    return [
        "### Trained on more pairs",
        prose("""
        *Question.* If a model of two mixers stops where its training did, then one with the same state that
        is trained on more pairs has to stop later.

        *What was done.* Two seeds of the small models of DeltaNet above were trained on up to 32 pairs, as
        many as they are asked for, all else equal. Pairs recalled of 32, each seed:
        """),
        table(
            ["trained up to", "writes halved", "as trained", "writes doubled", "as trained, by eighth, %"],
            rows,
        ),
        prose(f"""
        *Result.* Trained on 32 pairs the same model with the same state recalls {after} of them, not {before},
        and about as many from every eighth (the best and the worst differ by {min(apart):.0f} and
        {max(apart):.0f} points in a seed). So a state of this size has room for more pairs than the others
        recalled.

        *What weakens it.* Two seeds of one rule, small models, and after as many steps as the others they
        have not learned all of the longer rows (loss {min(losses):.2f} and {max(losses):.2f} nats).
        At Zoology's size no model was trained on 128 or 256 pairs.

        *What would refute it.* Models of Zoology's size that are trained on 256 pairs and recall no more of
        them.
        """),
    ]
