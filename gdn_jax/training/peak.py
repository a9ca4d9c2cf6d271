"""The share of the device's arithmetic that a run uses."""

import jax

from gdn_jax.models.config import ModelConfig
from gdn_jax.models.costs import layer_costs

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Dense products of 16-bit numbers in a second, as published for the SXM form, by a part of the device's name."""

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes of the device's memory that move in a second, as published for the SXM form, in the same way."""


def share_of_peak(parameters: int, tokens_per_second: float, attention_flops: float = 0.0) -> float | None:
    """Returns the share of the peak of all devices that training takes; None where a device's peak is not known.

    Args:
      parameters: trained values that a token is multiplied by: not those of an embedding that only looks up. Each
        takes 6 operations a token: a product and a sum, forward and for both gradients.
      tokens_per_second: of training, over all devices.
      attention_flops: operations a token of attention layers beside them. What the rule computes does not count.
    """
    peak = of_device(PEAK_FLOPS)
    if peak is None:
        return None
    return (6 * parameters + attention_flops) * tokens_per_second / (peak * jax.device_count())


def attention_flops(config: ModelConfig, length: int) -> float:
    """Returns the operations that the attention layers take for a token in training, beside their projections.

    Both gradients of a product cost as much as two of it; what a kernel computes again does not count.
    """
    kinds = [kind for kind in config.types if config.attention_of(kind) is not None]
    return 3 * sum(layer_costs(config, kind, length).prefill_flops for kind in kinds) / length


def of_device(published: dict[str, float]) -> float | None:
    """Returns the number of JAX's default device in a table such as PEAK_FLOPS; None if it is not there."""
    kind = jax.devices()[0].device_kind
    return next((number for name, number in published.items() if name in kind), None)
