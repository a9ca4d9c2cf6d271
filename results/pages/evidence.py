"""claims.md, and a page for each claim: its comparisons, settings, seeds, runs, and what would decide it."""

import statistics
from collections.abc import Callable
from functools import partial

from gdn_jax.rules import RULES
from gdn_jax.sweeps.summary import Start
from gdn_jax.training.mixers import MIXERS
from results.pages.claim import Claim
from results.pages.claims import CLAIMS
from results.pages.markdown import gain_of, joined, prose, table
from results.pages.numbers import Numbers
from results.pages.questions import OWN
from results.pages.stored import HALF
from results.pages.verdicts import Comparison, Fails, Gains, OneSeed, Rates

Compared = Comparison | OneSeed | Fails


def digits_of(r: Numbers, comparison: Compared) -> int:
    """Digits after the point of a score: none of steps and of %, three of bits per byte."""
    return 0 if comparison.at == HALF or r.percent(comparison.than.sweep) else 3


def result(r: Numbers, comparison: Compared, outcome: Gains | Rates) -> str:
    """What a comparison gave, in the words that the table of reproductions begins with."""
    digits = digits_of(r, comparison)
    unit = " steps" if comparison.at == HALF else "" if digits else " %"
    if isinstance(outcome, Rates):
        one, other = (f"{x:.{digits}f}{unit}" for x in outcome.best)
        rates = [
            " ".join(f"{x:.{digits}f}" for x in arm) for arm in zip(*outcome.scores.values(), strict=True)
        ]
        if isinstance(comparison, Fails):
            said = f"best rate {other}; all rates {rates[1]}; one seed"
        else:
            said = f"best rate {one} against {other}; all rates {rates[0]} against {rates[1]}; one seed"
    else:
        assert isinstance(comparison, Comparison)
        one, other = (f"{x:.{digits}f}{unit}" for x in outcome.scores)
        gain = gain_of(outcome, digits, outcome.tested or comparison.post_hoc)
        said = f"{one} against {other}, gain {gain}; {seeds_of(comparison, outcome)}"
    return f"{said}; **floor**" if outcome.at_floor else said


def seeds_of(comparison: Comparison, outcome: Gains) -> str:
    """How many pairs of seeds count, which were added, and how many learned where not all did."""
    said = f"{len(outcome.gains)} seeds"
    if outcome.earlier:
        mean = statistics.fmean(outcome.earlier)
        said = f"{len(outcome.gains)} added seeds (the first {len(outcome.earlier)}: {mean:+.0f})"
    elif comparison.first is not None:
        said += f", {len(outcome.gains) - comparison.first} of them added after a look, not tested"
    if comparison.post_hoc:
        said += ", measure chosen after the runs, not tested"
    if any(k < n for k, n in (outcome.of, outcome.than)):
        said += f", learned {outcome.of[0]} of {outcome.of[1]} and {outcome.than[0]} of {outcome.than[1]}"
    return said


def claim_of(name: str) -> Claim:
    """A question of our own, by its name."""
    return next(claim for claim in OWN if claim.id == name)


def cells(r: Numbers, claim: Claim) -> str:
    """What the comparisons of a claim gave, a line for each."""
    return "<br>".join(f"{x.name}: {result(r, x, outcome)}{edges(r, x)}" for _, x, outcome in r.made(claim))


def edges(r: Numbers, comparison: Compared) -> str:
    """Where the learning rates of both arms lie in their grids, in a few words; nothing where all rates are shown."""
    if not isinstance(comparison, Comparison):
        return ""
    one, other = (r.grid(arm).split(", ", 1)[1] for arm in (comparison.of, comparison.than))
    both = "one tried" if one == "the only one tried" else f"both {one}"
    return f"; rates: {both if one == other else f'{one} and {other}'}"


def own_table(r: Numbers, claims: list[Claim]) -> str:
    """Questions of our own, in the cells of the table of reproductions."""
    lines = [[f"[{x.says}](claims/{x.id}.md)", f"**{r.verdict(x)}**", cells(r, x)] for x in claims]
    return table(["question", "verdict", "here"], lines)


def short_table(r: Numbers, claims: list[Claim]) -> str:
    """Questions of our own whose comparisons a page shows in another table."""
    lines = [[f"[{x.says}](claims/{x.id}.md)", f"**{r.verdict(x)}**", str(len(r.made(x)))] for x in claims]
    return table(["question", "verdict", "comparisons"], lines)


def arms(r: Numbers, comparison: Compared) -> str:
    """The runs of a comparison, exactly: each arm's sweep, mixer, scale, start and rate, and the size of the test."""
    said = []
    for arm in (comparison.than,) if isinstance(comparison, Fails) else (comparison.of, comparison.than):
        parts = [f"`{arm.sweep}`", f"`{arm.mixer}`"]
        parts += [f"scale {arm.scale}"] if arm.scale != 1 else []
        if arm.start is not None:
            line = next(iter(r.records(arm._replace(lr=r.rates(arm)[0])).values()))
            varied = next(name for name in Start._fields if name in line)
            parts.append(f"{varied.replace('_', ' ')} {arm.start:g}")
        if isinstance(comparison, Comparison):
            [lr] = {line["lr"] for line in r.records(arm).values()}
            parts.append(f"rate {lr:g}")
        said.append(" ".join(parts))
    counted = ""
    if isinstance(comparison, Comparison):
        counted = ", all seeds" if comparison.every_seed else ", seeds that learned in both"
        counted += f", the first {comparison.first} apart" if comparison.first else ""
    return f"{' against '.join(said)}; at {comparison.at}{counted}"


def rows(r: Numbers, claim: Claim) -> str:
    """The table of a claim's comparisons, with every gain."""
    lines = []
    for _, comparison, outcome in r.made(claim):
        each, p, tried = "one seed", "no test", "every rate is shown"
        if isinstance(outcome, Gains):
            assert isinstance(comparison, Comparison)
            digits = digits_of(r, comparison) or (0 if comparison.at == HALF else 1)
            first, each = (
                " ".join(f"{x:+.{digits}f}" for x in part) for part in (outcome.earlier, outcome.gains)
            )
            each = f"first {first}, then {each}" if first else each
            significant = ", significant" if outcome.sign(r.largest_p) else ""
            p = "not tested" if not outcome.tested or outcome.p is None else f"{outcome.p:.2g}{significant}"
            tried = f"{r.grid(comparison.of)}; {r.grid(comparison.than)}"
        lines.append([comparison.name, arms(r, comparison), result(r, comparison, outcome), each, p, tried])
    return table(
        ["comparison", "runs", "result", "gain of each seed", "p", "learning rate of each arm"], lines
    )


def decays(mixer: str) -> bool:
    """Whether a mixer's state decays; those of `results.erase_and_write` do not."""
    return mixer in MIXERS and "g" in RULES[MIXERS[mixer].rule].gates


def settings(r: Numbers, claim: Claim) -> str:
    """The sweeps of a claim: what was run, with how many seeds and rates, and where."""
    sweeps = {
        name: None
        for _, comparison, _ in r.made(claim)
        for arm in (getattr(comparison, "of", comparison.than), comparison.than)
        for name in r.matching(arm.sweep)
    }
    lines = []
    for name in sweeps:
        config, runs = r.folder(name)
        o, place = config["options"], r.places[name]
        layers = f"{o['num_layers']} layer" + ("s" if o["num_layers"] > 1 else "")
        model = f"{layers}, {o['num_heads']} heads of {o['head_dim']}"
        if len(o["scales"]) > 1 or o["scales"][0] != 1:
            model += f" ({o.get('scaled') or 'state'} times {', '.join(str(x) for x in o['scales'])})"
        training = f"{o['steps']} steps of {o['batch_size']}"
        rates = ", ".join(f"{x:g}" for x in sorted(o["lrs"]))
        slower = o.get("time_step")
        usual = slower in (None, 1.0) or not any(map(decays, o["mixers"]))
        decay = "" if usual else f", decays {1 / slower:g} times slower at the start"
        lines.append(
            [f"[{name}](../{place.table})", model, training + decay, f"{o['seeds']}", rates, str(len(runs)),
             config["versions"]["device"]]
        )  # fmt: skip
    return table(["sweep", "model", "training", "seeds", "learning rates", "runs", "device"], lines)


def page_of(r: Numbers, claim: Claim) -> str:
    """The page of one claim."""
    blocks = [
        f"# {claim.says.rstrip('.')}",
        "[Findings](../README.md), [claims](../claims.md), [protocol](../protocol.md)",
        f"Verdict: **{r.verdict(claim)}**.",
    ]
    if claim.source is not None:
        s = claim.source
        theirs = f" Their numbers: {s.theirs}." if s.theirs else ""
        setting = f" Their setting: {s.setting}." if s.setting else ""
        blocks.append(f"*Source:* [{s.paper}]({s.url}), {s.where}.{theirs}{setting}")
    else:
        blocks.append("*Source:* a question of our own.")
    blocks.append(f"*Here:* {claim.here}")
    if claim.decided:
        blocks.append(f"*What would decide it:* {claim.decided}")
    if claim.comparisons:
        blocks += ["## Comparisons", rows(r, claim), "## Runs", settings(r, claim)]
    blocks += [of_parity(r)] if claim.id == "parity" else []
    if claim.figure:
        name, shown = claim.figure
        blocks.append(f"![{shown}](../figures/{name}.png)")
    if claim.task:
        blocks.append(f"All tables, and how to repeat them: [{claim.task}](../tasks/{claim.task}.md).")
    return joined(blocks)


def of_parity(r: Numbers) -> str:
    """Which numbers of parity are which."""
    sweeps = {"parity/full_far": 1024, "parity/ledger": 1024, "parity/small_far": 256}
    lines = []
    for name, size in sweeps.items():
        scores = r.ascending(name, "gated_delta_net_neg", size)
        where = {"parity/full_far": "the figure", "parity/ledger": "the first line of the table"}
        lines.append([f"`{name}`", where.get(name, "the second line of the table"), str(size), str(len(scores)),
                      f"{scores[0]:.0f} to {scores[-1]:.0f} %"])  # fmt: skip
    return "Three sweeps ask it; with beta to 2 their seeds have:\n\n" + table(
        ["sweep", "shown in", "bits", "seeds", "lowest to highest seed"], lines
    )


def page(r: Numbers) -> str:
    """The list of all claims."""
    lines = [
        [
            f"[{claim.says}](claims/{claim.id}.md)",
            r.verdict(claim),
            claim.source.paper if claim.source else "our own",
        ]
        for claim in (*CLAIMS, *OWN)
    ]
    return joined(
        [
            "# Claims, one by one",
            "[Findings](README.md), [protocol](protocol.md)",
            prose("""
            Each claim has a page: what the paper ran, what we ran, every gain, and what would decide it. A gain
            is what the favoured rule, named first, has more than the other with the same seed, in points of
            accuracy or in bits per byte; ± is half of the 95 % t interval. "Learning rate of each arm" says
            which of the rates tried was chosen: at an edge of its grid a rate outside might be better.
            """),
            table(["claim", "verdict", "source"], lines),
        ]
    )


PAGES: dict[str, Callable[[Numbers], str]] = {"claims.md": page} | {
    f"claims/{claim.id}.md": partial(page_of, claim=claim) for claim in (*CLAIMS, *OWN)
}
"""The pages by their path in the results."""
