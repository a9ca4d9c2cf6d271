"""tasks/words.md: running products of permutations."""

from results.pages.markdown import differences, entry, page_of, prose, sweep_table
from results.pages.numbers import Numbers, at_least

ONE_STEP = "gated_delta_net_neg"
STEPS = (ONE_STEP, "gated_delta_product", "gated_delta_product_3", "gated_delta_product_4")
OTHERS = ("mamba2", "delta_net", "gated_delta_net", "softmax_attention")
LAYERS = (1, 2, 4)


def opening(r: Numbers) -> list[str]:
    return [
        prose("""
        A model reads letters, each a permutation, and says after each where all of them so far lead together.
        Parity asks for one sign; here the order of the letters counts as well. The delta rule multiplies the
        state by `I - beta k k^T`, a Householder step. With a `beta` of 2 it reflects in the direction of the
        key: one step can exchange two things, but not move three round.
        [DeltaProduct](https://arxiv.org/abs/2502.10297) proves in section 4 that two layers of one step
        follow dihedral groups; S3 is the group of the triangle. [Grazzi et
        al.](https://arxiv.org/abs/2411.12537) ask for words of swaps. Where a test is longer than the
        training, only the tokens after the training length are scored. "Learned" compares the validation loss
        at the training length with a guess: a model that knows the first letters alone has learned something,
        and may still be at a guess past that length.
        """),
    ]


def letters_of_s3(r: Numbers) -> list[str]:
    s3 = "words/depth/s3"
    most = max(r.highest(s3, mixer, 64, layers) for mixer in OTHERS for layers in LAYERS)
    low, middle, _ = r.ascending(s3, ONE_STEP, 64)
    return [
        "## All letters of S3",
        sweep_table(r, s3),
        prose(f"""
        Only the mixer with negative eigenvalues follows the words past the training length: no run of the
        four others has more than {most:.0f} % at 64 letters. Two layers are better than one in every seed, by
        {min(r.gains("depth.layers")):.0f} to {max(r.gains("depth.layers")):.0f} points at 128 letters. With
        one layer two of three seeds have {low:.0f} and {middle:.0f} % at 64 letters. Someone who knows only
        whether the number of swaps is even has as much; we did not test whether that is what they know.

        Four layers are not better than two. The theorem says what they can do; training did not find it in
        one seed of three, which has {r.lowest(s3, ONE_STEP, 32, 4):.0f} % at the training length. More layers
        are also more parameters, and we did not run a single layer of that size.
        """),
    ]


def swaps_of_s3(r: Numbers) -> list[str]:
    return [
        "## Swaps of S3",
        sweep_table(r, "words/swaps/s3"),
        prose(f"""
        The layer that has at most {r.highest("words/depth/s3", ONE_STEP, 64):.0f} % for all letters has
        {at_least(r.lowest("words/swaps/s3", ONE_STEP, 64))} % for swaps at 64 letters. Such words are easier
        for another reason, too: there are three letters instead of six. No other mixer has learned anything.
        """),
    ]


def swaps_of_s5(r: Numbers) -> list[str]:
    def ahead(layers: int) -> float:
        one, other = (r.mean("words/swaps/s5", mixer, 32, layers) for mixer in ("gated_delta_net", "mamba2"))
        return one - other

    return [
        "## Swaps of S5",
        sweep_table(r, "words/swaps/s5"),
        differences(r, "words/swaps/s5", of=ONE_STEP, than=["mamba2", "gated_delta_net"], at=[32, 64, 128]),
        prose(f"""
        Without negative eigenvalues no depth follows the swaps past the training length. At the training
        length the delta rule helps: Gated DeltaNet is ahead of Mamba2's decay by {ahead(2):.0f} points with
        two layers and by {ahead(4):.0f} with four. DeltaNet and softmax attention were not run.
        """),
        *entry(r, "2411.12537/swaps", "words/swaps/ledger"),
    ]


def several_steps(r: Numbers) -> list[str]:
    def span(mixer: str) -> str:
        return f"{r.lowest('words/steps/s3', mixer, 32):.0f} to {r.highest('words/steps/s3', mixer, 32):.0f}"

    one, two, three, four = (span(mixer) for mixer in STEPS)
    best = max(r.highest("words/steps/s5", mixer, 32, 1, lr) for mixer in STEPS for lr in (0.002, 0.006))
    return [
        "## Several steps a token",
        prose("""
        These models have one layer and are trained on words of eight letters. DeltaProduct makes n_h
        Householder steps at every token, and [its paper](https://arxiv.org/abs/2502.10297) reports that more
        steps reach harder groups. Two reflections make a rotation, so two steps are enough for S3.
        """),
        sweep_table(r, "words/steps/s3"),
        prose(f"""
        At 32 letters, four times the training length, two steps have {two} %, three {three}, four {four}, and
        one step {one}: three seeds each, at the better of two rates. The parameters differ, too: each step
        has keys and values of its own.

        A5, the rotations of the icosahedron, takes two steps in principle. After 2000 steps of training every
        run of every mixer is at the floor: at 32 letters it has what a guess has. At the training length all
        have about {r.highest("words/steps/a5", "gated_delta_product", 8):.0f} %, as much as someone who knows
        the first letters and guesses the others. That says little of the claim: longer training was not
        tried.
        """),
        sweep_table(r, "words/steps/a5"),
        prose(f"""
        S5 has the same 2000 steps, three seeds and two rates, and every run is at the floor as well. At 32
        letters the best run has {best:.1f} %. A guess has {100 / 120:.1f} %, and a model that knows only whether
        the number of swaps so far is even has {100 / 60:.1f} %. So a few runs at the higher rate have learned that
        sign, which is parity, and nothing more.
        """),
        sweep_table(r, "words/steps/s5"),
    ]


def at_the_floor(r: Numbers) -> list[str]:
    s5 = "words/depth/s5"
    best = max(r.highest(s5, mixer, 32, layers) for mixer in (*OTHERS, ONE_STEP) for layers in LAYERS)
    return [
        "## At the floor: all letters of S5",
        prose(f"""
        Nobody learned all letters of S5 in 4000 steps; the papers train much longer, and use several steps a
        token. No run has more than {best:.1f} % at the training length, where a guess has
        {100 * r.baseline(s5):.1f} %.
        """),
        sweep_table(r, s5),
    ]


def page(r: Numbers) -> str:
    """The page."""
    sections = (opening, letters_of_s3, swaps_of_s3, swaps_of_s5, several_steps, at_the_floor)
    return page_of("Words of a group", r, sections)
