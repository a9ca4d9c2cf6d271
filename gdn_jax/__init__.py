"""Gated DeltaNet in JAX: the gated delta rule, its gates, its short convolution and its layer."""

from gdn_jax.gates import (
    alpha_from_log_decay,
    channel_log_decay,
    l2norm,
    log_decay,
    log_decay_from_alpha,
    write_strength,
)
from gdn_jax.parts.conv import causal_conv1d, causal_conv1d_update
from gdn_jax.rule.arguments import debug_checks
from gdn_jax.rule.chunks.decay import chunk_cumsum
from gdn_jax.rule.chunks.stages import chunk_output, kkt, solve_tril, wy
from gdn_jax.rule.erase_then_delta import erase_then_delta_rule, erase_then_delta_step
from gdn_jax.rule.ops import (
    chunk_states,
    delta_chunk_states,
    delta_rule,
    delta_step,
    gated_delta_rule,
    gated_delta_step,
    supported_implementations,
)
from gdn_jax.rule.product import gated_delta_product

__version__ = "0.1.0"

__all__ = [
    "alpha_from_log_decay",
    "causal_conv1d",
    "causal_conv1d_update",
    "channel_log_decay",
    "chunk_cumsum",
    "chunk_output",
    "chunk_states",
    "debug_checks",
    "delta_chunk_states",
    "delta_rule",
    "delta_step",
    "erase_then_delta_rule",
    "erase_then_delta_step",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_delta_step",
    "kkt",
    "l2norm",
    "log_decay",
    "log_decay_from_alpha",
    "solve_tril",
    "supported_implementations",
    "write_strength",
    "wy",
]
