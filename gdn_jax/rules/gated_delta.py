"""The gated delta rule, S <- exp(g) S; S <- S + beta k (v - k^T S)^T: decay and correction."""

from gdn_jax.parallel.token_shards import GATED_DELTA_RULE
from gdn_jax.rule.ops import gated_delta_step
from gdn_jax.rules.rule import Rule
from gdn_jax.styles import BLUE, VERMILION, Style

GATED_DELTA = Rule(
    "gated_delta",
    GATED_DELTA_RULE,
    gates=("g", "beta"),
    options=("initial_state", "cu_seqlens", "segment_ids", "implementation"),
    step=gated_delta_step,
    erases=True,
    style=Style(BLUE, "o", "full", "-", "Gated DeltaNet", ("gated delta rule",)),
    doubled=Style(VERMILION, "D", "none", "-", "Gated DeltaNet, beta to 2", ("gated delta rule, beta to 2",)),
    compared_as="gated_delta_net",
)
