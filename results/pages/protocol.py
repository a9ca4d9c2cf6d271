"""protocol.md: how runs were made, chosen and compared."""

from gdn_jax.sweeps.summary import t_of
from results.pages import verdicts
from results.pages.markdown import joined, prose, table
from results.pages.numbers import Numbers

MQAR = "gdn sweep recall --config results/configs/recall_mqar_place"
NEW_KEYS = "--first-seed 10 --together 3 --steps 6000 --curve-every 1000"
"""Commands of runs that are missing."""


def rules(r: Numbers) -> list[str]:
    return [
        "## The rules",
        prose("""
        | mixer | what a token does |
        |---|---|
        | linear attention with unit keys | `S <- S + beta k v^T` |
        | Mamba2's decay with unit keys | `S <- exp(g) S + beta k v^T` |
        | DeltaNet | `S <- S + beta k (v - k^T S)^T` |
        | Gated DeltaNet | `S <- exp(g) S`, then as DeltaNet |
        | Gated DeltaNet, beta to 2 | the same, `beta` up to 2: transitions have an eigenvalue down to -1 |
        | softmax attention without positions | keeps every `k` and `v` |
        | Transformer | attention with rotary positions in every layer, no convolution, no SiLU on q and k |
        | Gated DeltaNet and attention (the hybrid) | every fourth layer is attention, in the form of Qwen3.5 |
        | the hybrid without attention | its control: the same form |

        The first six are one layer, DeltaNet's: unit keys (not in softmax attention), SiLU and a short
        convolution on queries, keys and values, a write strength, a norm and an output gate. They are
        controlled comparisons, not the published layers: Mamba2 couples its write strength to its decay and
        has no unit keys, and a Transformer has positions and no SiLU on queries and keys. In a sweep all of
        these have the same parameters, the same initial weights and batches for a seed, and the same state
        size. The last three have about as many parameters.
        """),
    ]


def statistics(r: Numbers) -> list[str]:
    one, edge, inside = r.grids()
    tests = r.tests()
    return [
        "## Statistics",
        prose(f"""
        **Learned.** A run has learned something if its validation loss is below 0.9 times the loss of a
        guess, which is the logarithm of the number of answers. Tables say "k of n" and average learned runs
        alone: a mean over outcomes of two kinds is no run's.

        **The floor.** A run may know the first letters of a word, count as learned, and still be at a guess
        where it is asked. A comparison is *at the floor* where no run of either arm gets further than a tenth
        of the way from a guess to 100 %. It then counts neither for nor against a claim.

        **Gains.** We compare two mixers seed by seed, over the seeds that have learned in both or, where
        learning is the question, over all. ± is half of the 95 % interval of Student's t; bold means that the
        interval excludes zero. With two seeds it takes {t_of(2):.1f} standard errors, with three
        {t_of(3):.1f}, with five {t_of(5):.1f}. Models of different sizes are never pooled.

        **One seed at several rates.** The published settings of Zoology and of Kimi Linear have one seed at
        four learning rates. Rates are no replicates: such rows show the best rate of each rule and all rates,
        and have no interval and no test.

        **Seeds that were added.** Where more seeds were run after a look at the first, the pages say so.
        Three or more added seeds are tested by themselves, without the first. With fewer nothing is tested.

        **Multiplicity.** The pages make {len(tests)} tests. A gain is *significant* if its p-value passes the
        procedure of Benjamini and Hochberg at 5 % over all of them: {sum(p <= r.largest_p for p in tests)}
        do, with p up to {r.largest_p:.3f}. Measures that were chosen after the runs were seen are shown with
        an interval and not tested.

        **Selection.** The learning rate is the one with the lowest mean validation loss over the seeds that
        tried all rates; synthetic tests have other random keys than the validation. In recall that loss is a
        mean over queries, so rows of 64 pairs weigh most. In text the validation set of the table is the one
        that chose. Presets and sizes were chosen with pilots of one seed, which were not kept. Comparisons
        are made at the longest test of a sweep, or at the one that leaves room above and below.

        **Grids of learning rates.** Of {one + edge + inside} cells (a sweep, mixer, size and start) {one}
        tried one rate, {edge} chose an edge of their grid, and {inside} bracket their optimum. An edge means
        that a rate outside might change the order. [The pages of claims](claims.md) name the edge of every
        arm.

        **Curves.** The full presets keep a learning curve of every run except for text, whose loss falls from
        the first step on. {r.curves("*")} of the {r.runs("*")} runs here have one: the older sweeps have
        none.
        """),
    ]


def of_verdicts(r: Numbers) -> list[str]:
    return [
        "## Verdicts",
        prose(f"""
        The verdict of a paper's claim is the first line that holds:

        | verdict | when |
        |---|---|
        | {verdicts.NOT_TESTED} | no comparison has runs |
        | {verdicts.AT_FLOOR} | every comparison is at the floor: nobody learned what is asked |
        | {verdicts.CONTRADICTED} | some gain is significant and negative ("in part" if another is significant and positive); in another setting than the claim's, with what differs |
        | {verdicts.REPRODUCED} | every gain over seeds is significant and positive, in a setting that the claim names |
        | {verdicts.IN_SIGN} | the same in another setting; or every single pair of seeds is positive, at least two in each comparison |
        | {verdicts.IN_ONE_SEED} | in some comparison of one seed the favoured rule is behind at every rate (or the rule that should fail does not), and in none is it ahead at every rate |
        | {verdicts.UNDECIDED} | all else |

        The verdict of a question of our own:

        | verdict | when |
        |---|---|
        | {verdicts.EXPLORATORY} | the measure was chosen after the runs were seen |
        | {verdicts.OPPOSITE} | some gain is significant and negative, none significant and positive |
        | {verdicts.SHOWN} | every gain is significant and positive |
        | {verdicts.SHOWN_IN_PART} | every gain is positive, and some are significant |
        | {verdicts.NOT_CONFIRMED} | every gain is positive; the first seeds have intervals that exclude zero, the added ones are not significant |
        | {verdicts.NOT_SHOWN} | all else |

        The lines on one seed, on seeds that were added and on the floor were written after the runs were
        seen. The earlier rule took rates for replicates, pooled sizes, and called the claims on MQAR and on
        Mamba2's failing undecided.
        """),
    ]


def without_runs(r: Numbers) -> list[str]:
    names = ", ".join(f"`{path.stem}`" for path in sorted((r.root / "configs").iterdir()))
    return [
        "## Configurations without runs",
        prose(f"""
        - No runs: `configs/palindrome.full.json` and `configs/stack.full.json` (more rules than Kimi Linear's, at shorter lengths),
          `configs/recall_factorial.small.json`, `configs/recall_erasure.small.json`, `configs/scope_erasure.small.json`.
        - Cut short: the hybrid of `configs/text_30m_adamw.full.json`, Mamba2's decay of `configs/text_passed_rows.full.json`. Of
          `configs/recall_start_wide*.full.json` the rate of 0.003 was not run for the two delta rules. Of the five seeds of
          `configs/text_controls.full.json` all were run of the Transformer and of the hybrid without attention,
          {r.runs("text/30m/controls*", "hybrid")} of Gated DeltaNet and of the hybrid.
        - Of the published settings of `gdn reproduce` six were run whole: parity, swaps, the number in repeated words, Kimi
          Linear's palindrome and stack, and Zoology's MQAR. The other settings were not run.

        Of accuracy by place these were cut short or not started:

        | rules | keys | mixers | command |
        |---|---|---|---|
        | Mamba2's decay, linear attention | 64 | two, higher rate | `{MQAR}_two.full.json --mixers mamba2 linear_attention --lrs 0.01 --together 3` |
        | linear attention | 64 | one, higher rate | `{MQAR}_one.full.json --mixers linear_attention --lrs 0.032 --together 3` |
        | Mamba2's decay | 128 | two | `{MQAR}_two.full.json --mixers mamba2 --scales 4 --lrs 0.0032 {NEW_KEYS}` |
        | Mamba2's decay, linear attention | 32 | one | `{MQAR}_one.full.json --mixers mamba2 linear_attention --scales 1 --lrs 0.01 {NEW_KEYS}` |

        The four rates of a rule next to each other take two to six minutes in MQAR on an H200, and three and a half to six and
        a half in Kimi Linear's palindrome and stack. Names that end in `small` are for two CPU cores. All files of options:

        {names}.
        """),
    ]


def how_they_were_run(r: Numbers) -> list[str]:
    rows = []
    for name in r.names:
        config, lines = r.folder(name)
        made = ", ".join(f"`{commit}`" for commit in r.commits(name)) or "not named"
        seconds = sum(line["wall"]["seconds"] for line in lines)
        device = config["versions"]["device"]
        link = f"[{name}]({r.places[name].table})"
        rows.append([link, f"`{config['command']}`", device, made, str(len(lines)), f"{seconds:.0f}"])
    return [
        "## How they were run",
        table(["sweep", "command", "device", "commit", "runs", "seconds, added up"], rows),
        prose("""
        Each `table.md` has the whole command, and a line of `runs.jsonl` its commit. Sweeps of one experiment lie in
        one folder: its `configs.json` has their options by name, and a line of `runs.jsonl` begins with the name.
        Folders were renamed since some runs, so a command's `--out` may have an old name. Runs that advanced together
        in another number than `--together` says give the same results up to rounding. What else to know:

        | runs | note |
        |---|---|
        | older than `4e72860`, on an H200 | Several processes shared the GPU, each with a mixer, and their lines were joined. Most had `XLA_FLAGS=--xla_gpu_autotune_level=0`, so products of matrices were not tuned: in one call the flag made a step of Mamba2's decay in repeated words five times as long. Do not compare these seconds. |
        | `4e72860` and later | Without that flag, one group on the GPU at a time. |
        | sweeps by start of `recall` | Made on H100s (four runs of `recall/start_wide/gated` on an H200), in parts that are whole, and joined. No run that was finished is left out. |
        | `recall/start/ten` | Seeds 0 to 4 are in `recall/start/delta` and `recall/start/gated`, too. |
        | text by start of DeltaNet; the number in repeated words | Two runs of the first are of an H200, and all but seven of the second; the others are of an H100. A table names the device of its first run. |
        | Zoology's MQAR; Kimi Linear's palindrome and stack | All on H200s but softmax attention at scales 2 and 4 and, at scale 4, the decay at 0.032 and DeltaNet at 0.001 and 0.0032, which are of an H100. |
        | palindromes and stacks | Files had changed since the commit that the lines name; these runs use none of them. |
        | commits with a "+" | Files had changed since, none that these runs use: `recall/by_state/longer` and `recall/by_state/again` are of `a843b1f`, `text/30m/first` of `4f51eb7`, four lines of `text/30m/seeds` of `76fac69` on the same text (six are from `text/30m/first`), nine of `text/100m` of `2bebc27` and three of `8a36315`, the words of S3 of `76fac69`, other words and the needle in text of `1530a33`, except Gated DeltaNet at the needle and `recall/by_state/first`, which are of `ae1304c`. |
        | `04ebf41` | Had `gdn sweep --first-seed` and `results/erase_and_write.py` already. |
        | `438d009` | `2026-11-28`, four H200s of one machine (driver `580.159.04`), a card for each of four groups: `recall/place/far`; `recall/room` next to `recall/eps`; `recall/apart_high`, two processes of eight seeds one after the other (its command makes them in one); `recall/place/shuffled_gated`, then `recall/place/one_linear`. |
        | `b436478` | The afternoon of that day, four H200s, the same driver. |
        | `f3012fe` | The evening of that day, two H200s, the same driver, next to tests: the last four seeds of `recall/apart`; `recall/start/linear_again` in two halves of eight seeds (its command makes them in one); seeds 1 and 2 of linear attention and of Mamba2's decay in `text/rows/own`, linear attention in `text/rows/passed`; `text/30m/erasure`; EDA in `recall/erasure`, and KDA with EDA's gate in `recall/erasure/once` (the other rules there are of `b436478`). |
        | `b353406` | `2026-11-29`, two H200s of one machine (driver `580.159.04`), five processes on one card and four on the other, next to the tests for a GPU and other programs: `recall/place/sizes_two_32` and `recall/place/sizes_two_128` (the two scales of one command), `recall/place/shuffled_delta`, new seeds in `recall/erasure`. Do not compare these seconds. |
        | `f88dce1` | The afternoon of that day, two H200s of one machine, the same driver, six processes on each card next to other programs: `recall/erasure/sixteen`, `recall/place/sizes_one_32` and `recall/place/sizes_one_128`, of which linear attention and Gated DeltaNet came an hour later, in processes of their own. Do not compare these seconds. |
        | `0258a86` | Later that afternoon, an H200, the same driver: Mamba2's decay in `recall/place/sizes_one_128`, while another sweep was compiled for the same card. Do not compare these seconds. |
        | interventions of finding 1 | `python -m results.kept_models`, on the weights of `recall/place/kept_delta` and `recall/place/kept_gated` (ten megabytes each, not in the repository), and `python -m results.first_mixer`, both on two cores of a CPU. Their files have the versions. |
        | no longer shown | Seven sweeps older than `058cf94`, which changed the weights that a seed draws: parity up to 512 bits and its first version for a CPU, needles in noise (two) and among pairs, keys that are written once, and 16 keys that come again. One of short words of S3 showed nothing. They are in the history until `3b9abca`; no claim of these pages rests on them. |
        """),
    ]


def page(r: Numbers) -> str:
    """The page."""
    sections = (rules, statistics, of_verdicts, without_runs, how_they_were_run)
    return joined(["# Protocol", *(block for section in sections for block in section(r))])
