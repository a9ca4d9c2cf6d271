"""The mixer of a model: which recurrent layer it has, and what a model has to know of that layer.

A layer's file also has its `MixerConfig` and, by name, its `MIXERS`, for which `table.TOKEN_MIXERS` has an
entry. Sizes are fields of the `ModelConfig`, which all mixers share; what is the layer's own are fields here.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from gdn_jax.gates import MAX_RATE, MAX_STEP, MIN_STEP
from gdn_jax.layers.options import check_sizes, value_width
from gdn_jax.layers.recurrent import RecurrentMixer
from gdn_jax.shapes import ArgumentError
from gdn_jax.styles import Style

CHUNK = 64
"""Tokens of a chunk in the costs of the chunked form."""
MIDDLE_STEP = math.sqrt(MIN_STEP * MAX_STEP)
"""The time step of a middle head or channel of fresh weights."""


class MixerCosts(NamedTuple):
    """Costs of a token mixer without its projections, for one sequence of L tokens.

    Fields:
      prefill_flops: operations of one pass over all tokens; a multiplication and an addition are two.
      activation_bytes: queries, keys, values and outputs of all tokens, and a state where there is one.
      decode_flops: operations of the token after them.
      cache_bytes: what is kept for that token.
    """

    prefill_flops: int
    activation_bytes: int
    decode_flops: int
    cache_bytes: int


class Start(NamedTuple):
    """Forgetting of a fresh layer at every token.

    Fields:
      g: log decay of a middle head or channel.
      beta: strength of erasing.
    """

    g: float
    beta: float


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """The recurrent layers of a model, with the options that only they have as fields.

    Class attributes:
      name: the type of such layers in `ModelConfig.types`.
      layer: the class of the layer, whose name tables show.
      reflects: whether the published layer has strengths to 2.
      by_tokens: whether the tokens of a row may be split over the devices of a mesh, with every option.

    Fields:
      style: name in words and look of models with it, where they are compared; None: they are not.
    """

    name: ClassVar[str]
    layer: ClassVar[type[RecurrentMixer]]
    reflects: ClassVar[bool] = False
    by_tokens: ClassVar[bool] = False
    style: Style | None = dataclasses.field(default=None, kw_only=True, compare=False, repr=False)

    @property
    def title(self) -> str:
        """The mixer's name in tables."""
        return self.layer.__name__

    @property
    def label(self) -> str:
        """The mixer's name in words."""
        return self.title if self.style is None else self.style.label

    def check(self, config: Any) -> None:
        """Raises ValueError for the first field of a ModelConfig that the layer cannot have."""
        check_sizes(**config.options_of(check_sizes))
        if config.rule != type(config).rule:
            raise ArgumentError(
                "rule", f"{type(config).rule}, as {self.name} has a rule of its own", config.rule
            )

    def make(self, config: Any, **options: Any) -> RecurrentMixer:
        """The layer of a model.

        Args:
          config: the model's.
          options: dtypes, initialisers and `rngs`, in the place of the config's.
        """
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}
        common = config.options_of(RecurrentMixer.__init__) | config.options_of(self.layer.__init__)
        norm_eps = config.mixer_norm_eps or config.norm_eps
        return self.layer(**common | own | {"norm_eps": norm_eps} | options)

    def costs(self, config: Any, L: int) -> MixerCosts:
        """Costs of a layer, in which a token meets its chunk, and a state of fixed size.

        Args:
          config: of the model.
          L: tokens of the sequence.
        """
        return recurrent_costs(config, L)

    def start(self, config: Any, time_step: float) -> Start | None:
        """How fast a fresh layer forgets; None where it does not.

        Args:
          config: of the model.
          time_step: factor of the initial time steps.
        """
        raise NotImplementedError

    def splits_tokens(self, config: Any) -> bool:
        """Whether the tokens of a row may be split over the devices of a mesh; config: of the model."""
        del config
        return self.by_tokens


def decay_at_start(time_step: float, rate: float = MAX_RATE / 2) -> float:
    """Log decay of fresh weights in the middle of the time steps, by default of a middle head."""
    return -time_step * rate * MIDDLE_STEP


def strength_at_start(config: Any) -> float:
    """The strength of erasing of fresh weights."""
    start = 0.5 if config.write_start is None else config.write_start
    return (2 if config.allow_neg_eigval else 1) * start


def recurrent_costs(config: Any, L: int, *, steps: int = 1, gates: int = 0) -> MixerCosts:
    """Costs of a layer with a state.

    Of a chunk of C tokens and a head: k k^T and q k^T (4 C^2 K), the corrected keys and values (2 C^2 (K + V)), the
    outputs inside it (2 C^2 V), and three products with the state (6 C K V).

    Args:
      config: of the model.
      L: tokens of the sequence.
      steps: steps of the rule for every token, each with a key and a value.
      gates: float32 numbers of a head's gates that are kept beside a token's keys and values.
    """
    heads, K, V = (
        config.num_v_heads or config.num_heads,
        config.head_dim,
        value_width(config.head_dim, config.expand_v),
    )
    size, keys, values = jnp.dtype(config.dtype).itemsize, config.num_heads * K, heads * V
    state = heads * K * V * 4
    channels = (1 + steps) * keys + steps * values
    return MixerCosts(
        prefill_flops=L * steps * heads * (CHUNK * (6 * K + 4 * V) + 6 * K * V),
        activation_bytes=L * ((channels + values) * size + heads * gates * 4) + state,
        decode_flops=(2 + 4 * steps) * heads * K * V,
        cache_bytes=state + channels * (config.conv_size - 1) * size,
    )
