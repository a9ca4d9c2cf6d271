"""What notebooks say of the larger runs of results/ is what these show: sentence and result are there."""

import functools
import json
import re
from pathlib import Path

import pytest

from results.pages import places, verdicts
from results.pages.claims import CLAIMS
from results.pages.numbers import Numbers
from results.pages.questions import OWN

ROOT = Path(__file__).parents[2]
HIGH, EXPECTED = "recall/apart_high", 25


@functools.cache
def runs():
    return Numbers(ROOT / "results")


def verdict(name):
    return runs().verdict(next(claim for claim in (*CLAIMS, *OWN) if claim.id == name))


def gains(*names):
    return [runs().compared(name) for name in names]


def erasing_helps():
    """At the lower rate every interval of a weak start of erasing lies above zero, and none of writing does."""
    erase = gains("erase.write_50", "erase.write_50_half", "erase.write_06", "erase.write_06_half")
    write = gains("write.erase_50", "write.erase_50_half", "write.erase_06", "write.erase_06_half")
    return all(x.gain > x.interval for x in erase) and all(x.gain < x.interval for x in write)


def linear_learns_as_soon():
    return all(len(x.gains) == 16 and abs(x.gain) < x.interval for x in gains("linear.at_16", "linear.half"))


def smaller_than_expected():
    return all(x.gain < EXPECTED for x in gains("erase.write_50", "erase.write_06"))


def half_learned_nothing():
    learned = [
        (runs().count_learned(HIGH, mixer, 1, 0.003, start), runs().runs(HIGH, mixer, 1, 0.003, start))
        for mixer in ("erase_50", "erase_06")
        for start in (0.5, 0.06)
    ]
    return 2 * sum(k for k, _ in learned) < sum(n for _, n in learned) and all(k < n for k, n in learned)


def some_of_linear_gained():
    strong, weak = (
        runs().seeds("recall/start/linear", "linear_attention", 16, 1, 0.003, start) for start in (0.5, 0.06)
    )
    return sum(b > a + 10 for a, b in zip(strong, weak, strict=True)) > 1


def wide_keys_learn_sooner_and_recall_no_more():
    sooner = gains("wide_half.DeltaNet", "wide_half.Gated", "wide_again.usual", "wide_again.small")
    return all(min(x.gains) > 0 for x in sooner) and {verdict("wide"), verdict("start_text")} == {
        verdicts.NOT_SHOWN
    }


def two_mixers_stop_and_one_does_not():
    """Most runs of each rule, with keys of 64 numbers."""
    for rule in ("delta_net", "gated_delta_net", "linear_attention"):
        two, one = ([places.stopped(x) for x in places.runs(runs(), f"{n}*", rule)] for n in ("two", "one"))
        if 2 * sum(two) <= len(two) or any(one):
            return False
    return True


def trained_on_more():
    """Most of 256 pairs, and of 512 nearly none of the last three eighths."""
    lines = runs().lines("recall/place/far")
    return all(
        line["test_accuracy"]["256"] > 0.5 and max(line["test_accuracy_by"]["place"]["512"][5:]) < 0.01
        for line in lines
    )


def one_has_not_learned_to_stop():
    """Of the small models one recalls more than half of the last quarter, and others nearly nothing of it."""
    small = json.loads((ROOT / "results/recall/first_mixer/runs.json").read_text())["runs"]
    return sorted(run["place"]["1"][-1] > 0.5 for run in small) == [False] * (len(small) - 1) + [True]


SENTENCES = {
    "models learn sooner where erasing starts weak, and not where storing does": ("04", erasing_helps),
    "sixteen larger models of linear attention, too, learn as soon from either start": (
        "04",
        linear_learns_as_soon,
    ),
    "the gain was smaller than expected": ("04", smaller_than_expected),
    "more than half of the models with two gates learned nothing, some from every start": (
        "04",
        half_learned_nothing,
    ),
    "some of linear attention gained": ("04", some_of_linear_gained),
    "With wide keys models still learn sooner from weak writes, but no runs show that they recall more in the end, "
    "nor that weak writes help in text": ("04", wide_keys_learn_sooner_and_recall_no_more),
    "with two mixers DeltaNet, Gated DeltaNet and linear attention stop, with one they do not": (
        "13",
        two_mixers_stop_and_one_does_not,
    ),
    "trained on up to 256 pairs recalls most of them, in the same state, and stops after those": (
        "13",
        trained_on_more,
    ),
    "one model among them that has not learned to stop": ("13", one_has_not_learned_to_stop),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_on_larger_runs(sentence):
    notebook, holds = SENTENCES[sentence]
    [path] = (ROOT / "notebooks").glob(f"{notebook}_*.ipynb")
    prose = " ".join(
        "".join(x["source"]) for x in json.loads(path.read_text())["cells"] if x["cell_type"] == "markdown"
    )
    assert sentence in re.sub(r"\s+", " ", prose)
    assert holds()
