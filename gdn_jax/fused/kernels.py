"""When a part runs by its kernels, and on which shards of its arrays."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from gdn_jax.partitioning import expected_shards, on_shards

FEW_ROWS = 256
"""Up to here a GPU multiplies by weights in less time than it takes to write them side by side. Worked out for an
H200, not measured: to write and read a weight again moves 4 bytes at 4.2 TB/s, and a row takes 2 of 700 T operations
a second."""


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


def inner_axes(x: jax.Array | jax.ShapeDtypeStruct, block: int, most: int) -> tuple[str, dict[str, int]]:
    """The same of [B, T, H, ..], whose heads "h" can be split too, for a kernel of whole blocks of numbers.

    Args:
      x: the array.
      block: of so many numbers a multiple, a shard must have.
      most: parts of H at most. There are fewer where shards of so many parts and of few tokens would be no blocks.
    """

    def unit(parts: int) -> int:
        """The fewest tokens of a part of H that are whole blocks."""
        return block // math.gcd(math.prod(x.shape[2:]) // parts, block)

    if x.ndim < 3:
        return token_axes(x, 1)
    T, H = x.shape[1:3]
    parts = next((n for n in range(min(most, H), 0, -1) if not (H % n or T % unit(n))), 1)
    names, sizes = token_axes(x, unit(parts))
    return ("b t h" + names[5:], sizes | {"h": parts}) if sizes else (names, sizes)


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
