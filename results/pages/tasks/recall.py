"""tasks/recall.md: pairs of a key and a value, palindromes and stacks."""

import statistics

from gdn_jax.sweeps.summary import interval
from gdn_jax.training.mixers import MIXERS
from results.pages.markdown import (
    by_rate,
    differences,
    entry,
    page_of,
    prose,
    sweep_table,
    sweep_tables,
    table,
)
from results.pages.numbers import Numbers, at_least, half_life
from results.pages.stored import Arm

WITH_STATE = ("linear_attention", "mamba2", "delta_net", "gated_delta_net")
LEDGER = "recall/zoology/ledger*"
TEN, SMALL = "recall/start/ten", "recall/start/small"
LABELS = {"delta_net": "DeltaNet", "gated_delta_net": "Gated DeltaNet"}


def opening(r: Numbers) -> list[str]:
    return [
        prose("""
        A model reads pairs of a key and a value and is then asked for the values
        ([Zoology](https://arxiv.org/abs/2312.04927) calls it MQAR). Softmax attention keeps every token; a
        state has a fixed size, so all pairs share it. **Decays begin ten times slower than usual** in all
        sweeps of this page but the rows with a time step of 1, and the settings of Zoology and Kimi Linear.
        """),
    ]


def write_starts(r: Numbers) -> list[str]:
    seconds = r.run(TEN, "gated_delta_net", 0.001, 9, 0.06)["wall"]["seconds"]
    return [
        "## The start: what a write erases before anything is learned",
        prose(f"""
        A write of strength `beta` under another key takes `beta / K` of what is stored, on average over unit
        keys of K numbers, so half is left after about `K ln 2 / beta` tokens. Layers start at a `beta` of
        about 0.5 on every token: with K = 16 that is {half_life(16, 0.5):.0f} tokens, in rows of 64 to 256.
        From 0.25, 0.12, 0.06 and 0.02 it is {half_life(16, 0.25):.0f}, {half_life(16, 0.12):.0f},
        {half_life(16, 0.06):.0f} and {half_life(16, 0.02):.0f}. The sweeps below vary that start alone
        (`--write-starts`), with five seeds, an equal state of 1024 numbers, 4096 keys and values, and 8000
        steps. "Steps to half" are the steps after which half of 4 pairs are right, the median and the range
        of the seeds, "-" for never. On an H100 twenty runs of Gated DeltaNet next to each other take
        {20 * seconds / 60:.1f} minutes, so its whole sweep takes about {75 * seconds / 60:.0f}.
        """),
        *(
            sweep_table(r, f"recall/start/{name}")
            for name in ("delta", "gated", "gate", "linear", "linear_again")
        ),
        *by_start(r),
        *ten_seeds(r),
        *what_does_not_fit(r),
        *on_a_cpu(r),
        *wide_keys(r),
    ]


def by_start(r: Numbers) -> list[str]:
    rates, starts = (0.0003, 0.001, 0.003), (0.5, 0.25, 0.12, 0.06, 0.02)
    sweeps = (("recall/start/delta", "delta_net"), ("recall/start/gated", "gated_delta_net"))

    def learned(start: float) -> list[int]:
        return [r.count_learned(*sweep, 1, lr, start) for sweep in sweeps for lr in rates]

    strong, weak = learned(0.5), learned(0.02)
    heads = ["write start", *(f"{LABELS[mixer]} {lr:g}" for _, mixer in sweeps for lr in rates)]
    return [
        prose(f"""
        Runs of {r.runs(*sweeps[0], 1, 0.001, 0.5)} that have learned, by the start and the learning rate:
        """),
        table(heads, [[f"{start:g}", *(str(n) for n in learned(start))] for start in starts]),
        prose(f"""
        Over the three rates {sum(strong[:3])} of 15 runs of DeltaNet learn from 0.5 and {sum(weak[:3])} from
        0.02; of Gated DeltaNet {sum(strong[3:])} and {sum(weak[3:])}. The lowest rate is too slow for 8000
        steps from every start, and there, too, the weakest writes come furthest.
        """),
    ]


def ten_seeds(r: Numbers) -> list[str]:
    def learned(mixer: str, lr: float) -> str:
        strong, weak = (r.count_learned(TEN, mixer, 1, lr, start) for start in (0.5, 0.06))
        return f"{strong} of ten seeds from 0.5 and {weak} from 0.06"

    rows, positive, significant = [], 0, 0
    for key in ("DeltaNet", "Gated", "DeltaNet-0.003", "Gated-0.003"):
        found = r.compared(f"start.{key}")
        positive += sum(statistics.fmean(part) > 0 for part in (found.earlier, found.gains))
        significant += found.sign(r.largest_p)
        first, added = (" ".join(f"{x:.0f}" for x in part) for part in (found.earlier, found.gains))
        name = "Gated DeltaNet" if key.startswith("Gated") else "DeltaNet"
        means = [f"{statistics.fmean(found.earlier):.0f}", f"{found.gain:.0f} ± {found.interval:.0f}"]
        lr = "0.003" if key.endswith("0.003") else "0.001"
        rows.append([name, lr, first, means[0], added, means[1], f"{found.p:.3f}"])
    heads = [
        "rule",
        "learning rate",
        "seeds 0 to 4",
        "mean",
        "seeds 5 to 9",
        "mean, 95 % interval",
        "p of seeds 5 to 9",
    ]
    return [
        prose("""
        The next sweep has ten seeds from 0.5 and 0.06, at the two higher rates; the first five are in the
        tables above, too:
        """),
        sweep_table(r, TEN),
        prose(f"""
        At 0.001 DeltaNet learns with {learned("delta_net", 0.001)}, Gated DeltaNet with
        {learned("gated_delta_net", 0.001)}. At 0.003 DeltaNet learns with {learned("delta_net", 0.003)}, Gated DeltaNet
        with {learned("gated_delta_net", 0.003)}. Half of 4 pairs come after
        {r.half(TEN, "delta_net", 1, 0.001, 0.06)} steps in the median for DeltaNet from 0.06 at 0.001, and
        after {r.half("recall/start/linear", "linear_attention", 1, 0.001, 0.06)} for linear attention, which
        erases nothing. Seeds 0 to 4 were seen before seeds 5 to 9 were run, so the later five confirm or do
        not. Their gains at 16 pairs, 0.06 against 0.5, in points, also of seeds that have not learned:
        """),
        table(heads, rows),
        prose(f"""
        {positive} of the eight means are positive, and the added seeds gain less than the first. By
        themselves {significant or "none"} of the four passes the procedure of Benjamini and Hochberg (p up to
        {r.largest_p:.3f}).

        **With weak writes the delta rule is neither significantly ahead of a decay nor behind it.** At 16 pairs Gated
        DeltaNet from 0.06 and Mamba2's decay are {r.told("mqar.K16")}.
        """),
    ]


def what_does_not_fit(r: Numbers) -> list[str]:
    linear, gate = ("recall/start/linear", "linear_attention"), ("recall/start/gate", "mamba2")
    again = r.compared("linear.at_16")

    def more(lr: float) -> str:
        strong, weak = (r.seeds(*linear, 16, 1, lr, start) for start in (0.5, 0.06))
        gains = [b - a for a, b in zip(strong, weak, strict=True)]
        return (
            f"{statistics.fmean(gains):.0f} ± {interval(gains):.0f} ({' '.join(f'{x:.0f}' for x in gains)})"
        )

    return [
        prose(f"""
        **What does not fit.** Linear attention erases nothing, so its start should not matter. In steps to
        half it does not: {r.half(*linear, 1, 0.001, 0.5)} from 0.5 and {r.half(*linear, 1, 0.001, 0.06)} from
        0.06 at 0.001. In accuracy at 16 pairs it may: from 0.06 its first five seeds gain {more(0.001)} points
        at 0.001 and {more(0.003)} at 0.003. With {len(again.gains)} new seeds at 0.001 the gain is
        {again.gain:.0f} ± {again.interval:.0f}, so the gain of the first five there is not confirmed. There are no new seeds at 0.003. At 0.003 {r.count_learned(*linear, 1, 0.003, 0.5)} of
        {r.runs(*linear, 1, 0.003, 0.5)} seeds learn from 0.5 and {r.count_learned(*linear, 1, 0.003, 0.06)}
        from 0.06: weak writes also steady the training at a high rate. With Mamba2's decay
        {r.count_learned(*gate, 1, 0.001, 1.0)} of {r.runs(*gate, 1, 0.001, 1.0)} seeds learn at 0.001 with a time step of 1,
        ten times as fast, too. So no cost of forgetting by a decay is shown. In [a layer with a gate for each half of a
        write](../README.md#erase-and-write-apart) a weak start of erasing helps at 0.001 and a weak start of
        writing does not ([table](../recall/apart/table.md)); at 0.003 most of these models learn nothing
        ([table](../recall/apart_high/table.md)). [Okpekpe and Orvieto](https://arxiv.org/abs/2508.19029) find that recurrent models learn this task in a narrow
        window of learning rates only.
        """),
    ]


def on_a_cpu(r: Numbers) -> list[str]:
    def learned(mixer: str) -> str:
        strong, middle, weak = (r.count_learned(SMALL, mixer, 1, 0.015, start) for start in (0.5, 0.2, 0.06))
        return f"{strong} learn from 0.5, {middle} from 0.2 and {weak} from 0.06"

    return [
        prose(f"""
        The same on two CPU cores takes two to three minutes (`configs/recall_start.small.json`): three pairs
        in 32 tokens, six seeds, heads of 4 numbers, so that 0.5, 0.2 and 0.06 leave half after
        {half_life(4, 0.5):.0f}, {half_life(4, 0.2):.0f} and {half_life(4, 0.06):.0f} tokens.
        """),
        sweep_table(r, SMALL),
        prose(f"""
        Of six seeds of DeltaNet {learned("delta_net")}; of Gated DeltaNet {learned("gated_delta_net")}. All
        seeds of linear attention learn from every start.
        """),
    ]


def wide_keys(r: Numbers) -> list[str]:
    arms = (("delta", "delta_net", 0.06), ("delta", "delta_net", 0.5), ("gated", "gated_delta_net", 0.06),
            ("gated", "gated_delta_net", 0.5), ("gate", "mamba2", None))  # fmt: skip
    lowest = min(r.lowest(f"recall/start_wide/{n}", mixer, 64, 1, 0.001, start) for n, mixer, start in arms)
    linear = r.mean("recall/start_wide/linear", "linear_attention", 256)
    delta, gated = r.compared("wide_half.DeltaNet"), r.compared("wide_half.Gated")
    again, small = r.compared("wide_again.usual"), r.compared("wide_again.small")
    return [
        prose(f"""
        ### Wide keys

        From 0.5 the half-life is {half_life(64, 0.5):.0f} tokens at K = 64, four times as long as at K = 16.
        If the start made as large a difference there, the half-life would not be the reason. These runs have
        keys of 64 numbers and are asked for up to four times the pairs of training:
        """),
        *sweep_tables(r, "recall/start_wide/*"),
        prose(f"""
        At 256 pairs, from 0.06 against 0.5, DeltaNet is {r.told("wide.DeltaNet")} and Gated DeltaNet
        {r.told("wide.Gated")}; Gated DeltaNet from 0.06 and Mamba2's decay are {r.told("mqar.K64")}. At 64
        pairs, the most in training, every run of these has {at_least(lowest)} %: there is no room for a
        difference. Linear attention, which erases nothing, has {linear:.1f} % of 256 pairs at its better rate
        and the decay {r.mean("recall/start_wide/gate", "mamba2", 256):.1f}.

        In steps to half of 4 pairs, read off the learning curves between their points, the start does matter:
        DeltaNet needs {delta.scores[0]:.0f} steps from 0.06 and {delta.scores[1]:.0f} from 0.5 (fewer by
        {delta.gain:.0f} ± {delta.interval:.0f}), Gated DeltaNet {gated.scores[0]:.0f} and
        {gated.scores[1]:.0f} (fewer by {gated.gain:.0f} ± {gated.interval:.0f});
        {sum(x > 0 for x in delta.gains + gated.gains)} of {len(delta.gains + gated.gains)} pairs of seeds
        agree. We chose that measure after the runs were seen, so it is exploratory. New seeds of DeltaNet, 10
        to 17, were run with it, with the usual epsilon of the norm after the rule and with one that damps
        nothing ([table](../recall/eps/table.md)):
        """),
        "![Learning curves with wide keys by the start and the epsilon of the norm](../recall/eps/figure.png)",
        prose(f"""
        They need {again.scores[0]:.0f} steps from 0.06 and {again.scores[1]:.0f} from 0.5 (fewer by
        {again.gain:.0f} ± {again.interval:.0f}, p = {again.p:.3f}), with the small epsilon
        {small.scores[0]:.0f} and {small.scores[1]:.0f} (fewer by {small.gain:.0f} ± {small.interval:.0f}, p =
        {small.p:.3f}). Over all tests of these pages a gain is significant with p up to {r.largest_p:.3f}.
        """),
    ]


def by_state(r: Numbers) -> list[str]:
    return [
        "## With as many keys as Zoology has, by the size of the state",
        sweep_table(r, "recall/zoology/first"),
        sweep_table(r, "recall/zoology/linear"),
        prose("""
        Heads have a width of 16 times the scale, and writes start at 0.5. At the smallest state the delta
        rules hardly learn in 8000 steps (see the section above). Once more with three times the steps at the
        middle size:
        """),
        sweep_table(r, "recall/zoology/longer"),
        "Gains of DeltaNet there:",
        differences(
            r,
            "recall/zoology/longer",
            of="delta_net",
            than=["mamba2", "gated_delta_net"],
            at=[4, 16, 32, 64],
            scale=2,
        ),
    ]


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


def keys_128(r: Numbers) -> list[str]:
    others = ["mamba2", "gated_delta_net"]
    return [
        "## With 128 keys",
        sweep_table(r, "recall/by_state/first"),
        prose("""
        Then with twice as many steps, and with a few keys that come again (12 % of the queries ask for a key
        that was written more than once):
        """),
        sweep_table(r, "recall/by_state/longer"),
        sweep_table(r, "recall/by_state/again"),
        "Gains of DeltaNet in these three sweeps, in their order:",
        *(
            differences(r, f"recall/by_state/{name}", of="delta_net", than=others, at=[4, 16, 32])
            for name in ("first", "longer", "again")
        ),
        prose("""
        Mamba2's decay is ahead where keys come again and 4000 steps are not enough for the delta rules. All
        writes start at 0.5.
        """),
    ]


def keys_again(r: Numbers) -> list[str]:
    return [
        "## Where keys often come again",
        prose("""
        The delta rule replaces the value of a key; it does not make room for more keys: what it buys is
        overwriting ([the first notebook](../../notebooks/01_from_attention_to_the_delta_rule.ipynb)). One layer on a
        CPU, 12 keys that come again:
        """),
        sweep_table(r, "recall/small"),
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


def factorial(r: Numbers) -> list[str]:
    sweep = "recall/factorial"
    return [
        "## Decay and delta rule, the factorial",
        prose("""
        These runs have keys that come again and heads of 8 numbers, for the factorial of decay and delta rule
        ([FdXB4u27LD](https://openreview.net/forum?id=FdXB4u27LD)): a decay per head or per channel, with and
        without the delta rule, five seeds at two rates, 3000 steps.
        """),
        sweep_table(r, sweep),
        prose(f"""
        Every run learns it. The paper, of which we read an excerpt, says that the delta rule with a decay per
        head solves exact retrieval and with a per-channel decay does not. Here, at 32 pairs, Gated DeltaNet
        against KDA is {r.told("factorial.head")}. Without the delta rule the decay per head has
        {r.mean(sweep, "mamba2", 32):.0f} % and the per-channel decay {r.mean(sweep, "gla", 32):.0f}; Gated
        DeltaNet has {r.mean(sweep, "gated_delta_net", 32):.0f}. The paper's order of language models, every
        variant with the delta rule before every one without, was not tested. Writes start at 0.5, which with
        heads of 8 numbers leaves half of a state after {half_life(8, 0.5):.0f} tokens; weaker starts were not
        tried.
        """),
    ]


def erasures(r: Numbers) -> list[str]:
    once, scope, eviction = (f"recall/erasure/{name}" for name in ("once", "scope", "eviction"))
    return [
        "## Erasures",
        prose("""
        [Erase-then-Delta Attention](https://arxiv.org/abs/2606.26560) (EDA) erases at a key of its own before it
        writes; [finding 4](../README.md#finding-4-erasures-at-a-key-of-their-own) says what comes out. "KDA, EDA's
        gate" tells the gate from the erasure. Every key is written once, up to 32 pairs in 128 tokens, in states that hold few of
        them:
        """),
        sweep_table(r, once),
        prose(f"""
        At 32 pairs KDA and EDA are {r.told("erasure_recall.kda")}, KDA with EDA's gate and EDA
        {r.told("erasure_recall.gate")}. In `scope` names get values in scopes, of which up to four are open inside the
        outermost one, and a scope that closes takes its values along. The second table has accuracy where the value
        that a name got last has gone with its scope, and where it is the answer:
        """),
        sweep_table(r, scope),
        _by(r, scope, "latest", ("gone", "valid")),
        prose(f"""
        At 384 tokens, twice the training length, EDA and KDA are {r.told("erasure_scope.scope_kda")}, EDA and KDA with
        EDA's gate {r.told("erasure_scope.scope_gate")}. In `eviction` a token gives a name a value and takes the value
        of another name away; the second table has accuracy of names that lost their value, and of those that have one:
        """),
        sweep_table(r, eviction),
        _by(r, eviction, "evicted", ("evicted", "valid")),
        prose(f"""
        Every rule solves it, Gated DeltaNet and KDA as well, which have one key a token. The parameters are not equal: in
        `scope` EDA has {r.parameters(scope, "eda"):,} and KDA {r.parameters(scope, "kda"):,}.
        """),
    ]


def _by(r: Numbers, sweep: str, name: str, kinds: tuple[str, str]) -> str:
    """Accuracy in %, the mean of the seeds, by a kind of question that the task scores apart."""
    rows = []
    sizes = r.option(sweep, "test_lengths")
    for mixer in r.option(sweep, "mixers"):
        lines = [*r.records(Arm(sweep, mixer)).values()]
        cells = []
        for size in map(str, sizes):
            parts = zip(*(line["test_accuracy_by"][name][size] for line in lines), strict=True)
            cells += [f"{100 * statistics.fmean(part):.1f}" for part in parts]
        rows.append([MIXERS[mixer].label, *cells])
    return table(["mixer", *(f"{size} tokens: {kind}" for size in sizes for kind in kinds)], rows)


def page(r: Numbers) -> str:
    """The page."""
    sections = (
        opening,
        write_starts,
        by_state,
        zoology,
        keys_128,
        keys_again,
        palindromes_and_stacks,
        factorial,
        erasures,
    )
    return page_of("Recall", r, sections)
