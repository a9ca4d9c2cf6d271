"""The short convolution over tokens that are split over a mesh axis: W - 1 tokens cross each border.

`causal_conv1d` is the operation in plain JAX, `short_conv_by_kernels` the fused one by its kernels.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.parallel.borders import Borders, last_states, local_offsets, previous
from gdn_jax.parts import conv
from gdn_jax.parts.conv import segment_starts
from gdn_jax.parts.short_conv import split_normalized
from gdn_jax.shapes import widened


def causal_conv1d(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    axis_name: str,
    initial_state: Float[Array, "N D W1"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "N D W1"]]:
    """`gdn_jax.causal_conv1d` of rows whose tokens are split over a mesh axis in order, inside `jax.shard_map`.

    Args: those of `gdn_jax.causal_conv1d`. x and segment_ids are this device's tokens, at least W - 1 of them;
      weight, bias, initial_state and cu_seqlens are the same on every device of the axis.
      axis_name: the mesh axis.

    Returns:
      y of this device's tokens, and the final states of the whole sequences, the same on every device of the axis.

    Raises:
      ValueError: an argument is wrong, or there are fewer than W - 1 tokens on a device.
    """
    (_, T, _), W = x.shape, weight.shape[1]
    if T < W - 1:
        raise ValueError(
            f"x: expected at least W - 1 = {W - 1} tokens on every device of {axis_name!r}, got {T}"
        )
    if cu_seqlens is not None:
        return _packed(x, weight, bias, axis_name, initial_state, cu_seqlens, segment_ids)
    state = _entering(x, W, axis_name, initial_state, segment_ids)
    ends = slice(None, W - 1), slice(1 - W, None)
    head_ids, tail_ids = (None if segment_ids is None else segment_ids[:, end] for end in ends)
    # The first tokens apart: only they see the device before.
    head, _ = conv.causal_conv1d(x[:, : W - 1], weight, bias, initial_state=state, segment_ids=head_ids)
    y, _ = conv.causal_conv1d(x, weight, bias, segment_ids=segment_ids)
    _, final = conv.causal_conv1d(x[:, 1 - W :], weight, segment_ids=tail_ids)
    if initial_state is not None:
        final = final.astype(initial_state.dtype)
    return jnp.concatenate([head, y[:, W - 1 :]], 1), last_states(final, None, None, T, axis_name)


def _entering(x, W: int, axis_name: str, initial_state, segment_ids) -> jax.Array:
    """Receives the W - 1 inputs before this device's tokens [B, D, W - 1], zeros where a segment ends between."""
    state = jnp.swapaxes(previous(x[:, 1 - W :], axis_name), 1, 2)
    if segment_ids is not None:
        ids = jnp.concatenate([previous(segment_ids[:, 1 - W :], axis_name), segment_ids[:, :1]], 1)
        same = lax.cumprod((ids[:, 1:] == ids[:, :-1]).astype(jnp.int32), 1, reverse=True)
        state = jnp.where(same[:, None] > 0, state, 0)
    if initial_state is None:
        return state  # zeros at the first device
    wide = jnp.promote_types(initial_state.dtype, x.dtype)
    return jnp.where(lax.axis_index(axis_name) == 0, initial_state.astype(wide), state.astype(wide))


def _packed(x, weight, bias, axis_name: str, initial_state, cu_seqlens, segment_ids):
    T, N = x.shape[1], cu_seqlens.shape[0] - 1
    cu_seqlens = widened(jnp.asarray(cu_seqlens))
    borders = Borders.of_packed(cu_seqlens, T, axis_name)
    options = dict(cu_seqlens=local_offsets(cu_seqlens, T, axis_name), segment_ids=segment_ids)
    starts = initial_state
    if starts is None:
        starts = jnp.zeros_like(x, shape=(N, x.shape[2], weight.shape[1] - 1))
    # A sequence that leaves has W - 1 tokens here, or it begins here: its state does not depend on what enters.
    _, states = conv.causal_conv1d(x, weight, initial_state=starts, **options)
    crossing = previous(borders.pick(states, borders.last), axis_name)
    states = borders.put(starts, borders.first, crossing, borders.enters)
    y, local = conv.causal_conv1d(x, weight, bias, initial_state=states, **options)
    return y, last_states(local, initial_state, cu_seqlens, T, axis_name)


class _Static(NamedTuple):
    """Static options of a call."""

    axis_name: str
    heads: int
    width: int
    normalize: bool


def short_conv_by_kernels(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    axis_name: str,
    heads: int,
    width: int,
    normalize: bool,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B T Dv"]]:
    """q, k and v of `gdn_jax.parts.short_conv.short_conv` by its kernels, of tokens split over a mesh axis in order.

    The kernels take a device's tokens as whole rows. The first W - 1 outputs are made again in plain JAX, from the
    inputs that enter from the device before, and put in their places. Differentiable once, in reverse.

    Args: those of `gdn_jax.parts.short_conv.short_conv`, inside `jax.shard_map`. x and segment_ids are this device's
      tokens, which the kernels accept; everything varies over the axis. weight, heads, width and normalize are the
      same on every device.
      axis_name: the mesh axis.

    Returns:
      q and k [B, T, heads, width] and v [B, T, D - 2 heads width] of this device's tokens.
    """
    return _by_kernel(_Static(axis_name, heads, width, normalize), x, weight, segment_ids)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(static: _Static, x, weight, segment_ids):
    return _by_kernel_fwd(static, x, weight, segment_ids)[0]


def _heads(static: _Static) -> dict[str, Any]:
    return dict(heads=static.heads, width=static.width, normalize=static.normalize)


def _first(static: _Static, x, weight, state, segment_ids):
    """Computes q, k and v of the first tokens, from the inputs before them."""
    y, _ = conv.causal_conv1d(x, weight, initial_state=state, segment_ids=segment_ids)
    return split_normalized(y, **_heads(static))


def _fresh(segment_ids) -> jax.Array | None:
    return None if segment_ids is None else segment_starts(segment_ids).astype(jnp.int32)


def _by_kernel_fwd(static: _Static, x, weight, segment_ids):
    from pallas_kernels.layer import short_conv as kernels

    n = weight.shape[1] - 1
    ids = None if segment_ids is None else segment_ids[:, :n]
    state = _entering(x, n + 1, static.axis_name, None, segment_ids)
    found = kernels.short_conv(x, weight, _fresh(segment_ids), **_heads(static))
    first = _first(static, x[:, :n], weight, state, ids)
    out = tuple(y.at[:, :n].set(part.astype(y.dtype)) for y, part in zip(found, first, strict=True))
    return out, (x, weight, segment_ids, state)


def _by_kernel_bwd(static: _Static, saved, cotangents):
    from pallas_kernels.layer import short_conv as kernels

    x, weight, segment_ids, state = saved
    n = weight.shape[1] - 1
    ids = None if segment_ids is None else segment_ids[:, :n]
    # What is read of an array is read before it is written in its place: else XLA may copy the whole of it.
    of_first, cotangents = lax.optimization_barrier((tuple(dy[:, :n] for dy in cotangents), cotangents))
    others = (dy.at[:, :n].set(0) for dy in cotangents)
    dx, dweight = kernels.short_conv_backward(
        x, weight, _fresh(segment_ids), *others, normalize=static.normalize
    )
    _, through_first = jax.vjp(partial(_first, static, segment_ids=ids), x[:, :n], weight, state)
    dfirst, dweight_of_first, dstate = through_first(of_first)
    _, through_border = jax.vjp(
        lambda last: _entering(last, n + 1, static.axis_name, None, segment_ids), x[:, -n:]
    )
    (dlast,) = through_border(dstate)
    ends = lax.optimization_barrier((dx[:, :n] + dfirst, dx[:, -n:] + dlast))
    dx = dx.at[:, :n].set(ends[0]).at[:, -n:].set(ends[1])
    return dx, (dweight + dweight_of_first).astype(weight.dtype), None


_by_kernel.defvjp(_by_kernel_fwd, _by_kernel_bwd)
