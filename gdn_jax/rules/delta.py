"""The delta rule, S <- S + beta k (v - k^T S)^T: correction."""

from functools import partial

from gdn_jax.parallel.token_shards import GATED_DELTA_RULE
from gdn_jax.rule.ops import gated_delta_step
from gdn_jax.rules.rule import Rule
from gdn_jax.styles import GREEN, Style

DELTA = Rule(
    "delta",
    GATED_DELTA_RULE,
    gates=("beta",),
    options=("initial_state", "cu_seqlens", "segment_ids", "implementation"),
    step=partial(gated_delta_step, g=None),
    erases=True,
    style=Style(GREEN, "^", "full", "-.", "DeltaNet", ("delta rule",)),
    compared_as="delta_net",
)
