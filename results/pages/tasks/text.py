"""tasks/text.md: Python source, byte by byte."""

from collections.abc import Sequence

from gdn_jax.training.mixers import MIXERS
from results.pages.markdown import differences, gain_of, page_of, prose, sweep_table, sweep_tables, table
from results.pages.numbers import Numbers, half_life
from results.pages.stored import Arm
from results.pages.verdicts import Comparison

PLACES = ["validation", 256, 2048, 4096, 16384]
OTHERS = ["linear_attention", "mamba2", "delta_net", "softmax_attention", "hybrid"]
CONTROLS = "text/30m/controls*"


def opening(r: Numbers) -> list[str]:
    return [
        prose(f"""
        The models read the sources of Python packages as bytes and predict the next byte; whole packages are
        held out. Every other task is made so that one ability decides; text asks for all of them, in the
        shares in which real data needs them. Numbers are bits per byte: less is better. A table that counts
        pairs of bytes reaches {r.baseline("text/30m/first", "bigram"):.3f}, one that counts triples
        {r.baseline("text/30m/first", "trigram"):.3f}. Columns are places in a row: 4096 means the places
        after 2048 up to 4096.
        """),
    ]


def parameters_30m(r: Numbers) -> list[str]:
    gains = r.gains("text.DeltaNet-30M")
    lower = [r.run("text/30m/first", mixer, 0.001, 0)["val_bpb"] for mixer in ("mamba2", "gated_delta_net")]
    return [
        "## 30M parameters",
        sweep_table(r, "text/30m/first"),
        prose("""
        The next table has gains seed by seed; ± is half of the 95 % t interval, bold excludes zero, n counts
        pairs.
        """),
        differences(r, "text/30m/first", of="gated_delta_net", than=OTHERS, at=PLACES),
        prose(f"""
        Gated DeltaNet is better than DeltaNet in validation and at every place, and the seeds agree closely
        ({min(gains):.3f} to {max(gains):.3f} bits). Softmax attention here has no positions, and SiLU and a
        short convolution on queries and keys: it is no usual Transformer. At the lower of the two learning
        rates, which one seed tried, Mamba2's decay is better than Gated DeltaNet ({lower[0]:.3f} against
        {lower[1]:.3f}). For every mixer the larger rate was better, so a still larger one may be better
        again.
        """),
    ]


def five_seeds(r: Numbers) -> list[str]:
    gains, larger = r.gains("text.decay-30M"), r.gains("text.decay-100M")
    return [
        "## Five seeds of Mamba2's decay",
        sweep_table(r, "text/30m/seeds"),
        differences(r, "text/30m/seeds", of="gated_delta_net", than=["mamba2"], at=PLACES),
        prose(f"""
        Three seeds were run first and were not enough; two were added. A test over all five would let more
        pass by chance, so the pages make none. The two that were added gain {gains[3]:.3f} and {gains[4]:.3f}
        bits by themselves, the first three {gains[0]:.3f}, {gains[1]:.3f} and {gains[2]:.3f}, and the two of
        the 100M models {larger[0]:.3f} and {larger[1]:.3f}.
        """),
    ]


def parameters_100m(r: Numbers) -> list[str]:
    small, large = r.compared("text.DeltaNet-30M").gain, r.compared("text.DeltaNet-100M").gain
    return [
        "## 100M parameters",
        sweep_table(r, "text/100m"),
        differences(r, "text/100m", of="gated_delta_net", than=OTHERS, at=PLACES),
        prose(f"""
        There are two seeds: an interval of two excludes zero only where they nearly agree. Gated DeltaNet is
        ahead of DeltaNet by {large:.3f} bits, where it is ahead by {small:.3f} at 30M. The hybrid is ahead at
        every place, also at eight times the training length. Its attention has rotary positions (RoPE), a
        norm of queries and keys and an output gate, its norms are zero-centred, and its embedding starts at
        unit size unscaled; the next section has the same form without attention.
        """),
    ]


def controls(r: Numbers) -> list[str]:
    attention, transformer = r.gains("control.attention"), r.gains("transformer.30M")

    def span(mixer: str) -> str:
        low, high = (which(CONTROLS, mixer, "validation") for which in (r.lowest, r.highest))
        return f"{low:.3f} to {high:.3f}"

    [higher] = r.seeds(CONTROLS, "transformer", "validation", 1, 0.003)
    return [
        "## The hybrid without attention, and a Transformer",
        prose(f"""
        Does the hybrid owe its lead to attention, or to the rest of its form? And how good is a Transformer with
        rotary positions, without a convolution or SiLU on queries and keys? These models have 30M
        parameters and the bytes of the first table, with {r.runs(CONTROLS, "hybrid")} seeds
        ({r.runs(CONTROLS, "transformer")} of the control and of the Transformer), of which the first tried
        two rates:
        """),
        *sweep_tables(r, CONTROLS),
        differences(
            r, CONTROLS, of="hybrid", than=["hybrid_control", "gated_delta_net", "transformer"], at=PLACES
        ),
        prose(f"""
        The hybrid is ahead of its own form without attention in {sum(x > 0 for x in attention)} of
        {len(attention)} seeds, by {min(attention):.3f} to {max(attention):.3f} bits in validation:
        {r.told("control.attention")}. The form without attention has {span("hybrid_control")} bits, Gated
        DeltaNet {span("gated_delta_net")}. So the form shows no gain by itself, and attention is what is
        left.
        """),
        differences(r, CONTROLS, of="gated_delta_net", than=["hybrid_control", "transformer"], at=PLACES),
        prose(f"""
        The Transformer is better at 0.001, where Gated DeltaNet is better at 0.003: at that rate it has
        {higher:.3f} bits with the one seed that tried it. Each at its better rate, Gated DeltaNet is
        {r.told("transformer.30M")}, ahead in {sum(x > 0 for x in transformer)} of {len(transformer)} seeds.
        Past its rows of 2048 bytes, where its positions are new to it, the Transformer falls apart; within
        them it is ahead nowhere. No rate between the two was tried, and neither model is bracketed: 0.001 is
        the lower edge of the grid, 0.003 the upper.
        """),
    ]


def write_starts(r: Numbers) -> list[str]:
    def gains(sweep: str, mixer: str, lr: float) -> list[str]:
        strong, weak = (r.seeds(sweep, mixer, "validation", 1, lr, start) for start in (0.5, 0.06))
        return [f"{a - b:.3f}" for a, b in zip(strong, weak, strict=True)]

    def said(sweep: str, mixer: str) -> str:
        first = gains(sweep, mixer, 0.001)[0]
        return f"The seeds gain {', '.join(gains(sweep, mixer, 0.003))} bits at 0.003, the first {first} at 0.001."

    return [
        "## Where writes start",
        prose("""
        [Recall](recall.md) is learned sooner from weak writes. Does the start matter in text? First DeltaNet
        at 30M on the same text as above, with three seeds, of which the first tried two rates:
        """),
        sweep_table(r, "text/30m/start"),
        prose(f"""
        From 0.06 against 0.5 DeltaNet is {r.told("start_text.DeltaNet")} in validation.
        {said("text/30m/start", "delta_net")} Heads have keys of 96 numbers, of which a write at 0.5 leaves
        half after {half_life(96, 0.5):.0f} tokens, at 0.06 after {half_life(96, 0.06):.0f}: from 0.5 that is
        six times as long as with keys of 16. Then Gated DeltaNet:
        """),
        sweep_table(r, "text/30m/start_gated"),
        prose(f"""
        From 0.06 against 0.5 Gated DeltaNet is {r.told("start_text.Gated")}.
        {said("text/30m/start_gated", "gated_delta_net")}
        """),
    ]


def over(r: Numbers, sweeps: tuple[str, str], mixers: list[str], at: Sequence[int | str]) -> str:
    """Gains of the second sweep's runs over the first one's, mixer by mixer."""
    (than, of), rows = sweeps, []
    for size in at:
        found = [Comparison("", Arm(of, mixer), Arm(than, mixer), size).outcome(r) for mixer in mixers]
        rows.append([str(size), *(f"{gain_of(x, 3)} (n={len(x.gains)})" for x in found if x is not None)])
    return table(["gain", *(MIXERS[mixer].label for mixer in mixers)], rows)


def muon(r: Numbers) -> list[str]:
    mixer, sweeps, gains = "gated_delta_net", ("text/30m/adamw", "text/30m/muon"), r.gains("muon.Gated")
    rates = " and ".join(r.grid(Arm(sweep, mixer)) for sweep in sweeps)
    low, high = (r.run("text/30m/first", mixer, lr, 0)["val_bpb"] for lr in (0.001, 0.003))
    return [
        "## Muon and AdamW",
        prose("""
        Muon makes the update of every matrix orthogonal. Its updates are scaled to the size of AdamW's, so
        both optimisers try the same learning rates, with the first of five seeds; the text, the batches and
        the initial weights of a seed are the same. First AdamW, then Muon:
        """),
        *(sweep_table(r, sweep) for sweep in sweeps),
        "Muon over AdamW, in bits:",
        over(r, sweeps, [mixer], PLACES),
        prose(f"""
        In validation, with Muon, Gated DeltaNet is {r.told("muon.Gated")}; Muon is ahead in
        {sum(x > 0 for x in gains)} of {len(gains)} seeds. Learning rates, AdamW's and then Muon's: {rates}.
        AdamW's lies at an edge, so a lower one may be better; in the [first table](#30m-parameters), on another text, seed
        0 has {low:.3f} bits at 0.001 and {high:.3f} at 0.003. Steps are compared here: a step of Muon takes longer, by the products that make its updates orthogonal.
        The hybrid's runs with AdamW were cut short, so no number stands next to its runs with Muon.
        """),
    ]


def passed_states(r: Numbers) -> list[str]:
    sweeps, steps = ("text/rows/own", "text/rows/passed"), r.option("text/rows/passed", "passed_steps")
    mixers, sizes = r.option(sweeps[1], "mixers"), r.option(sweeps[0], "test_lengths")
    first, longest = sizes[0], sizes[-1]

    def lost(mixer: str) -> str:
        own, passed = (r.mean(sweep, mixer, longest) - r.mean(sweep, mixer, first) for sweep in sweeps)
        return f"{MIXERS[mixer].label} {own:+.3f} and {passed:+.3f}"

    return [
        "## States of other rows",
        prose(f"""
        Training rows begin with empty states, so a model may never have met the states that it has after many
        rows. Small models ({r.parameters(sweeps[0], "delta_net") / 1e6:.1f} million parameters) are trained
        on rows of {first} bytes, and asked for rows of up to {longest}. In the second sweep the last {steps}
        of {r.option(sweeps[0], "steps")} steps go on from the states after the row before
        (`gdn sweep --passed-steps`); all else is equal.
        """),
        *(sweep_table(r, sweep) for sweep in sweeps),
        "States passed over not, in bits:",
        over(r, sweeps, mixers, ["validation", *sizes]),
        prose(f"""
        At the longest rows, with states passed, DeltaNet is {r.told("passing.DeltaNet")} and linear attention
        {r.told("passing.linear")}. From the places up to {first} to those up to {longest} the bits of a byte change,
        without states that are passed and with them, by: {"; ".join(map(lost, mixers))}. The places hold
        different text, so a change of all rules alike is the text's.

        So passed states make DeltaNet read far, and linear attention only loses less: it still needs more bits at the end
        of a long row than at its beginning. The rules with a decay read as far without, and no rule gets it for
        nothing: within the training length, and in validation, every rule is higher with states passed. Only one learning rate and one
        number of steps with states passed were tried. Of Mamba2's decay with states passed two of three seeds were cut
        short.
        """),
    ]


def erasure(r: Numbers) -> list[str]:
    sweep = "text/30m/erasure"
    gains = r.compared("erasure_text.kda").gains
    return [
        "## EDA and KDA",
        prose(f"""
        [Erase-then-Delta Attention](https://arxiv.org/abs/2606.26560) (EDA) and KDA, each with its published gate, at
        one learning rate, with {len(gains)} seeds:
        """),
        sweep_table(r, sweep),
        "EDA over KDA, in bits:",
        differences(r, sweep, of="eda", than=["kda"], at=PLACES),
        prose(f"""
        In validation EDA and KDA are {r.told("erasure_text.kda")}; EDA is ahead in {sum(x > 0 for x in gains)} of
        {len(gains)} seeds. [Gated DeltaNet with AdamW](#muon-and-adamw), with the same text and steps, is
        lower than either in the mean. See [finding 4](../README.md#finding-4-erasures-at-a-key-of-their-own).
        """),
    ]


def limits(r: Numbers) -> list[str]:
    def million(count: float) -> str:
        return f"{count / 1e6:.1f}"

    small, large = (r.parameters(sweep, "gated_delta_net") for sweep in ("text/30m/first", "text/100m"))
    few, many = r.trained_bytes("text/30m/first"), r.trained_bytes("text/100m")
    return [
        "## What these numbers do not say",
        prose(f"""
        - Models of {million(small)} million parameters (the hybrid:
          {million(r.parameters("text/30m/first", "hybrid"))}) were trained on {million(few)} million bytes,
          {few / small:.2f} for each parameter; models of {million(large)} million on {million(many)},
          {many / large:.2f} for each. Language models get hundreds of times more, and the order may change.
        - Seed 0 alone chose the learning rate of the 30M models of the first table, of two, on the validation set that
          the table shows. For every mixer it was the upper edge of the grid. The 100M models have one rate.
        - Whether the loss keeps falling with the context is not settled: the places hold different text,
          and the two sweeps score different rows. Differences at one place do not depend on it.
        - The text is Python, byte by byte, and what was installed on one machine. `config.json` has the
          held-out packages and a fingerprint of the text.
        """),
    ]


def page(r: Numbers) -> str:
    """The page."""
    sections = (
        opening,
        parameters_30m,
        five_seeds,
        parameters_100m,
        controls,
        write_starts,
        muon,
        passed_states,
        erasure,
        limits,
    )
    return page_of("Text", r, sections)
