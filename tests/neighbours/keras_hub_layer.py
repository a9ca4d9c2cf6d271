"""keras-hub's Gated DeltaNet layer with our rule in the place of its own: training, a prompt, tokens and padding."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import numpy as np
from compare import GRADIENT, OUTPUT, compare, put
from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net as module

from gdn_jax.adapters import keras_hub

T, WIDTH = 70, 32
SIZES = dict(
    hidden_size=WIDTH,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
)


class Ours:
    """Our functions under the module's names."""

    _chunk_gated_delta_rule = staticmethod(keras_hub.chunk_gated_delta_rule)
    _recurrent_gated_delta_rule = staticmethod(keras_hub.recurrent_gated_delta_rule)


NAMES = ("_chunk_gated_delta_rule", "_recurrent_gated_delta_rule")
keys = jax.random.split(jax.random.key(0), 2)
x, dy = (jax.random.normal(key, (2, T, WIDTH)) for key in keys)
layer = module.Qwen3_5GatedDeltaNet(**SIZES)
layer.build(x.shape)
weights = [jnp.asarray(w) for w in layer.trainable_variables]
cache = (jnp.zeros((2, 2 * 2 * 16 + 4 * 8, 3)), jnp.zeros((2, 4, 16, 8)))


def prefill(x, mask=None):
    """A prompt into a cache: its outputs, and the window and state after it."""
    return layer(x, attention_mask=mask, cache=cache)


def results():
    """Outputs and gradients of a batch, then a prompt and two tokens by the cache."""

    def forward(weights, x):  # a new function, so that no earlier trace is found
        return layer.stateless_call(weights, layer.non_trainable_variables, x)[0]

    y, vjp = jax.vjp(jax.jit(forward), weights, x)
    after = prefill(x)
    found = [y, after]
    for token in (x[:, :1], x[:, 1:2]):
        after = layer(token, cache=after[1])
        found.append(after)
    return found, vjp(dy)


with jax.default_matmul_precision("highest"):
    theirs = results()
    called = put(module, Ours, NAMES)
    ours = results()
    short = prefill(x[:, :41])
    mask = np.broadcast_to(np.arange(T) < 41, (2, T)).astype(np.int32)
    padded = prefill(x, mask)
assert called == {*NAMES}, f"the layer called only {called} of what was put there"
compare("a batch, a prompt and two tokens: outputs and states", theirs[0], ours[0], OUTPUT)
compare("gradients", theirs[1], ours[1], GRADIENT)
compare(
    "the state after a padded prompt, next to the prompt without padding", short[1][1], padded[1][1], OUTPUT
)
