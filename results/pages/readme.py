"""README.md: our own findings, and the table of reproductions."""

from results.pages.claims import CLAIMS
from results.pages.evidence import cells, claim_of, own_table
from results.pages.findings import SECTIONS
from results.pages.markdown import joined, prose, table
from results.pages.numbers import Numbers

LEDGER = "recall/zoology/ledger*"
WITH_STATE = ("linear_attention", "mamba2", "delta_net", "gated_delta_net")


def opening(r: Numbers) -> list[str]:
    return [
        "# Findings",
        prose("""
        We train small models that differ in one rule: how a token changes the state. The recurrent rules sit
        in the same layer, DeltaNet's, with equal parameters, states and batches, so "Mamba2's decay" below is
        its decay with unit keys and a free write strength, not the published layer. Four findings are ours:
        [what MQAR measures](#finding-1-what-mqar-measures), [where writes
        start](#finding-2-where-writes-start), [a gap that shrinks](#finding-3-a-gap-that-shrinks) and [erasures at a
        key of their own](#finding-4-erasures-at-a-key-of-their-own). The
        [table of reproductions](#reproductions) puts claims of papers next to what our runs give.

        Every number on these pages is computed from the runs stored next to them, and a test computes the
        pages again. The [protocol](protocol.md) has the statistics and the commands, the [claims](claims.md)
        every comparison with its settings, seeds and runs. To cite a finding, name it by its number and the
        commit.
        """),
    ]


def reproductions(r: Numbers) -> list[str]:
    reading = """
        *Rule A against rule B, size of the test: 93 % against 50 %, gain **+43 ± 10**; 5 seeds; rates: both at the upper edge of
        2* means that rule A has 93 % and rule B 50 % in the mean of five seeds; the gain seed by seed is 43 points, with
        a 95 % interval from 33 to 53; bold means that it excludes zero, which by itself is no verdict. Both learning
        rates chosen are the upper one of two, so a higher one may be better. Text is in bits per byte, where less is
        better, and a positive gain still favours rule A. *Floor*: nobody got further than a tenth of the way from a
        guess to 100 %.
        """
    rows = [
        [
            "*How to read a row:* the claim, in a sentence; its link leads to settings, seeds and runs",
            "by [one rule](protocol.md#verdicts)",
            prose(reading),
            "the paper, the place in it, its numbers",
        ]
    ]
    for claim in CLAIMS:
        if claim.comparisons and claim.source is not None:
            s = claim.source
            theirs = f": {s.theirs}" if s.theirs else ""
            said, source = f"[{claim.says}](claims/{claim.id}.md)", f"[{s.paper}]({s.url}), {s.where}{theirs}"
            rows.append([said, f"**{r.verdict(claim)}**", cells(r, claim), source])
    control = claim_of("control")
    untested = "; ".join(
        f"[{x.says.rstrip('.')}](claims/{x.id}.md) ({x.source.paper}, {x.source.where}: {x.source.theirs})"
        for x in CLAIMS
        if not x.comparisons and x.source is not None
    )
    return [
        "## Reproductions",
        table(["claim", "verdict", "here", "source"], rows),
        f"**Not tested:** {untested}.",
        prose("""
        The control of the hybrid, a question of our own:
        """),
        own_table(r, [control]),
    ]


def differences(r: Numbers) -> list[str]:
    few, many = r.trained_bytes("text/30m/first") / 1e6, r.trained_bytes("text/100m") / 1e6
    return [
        "## Differences from the papers",
        prose(f"""
        | | papers | here |
        |---|---|---|
        | text | 100B tokens, 1.3B parameters | {few:.0f} and {many:.0f} million bytes, 30M and 100M parameters |
        | recall | 22,500 steps of 256 rows, the best of 4 rates | 8000 steps of 64 rows, the mean of seeds at the best of up to three rates; Zoology's training as theirs, with two mixers and one seed, three seeds where we look by place |
        | needle | language models, not trained for it | {r.parameters("needle/text/first", "delta_net") / 1e6:.1f}M parameters, trained on it, decays ten times slower at the start |
        | Mamba2 | write tied to the decay | free write strength, unit keys |
        """),
    ]


def repeat(r: Numbers) -> list[str]:
    return [
        "## Repeat it",
        prose("""
        `gdn sweep TASK --config results/configs/FILE` repeats a [sweep](protocol.md#how-they-were-run) and
        `gdn reproduce` runs published settings. In a checkout `python -m results.pages` makes these pages and
        figures again from the stored runs. `python -m results.recompute` computes numbers that it draws from the
        tables and from the main sentences once more, by code that shares nothing with what made them.
        """),
    ]


def page(r: Numbers) -> str:
    """The page."""
    sections = (
        opening,
        *SECTIONS,
        reproductions,
        differences,
        repeat,
    )
    return joined([block for section in sections for block in section(r)])
