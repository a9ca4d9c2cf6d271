"""The file claims.json: claims and their comparisons, with what came of them.

A claim has an `id`, the `claim`, its `source` (None for a question of this project: paper, where in it, their
number, their setting), `card` or None, `setting` ("same" where the claim names a setting that ours is, else
"another") and `comparisons`. A comparison has a `name`, `of` and `than` (see `Arm`; lists where several sweeps are
taken together), `at`, perhaps `every_seed`, and the `result` that `refresh` computes. `verdict` is computed, too.
"""

import copy
from typing import Any

from gdn_jax.findings.records import Arm, Results
from gdn_jax.findings.verdicts import Outcome, as_list, compare, own_verdict, threshold, verdict


def outcomes(results: Results, content: dict[str, Any]) -> dict[str, Outcome | None]:
    """Computes every comparison by the name "claim.comparison"."""
    found = {}
    for claim in content["claims"]:
        for comparison in claim["comparisons"]:
            found[f"{claim['id']}.{comparison['name']}"] = compare(results, comparison)
    return found


def in_percent(results: Results, content: dict[str, Any]) -> dict[str, bool]:
    """Whether scores of each comparison with runs are in %."""
    found = {}
    for claim in content["claims"]:
        for comparison in claim["comparisons"]:
            sweep = Arm.of(as_list(comparison["of"])[0]).sweep
            if results.matching(sweep):
                percent = results.about(sweep).metric == "accuracy"
                found[f"{claim['id']}.{comparison['name']}"] = percent
    return found


def refresh(results: Results, content: dict[str, Any]) -> dict[str, Any]:
    """Returns the file's content with every result and verdict computed again from the runs."""
    content = copy.deepcopy(content)
    found = outcomes(results, content)
    largest = threshold([x.p for x in found.values() if x is not None and x.p is not None])
    for claim in content["claims"]:
        made = []
        for comparison in claim["comparisons"]:
            outcome = found[f"{claim['id']}.{comparison['name']}"]
            comparison["result"] = None if outcome is None else outcome.stored()
            made += [] if outcome is None else [outcome]
        if claim["source"] is None:
            claim["verdict"] = own_verdict(made, largest)
        else:
            claim["verdict"] = verdict(made, claim["setting"] == "same", largest)
    return content
