"""tasks/parity.md: whether the number of ones so far is even."""

from results.pages.markdown import differences, entry, page_of, prose, sweep_table
from results.pages.numbers import Numbers

NEGATIVE = "gated_delta_net_neg"
OTHERS = ["linear_attention", "mamba2", "delta_net", "gated_delta_net", "softmax_attention"]


def opening(r: Numbers) -> list[str]:
    return [
        prose("""
        A model reads bits and says after each whether the number of ones so far is even. A guess is right in
        50 %. One bit of memory is enough, but every one in the input must flip it, and to flip is to multiply
        by minus one. A state whose transition has real eigenvalues that are never negative cannot do that,
        however large it is ([Grazzi et al.](https://arxiv.org/abs/2411.12537), Theorem 1). Complex
        eigenvalues could; one Householder step has none. A model can still learn a table of short inputs, so
        the question is asked past the training length.
        """),
    ]


def two_layers(r: Numbers) -> list[str]:
    low, middle, high = r.ascending("parity/full_far", NEGATIVE, 1024)
    return [
        "## Two layers, trained on 64 bits: `parity/full_far`",
        sweep_table(r, "parity/full_far"),
        prose("""
        The next table has gains seed by seed, over the seeds that have learned something in both mixers. ± is
        half of the 95 % t interval, bold excludes zero, n counts pairs.
        """),
        differences(r, "parity/full_far", of=NEGATIVE, than=OTHERS, at=[64, 128, 256, 512, 1024]),
        prose(f"""
        At sixteen times the training length the model with write strengths up to 2 makes errors: its three
        seeds have {low:.0f}, {middle:.0f} and {high:.0f} %. We did not look for the reason.
        """),
    ]


def as_published(r: Numbers) -> list[str]:
    return [
        "## The published setting: `parity/ledger`",
        *entry(r, "2411.12537/parity", "parity/ledger"),
        prose(f"""
        This sweep has five seeds and other lengths of the test. At 1024 bits the seeds with write strengths
        up to 2 have {r.lowest("parity/ledger", NEGATIVE, 1024):.0f} to
        {r.highest("parity/ledger", NEGATIVE, 1024):.0f} %.
        """),
    ]


def one_layer(r: Numbers) -> list[str]:
    return [
        "## One layer on a CPU, trained on 16 and on 32 bits: `parity/small_far`",
        sweep_table(r, "parity/small_far"),
        differences(r, "parity/small_far", of=NEGATIVE, than=OTHERS, at=[16, 256]),
    ]


def page(r: Numbers) -> str:
    """The page."""
    return page_of("Parity", r, (opening, two_layers, as_published, one_layer))
