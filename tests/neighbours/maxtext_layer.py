"""MaxText's Qwen3-Next layer with our rule in the place of its own: training, padding, prefill and one token."""

from pathlib import Path

import jax
import jax.numpy as jnp
from compare import GRADIENT, OUTPUT, compare, put
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.models import qwen3
from maxtext.utils import maxtext_utils

from gdn_jax.adapters import maxtext

NAMES = ("jax_chunk_gated_delta_rule", "jax_ar_gated_delta_rule")
T, WIDTH = 70, 32

config = pyconfig.initialize(
    ["", str(Path(pyconfig.__file__).parent / "base.yml")],
    run_name="neighbours",
    base_output_directory=".",
    decoder_block="qwen3_next",
    base_emb_dim=WIDTH,
    gdn_num_key_heads=2,
    gdn_num_value_heads=4,
    gdn_key_head_dim=16,
    gdn_value_head_dim=8,
    dtype="float32",
    weight_dtype="float32",
    matmul_precision="highest",
    use_qk_norm_in_gdn=True,
    max_prefill_predict_length=T,
    max_target_length=T + 10,
    per_device_batch_size=1,
    skip_jax_distributed_system=True,
    enable_checkpointing=False,
    log_config=False,
)
mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, jax.devices()[:1]), config.mesh_axes)
keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(keys[0], (2, T, WIDTH))
dy = jax.random.normal(keys[1], x.shape)
padding = (jnp.arange(T) < jnp.array([[T], [41]])).astype(jnp.int32)


def training(segments):
    """Outputs, and gradients of every parameter and of the input."""
    layer = qwen3.Qwen3NextGatedDeltaNet(config, mesh=mesh, rngs=nnx.Rngs(0))
    definition, parameters = nnx.split(layer)

    def outputs(parameters, x):
        return nnx.merge(definition, parameters)(x, decoder_segment_ids=segments)[0]

    y, vjp = jax.vjp(jax.jit(outputs), parameters, x)
    return y, vjp(dy)


def generation():
    """Outputs of a prompt and of the two tokens behind it, by the layer's own cache."""
    options = dict(inputs_shape=x.shape, mesh=mesh, rngs=nnx.Rngs(0))
    layer = qwen3.Qwen3NextGatedDeltaNet(config, model_mode="prefill", **options)
    found = [layer(x, model_mode="prefill")[0]]
    for token in (x[:, :1], x[:, 1:2]):
        found.append(layer(token, model_mode="autoregressive")[0])
    return found


def results():
    return training(None), training(padding), generation()


theirs = results()
called = put(qwen3, maxtext, NAMES)
ours = results()
assert called == {*NAMES}, f"the layer called only {called} of what was put there"
for what, (y, gradients), (our_y, our_gradients) in (
    ("training", theirs[0], ours[0]),
    ("training with padding", theirs[1], ours[1]),
):
    compare(f"{what}, output", y, our_y, OUTPUT)
    compare(f"{what}, gradients", gradients, our_gradients, GRADIENT)
compare("prefill and two tokens, outputs", theirs[2], ours[2], OUTPUT)
