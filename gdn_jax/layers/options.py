"""Checks of the options of recurrent layers, which a model's configuration has too, and what follows from them."""

import math

import numpy as np

from gdn_jax.parts.conv import MAX_WIDTH, MIN_WIDTH
from gdn_jax.rule.implementations import IMPLEMENTATIONS
from gdn_jax.shapes import MAX_HEAD_DIM, ArgumentError, check_choice


def check_sizes(
    *,
    hidden_size: int,
    num_heads: int,
    num_v_heads: int | None,
    head_dim: int,
    expand_v: float,
    conv_size: int,
    norm_eps: float,
    write_start: float | None,
    implementation: str | None,
) -> None:
    """Raises ValueError for the first option that no recurrent layer can have."""
    check_positive(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
    if num_v_heads is not None and (num_v_heads < 1 or num_v_heads % num_heads):
        raise ArgumentError("num_v_heads", f"a multiple of num_heads = {num_heads}", num_v_heads)
    if head_dim > MAX_HEAD_DIM:
        raise ArgumentError("head_dim", f"a width up to {MAX_HEAD_DIM}", head_dim)
    V = value_width(head_dim, expand_v)
    if V > MAX_HEAD_DIM:
        raise ArgumentError("expand_v", f"head_dim * expand_v up to {MAX_HEAD_DIM}", V)
    if not MIN_WIDTH <= conv_size <= MAX_WIDTH:
        raise ArgumentError("conv_size", f"{MIN_WIDTH} to {MAX_WIDTH}", conv_size)
    if not norm_eps > 0:
        raise ArgumentError("norm_eps", "a positive number", norm_eps)
    if write_start is not None and not 0 < write_start < 1:
        raise ArgumentError("write_start", "None or a number between 0 and 1", write_start)
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))


def check_positive(**sizes: int) -> None:
    """Raises ValueError for the first size that is not a positive integer."""
    for name, value in sizes.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(name, "a positive integer", value)


def value_width(head_dim: int, expand_v: float) -> int:
    """V = head_dim * expand_v.

    Raises:
      ValueError: the product is not a positive whole number.
    """
    width = head_dim * expand_v
    if not math.isfinite(width) or round(width) < 1 or not math.isclose(width, round(width), rel_tol=1e-9):
        raise ArgumentError("expand_v", "head_dim * expand_v to be whole and positive", width)
    return round(width)
