"""The sections of our own findings: question, figure, what was done, result, what would refute it."""

import statistics

from results.pages import erasures, write_starts
from results.pages.first_mixer import first_mixer
from results.pages.further import random_order, trained_further
from results.pages.markdown import prose, table
from results.pages.numbers import Numbers
from results.pages.stored import Arm

LEDGER = "recall/zoology/ledger*"
WITH_STATE = ("linear_attention", "mamba2", "delta_net", "gated_delta_net")


def finding_1(r: Numbers) -> list[str]:
    same, all_runs = 0, r.lines("recall/start_wide/*")
    for line in all_runs:
        pairs = [n * line["test_accuracy"][str(n)] for n in (128, 256)]
        same += abs(pairs[0] - pairs[1]) <= 3
    rows, apart = [], {}
    for mixer, label in zip(
        WITH_STATE, ("linear attention", "Mamba2's decay", "DeltaNet", "Gated DeltaNet"), strict=True
    ):
        apart[mixer] = [
            [n * x / 100 for x in r.by_rate(LEDGER, mixer, n, 2).values()] for n in (64, 128, 256)
        ]
        rows.append([label, *(" ".join(f"{x:.0f}" for x in part) for part in apart[mixer])])
    linear = apart["linear_attention"][2]
    further = sorted(256 * line["test_accuracy"]["256"] for line in r.lines("recall/place/far"))
    return [
        "## Finding 1: what MQAR measures",
        "**What MQAR scores past its longest training case is not what a state can hold.**",
        prose("""
        *Question.* In multi-query associative recall (MQAR) a model reads pairs and is asked for their
        values. Rules are ranked by tests with up to four times the pairs of training. Do such tests measure
        how many pairs a state holds?
        """),
        "![Pairs recalled of 64, 128 and 256](figures/mqar.png)",
        prose("""
        *What was done.* We ran Zoology's training: 22,500 steps of 256 rows, up to 64 pairs, keys of 32, 64
        and 128 numbers, four learning rates, one seed. Our models have two mixers of a rule, as
        [Kimi Linear's](https://arxiv.org/abs/2510.26692) do; most of Zoology's have one, after a convolution,
        and its score is a mean over tests of which only some go past the training. The number of pairs
        recalled is the accuracy times the pairs in the test. With keys of 64 numbers, at the four rates from
        0.001 to 0.032:
        """),
        table(["rule", "recalled of 64", "of 128", "of 256"], rows),
        prose(f"""
        *Result.* All of these runs recall all 64 pairs. Past them one rule with one state size recalls very
        different numbers: linear attention {min(linear):.0f} of 256 pairs at one learning rate and
        {max(linear):.0f} at another. Its state can hold the larger number, so the smaller one is not its
        capacity. Nor do most runs lose pairs when more are stored, as a full memory does: with keys of 64
        numbers, 8000 steps and five seeds, {same} of {len(all_runs)} runs recall the same number of 128 and
        of 256 pairs, within three. Both fit models that learn to stop storing after about the most pairs of
        training.

        Three looks could have refuted that, and did not: [by place](#accuracy-by-place) the later pairs are
        those that are lost; [models that are trained on 256 pairs](#trained-on-more-pairs) recall {further[0]:.0f} to {further[-1]:.0f} of them, in the same state, and stop after 256; and [the order of
        questions](#questions-in-random-order) does not make the stop. [What the first mixer
        counts](#what-the-first-mixer-counts) decides where it comes.

        *Consequence.* The claim that the delta rule recalls more than Mamba2 comes out contradicted in one
        seed below. Do not read the opposite, "a decay recalls more", into the rows of MQAR below: within the
        training length the rules hardly differ.

        *What does not fit.* With keys of 32 numbers the delta rules do lose pairs from 128 to 256. With keys
        of 128 Mamba2's decay recalls nearly all 256 pairs. Why rules without a correction stop later, or not,
        is open. And of three models that were trained with questions in random order two [store
        again](#questions-in-random-order) long after the stop.

        *What would refute it.* Accuracy that is equal at every place among the stored pairs in models of two
        mixers of the delta rules; or models that recall no more of 256 pairs after training on them. We
        looked for both below. Not looked for: the same gap between the rules where all are trained on 256
        pairs.
        """),
    ]


PLACES = {
    "two*": "two",
    "keys_32": "two, keys of 32",
    "keys_128*": "two, keys of 128",
    "one*": "one",
}
"""Mixers of a model, and what else is not as in Zoology's setting with keys of 64, by the sweeps of `recall/place`."""


def by_place(r: Numbers, sweep: str, mixer: str, lr: float) -> list[list[float]]:
    """Accuracy at 256 pairs in % of each seed, by eighths of the pairs as written."""
    lines = [x for x in r.lines(f"recall/place/{sweep}") if (x["mixer"], x["lr"]) == (mixer, lr)]
    return [[100 * x for x in line["test_accuracy_by"]["place"]["256"]] for line in lines]


def accuracy_by_place(r: Numbers) -> list[str]:
    names = dict(
        zip(WITH_STATE, ("linear attention", "Mamba2's decay", "DeltaNet", "Gated DeltaNet"), strict=True)
    )
    rows, later, nearly, first = [], [], [], []
    for sweep, mixers in PLACES.items():
        lines = r.lines(f"recall/place/{sweep}")
        for mixer in (name for name in names if any(line["mixer"] == name for line in lines)):
            for lr in sorted({line["lr"] for line in lines if line["mixer"] == mixer}):
                runs = [x for x in lines if (x["mixer"], x["lr"]) == (mixer, lr)]
                parts = by_place(r, sweep, mixer, lr)
                recalled = sorted(256 * x["test_accuracy"]["256"] for x in runs)
                trained = [100 * x["test_accuracy"]["64"] for x in runs]
                means = " ".join(f"{statistics.fmean(part):.0f}" for part in zip(*parts, strict=True))
                learned = f"{min(trained):.1f} to {max(trained):.1f}"
                numbers = " ".join(f"{x:.0f}" for x in recalled)
                rows.append([mixers, names[mixer], f"{lr:g}", learned, numbers, means])
                if mixers == "one":
                    nearly += [max(part) - min(part) for part in parts]
                elif mixers == "two" and mixer != "mamba2":
                    first += [part[0] for part in parts]
                    later += [x for part in parts for x in part[4:]]
    decay = sorted(by_place(r, "two*", "mamba2", 0.0032), key=lambda part: part[-1])
    pairs = [32 * sum(part) / 100 for part in decay]
    stops = by_place(r, "two*", "linear_attention", 0.0032)
    linear = [x for part in stops for x in part[4:]]
    closed, alone = (
        [32 * sum(part) / 100 for part in parts]
        for parts in (stops, by_place(r, "one*", "linear_attention", 0.01))
    )
    return [
        "### Accuracy by place",
        "![Accuracy by the place of a pair, with two mixers and with one](figures/place.png)",
        prose("""
        *What was done.* The same setting with keys of 64 numbers again, three seeds each, scored by the place
        of the asked pair among the 256 that are written, in eighths: once with two mixers, as above, and once
        with one, so that no layer can count the pairs for another one.
        """),
        table(
            [
                "mixers",
                "rule",
                "rate",
                "64 pairs, %",
                "recalled of 256, each seed",
                "by eighth, first to last, %",
            ],
            rows,
        ),
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
        and of linear attention with one; keys of 32 and of 128 numbers by place. The rates differ between the
        two settings, because one mixer does not learn 64 pairs at the lower ones.

        *Fixed before the runs with other keys.* Keys of 32 and 128 numbers, all four rules, seeds 10 to 12, two
        mixers at 0.0032 and one at 0.01, 6000 steps. A run that knows at least 95 % of 64 pairs has stopped if of 256
        pairs the last half has less than a quarter of the accuracy of the first quarter. The finding expects each
        run of a delta rule with two mixers to have stopped and none with one mixer. It is refuted for a size of
        keys if most of the delta rules' runs with two mixers have not stopped, or most with one mixer have.

        *What would refute it.* Accuracy by place that is flat in models of two mixers of the delta rules with
        other seeds.
        """),
    ]


def finding_3(r: Numbers) -> list[str]:
    places = ["validation", "256", "2048", "4096", "16384"]
    sweeps = {"30M": "text/30m/first", "100M": "text/100m"}

    def gap(sweep: str, other: str, place: str) -> str:
        one, two = (r.scores(Arm(sweep, mixer), place) for mixer in ("gated_delta_net", other))
        gains = [two[seed] - one[seed] for seed in one if seed in two]
        return f"{statistics.fmean(gains):.3f}"

    rows = [[place, *(gap(sweep, "delta_net", place) for sweep in sweeps.values())] for place in places]
    small, large = r.compared("text.DeltaNet-30M"), r.compared("text.DeltaNet-100M")
    decay_small, decay_large = r.compared("text.decay-30M"), r.compared("text.decay-100M")
    few, many = r.trained_bytes("text/30m/first") / 1e6, r.trained_bytes("text/100m") / 1e6
    return [
        "## Finding 3: a gap that shrinks",
        "**The gap between DeltaNet and Gated DeltaNet in text shrinks threefold from 30M to 100M parameters.**",
        prose("""
        *Question.* Gated DeltaNet predicts text better than DeltaNet. Is that lead as large in a larger
        model?
        """),
        "![Bits above Gated DeltaNet by place in a row](figures/text.png)",
        prose(f"""
        *What was done.* Models of 30M and 100M parameters read Python source as bytes: {few:.0f} million
        bytes with three seeds, and {many:.0f} million with two. The lead of Gated DeltaNet over DeltaNet, in
        bits per byte, seed by seed:
        """),
        table(["place in a row", *sweeps], rows),
        prose(f"""
        *Result.* In validation the lead is {small.gain:.3f} ± {small.interval:.3f} bits with 30M parameters
        and {large.gain:.3f} ± {large.interval:.3f} with 100M: the intervals are far apart, so a mean over
        both would describe neither. Over Mamba2's decay it is {decay_small.gain:.3f} and
        {decay_large.gain:.3f} bits, positive in {sum(x > 0 for x in decay_small.gains + decay_large.gains)}
        of {len(decay_small.gains + decay_large.gains)} pairs of seeds; two of the five seeds at 30M were
        added after a look at three.

        *What weakens it.* Two sizes, few seeds, about half a byte a parameter. At 30M the chosen learning
        rate is the upper of two for both rules; at 100M one rate was tried. The two sizes had different
        numbers of bytes. We saw the trend after the runs.

        *What would refute it.* A third size, or rates that bracket the optimum, with a lead that does not
        shrink.
        """),
    ]


SECTIONS = (
    finding_1,
    accuracy_by_place,
    trained_further,
    random_order,
    first_mixer,
    write_starts.finding,
    write_starts.erase_and_write_apart,
    finding_3,
    erasures.section,
)
"""The sections in the order of the page."""
