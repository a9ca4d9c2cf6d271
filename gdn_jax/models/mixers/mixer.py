"""The part of a recurrent token mixer that a model has to know.

Every mixer has a file of its own beside this one and an entry in `table.TOKEN_MIXERS`. Sizes are fields of the
`ModelConfig`, which all mixers share; what is the mixer's own are fields of its object.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from gdn_jax.gates import MAX_STEP, MIN_STEP
from gdn_jax.layers import RecurrentMixer
from gdn_jax.layers.options import check_sizes, value_width
from gdn_jax.shapes import ArgumentError

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
class Mixer:
    """A kind of recurrent layer, with the options that only it has as fields.

    Class attributes:
      name: the type of such layers in `ModelConfig.types`.
      layer: the class of the layer, whose name is that of the mixer in tables.
    """

    name: ClassVar[str]
    layer: ClassVar[type[RecurrentMixer]]

    @property
    def title(self) -> str:
        """The mixer's name in tables."""
        return self.layer.__name__

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
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
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
        """Whether the tokens of a row may be split over the devices of a mesh."""
        del config
        return False


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
