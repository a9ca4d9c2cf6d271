"""When a part runs by its kernels, and on which shards of its arrays."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from gdn_jax.partitioning import expected_shards, on_shards


def usable(implementation: str | None, reason: str | None) -> bool:
    """Whether kernels take a call.

    Args:
      implementation: that of the delta rule; "chunked" and "recurrent" never use a kernel.
      reason: why they cannot take the arguments; None if they can.
    """
    if implementation not in (None, "mosaic_gpu") or reason is not None:
        return False
    from pallas_kernels.device.launch import device_reason

    return device_reason() is None


def token_axes(x: jax.Array | jax.ShapeDtypeStruct, unit: int) -> tuple[str, dict[str, int]]:
    """Names of the dimensions of [B, T, ..], and into how many parts rows "b" and tokens "t" can be split.

    Args:
      x: the array. One without rows and tokens is never split.
      unit: of so many tokens a multiple, a shard must have for its kernel.
    """
    if x.ndim < 3 or x.shape[1] % unit:
        return " ".join("." * x.ndim), {}
    return " ".join(("b", "t", *"." * (x.ndim - 2))), {"b": x.shape[0], "t": x.shape[1] // unit}


def tokens_of(numbers: int, block: int) -> int:
    """The fewest tokens of so many numbers that are whole blocks."""
    return block // math.gcd(numbers, block)


def run(
    kernel: Callable[..., Any],
    static: Hashable,
    args: Sequence[Any],
    operands: Sequence[Any],
    results: Any,
    sizes: Mapping[str, int],
) -> Any:
    """kernel(static, *args), on the shards of the arguments; see `partitioning.on_shards`."""
    if expected_shards(args) is None:
        return kernel(static, *args)
    return on_shards(kernel, static, args, operands, lambda _: results, sizes)
