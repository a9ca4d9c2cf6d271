"""Mamba2's rule, S <- exp(g) S + beta k v^T: decay. A write strength replaces the time step of the paper."""

from gdn_jax.rules import linear
from gdn_jax.rules.rule import Rule
from gdn_jax.styles import ORANGE, Style

MAMBA2 = Rule(
    "mamba2",
    linear.rows,
    gates=("g", "beta"),
    options=("initial_state", "segment_ids"),
    refuses=linear.REFUSES,
    erases=False,
    style=Style(ORANGE, "s", "full", "--", "Mamba2's decay with unit keys", ("gate alone", "mamba2")),
)
