"""Gradients of Kimi Linear, Ling and Lara, of all weights and of low-rank changes, against float64 NumPy."""

import dataclasses
from pathlib import Path

import hf_checkpoints
import hf_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import tiers

from gdn_jax.hf import load_hf
from gdn_jax.hf.load import name_of
from gdn_jax.losses import linear_softmax_cross_entropy
from gdn_jax.models.lora import add_lora

DATA = Path(__file__).parents[1] / "data"
STEP = 1e-6
PROJECTIONS = {
    "kimi_linear_released": ("f_b_proj", "kv_b_proj", "o_proj"),
    "bailing_hybrid_released": ("f_proj", "q_b_proj", "kv_b_proj", "g_proj"),
    "lara_mini": ("q_proj", "a_proj", "up_proj"),
}
"""Projections with a low-rank change: of both kinds of layers, of latents, of the shared expert."""

LAYERS = {"kimi_linear_released": (0, 2), "bailing_hybrid_released": (0, 2), "lara_mini": (0, 1, 3)}
"""Layers of the cut model, in which there is one of each mixer, dense or with experts."""


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(PROJECTIONS, (), ("lara_mini", "bailing_hybrid_released")))
def test_gradients_are_those_of_float64(name):
    """Along a direction drawn for each parameter; the row is longer than Lara's window of 20 tokens.

    The loss moves with the B of a low-rank change A B of W by A^T times the gradient of W.
    """
    model = load_hf(DATA / name, implementation="recurrent")
    layers = LAYERS[name]
    config = dataclasses.replace(
        model.config,
        num_layers=len(layers),
        layer_types=tuple(model.config.types[layer] for layer in layers),
        dense_layers=tuple(i for i, layer in enumerate(layers) if not model.config.has_experts(layer)),
    )
    model.blocks = nnx.List([model.blocks[layer] for layer in layers])
    add_lora(model, 2, projections=PROJECTIONS[name], rngs=nnx.Rngs(0))
    row = hf_checkpoints.expected_of(DATA / name)["input_ids"][0, :24]
    graphdef, state = nnx.split(model)

    @jax.jit
    @jax.value_and_grad
    def gradient(state, ids):
        model = nnx.merge(graphdef, state)
        x, _ = model.hidden_states(ids[:, :-1])
        return linear_softmax_cross_entropy(x, model.head_weight(), ids[:, 1:]).loss / (ids.size - 1)

    value, gradients = gradient(state, jnp.asarray(row)[None])
    params, gradients = (
        {
            name_of(path).replace(".base.", "."): np.asarray(x, np.float64)
            for path, x in jax.tree.leaves_with_path(nnx.to_pure_dict(tree))
        }
        for tree in (state, gradients)
    )
    np.testing.assert_allclose(value, hf_oracle.loss(config, params, row), rtol=1e-6)
    rng = np.random.default_rng(0)
    for name, g in gradients.items():
        assert np.isfinite(g).all(), name
        place = name.rpartition(".")[0]
        if name.endswith(".a"):
            assert not g.any()
        elif name.endswith(".b"):
            want = params[f"{place}.a"].T @ gradients[f"{place}.kernel"]
            np.testing.assert_allclose(g, want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=name)
        if name.endswith((".a", ".b")):
            continue
        if name.endswith("router_bias"):  # it takes part in the choice alone
            assert not g.any()
            continue
        assert g.any(), name
        way = rng.normal(size=g.shape)
        moved = (
            hf_oracle.loss(config, params | {name: params[name] + sign * STEP * way}, row) for sign in (1, -1)
        )
        change = (next(moved) - next(moved)) / (2 * STEP)
        assert abs((g * way).sum() - change) < 1e-3 * np.linalg.norm(g), name
