"""Figures of results/figures/, and of every learning rate of Zoology's setting: one function each."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gdn_jax.commands.files import replacing
from gdn_jax.styles import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION
from gdn_jax.sweeps import figure
from gdn_jax.sweeps.figure import Panel
from gdn_jax.sweeps.report import stored_options, trained_size
from results.pages import erasures, first_mixer, further, places, starts
from results.pages.numbers import Numbers
from results.pages.starts import ONE_SEED, plain
from results.pages.stored import Arm


def panel(
    r: Numbers, title: str, sweep: str, mixers: list[str], scale: int = 1, lr: float | None = None
) -> Panel:
    """Scores of mixers by the size of the test."""
    about = r.about(sweep)
    curves = [(mixer, r.row(Arm(sweep, mixer, scale, lr)).scores) for mixer in mixers]
    trained = trained_size(stored_options(r.folder(r.matching(sweep)[0])[0]).task)
    return Panel(title, f"{about.axis} of a test", curves, (trained, "trained"), about.baselines)


def bits_above(r: Numbers, title: str, sweep: str, mixers: list[str], zero: str = "gated_delta_net") -> Panel:
    """Bits per byte more than Gated DeltaNet with the same seed, by place in a row."""
    about, curves = r.about(sweep), []
    below = r.records(Arm(sweep, zero))
    for mixer in mixers:
        records = r.records(Arm(sweep, mixer))
        both = [seed for seed in records if seed in below]
        sizes = [*next(iter(records.values()))["test_bpb"]]
        curves.append(
            (
                mixer,
                {int(n): [records[s]["test_bpb"][n] - below[s]["test_bpb"][n] for s in both] for n in sizes},
            )
        )
    trained = trained_size(stored_options(r.folder(r.matching(sweep)[0])[0]).task)
    return Panel(
        title, f"place in a row, up to ({about.axis})", curves, (trained, "trained"), {"Gated DeltaNet": 0.0}
    )


def recalled(r: Numbers, title: str, sweep: str, mixers: dict[str, str], scale: int = 1) -> Panel:
    """Pairs recalled by pairs asked; a line is a learning rate, or a seed where there are several."""
    curves = []
    for mixer, name in mixers.items():
        scores: dict[int, list[float]] = {}
        for size in (64, 128, 256):
            for lr in r.rates(Arm(name or sweep, mixer, scale)):
                values = r.seeds(name or sweep, mixer, size, scale, lr)
                scores.setdefault(size, []).extend(size * x / 100 for x in values)
        curves.append((mixer, scores))
    return Panel(title, "pairs in a test", curves, (64, "trained"))


def mqar(r: Numbers, path: Path) -> None:
    """Pairs recalled of 64, 128 and 256."""
    ledger = dict.fromkeys(("linear_attention", "mamba2", "delta_net", "gated_delta_net"), "")
    panels = [recalled(r, f"keys of {32 * n}", "recall/zoology/ledger*", ledger, n) for n in (1, 2, 4)]
    figure.draw_panels(
        path,
        panels,
        label="pairs recalled",
        percent=False,
        title="Past 64 pairs, the most in training, most runs recall the same number however many they are asked for",
        caption="Zoology's MQAR, two mixers, trained on 4 to 64 pairs. A line is one learning rate of one seed.",
    )


def place(r: Numbers, path: Path) -> None:
    """Accuracy at 256 pairs by the place of the pair as written, with two mixers and with one."""
    panels = []
    for sweep, title, lrs in (("two*", "two mixers", (0.0032, 0.01)), ("one*", "one mixer", (0.01, 0.032))):
        for lr in lrs:
            curves: dict[str, dict[int, list[float]]] = {}
            for line in r.lines(f"recall/place/{sweep}"):
                if line["lr"] == lr:
                    scores = curves.setdefault(line["mixer"], {})
                    for i, x in enumerate(line["test_accuracy_by"]["place"]["256"]):
                        scores.setdefault(i + 1, []).append(x)
            below = "eighth of the pairs, as written"
            panels.append(Panel(f"{title}, rate {lr:g}", below, [*curves.items()], (2, "trained"), even=True))
    figure.draw_panels(
        path,
        panels,
        label="recalled of 256 pairs",
        title="Most models of two mixers stop storing after about the pairs of training; models of one mixer do not",
        caption="Zoology's MQAR, keys of 64 numbers, trained on 4 to 64 pairs, asked for 256, in eighths of the pairs as "
        f"written, three seeds. {ONE_SEED}",
    )


def more_pairs(r: Numbers, path: Path) -> None:
    """Accuracy by place of models that are trained on up to 64 and on up to 256 pairs."""
    few = ("two", "trained on up to 64 pairs", dict(color=BLUE))
    many = ("far", "trained on up to 256 pairs", dict(color=VERMILION, ls="--"))
    panels = [
        (f"asked for {size} pairs", further.AS_WRITTEN, size, [few, many] if size != "512" else [many])
        for size in further.SIZES[1:]
    ]
    _by_eighth(r, path, panels, "A model that is trained on more pairs stops later, in the same state")


def random_order(r: Numbers, path: Path) -> None:
    """Accuracy by place as written and as asked, of models that are trained with questions in two orders."""
    kinds = [
        ("two", "questions in Zoology's order", dict(color=BLUE)),
        ("shuffled_*", "questions in random order, in training and in the test", dict(color=ORANGE, ls="--")),
    ]  # fmt: skip
    panels = [
        ("128 pairs, by place", further.AS_WRITTEN, "128", kinds),
        ("256 pairs, by place", further.AS_WRITTEN, "256", kinds),
        ("256 pairs, by question", further.AS_ASKED, "256", kinds),
    ]
    _by_eighth(
        r,
        path,
        panels,
        "Trained with questions in random order, models stop too; two of Gated DeltaNet store again later",
        (*further.ORDERS,),
    )


def _by_eighth(
    r: Numbers,
    path: Path,
    panels: list[tuple[str, str, str, list[tuple[str, str, dict]]]],
    title: str,
    rules: tuple[str, ...] = ("gated_delta_net",),
) -> None:
    """Panels of accuracy by eighth: a title, whether as written or as asked, a size, and sweeps with their looks.

    A line of panels is a rule.
    """
    drawn = Figure(figsize=(10.2, 1.2 + 3.0 * len(rules)), dpi=200, layout="constrained")
    grid = drawn.subplots(len(rules), len(panels), sharex=True, sharey=True, squeeze=False)
    labels = {}
    for rule, line_of_panels in zip(rules, grid, strict=True):
        for axes, (name, by, size, kinds) in zip(line_of_panels, panels, strict=True):
            for sweep, label, look in kinds:
                for line, marker, filled in zip(
                    further.models(r, sweep, rule), "os^", ("none", "full", "full"), strict=True
                ):
                    part = further.eighths(line, size, by)
                    [labels[label]] = axes.plot(
                        range(1, 9), part, marker=marker, fillstyle=filled, ms=6, lw=1.3, **look
                    )
            axes.set_title(f"{further.NAMES[rule]}, {name}" if len(rules) > 1 else name, fontsize=9.5)
            axes.set_xticks(range(1, 9))
            what = "pairs, as written" if by == further.AS_WRITTEN else "questions, as asked"
            axes.set_xlabel(f"eighth of the {what}")
            plain(axes)
        line_of_panels[0].set_ylabel("recalled, %")
    named = " and ".join(further.NAMES[rule] for rule in rules)
    caption = f"{named}, two mixers, keys of 64 numbers, learning rate 0.0032, three seeds. {ONE_SEED}"
    handles = [Line2D([], [], color=x.get_color(), ls=x.get_linestyle()) for x in labels.values()]
    drawn.legend(
        handles, labels, loc="outside lower center", ncols=2, fontsize=9, title=caption, title_fontsize=8.5
    )
    drawn.suptitle(title, fontsize=11)
    with replacing(path) as file:
        drawn.savefig(file, format="png")


def changed_mixers(r: Numbers, path: Path) -> None:
    """Accuracy by place of two models where a mixer's writes are changed, and what is recalled after other things."""
    drawn = Figure(figsize=(10.2, 4.4), dpi=200, layout="constrained")
    grid = drawn.subplots(1, 3, sharey=True)
    lines = {
        "as trained": dict(color="black", lw=2.2),
        "first mixer's writes halved": dict(color=BLUE, marker="o"),
        "first mixer's writes doubled": dict(color=VERMILION, marker="s"),
        first_mixer.KEPT: dict(color=GREEN, marker="^", ls="-."),
        "second mixer's writes halved": dict(color=SKY, ls="--"),
        "second mixer's writes doubled": dict(color=ORANGE, ls="--"),
    }
    places = first_mixer.kept(r)
    for axes, rule in zip(grid, first_mixer.LARGE, strict=False):
        for words, look in lines.items():
            part = places[rule][first_mixer.CHANGES[words]]
            axes.plot(range(1, 9), [100 * x for x in part], ms=4, label=words, **look)
        axes.set_title(f"{first_mixer.NAMES[rule]}, trained on two eighths", fontsize=9.5)
        axes.set_xticks(range(1, 9))
        axes.set_xlabel("eighth of 256 pairs, as written")
        plain(axes)
    for rule, marker in zip(first_mixer.LARGE, "^o", strict=True):
        for what, ls in zip(first_mixer.IN_FRONT, ("-", ":"), strict=True):
            found = first_mixer.in_front(places[rule], what)
            tokens = [n * (2 if what == "pairs" else 1) for n in found]
            look = dict(color="black" if marker == "^" else GREY, ls=ls, marker=marker, ms=4)
            label = f"{first_mixer.NAMES[rule]}, {'other pairs' if what == 'pairs' else 'fill'}"
            grid[2].plot(tokens, [100 * x for x in found.values()], label=label, **look)
    grid[2].set_title("64 pairs after something else", fontsize=9.5)
    grid[2].set_xlabel("tokens in front")
    grid[2].legend(fontsize=7.5, loc=(0.4, 0.3))
    plain(grid[2])
    grid[0].set_ylabel("recalled, %")
    drawn.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    drawn.suptitle("Models of two mixers stop where the first one's state says so", fontsize=11)
    with replacing(path) as file:
        drawn.savefig(file, format="png")


def text(r: Numbers, path: Path) -> None:
    """The lead of Gated DeltaNet, by place and by size."""
    panels = [
        bits_above(r, "30M, DeltaNet, three seeds", "text/30m/first", ["delta_net"]),
        bits_above(r, "30M, decay, five seeds", "text/30m/seeds", ["mamba2"]),
        bits_above(r, "100M, both, two seeds", "text/100m", ["delta_net", "mamba2"]),
    ]
    figure.draw_panels(
        path,
        panels,
        label=f"{r.about('text/100m').label} more than Gated DeltaNet",
        percent=False,
        title="Gated DeltaNet is ahead of DeltaNet, by less in the larger model",
        caption="Python source as bytes, trained on rows of 2048. Below zero is better than Gated DeltaNet with the same "
        f"seed on the same text. {ONE_SEED}",
    )


def hybrid(r: Numbers, path: Path) -> None:
    """The hybrid, its form without attention, and attention in every layer."""
    panels = [
        bits_above(r, "30M, three seeds", "text/30m/first", ["hybrid", "softmax_attention"]),
        bits_above(r, "30M, the control, four seeds", "text/30m/controls*", ["hybrid", "hybrid_control"]),
        bits_above(r, "100M, two seeds", "text/100m", ["hybrid", "softmax_attention"]),
    ]
    figure.draw_panels(
        path,
        panels,
        label=f"{r.about('text/100m').label} more than Gated DeltaNet",
        percent=False,
        title="The hybrid predicts better; its form without attention shows no gain",
        caption="Attention in every fourth layer, in every layer but without positions, or in no layer of the hybrid's form. Below "
        f"zero is better than Gated DeltaNet with the same seed. {ONE_SEED}",
    )


def parity(r: Numbers, path: Path) -> None:
    """Parity by length."""
    mixers = [
        "linear_attention",
        "mamba2",
        "delta_net",
        "gated_delta_net",
        "gated_delta_net_neg",
        "softmax_attention",
    ]
    about = r.about("parity/full_far")
    answers = about.answers
    learned = {m: f"{r.row(Arm('parity/full_far', m)).k_of_n(answers)} learned" for m in mixers}
    figure.draw_panels(
        path,
        [panel(r, "", "parity/full_far", mixers)],
        label=about.label,
        learned=learned,
        title="Only a write that can reverse goes on counting",
        caption="Parity of the bits so far, two layers, trained on 64 bits: sweep parity/full_far, three seeds at the best "
        f"of three learning rates. {ONE_SEED}",
    )


def words(r: Numbers, path: Path) -> None:
    """Running products of permutations by length."""
    some = ["mamba2", "gated_delta_net", "gated_delta_net_neg"]
    all_five = ["mamba2", "delta_net", "gated_delta_net", "gated_delta_net_neg", "softmax_attention"]
    panels = [
        panel(r, "S5, swaps, 1 layer", "words/swaps/s5", some),
        panel(r, "S3, swaps, 1 layer", "words/swaps/s3", all_five),
        panel(r, "S3, all letters, 1 layer", "words/depth/s3", all_five),
        panel(r, "S3, all letters, 2 layers", "words/depth/s3", all_five, 2),
    ]
    figure.draw_panels(
        path,
        panels,
        label=r.about("words/depth/s3").label,
        title="One layer follows swaps, two layers follow all of S3",
        caption="Running product of permutations, trained on 32 letters; past them only the letters after 32 are scored. A "
        "guess in swaps knows whether the number of letters is even. Three seeds at the best of two learning rates. "
        f"{ONE_SEED}",
    )


def retention(r: Numbers, path: Path) -> None:
    """A number amid repeated words, by length."""
    mixers = ["mamba2", "delta_net", "gated_delta_net"]
    panels = [
        panel(r, f"learning rate {lr:g}", "needle/words/ledger", mixers, lr=lr) for lr in (0.003, 0.001)
    ]
    figure.draw_panels(
        path,
        panels,
        label=r.about("needle/words/ledger").label,
        title="At the better rate a decay keeps the number nearly as well",
        caption="A number of seven digits between a few words over and over, trained on 512 bytes, 2000 steps, five seeds. "
        f"Those at the dotted line have not learned. {ONE_SEED}",
    )


def rates(r: Numbers, path: Path) -> None:
    """Every learning rate of Zoology's setting, by the size of the keys and the start."""
    mixers = ["linear_attention", "mamba2", "delta_net", "gated_delta_net", "softmax_attention"]
    ledger, weak = (
        "recall/zoology/ledger*",
        ("recall/zoology/start", 2, 0.06, ["delta_net", "gated_delta_net"]),
    )
    parts = [(ledger, 1, None, mixers), (ledger, 2, None, mixers), weak, (ledger, 4, None, mixers)]
    panels = []
    for sweep, scale, start, which in parts:
        curves = []
        for mixer in which:
            scores = r.by_rate(sweep, mixer, 256, scale, start)
            curves.append((mixer, {lr: [score / 100] for lr, score in scores.items()}))
        begins = "" if start is None else f", write start {start:g}"
        panels.append(Panel(f"keys of {32 * scale}{begins}", "learning rate", curves))
    figure.draw_panels(
        path,
        panels,
        label=r.about("recall/zoology/ledger").label,
        title="Asked for four times the pairs of training, the best runs are of rules without a correction",
        caption="Recall of 256 pairs in 1024 tokens by models trained on up to 64 pairs in 256. A dot is one run.",
    )


DRAWN: dict[str, Callable[[Numbers, Path], None]] = {
    "figures/mqar.png": mqar,
    "figures/place.png": place,
    "figures/place_keys.png": places.draw_other_keys,
    "figures/more_pairs.png": more_pairs,
    "figures/random_order.png": random_order,
    "figures/first_mixer.png": changed_mixers,
    "figures/recall.png": starts.recall,
    "recall/apart/figure.png": starts.erase_and_write,
    "recall/apart_high/figure.png": starts.erase_and_write_high,
    "recall/room/figure.png": starts.room,
    "recall/eps/figure.png": starts.epsilon,
    "figures/text.png": text,
    "figures/erasure.png": erasures.figure,
    "figures/parity.png": parity,
    "figures/words.png": words,
    "figures/retention.png": retention,
    "figures/hybrid.png": hybrid,
    "recall/zoology/rates.png": rates,
}
"""Figures by their path in the results."""
