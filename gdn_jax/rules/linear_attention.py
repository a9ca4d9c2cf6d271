"""Linear attention, S <- S + beta k v^T: neither decay nor correction."""

from gdn_jax.rules import linear
from gdn_jax.rules.rule import Rule
from gdn_jax.styles import GREY, Style

LINEAR_ATTENTION = Rule(
    "linear_attention",
    linear.rows,
    gates=("beta",),
    options=("initial_state", "segment_ids"),
    refuses=linear.REFUSES,
    erases=False,
    style=Style(GREY, "v", "none", ":", "linear attention with unit keys", ("linear attention",)),
)
