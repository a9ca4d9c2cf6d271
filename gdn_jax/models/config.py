"""Configuration of a language model: the one list of its options."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from gdn_jax.layers import check_options, check_positive
from gdn_jax.shapes import check_choice

DTYPES = ("float32", "bfloat16")
REMAT = ("none", "rule", "full")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and arithmetic of a LanguageModel. Every value is checked when the object is made.

    Fields:
      vocab_size: number of tokens.
      hidden_size: width of the residual stream.
      num_layers: blocks.
      num_heads: query and key heads of a GatedDeltaNet.
      num_v_heads: its value and state heads, a multiple of num_heads; None: num_heads.
      head_dim: K. num_heads * head_dim = 0.75 * hidden_size and expand_v = 2 give a mixer of about
        6 * hidden_size^2 parameters.
      expand_v: V / K, with head_dim * expand_v whole.
      conv_size: taps of the short convolution, 2 to 4.
      intermediate_size: inner width of the SwiGLU; None: mlp_ratio * hidden_size, up to a multiple of 8.
      mlp_ratio: read only where intermediate_size is None.
      allow_neg_eigval: write strength in [0, 2] instead of [0, 1].
      rule: of the token mixers, one of `rules.RULES`. Sizes and parameters do not depend on it.
      tie_embeddings: use the embedding as the output projection, which saves vocab_size * hidden_size parameters;
        with a small vocabulary a projection of its own learns faster.
      norm_eps: of every RMSNorm.
      dtype: compute dtype, float32 or bfloat16, kept as its name. Parameters, norms, gates, states and logits are
        float32 in any case.
      residual_dtype: of the residual stream between the blocks, float32 or bfloat16, kept as its name. bfloat16 is
        half the traffic, and rounds the small contribution of a late block to a large sum away.
      implementation: of the rule, see `gated_delta_rule`; None: the fastest that supports the call.
      remat: what a block keeps for the backward pass; the rest is computed again there.
        "none": all that its derivative reads.
        "rule": its input and what the rule's own derivative keeps, so that no rule is run twice: projections,
          convolution, norms and SwiGLU are. The implementation "recurrent" and the other rules keep nothing here.
        "full": its input alone, which costs about one more forward pass.
      scan_layers: compile one block and scan over the weights of all: a deep model compiles as fast as a shallow one,
        for a copy of the weights in each pass. What it costs on a GPU was not measured, so it is off by default. A
        call with a cache, or with `around`, walks block by block in any case.

    Raises:
      ValueError: names the field, what was expected and what came.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 2
    num_v_heads: int | None = None
    head_dim: int = 32
    expand_v: float = 2.0
    conv_size: int = 4
    intermediate_size: int | None = None
    mlp_ratio: float = 8 / 3
    allow_neg_eigval: bool = False
    rule: str = "gated_delta"
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    dtype: DTypeLike = "float32"
    residual_dtype: DTypeLike = "float32"
    implementation: str | None = None
    remat: str = "none"
    scan_layers: bool = False

    def __post_init__(self):
        for name in ("dtype", "residual_dtype"):
            dtype = getattr(self, name)
            dtype = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
            object.__setattr__(self, name, dtype)  # what a frozen dataclass leaves to its own constructor
        check_positive(vocab_size=self.vocab_size, num_layers=self.num_layers)
        check_options(**self.options_of(check_options))
        if self.intermediate_size is not None:
            check_positive(intermediate_size=self.intermediate_size)
        elif not 0 < self.mlp_ratio < math.inf or self.mlp_size < 1:
            raise ValueError(
                f"mlp_ratio: expected a positive number that gives hidden_size = {self.hidden_size} an inner width "
                f"of at least 1, got {self.mlp_ratio}"
            )
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("residual_dtype", self.residual_dtype, DTYPES)
        check_choice("remat", self.remat, REMAT)
        check_choice("scan_layers", self.scan_layers, (True, False))

    @property
    def mlp_size(self) -> int:
        """Inner width of the SwiGLU."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-round(self.mlp_ratio * self.hidden_size) // 8) * 8

    def options_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The fields that a function has parameters for, by name: an option that both know cannot be forgotten."""
        parameters = inspect.signature(function).parameters
        names = (field.name for field in dataclasses.fields(self) if field.name in parameters)
        return {name: getattr(self, name) for name in names}
