"""Models by name for the benchmarks, with fields that an option changes."""

import dataclasses
from typing import Any

from gdn_jax.commands.errors import fail
from gdn_jax.commands.files import parse_json
from gdn_jax.models import ModelConfig
from gdn_jax.models.presets import PRESETS

SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(vocab_size=256, hidden_size=64, num_layers=2, num_heads=2, head_dim=16),
    "0.4b": dict(
        vocab_size=32768, hidden_size=1024, num_layers=24, num_heads=8, head_dim=128, intermediate_size=2736
    ),
    "1.3b": dict(
        vocab_size=32000, hidden_size=2048, num_layers=24, num_heads=16, head_dim=128, intermediate_size=5632
    ),
}
"""Models by name: fields of a ModelConfig. V = K in all of them. The names of PRESETS are models too."""


def model_config(name: str, options: tuple[str, ...] = (), **values: Any) -> ModelConfig:
    """The configuration of a model of SIZES or PRESETS.

    Args:
      name: the model's.
      options: fields with a value, as in "remat=rule".
      values: more fields.

    Raises:
      RunError: there is no such model, an option does not name a field, or its value does not fit.
    """
    if name not in SIZES and name not in PRESETS:
        fail("model", f"one of {', '.join([*SIZES, *PRESETS])}", name)
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    for text in options:
        field, _, value = text.partition("=")
        if field not in fields:
            fail("options", f"fields of ModelConfig with a value, as in {sorted(fields)[0]}=...", text)
        try:
            values[field] = parse_json(value)
        except ValueError:
            values[field] = value
    try:
        if name in PRESETS:
            return dataclasses.replace(PRESETS[name], **values)
        return ModelConfig(**SIZES[name] | {"expand_v": 1.0} | values)
    except (ValueError, TypeError) as error:
        fail("options", f"values that fit ({error})", " ".join(options))
