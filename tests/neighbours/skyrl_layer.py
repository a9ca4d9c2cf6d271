"""SkyRL's Gated DeltaNet layer with our rule in the place of its own: training, a prompt and two tokens."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
from compare import GRADIENT, OUTPUT, compare, put
from flax import nnx

from gdn_jax.adapters import skyrl

# It saves adapters with peft, which imports PyTorch. Nothing is saved here.
sys.modules["peft"] = ModuleType("peft")
qwen3_5 = import_module("skyrl.tx.models.qwen3_5")

NAMES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")
T, WIDTH = 70, 32

config = SimpleNamespace(
    hidden_size=WIDTH,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    max_lora_adapters=0,
    max_lora_rank=0,
)
keys = jax.random.split(jax.random.key(0), 2)
x, dy = (jax.random.normal(key, (2, T, WIDTH)) for key in keys)
mask = (jnp.arange(T) < jnp.array([[T], [41]])).astype(jnp.int32)


def results():
    """Outputs and states of a batch with padding, gradients of all parameters and the input, and two tokens more."""
    layer = qwen3_5.Qwen3_5GatedDeltaNet(config, 0, dtype=jnp.float32, rngs=nnx.Rngs(0))
    definition, parameters = nnx.split(layer)

    def outputs(parameters, x):
        return nnx.merge(definition, parameters)(x, attention_mask=mask)

    (y, window, state), vjp = jax.vjp(jax.jit(outputs), parameters, x)
    found = [y, state]
    gradients = vjp((dy, jnp.zeros_like(window), jnp.ones_like(state)))
    for token in (x[:, :1], x[:, 1:2]):
        y, window, state = layer(token, attention_mask=None, conv_state=window, recurrent_state=state)
        found += [y, state]
    return found, gradients


mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
    theirs = results()
    called = put(qwen3_5, skyrl, NAMES)
    ours = results()
assert called == {*NAMES}, f"the layer called only {called} of what was put there"
compare("a batch and two tokens, outputs and states", theirs[0], ours[0], OUTPUT)
compare("gradients", theirs[1], ours[1], GRADIENT)
