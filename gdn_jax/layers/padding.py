"""Padding around the tokens of a row: which masks a layer takes, and where a row's tokens lie."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.shapes import check_array


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
      mask, segment_ids, cu_seqlens: what it was called with; padding is False in mask, and behind cu_seqlens[-1].
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


def run_of_tokens(mask: Bool[Array, "B T"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """First True and one past the last True of each row [B]; 0, 0 where there is none."""
    T = mask.shape[1]
    any_token = mask.any(axis=1)
    begin = jnp.argmax(mask, axis=1)
    end = jnp.where(any_token, T - jnp.argmax(mask[:, ::-1], axis=1), 0)
    return begin, end
