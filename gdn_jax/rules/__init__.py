"""The rules that are compared: a token mixer hands each one q, k, v, g and beta, under one interface.

    linear_attention    S <- S + beta k v^T                                          neither decay nor correction
    mamba2              S <- exp(g) S + beta k v^T                                   decay
    delta               S <- S + beta k (v - k^T S)^T                                correction
    gated_delta         S <- exp(g) S;  S <- S + beta k (v - k^T S)^T                both
    softmax_attention   o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(K)) v_j          no state: every token is kept

The first four read o = q^T S / sqrt(K), with q and k of unit length. A rule that has no use for g or beta leaves
it unread, so a layer has the same parameters, and the same initial weights, under every rule.

Source: Yang et al. 2024 (arXiv 2412.06464), table 1; Mamba2 there and here with a write strength of its own instead
of its time step.
"""

from gdn_jax.rules.linear import gated_linear_attention
from gdn_jax.rules.rule import Rule, RuleInputs
from gdn_jax.rules.softmax_attention import softmax_attention
from gdn_jax.rules.table import RULES, apply, find, wants_unit_length

__all__ = [
    "RULES",
    "Rule",
    "RuleInputs",
    "apply",
    "find",
    "gated_linear_attention",
    "softmax_attention",
    "wants_unit_length",
]
