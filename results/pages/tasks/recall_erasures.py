"""tasks/recall.md: erasures at a key of their own."""

import statistics

from gdn_jax.training.mixers import MIXERS
from results.pages.markdown import prose, sweep_table, table
from results.pages.numbers import Numbers
from results.pages.stored import Arm


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
        prose("""
        Eight more seeds, also at the next higher rate, and sixteen more after these:
        """),
        sweep_table(r, "recall/erasure/once_more"),
        sweep_table(r, "recall/erasure/sixteen"),
        prose(f"""
        At 32 pairs and a rate of 0.003, KDA compared with EDA is {r.told("erasure_recall.kda")} in the eight seeds and
        {r.told("erasure_recall.kda_last")} in the sixteen; KDA with EDA's gate is {r.told("erasure_recall.gate")} and
        {r.told("erasure_recall.gate_last")}. In `scope` names get values in scopes, of which up to four are open inside the
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
