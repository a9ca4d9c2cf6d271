"""The section on what the first mixer counts: interventions on models of Zoology's size and on small ones."""

import json
import statistics

from results.pages.markdown import prose, table
from results.pages.numbers import Numbers

NAMES = {
    "linear_attention": "linear attention",
    "delta_net": "DeltaNet",
    "gated_delta_net": "Gated DeltaNet",
}
LARGE = ("delta_net", "gated_delta_net")
CHANGES = {
    "as trained": "gaps, as trained",
    "first mixer's writes halved": "gaps, first mixer's writes times 0.5",
    "first mixer's writes doubled": "gaps, first mixer's writes times 2",
    "second mixer's writes halved": "gaps, second mixer's writes times 0.5",
    "second mixer's writes doubled": "gaps, second mixer's writes times 2",
    "first mixer's state kept from pair 65 to the questions": "gaps, first mixer frozen after 64 pairs to the questions",
    "first mixer's state kept from pair 65 to the end": "gaps, first mixer frozen after 64 pairs to the end",
    "as trained, questions in random order": "shuffled, as trained",
}
"""Changes of a model by their words on the page, as `results.kept_models` names them."""
HALVED, DOUBLED = "first mixer's writes halved", "first mixer's writes doubled"
KEPT = "first mixer's state kept from pair 65 to the questions"
IN_FRONT = {"pairs": "64 pairs after {} others", "tokens of fill": "64 pairs after {} tokens of fill"}
NOTHING = "64 pairs"


def kept(r: Numbers) -> dict[str, dict[str, list[float]]]:
    """Accuracy by place of every change of every model of Zoology's size, by its rule and the name of the change."""
    found = json.loads((r.root / "recall/first_mixer/kept.json").read_text())["runs"]
    return {entry["mixer"]: entry["places"] for entry in found}


def in_front(places: dict[str, list[float]], what: str) -> dict[int, float]:
    """Part of 64 pairs that are recalled after a number of other pairs, or of tokens of fill."""
    before, after = IN_FRONT[what].split("{}")
    found = {
        name.removeprefix(before).removesuffix(after): x for name, x in places.items() if name.endswith(after)
    }
    return {0: statistics.fmean(places[NOTHING])} | {int(n): statistics.fmean(x) for n, x in found.items()}


def first_mixer(r: Numbers) -> list[str]:
    """The interventions."""
    places = kept(r)
    rows = []
    for words, change in CHANGES.items():
        cells = [words]
        for rule in LARGE:
            part = places[rule][change]
            cells += [f"{256 * statistics.fmean(part):.0f}", " ".join(f"{100 * x:.0f}" for x in part)]
        rows.append(cells)
    heads = ["change", *(f"{NAMES[rule]}: {of}" for rule in LARGE for of in ("of 256", "by eighth, %"))]
    front = []
    for what in IN_FRONT:
        parts = [in_front(places[rule], what) for rule in LARGE]
        front += [
            [f"{n} {what}" if n else "nothing", *(f"{64 * part[n]:.0f}" for part in parts)]
            for n in parts[0]
            if n or what == "pairs"
        ]
    stops, of_64 = ({rule: numbers(places[rule]) for rule in LARGE} for numbers in (_recalled, _ends))
    held, frozen = (
        [" and ".join(f"{stops[rule][change]:.0f}" for rule in LARGE) for change in changes]
        for changes in (("as trained", HALVED, DOUBLED), (KEPT,))
    )
    ends = {when: " and ".join(f"{of_64[rule][when]:.0f}" for rule in LARGE) for when in of_64[LARGE[0]]}
    return [
        "### What the first mixer counts",
        prose("""
        *Question.* If the second mixer stops by what the first one has counted, then it has to stop at
        another place where the first one's writes are changed, though nothing is changed in the second.
        """),
        "![Accuracy by place where the writes of a mixer are changed](figures/first_mixer.png)",
        prose("""
        *What was done.* We trained DeltaNet and Gated DeltaNet with two mixers once more as above, keys of 64
        numbers, learning rate 0.0032, one seed, and kept their weights. Then `python -m
        results.kept_models` changed one thing at a time in the trained model, with 64 rows for each: the
        write strengths of the first mixer on all tokens, or of the second one as a control; or nothing
        was written or forgotten in the first mixer any more after 64 pairs, the most in training, until the
        questions began.
        """),
        table(heads, rows),
        prose(f"""
        *Result.* The first mixer decides where the second one stops. With its writes halved DeltaNet and
        Gated DeltaNet recall {held[1]} of 256 pairs, not {held[0]}, and the stop comes after twice as many
        pairs; with its writes doubled it comes after half as many, and {held[2]} are left. The same changes
        of the second mixer do not move it. When the count stands still at 64 pairs, the second mixer goes on
        storing: {frozen[0]} pairs are recalled, the last of them nearly all, and the early ones are partly
        overwritten, as a full memory does. So the state of the second mixer has room for nearly twice the
        pairs that it recalls as trained, and [models that are trained on more pairs](#trained-on-more-pairs)
        show that there is room for more. If the count stands still during the questions too, little is
        recalled ({_range(places, "to the end")} of the pairs): in the questions the
        models need what the first mixer writes, too. Questions in an order that is independent of the pairs
        change nothing.

        *In front.* The models know 64 pairs. When other pairs stand in front of these, and are not asked for,
        they lose them: after 64 others {ends["pairs"]} of the last 64 pairs are left. As many
        tokens of fill, which are values without a key, do less: {ends["fill"]} are left. Of 64 pairs each
        model recalls, by what stands in front:
        """),
        table(["in front", *(f"{NAMES[rule]}: of 64" for rule in LARGE)], front),
        *of_small_models(r),
        prose("""
        *What weakens it.* One seed of each rule at Zoology's size, at one learning rate, and no other rule.
        Doubling a mixer's writes also disturbs whatever else it does: the second one's doubled cost both
        models pairs at every place.

        *What would refute it.* Models whose stop stays at its place when the first mixer's writes change.
        """),
    ]


def _recalled(places: dict[str, list[float]]) -> dict[str, float]:
    """Pairs recalled of 256 by the change, in the words of the page."""
    return {words: 256 * statistics.fmean(places[change]) for words, change in CHANGES.items()}


def _ends(places: dict[str, list[float]]) -> dict[str, float]:
    """Pairs recalled of 64 after 64 other pairs, and after as many tokens of fill."""
    return {
        "pairs": 64 * in_front(places, "pairs")[64],
        "fill": 64 * in_front(places, "tokens of fill")[128],
    }


def _range(places: dict[str, dict[str, list[float]]], end: str) -> str:
    """Part of 256 pairs that are recalled with the first mixer's state kept from pair 65, of both rules."""
    found = sorted(
        statistics.fmean(places[rule][f"gaps, first mixer frozen after 64 pairs {end}"]) for rule in LARGE
    )
    return f"{100 * found[0]:.0f} to {100 * found[-1]:.0f} %"


def of_small_models(r: Numbers) -> list[str]:
    """Pairs that small models recall where the first mixer writes more or less than it has learned to."""
    found = json.loads((r.root / "recall/first_mixer/runs.json").read_text())["runs"]
    factors, rows, pairs = ("0.5", "1", "2"), [], []
    for rule in NAMES:
        runs = [run for run in found if run["rule"] == rule]
        recalled = [[32 * statistics.fmean(run["place"][factor]) for factor in factors] for run in runs]
        pairs += recalled
        losses = [run["loss"] for run in runs]
        cells = (" ".join(f"{x:.1f}" for x in column) for column in zip(*recalled, strict=True))
        rows.append([NAMES[rule], f"{min(losses):.2f} to {max(losses):.2f}", *cells])
    still = max(found, key=lambda run: min(run["place"]["1"]))
    places, held = still["place"]["1"], {x: 32 * statistics.fmean(still["place"][x]) for x in factors}
    less, more = (
        sum(half > as_is for half, as_is, _ in pairs),
        sum(as_is > twice for _, as_is, twice in pairs),
    )
    return [
        prose(f"""
        *Small models, more seeds.* Models of two mixers, small enough for a CPU, were trained on up to 8
        pairs, {len(pairs) // len(NAMES)} seeds a rule, and asked for 32, in random order, as they are and
        with the first mixer's writes halved or doubled. [A notebook](../notebooks/13_where_memory_stops.ipynb)
        trains one such model, and shows accuracy by place. Pairs recalled of 32, each seed:
        """),
        table(["rule", "loss, nats", "first mixer's writes halved", "as trained", "doubled"], rows),
        prose(f"""
        With halved writes {less} of {len(pairs)} models recall more pairs than as trained, and with
        doubled writes {more} of {len(pairs)} recall fewer. One model, of {NAMES[still["rule"]]}, has not
        learned to stop: it recalls {100 * min(places):.0f} to {100 * max(places):.0f} % from every eighth, and
        {held["1"]:.1f} pairs in all, more than any other model as trained. There the change matters least:
        {held["0.5"]:.1f} pairs with halved writes, {held["2"]:.1f} with doubled ones.
        """),
    ]
