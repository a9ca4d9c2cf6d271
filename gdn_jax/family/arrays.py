"""Array arguments of the family's calls, and the names of their dimensions. A leaf."""

from typing import Any, NamedTuple

from gdn_jax.partitioning import RuleAxes
from gdn_jax.shapes import RuleArrays


class Arrays(NamedTuple):
    """Array arguments of one call, see `delta_rule`. g, erase and write have one number a head or one a channel."""

    q: Any
    k: Any
    v: Any
    g: Any
    erase: Any
    write: Any
    initial_state: Any
    cu_seqlens: Any
    segment_ids: Any


def rule_axes(x: Arrays) -> RuleAxes:
    """Names of the dimensions that the arrays share with those of `gated_delta_rule`."""
    return RuleAxes.of(RuleArrays(x.q, x.k, x.v, None, None, x.initial_state, x.cu_seqlens, x.segment_ids))


def array_names(x: Arrays, axes: RuleAxes) -> Arrays:
    """Names of the dimensions of every array."""

    def channels(y: Any) -> str | None:
        return None if y is None else "b t h" if y.ndim == 3 else "b t h ."

    q, k, v, _, _, *rest = axes.inputs
    return Arrays._make((q, k, v, channels(x.g), channels(x.erase), channels(x.write), *rest))
