"""A head for the token after the next (multi-token prediction), as Qwen's hybrid models have it.

With h_t the output of a model's last norm at token x_t, E its embedding and W its output projection,

    u_t = F [norm(E[x_(t+1)]); norm(h_t)]
    m_t = norm(block(u)_t)            block: attention and a feed-forward part as the model's, causal over t
    logits of x_(t+2) = W m_t

A further token is drafted from m_t in the place of h_(t+1). Source: `MtpModel` of transformers, `qwen3_5_mtp.py` of
vLLM.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.models.block import arithmetic, make_block, stream_norm
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.shapes import check_array


class MTPHead(nnx.Module):
    """m_t from embeddings of the next tokens and the model's hidden states.

    Args:
      config: of the model, which has an attention layer; that layer says what the head's block is.
      rngs: source of the initial weights.

    Parameters: fc [2 D, D]; embedding_norm, hidden_norm, norm [D]; block.

    Raises:
      ValueError: the model has no attention layer.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if "attention" not in config.types:
            raise ValueError("config: expected a model with a layer of type 'attention', got none")
        config = dataclasses.replace(config, dense_layers=())  # with experts where the model has any
        self.fc = nnx.Linear(
            2 * config.hidden_size, config.hidden_size, use_bias=False, **arithmetic(config), rngs=rngs
        )
        self.embedding_norm, self.hidden_norm = stream_norm(config), stream_norm(config)
        self.block = make_block(config, config.types.index("attention"), rngs=rngs)
        mixer: Any = self.block.mixer
        mixer.layer = config.num_layers  # a number that no other attention of the model has
        self.norm = stream_norm(config)
        self.residual_dtype = config.residual_dtype

    def __call__(
        self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"], **options: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """m [B, T, D] in the compute dtype, and the cache of the head's attention.

        Args:
          embedded: E[x_(t+1)], any floating dtype.
          hidden: h_t, or m_(t-1) for a draft after a draft, in the compute dtype.
          options: `cache`, `mask` and `return_cache` of the attention.
        """
        both = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x, y, cache = self.block(self.fc(both).astype(self.residual_dtype), None, **options)
        return self.norm.add(x, y)[1], cache

    def logits(
        self, model: LanguageModel, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T1 vocab"]:
        """See `LanguageModel.mtp_logits`."""
        check_array("tokens", tokens, (None, None), "B T")
        if tokens.shape[1] < 2:
            raise ValueError(f"tokens: expected rows of at least two tokens, got {tokens.shape[1]}")
        hidden, _ = model.hidden_states(tokens, mask=mask)
        pairs = None if mask is None else mask[:, 1:] & mask[:, :-1]
        return model.logits(self(model.embedded(tokens[:, 1:]), hidden[:, :-1], mask=pairs)[0])
