"""Option combinations: few of them, in which every two values of two options meet."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairs_of(row: Mapping[str, Any]) -> set:
    """All pairs of values that meet in a combination."""
    return set(itertools.combinations(sorted((name, repr(value)) for name, value in row.items()), 2))


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations in which every pair of values of two options occurs: always the one that has most new pairs."""
    every = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    left = set().union(*map(pairs_of, every))
    chosen = []
    while left:
        best = max(every, key=lambda row: len(pairs_of(row) & left))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen
