"""What generation makes of a model's weights once, so that no token pays for it again."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from gdn_jax.blocks import RMSNorm
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.models.experts import Experts
from gdn_jax.models.lora import merge_lora


def for_inference(model: LanguageModel) -> LanguageModel:
    """A copy whose products find their weights in the compute dtype, as they would round them at every call.

    Norms find theirs in float32, in which they read them: a compiler would widen 16-bit ones for every token. Its
    logits are those of the model, bit for bit. Low-rank changes are merged. Where a tied output projection would be
    rounded, the copy has one of its own; the embedding stays as it is, since the residual stream begins with it. What
    needs no conversion is shared with the model. The copy is neither for training nor for saving.

    Args:
      model: the model; may be traced.
    """
    model = nnx.clone(model)
    merge_lora(model)
    dtype = jnp.dtype(model.config.dtype)
    for _, part in nnx.iter_modules(model):
        if isinstance(part, nnx.Linear):
            _convert(part.kernel, dtype)
        elif isinstance(part, Experts):
            for weight in (part.router, part.gate_up, part.down, part.shared_gate):
                _convert(weight, dtype)
        elif isinstance(part, RMSNorm):
            _convert(part.weight, jnp.float32)
    if model.head_weight().dtype != dtype:
        model.head = nnx.data(nnx.Param(model.head_weight().astype(dtype)))
    return model


def _convert(weight: nnx.Variable, dtype: DTypeLike) -> None:
    weight.set_value(weight[...].astype(dtype))
