"""tasks/recall.md: the settings of Zoology and of Kimi Linear."""

from results.pages.markdown import by_rate, entry, prose, sweep_table, table
from results.pages.numbers import Numbers, half_life

WITH_STATE = ("linear_attention", "mamba2", "delta_net", "gated_delta_net")
LEDGER = "recall/zoology/ledger*"


def zoology(r: Numbers) -> list[str]:
    trained = [r.best(LEDGER, mixer, 64, 1) for mixer in WITH_STATE]
    losses = [
        r.run("recall/zoology/ledger", mixer, 0.001, 0)["val_loss"]
        for mixer in ("delta_net", "gated_delta_net")
    ]
    decay = r.by_rate(LEDGER, "mamba2", 256, 2).values()
    linear = r.by_rate(LEDGER, "linear_attention", 256, 4).values()
    best = {
        scale: [f"{r.best(LEDGER, mixer, 256, scale):.1f}" for mixer in WITH_STATE] for scale in (1, 2, 4)
    }

    def span(sweep: str, mixer: str, start: float | None = None) -> str:
        scores = r.by_rate(sweep, mixer, 256, 2, start).values()
        return f"{min(scores):.1f} to {max(scores):.1f}"

    return [
        "## Zoology's MQAR with as much training as theirs",
        *entry(r, "2312.04927/mqar", LEDGER),
        prose(f"""
        All {r.runs(LEDGER)} runs of the setting are here: **one seed at four rates**, writes that start at
        0.5 and decays at their usual speed, up to 64 pairs in training, heads of
        {r.option("recall/zoology/ledger", "head_dim")} numbers times the scale. The twelve of
        `recall/zoology/ledger` had rows of 4 and 8 pairs alone in validation (640 rows in batches of 256),
        which hardly tells learned runs apart; the setting has more now, and the others were made with it.
        Softmax attention with keys of 32 was run twice; the runs that ended first are shown. The paper shows
        the best of four rates. Here is every rate, in %, with the delta rules also from weaker writes:
        """),
        by_rate(
            r, LEDGER, [*WITH_STATE, "softmax_attention"], [64, 128, 256], [("recall/zoology/start", 0.06)]
        ),
        "![Recall of 256 pairs by learning rate, after training on up to 64 pairs](../recall/zoology/rates.png)",
        prose(f"""
        **Within the training length the rules hardly differ.** With keys of 32 numbers the four rules with a
        state hold 64 pairs at {min(trained):.1f} to {max(trained):.1f} %, each at its best rate; with wider
        keys they hold them all. Softmax attention, which keeps every token, has all 256 pairs at every rate.

        **Asked for 256 pairs, four times the training length, the best runs are of the rules without the
        delta rule's correction.** Best of four rates, in %:
        """),
        table(
            ["keys", "linear attention", "Mamba2's decay", "DeltaNet", "Gated DeltaNet"],
            [[str(32 * scale), *scores] for scale, scores in best.items()],
        ),
        prose(f"""
        At every rate Gated DeltaNet is behind the decay with keys of 32 and of 128; with keys of 64 it is
        ahead at one rate of four. The literature says the opposite, of another Mamba2, which ties the write
        to the decay and has no unit keys. Whether these numbers say anything about what a state can hold is
        the subject of [finding 1](../README.md#finding-1-what-mqar-measures).

        The rate decides as much as the rule: with keys of 64 the decay has between {min(decay):.0f} and
        {max(decay):.0f} %, with keys of 128 linear attention between {min(linear):.0f} and {max(linear):.0f}.
        Validation, where nearly all runs know everything, cannot choose: the tables of runs take the rate of
        the lowest loss, the paper the best. At 0.001 and with keys of 32 the two delta rules learn nothing.
        They end at validation losses of {losses[0]:.1f} and {losses[1]:.1f} nats, above a guess, as models do
        that know their 20,000 rows of each kind by heart.

        **Is it the start?** With keys of 64 a write at 0.5 leaves half after {half_life(64, 0.5):.0f} tokens,
        one at 0.06 after {half_life(64, 0.06):.0f}, and rows of 256 pairs have 1024. If the delta rules were
        behind because of what they erase before they have learned anything, weak writes would mend it. They
        do not: from 0.06, all else equal, the four rates of DeltaNet have
        {span("recall/zoology/start", "delta_net", 0.06)} % of 256 pairs, the four of Gated DeltaNet
        {span("recall/zoology/start", "gated_delta_net", 0.06)}; from 0.5 it is {span(LEDGER, "delta_net")}
        and {span(LEDGER, "gated_delta_net")}.
        """),
    ]


def palindromes_and_stacks(r: Numbers) -> list[str]:
    mixers = ("mamba2", "gated_delta_net", "kda")

    def halves(sweep: str, mixer: str) -> str:
        *first, last = (r.half(sweep, mixer, 1, lr) for lr in (5e-5, 1e-4, 5e-4, 1e-3))
        return f"{', '.join(first)} and {last}"

    lowest = [f"{r.seeds('kimi/stack_full', mixer, 510, 1, 5e-5)[0]:.1f}" for mixer in mixers]
    return [
        "## Palindromes and stacks",
        prose("""
        [Kimi Linear](https://arxiv.org/abs/2510.26692), section 5, trains models of two layers for up to
        20,000 steps on palindromes of hundreds of tokens and on 64 stacks. It reports KDA before Gated
        DeltaNet, and that Mamba2 fails. Its palindromes as the published setting asks for them, one seed at
        four rates:
        """),
        *entry(r, "2510.26692/palindrome", "kimi/palindrome_full"),
        by_rate(r, "kimi/palindrome_full", mixers, [256]),
        prose(f"""
        All three learn to say 256 tokens backwards, at every rate. Mamba2's decay does, too, where the paper
        says that Mamba2 fails: here it has unit keys and a write strength of its own, which Mamba2 has not.
        At the four rates, the lowest first, half of the tokens are right after
        {halves("kimi/palindrome_full", "kda")} steps with KDA,
        {halves("kimi/palindrome_full", "gated_delta_net")} with Gated DeltaNet and
        {halves("kimi/palindrome_full", "mamba2")} with the decay. One seed a rate shows no order. Sixty-four
        stacks:
        """),
        *entry(r, "2510.26692/stack", "kimi/stack_full"),
        by_rate(r, "kimi/stack_full", mixers, [510]),
        prose(f"""
        All three learn these as well. At the lowest rate, where none knows them whole after 20,000 steps,
        they stand in the paper's order: KDA {lowest[2]}, Gated DeltaNet {lowest[1]}, the decay {lowest[0]} %.
        At the best rate of each nothing is left between them. Half of the values are right after
        {halves("kimi/stack_full", "kda")} steps with KDA, {halves("kimi/stack_full", "gated_delta_net")} with
        Gated DeltaNet and {halves("kimi/stack_full", "mamba2")} with the decay. There is one seed a rate, and
        one length: the paper's longer rows were not run. The next runs have one layer on a CPU and a few
        tokens:
        """),
        sweep_table(r, "kimi/palindrome"),
        prose(f"""
        All three learn to say eight tokens backwards, with {r.mean("kimi/palindrome", "kda", 8):.1f} % for
        KDA and {r.mean("kimi/palindrome", "mamba2", 8):.1f} for the decay, and all fall at sixteen, which is
        past the training: there KDA and the decay are {r.told("kimi.palindrome")}. Four stacks of eight
        values, at twice the training length:
        """),
        sweep_table(r, "kimi/stack"),
        prose(f"""
        Against Mamba2's decay KDA is {r.told("kimi.stack")}, at tasks so small that every rule learns them.
        """),
    ]
