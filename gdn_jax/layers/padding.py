"""Rows of tokens as layers take them: what is checked of a call, padding, and where a row's tokens lie."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.parts.conv import convolve_spans, segment_starts
from gdn_jax.shapes import ArgumentError, check_array, check_floating


def check_rows(
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None,
    segment_ids: Int[Array, "B T"] | None,
    hidden_size: int,
    cu_seqlens: Int[Array, " N1"] | None = None,
) -> None:
    """Raises ValueError unless x is floating [B, T, hidden_size] with T > 0, and the other arguments fit together."""
    check_array("x", x, (None, None, hidden_size), "B T hidden_size")
    check_floating("x", x)
    B, T, _ = x.shape
    if T == 0:
        raise ValueError("x: expected at least one token, got T = 0")
    if cu_seqlens is not None and (mask is not None or segment_ids is not None):
        other = "mask" if mask is not None else "segment_ids"
        raise ArgumentError("cu_seqlens", "neither mask nor segment_ids with it", other)
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, (B, T), "B T")
    if mask is not None:
        check_mask(mask, B, T)


def check_mask(mask: Bool[Array, "B T"], B: int, T: int) -> None:
    """Raises ValueError unless mask is bool [B, T] with one run of tokens in each row, where its values are known."""
    check_array("mask", mask, (B, T), "B T")
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask: expected dtype bool, got {mask.dtype}")
    if not isinstance(mask, jax.core.Tracer):
        rises = np.diff(np.asarray(mask).astype(np.int8), axis=1, prepend=0) > 0
        if (rises.sum(axis=1) > 1).any():
            row = int(np.argmax(rises.sum(axis=1) > 1))
            raise ValueError(f"mask: expected one run of tokens in each row, got a gap in row {row}")


def clear_padding(
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None,
    segment_ids: Int[Array, "B T"] | None,
    cu_seqlens: Int[Array, " N1"] | None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"] | None]:
    """x with zeros at padding, and segment_ids in which padding has the id of the nearest token of its row.

    Args:
      x: inputs of a layer.
      mask, segment_ids, cu_seqlens: what it was called with; padding is False in mask, and after cu_seqlens[-1].
    """
    T = x.shape[1]
    if cu_seqlens is not None:
        x = jnp.where((jnp.arange(T) < cu_seqlens[-1])[:, None], x, 0)
    if mask is None:
        return x, segment_ids
    if segment_ids is not None:
        begin, end = run_of_tokens(mask)
        nearest = jnp.clip(jnp.arange(T), begin[:, None], jnp.maximum(end - 1, begin)[:, None])
        segment_ids = jnp.take_along_axis(segment_ids, nearest, axis=1)
    return jnp.where(mask[..., None], x, 0), segment_ids


def convolve_tokens(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None,
    past: Float[Array, "B D W1"] | None,
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B D W1"]]:
    """`parts.conv.causal_conv1d` with SiLU of the tokens of each row, with zeros at padding, and the new state.

    Args:
      x, weight, bias, segment_ids: of `causal_conv1d`.
      past: inputs before each row; None: zeros.
      mask: True at tokens, one run of them in each row.
    """
    begin, end = run_of_tokens(mask)
    position = jnp.arange(mask.shape[1])
    fresh = (position == 0) | (position == begin[:, None])
    if segment_ids is not None:
        fresh = fresh | segment_starts(segment_ids)
    past = None if past is None else past[:, None]
    spans = (fresh, begin[:, None], end[:, None], mask)
    y, state = convolve_spans(x, weight, bias, "silu", past, *spans)
    return y, state[:, 0]


def run_of_tokens(mask: Bool[Array, "B T"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """First True and one past the last True of each row [B]; 0, 0 where there is none."""
    T = mask.shape[1]
    any_token = mask.any(axis=1)
    begin = jnp.argmax(mask, axis=1)
    end = jnp.where(any_token, T - jnp.argmax(mask[:, ::-1], axis=1), 0)
    return begin, end
