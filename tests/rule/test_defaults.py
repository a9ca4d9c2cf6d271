"""Defaults, in one table: what is taken where a caller or a config.json says nothing, and whose value it is."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

import gdn_jax
from gdn_jax import gates, serving
from gdn_jax.hf import olmo_hybrid, qwen3_5, qwen3_next
from gdn_jax.layers import GatedDeltaNet, RecurrentMixer
from gdn_jax.layers.blocks import RMSNorm
from gdn_jax.models import generate
from gdn_jax.models.config import AttentionConfig, ExpertsConfig, ModelConfig
from gdn_jax.parts import norms
from gdn_jax.training.options import OptimizerOptions, RunOptions

PAPER = "Yang, Kautz, Hatamizadeh 2024 (arXiv 2412.06464), and fla's layer and operation of it"
CHUNKS = {"chunk_size": 64, "state_layout": "kv"}
OURS = "chosen here; the recorded runs have it"

DEFAULTS = [
    # The operations.
    (gdn_jax.gated_delta_rule, {"scale": None, "use_qk_l2norm": False} | CHUNKS, PAPER),
    (gdn_jax.delta_rule, {"scale": None, "use_qk_l2norm": False} | CHUNKS, PAPER),
    (gdn_jax.chunk_states, {"use_k_l2norm": False} | CHUNKS, PAPER),
    (gdn_jax.l2norm, {"eps": 1e-6}, "fla's l2norm, and the layers of transformers"),
    (gdn_jax.write_strength, {"allow_neg_eigval": False}, PAPER),
    (gdn_jax.causal_conv1d, {"activation": "silu", "bias": None}, PAPER),
    (gdn_jax.channel_log_decay, {"lower_bound": None}, "Kimi Team, Kimi Linear (arXiv 2510.26692)"),
    (serving.decode, {"use_qk_l2norm": True, "allow_neg_eigval": False, "scale": None}, "FlashInfer's decode"),
    (serving.verify, {"use_qk_l2norm": True, "allow_neg_eigval": False, "scale": None}, "FlashInfer's decode"),
    (serving.prefill, {"use_qk_l2norm": False, "chunk_size": 64, "batch_invariant": False}, "the rule's"),
    (serving.make_ring_pool, {"length": 16, "trees": False, "dtype": jax.numpy.bfloat16}, OURS),
    (norms.add_norm, {"eps": 1e-5}, PAPER),
    (norms.gated_norm, {"eps": 1e-5}, PAPER),
    # Layers and models.
    (
        GatedDeltaNet,
        {"expand_v": 2.0, "use_gate": True, "allow_neg_eigval": False, "rule": "gated_delta"},
        PAPER,
    ),
    (
        RecurrentMixer,
        {"conv_size": 4, "conv_bias": False, "use_short_conv": True, "norm_eps": 1e-5, "write_start": None},
        PAPER,
    ),
    (RMSNorm, {"eps": 1e-5, "zero_centred": False}, PAPER),
    (
        ModelConfig,
        {"mlp_ratio": 8 / 3, "norm_eps": 1e-5, "tie_embeddings": False, "conv_size": 4, "expand_v": 2.0},
        "the width of a SwiGLU with the parameters of an MLP of 4 (Shazeer 2020); the rest as the layer",
    ),
    (AttentionConfig, {"rope_theta": 1e4, "rotary_dim": 0, "bias": False}, "Su et al. 2021 (arXiv 2104.09864)"),
    (ExpertsConfig, {"normalise": True}, "Qwen3-Next"),
    (generate, {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "stop_tokens": ()}, OURS),
    # Training.
    (OptimizerOptions, {"lr": 3e-3, "weight_decay": 0.1, "clip": 1.0, "warmup": 0.05, "end_lr": 0.02}, OURS),
    (RunOptions, {"seed": 0, "accumulate": 1, "keep": 2, "deterministic": True}, OURS),
]  # fmt: skip


@pytest.mark.parametrize("where, values, whose", DEFAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_defaults(where, values, whose):
    if dataclasses.is_dataclass(where):
        found = {field.name: field.default for field in dataclasses.fields(where)}
    else:
        found = {
            name: p.default
            for name, p in inspect.signature(getattr(where, "__init__", where)).parameters.items()
        }
        if not isinstance(where, type):
            found = {name: p.default for name, p in inspect.signature(where).parameters.items()}
    assert {name: found[name] for name in values} == values, whose


ROTARY = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
QWEN = ROTARY | {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
}
TRANSFORMERS = {
    qwen3_next: QWEN | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    qwen3_5: QWEN | {"head_dim": 256},
    olmo_hybrid: QWEN | {"partial_rotary_factor": 1.0, "linear_allow_neg_eigval": True},
}
"""Defaults of the classes `Qwen3NextConfig`, `Qwen3_5TextConfig` and `OlmoHybridConfig` of transformers 5.24."""


@pytest.mark.parametrize("family", TRANSFORMERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_fields_that_a_config_leaves_out_are_those_of_transformers(family):
    assert family.DEFAULTS == TRANSFORMERS[family]


def test_the_decay_starts_as_in_the_paper():
    """A ~ U(0, 16), and time steps of which the logarithm is uniform between those of 0.001 and 0.1."""
    assert (gates.MIN_RATE, gates.MAX_RATE) == (1e-4, 16)
    assert (gates.MIN_STEP, gates.MAX_STEP, gates.STEP_FLOOR) == (1e-3, 1e-1, 1e-4)
    rates = np.exp(gates.init_A_log(jax.random.key(0), 4096))
    steps = np.log(jax.nn.softplus(gates.init_dt_bias(jax.random.key(1), 4096)))
    for drawn, low, high in ((rates, 0, 16), (steps, np.log(1e-3), np.log(1e-1))):
        width = high - low
        assert low <= drawn.min() < low + 0.01 * width and high - 0.01 * width < drawn.max() <= high + 1e-3
        np.testing.assert_allclose(drawn.mean(), (low + high) / 2, atol=0.03 * width)
        np.testing.assert_allclose(drawn.std(), width / 12**0.5, rtol=0.03)
