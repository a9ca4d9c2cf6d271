"""Fields of a config.json, checked when they are read."""

import math
from typing import Any

import jax.numpy as jnp

from gdn_jax.commands.errors import brief

LAYER_TYPES = {
    "linear_attention": "gated_delta_net",
    "full_attention": "attention",
    "attention": "attention",  # an older name of it
}
"""Our layer types by Hugging Face's."""


MOST = 2**31
"""A size of a model is less: a token is an int32."""


class Fields:
    """The fields of a config.json.

    Args:
      values: the JSON object.
      defaults: what a missing field is, as transformers has it.
      where: what errors begin with.
    """

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any], where: str):
        self.values, self.where = defaults | values, where

    def get(self, name: str, *kinds: type) -> Any:
        """A field of one of these types.

        Raises:
          ValueError: it is missing or of another type.
        """
        value = self.values.get(name)
        number = isinstance(value, bool) and bool not in kinds
        if number or not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{self.where}: expected {name} of type {wanted}, got {brief(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.where}: expected a finite {name}, got {value!r}")
        return value

    def size(self, name: str) -> int:
        """A whole number above 0, less than `MOST`."""
        value = self.get(name, int)
        if value < 1:
            raise ValueError(f"{self.where}: expected {name} above 0, got {brief(value)}")
        if value >= MOST:
            raise ValueError(f"{self.where}: expected {name} below {MOST}, got {brief(value)}")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        try:
            return float(self.get(name, float, int))
        except OverflowError:
            raise ValueError(
                f"{self.where}: expected {name} that a float holds, got {brief(self.values[name])}"
            ) from None

    def refuse(self, name: str, supported: Any, reason: str) -> None:
        """Raises NotImplementedError if a field is there and is not what is supported."""
        value = self.values.get(name)
        if value is not None and value != supported:
            raise NotImplementedError(f"{self.where}: {name} = {brief(value)}: {reason}")

    def layer_types(
        self, known: dict[str, str] = LAYER_TYPES, *, attends_at_last: bool = False
    ) -> tuple[str, ...]:
        """Our types of all layers, of `layer_types` or of `full_attention_interval`.

        Args:
          known: our types by theirs.
          attends_at_last: whether the last layer is an attention layer where the interval gives none.
        """
        number = self.size("num_hidden_layers")
        given = self.values.get("layer_types")
        if given is None:
            every = self.size("full_attention_interval")
            given = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(number)]
            if attends_at_last and number < every:
                given[-1] = "full_attention"
        if not isinstance(given, list) or len(given) != number:
            raise ValueError(f"{self.where}: expected {number} layer_types, got {brief(given)}")
        for kind in given:
            if not isinstance(kind, str) or kind not in known:
                raise NotImplementedError(
                    f"{self.where}: layer_types: layers of type {brief(kind)} are not supported"
                )
        return tuple(known[kind] for kind in given)

    def of_decoder(self, types: tuple[str, ...]) -> dict[str, Any]:
        """Options of a `ModelConfig` that every family has under the same names.

        Args:
          types: of `layer_types`.
        """
        return dict(
            vocab_size=self.size("vocab_size"),
            hidden_size=self.size("hidden_size"),
            num_layers=len(types),
            conv_size=self.size("linear_conv_kernel_dim"),
            tie_embeddings=self.get("tie_word_embeddings", bool),
            norm_eps=self.get("rms_norm_eps", float),
            layer_types=types,
            scale_embedding=False,
        )

    def rope(self) -> tuple[float | None, float]:
        """Base of the rotary wavelengths (None: no positions), and the part of a head that is rotated.

        They are in `rope_parameters`, in `rope_scaling` of older files, or next to them.
        """
        parameters = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(parameters, dict):
            raise ValueError(f"{self.where}: expected an object rope_parameters, got {brief(parameters)}")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise NotImplementedError(
                f"{self.where}: rope_parameters: rope_type {brief(kind)} is not supported, only 'default'"
            )
        merged = Fields(self.values | parameters, {}, self.where)
        if merged.values.get("rope_theta", 0) is None:
            return None, 0.0
        theta, part = merged.number("rope_theta"), merged.number("partial_rotary_factor")
        if not 0 <= part <= 1:
            raise ValueError(f"{self.where}: expected partial_rotary_factor from 0 to 1, got {part}")
        return theta, part

    def dtype(self) -> str:
        """Dtype of the weights, of `dtype` or, in older files, `torch_dtype`; float32 without either."""
        name = str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32")
        if name.removeprefix("torch.") not in ("float32", "bfloat16", "float16"):
            raise NotImplementedError(f"{self.where}: dtype {brief(name)} is not supported")
        return jnp.dtype(name.removeprefix("torch.")).name

    def check_layers_alike(self) -> None:
        """Raises NotImplementedError for fields that hold for single layers."""
        if self.values.get("per_layer_config"):
            raise NotImplementedError(
                f"{self.where}: per_layer_config: layers with fields of their own are not supported"
            )

    def check_quantization(self) -> None:
        """Raises NotImplementedError for a decoder inside of a model with a quantization of its own."""
        if self.values.get("quantization_config") is not None:
            raise NotImplementedError(
                f"{self.where}: quantization_config: it is supported for the whole model only, outside of text_config"
            )
