"""A served model for one request at a time, whose only slot is the cache of a row, and for a few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from small_models import made

from gdn_jax import serving
from gdn_jax.models import AttentionConfig, ModelConfig, generate
from gdn_jax.models.inference import program
from gdn_jax.models.served import ServedModel

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=1,
    num_v_heads=2,
    head_dim=16,
    expand_v=1.0,
    layer_types=("gated_delta_net", "attention"),
    attention=AttentionConfig(2, 1, 16, rotary_dim=8),
)


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_request_gets_what_generate_gives(slots):
    """With an attention layer, from slots that held NaN. A model for one request takes pools of more slots, too."""
    model, rng = made(CONFIG), np.random.default_rng(0)
    prompts = [rng.integers(0, 61, length).astype(np.int32) for length in (5, 150, 5)]
    want = [np.asarray(generate(model, put(prompt[None]), 6))[0] for prompt in prompts]
    served = ServedModel(model, max_batch=1)
    pools = served.make_pools(slots, capacity=160)
    pools = jax.tree.map(lambda x: jnp.full_like(x, 3 if x.dtype == jnp.int32 else jnp.nan), pools)
    server = serving.Server(
        *(served.prefill, served.decode, served.params, pools), max_batch=1, prefill_tokens=128, most_tokens=4
    )
    numbers = [server.submit(prompt, 6) for prompt in prompts]
    got = server.run()
    for tokens, number in zip(want, numbers, strict=True):
        np.testing.assert_array_equal(tokens, got[number])


def test_prompts_and_tokens_share_weights(monkeypatch):
    """Those of the copy for tokens of a few rows, whose products are in parts: the text is that of `generate`."""
    model, rng = made(CONFIG), np.random.default_rng(1)
    prompts = [rng.integers(0, 61, length).astype(np.int32) for length in (5, 70, 9)]
    want = [np.asarray(generate(model, put(prompt[None]), 5))[0] for prompt in prompts]
    monkeypatch.setattr(program, "usable", lambda *_: True)
    served = ServedModel(model, max_batch=3)
    shapes = {x.shape for x in served.params}
    # Both branches of an MLP, and not what they were.
    assert (2 * 128, 32) in shapes and (32, 88) not in shapes
    server = serving.Server(
        *(served.prefill, served.decode, served.params, served.make_pools(3, capacity=80)), max_batch=3
    )
    numbers = [server.submit(prompt, 5) for prompt in prompts]
    got = server.run()
    for tokens, number in zip(want, numbers, strict=True):
        np.testing.assert_array_equal(tokens, got[number])


def test_what_cannot_be():
    with pytest.raises(ValueError, match="max_batch: expected at least 1, got 0"):
        ServedModel(made(CONFIG), max_batch=0)
