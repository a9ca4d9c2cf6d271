"""How much of the device's arithmetic a run uses."""

import jax

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Dense products of 16-bit numbers in a second, as published for the SXM form, by a part of the device's name."""


def share_of_peak(parameters: int, tokens_per_second: float) -> float | None:
    """Share of the peak of all devices that training takes; None where the peak of a device is not known.

    Args:
      parameters: trained values but the embedding's, each of which takes 6 operations a token: a product and a sum,
        forward and for both gradients. What the rule and attention compute beside them does not count.
      tokens_per_second: of training, over all devices.
    """
    kind = jax.devices()[0].device_kind
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)
    return None if peak is None else 6 * parameters * tokens_per_second / (peak * jax.device_count())
