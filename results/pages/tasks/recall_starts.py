"""tasks/recall.md: what a write erases before anything is learned."""

import statistics

from gdn_jax.sweeps.summary import interval
from results.pages.markdown import prose, sweep_table, sweep_tables, table
from results.pages.numbers import Numbers, at_least, half_life

TEN, SMALL = "recall/start/ten", "recall/start/small"
LABELS = {"delta_net": "DeltaNet", "gated_delta_net": "Gated DeltaNet"}


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
