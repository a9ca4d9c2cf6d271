"""A token of one row by the kernels of such tokens, next to the recurrence in float32.

The model has the widths of a published one, a few of its layers and a small vocabulary, with random weights in
bfloat16. After a few tokens by the model itself the copy for single tokens writes one more. What its roundings may
cost is what they cost the same model in plain JAX.
"""

import dataclasses
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax.bench.sizes import model_config
from gdn_jax.checks.accuracy import rms_ratio
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.models.inference.program import for_decoding, for_inference

LAYERS, VOCABULARY, CONTEXT = 4, 512, 16
"""Layers of the model, its vocabulary, and tokens before the one that is compared."""

ALLOWED = 1.5
"""Times the error of plain JAX that the kernels' may be: they round what plain JAX rounds, or less, in another order.
The rms of 512 logits scatters by 3 % where they miss independently, and by more where a layer's miss moves all."""


class Token(NamedTuple):
    """Errors of a token's logits and their bounds, and the names of the kernels in its program."""

    errors: dict[str, float]
    bounds: dict[str, float]
    kernels: list[str]


def kernel_names(text: str) -> list[str]:
    """Names of the kernels in a lowered program."""
    return sorted({*re.findall(r"\\00(\w+)_mosaic_gpu\\00", text)} - {"stable"})


def compare(name: str, seed: int) -> Token:
    """A token of a model by name, as `gdn bench generate` names it."""
    config = _few_layers(model_config(name, dtype="bfloat16", weight_dtype="bfloat16"))
    wide = dict(dtype="float32", weight_dtype="float32", implementation="recurrent")
    params = nnx.state(nnx.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(seed)))())
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (1, CONTEXT + 1)).astype(np.int32)

    def model(params: Any, **fields: Any) -> LanguageModel:
        like = dataclasses.replace(config, **fields)
        return nnx.merge(
            nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(like, rngs=nnx.Rngs(seed)))), params
        )

    def token(params: Any, tokens: jax.Array, **fields: Any) -> jax.Array:
        own = for_inference(model(params, **fields))
        _, cache = own(tokens[:, :-1], cache=own.init_cache(1, CONTEXT + 1))
        return for_decoding(own, 1)(tokens[:, -1:], cache=cache)[0][0, 0]

    def definition(params: Any, tokens: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            widened = jax.tree.map(lambda x: x.astype(jnp.float32), params)
            return model(widened, **wide)(tokens)[0][0, -1]

    lowered = jax.jit(token).lower(params, tokens)
    plain = jax.jit(partial(token, implementation="chunked"))
    want = np.asarray(jax.jit(definition)(params, tokens))
    error, of_plain = (rms_ratio(want, np.asarray(run(params, tokens))) for run in (lowered.compile(), plain))
    return Token({"logits": error}, {"logits": ALLOWED * of_plain}, kernel_names(lowered.as_text()))


def _few_layers(config: ModelConfig) -> ModelConfig:
    layers = min(LAYERS, config.num_layers)
    types = None if config.layer_types is None else config.layer_types[:layers]
    return dataclasses.replace(config, num_layers=layers, layer_types=types, vocab_size=VOCABULARY)
