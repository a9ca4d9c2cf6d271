"""The rules that are compared, by name."""

from typing import Any

from jaxtyping import Array, Float

from gdn_jax.rules.delta import DELTA
from gdn_jax.rules.gated_delta import GATED_DELTA
from gdn_jax.rules.linear_attention import LINEAR_ATTENTION
from gdn_jax.rules.mamba2 import MAMBA2
from gdn_jax.rules.rule import Rule
from gdn_jax.rules.softmax_attention import SOFTMAX_ATTENTION
from gdn_jax.shapes import ArgumentError, Keys, LogDecay, Outputs, Queries, Strength, Values, check_choice

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (LINEAR_ATTENTION, MAMBA2, DELTA, GATED_DELTA, SOFTMAX_ATTENTION)
}
"""Rules by name. A rule is called, or applied by its name with `apply`."""


def find(rule: str | Rule) -> Rule:
    """The rule that a layer or a call was given: an object as it is, a name as the entry of `RULES`.

    Raises:
      ValueError: it is neither, or no entry has that name.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        raise ArgumentError("rule", "a rules.Rule or the name of one in rules.RULES", repr(rule))
    check_choice("rule", rule, tuple(RULES))
    return RULES[rule]


def wants_unit_length(rule: str | Rule) -> bool:
    """Whether a rule, or that of a name, reads q and k of unit length.

    Raises:
      ValueError: no rule has that name.
    """
    return find(rule).unit_length


def apply(
    rule: str | Rule, q: Queries, k: Keys, v: Values, g: LogDecay, beta: Strength, **options: Any
) -> tuple[Outputs, Float[Array, "N HO K V"] | None]:
    """Applies a rule; see the room's docstring.

    Args:
      rule: a name of `RULES`, or a rule that is not there.
      q, k, v, g, beta, options: as for a call of a `Rule`.

    Returns:
      o, and the final states (None for softmax_attention).

    Raises:
      ValueError: no rule has that name.
      NotImplementedError: the rule cannot run with these arguments, with the reason.
    """
    return find(rule)(q, k, v, g, beta, **options)
