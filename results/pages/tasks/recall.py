"""tasks/recall.md: pairs of a key and a value, palindromes and stacks."""

from results.pages.markdown import differences, page_of, prose, sweep_table
from results.pages.numbers import Numbers, half_life
from results.pages.tasks import recall_erasures, recall_papers, recall_starts


def opening(r: Numbers) -> list[str]:
    return [
        prose("""
        A model reads pairs of a key and a value and is then asked for the values
        ([Zoology](https://arxiv.org/abs/2312.04927) calls it MQAR). Softmax attention keeps every token; a
        state has a fixed size, so all pairs share it. **Decays begin ten times slower than usual** in all
        sweeps of this page but the rows with a time step of 1, and the settings of Zoology and Kimi Linear.
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


def page(r: Numbers) -> str:
    """The page."""
    sections = (
        opening,
        recall_starts.write_starts,
        by_state,
        recall_papers.zoology,
        keys_128,
        keys_again,
        recall_papers.palindromes_and_stacks,
        factorial,
        recall_erasures.erasures,
    )
    return page_of("Recall", r, sections)
