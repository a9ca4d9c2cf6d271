"""The rules that are compared, by name."""

import contextlib
from collections.abc import Iterator

from jaxtyping import Array, Float

from gdn_jax.rules.delta import DELTA
from gdn_jax.rules.gated_delta import GATED_DELTA
from gdn_jax.rules.linear_attention import LINEAR_ATTENTION
from gdn_jax.rules.mamba2 import MAMBA2
from gdn_jax.rules.rule import Rule
from gdn_jax.rules.softmax_attention import SOFTMAX_ATTENTION
from gdn_jax.shapes import Keys, LogDecay, Offsets, Outputs, Queries, SegmentIds, Strength, Values

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (LINEAR_ATTENTION, MAMBA2, DELTA, GATED_DELTA, SOFTMAX_ATTENTION)
}
"""Rules by name; called through `apply`."""


@contextlib.contextmanager
def listed(rule: Rule) -> Iterator[None]:
    """Lists one more rule inside the block, so that a `GatedDeltaNet(rule=...)` can have it, for a comparison.

    What was traced with it keeps it; what is traced later no longer finds it.

    Args:
      rule: one whose name no other has.

    Raises:
      ValueError: another rule has its name.
    """
    if rule.name in RULES:
        raise ValueError(f"rule: expected a name that no other rule has, got {rule.name!r}")
    RULES[rule.name] = rule
    try:
        yield
    finally:
        del RULES[rule.name]


def wants_unit_length(rule: str) -> bool:
    """Whether the rule of that name, one of `RULES`, reads q and k of unit length."""
    return RULES[rule].unit_length


def apply(
    rule: str,
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Strength,
    *,
    normalized: bool = False,
    initial_state: Float[Array, "N HO K V"] | None = None,
    cu_seqlens: Offsets | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str | None = None,
    layer: int = 0,
) -> tuple[Outputs, Float[Array, "N HO K V"] | None]:
    """Applies the rule of that name, one of `RULES`; see the room's docstring.

    Args:
      rule: its name.
      q, k, v, g, beta: as for `gated_delta_rule`, q and k of any length.
      normalized: q and k have the length that the rule wants; False gives it to them.
      initial_state, cu_seqlens, segment_ids: as for `gated_delta_rule`.
      implementation: of the delta rules. The linear ones have one form, in plain JAX; softmax attention chooses its
        own. Both warn where "mosaic_gpu" is named.
      layer: of softmax attention, see there.

    Returns:
      o, and the final states (None for softmax_attention).

    Raises:
      NotImplementedError: the rule cannot run with these arguments, with the reason.
    """
    options = dict(initial_state=initial_state, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
    return RULES[rule](
        q,
        k,
        v,
        {"g": g, "beta": beta},
        normalized=normalized,
        implementation=implementation,
        layer=layer,
        **options,
    )
