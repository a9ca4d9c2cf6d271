"""The record that a file of a family of checkpoints fills in."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from gdn_jax.hf.fields import Fields
from gdn_jax.hf.weights import Weight
from gdn_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of the tensors of a checkpoint.

    Fields:
      prefix: of the tensors of the decoder.
      found: shapes of all tensors by name; empty for a checkpoint that is yet to be written.
    """

    prefix: str = "model."
    found: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def first(self, *choices: str) -> str:
        """The choice that was found, or the first one."""
        return next((name for name in choices if name in self.found), choices[0])


@dataclasses.dataclass(frozen=True)
class Family:
    """Checkpoints of one architecture.

    Fields:
      model_types: of their config.json; the first one is what we write.
      architecture: class of transformers that opens what we write.
      defaults: of fields that a config.json may leave out, as transformers has them.
      config: our configuration of a config.json, without dtypes.
      fields: the fields of a config.json for a model of our own. Raises NotImplementedError where the family has no
        such model.
      weights: of the blocks of a model.
      embedding: name of its tensor, after the prefix.
      eight_bits: finds the names of matrices that FP8 checkpoints of the family have in 8 bits; None: there are none.
      mtp: weights of the head for the token after the next; None: such a head is not known.
      mtp_fields: of the config.json of a model of our own that has the head.
    """

    model_types: tuple[str, ...]
    architecture: str
    defaults: dict[str, Any]
    config: Callable[[Fields], ModelConfig]
    fields: Callable[[ModelConfig], dict[str, Any]]
    weights: Callable[[ModelConfig, Names], Iterator[Weight]]
    embedding: str = "embed_tokens"
    eight_bits: re.Pattern[str] | None = None
    mtp: Callable[[ModelConfig, Names], Iterator[Weight]] | None = None
    mtp_fields: Mapping[str, Any] = MappingProxyType({})
