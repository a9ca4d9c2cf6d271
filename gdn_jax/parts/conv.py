"""Causal depthwise convolution, over whole sequences and one token at a time.

Every channel d of a sequence is filtered by its own W numbers, the last of which meets the present token:

    y[t, d] = activation(bias[d] + sum_{j < W} weight[d, j] * x[t - (W - 1) + j, d])

The state of a sequence is its last W - 1 inputs, oldest first, [D, W - 1]: what the next token still sees.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.shapes import (
    accumulation_dtype,
    changes_segment,
    check_array,
    check_ascending,
    check_choice,
    check_floating,
    check_packing,
)

ACTIVATIONS = ("silu", None)
MIN_WIDTH, MAX_WIDTH = 2, 4


def causal_conv1d(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Float[Array, "N D W1"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "N D W1"]]:
    """Causal depthwise convolution of every sequence (the module docstring has the equation).

    Args:
      x: inputs, float16, bfloat16, float32 or float64.
      weight: filters of width W = 2 to 4, oldest tap first, any floating dtype.
      bias: added before the activation; none by default.
      activation: "silu" or None.
      initial_state: the W - 1 inputs before each sequence, oldest first, any floating dtype; default zeros.
      cu_seqlens: [N + 1] integers, packed sequences in one row (B = 1): sequence n is the tokens
        cu_seqlens[n] to cu_seqlens[n + 1] - 1. A length may be shorter than W - 1, or 0 (the state passes
        through). Tokens past cu_seqlens[-1] are padding: whatever they hold, their output is 0.
      segment_ids: [B, T] integers, packed rows: nothing reaches across a change of id. The initial state
        belongs to the first segment of the row and the final state to the last. Exclusive with cu_seqlens.

    Returns:
      y: [B, T, D] in x's dtype.
      final_state: [N, D, W - 1], N = B or len(cu_seqlens) - 1: the last W - 1 inputs of each sequence (part
        of the initial state where a sequence is shorter; with segment_ids zeros for what lies before the
        last segment). In initial_state's dtype when that is given (a float32 state fed by bfloat16 tokens
        stays float32), otherwise in x's.

    Raises:
      ValueError: naming the argument whose rank, shape, dtype or value is wrong, or both packings at once.

    Numerics: products and sums in float32 (float64 for a float64 argument), taps added oldest first.
      Differentiable any number of times, forward and reverse, in x, weight, bias and initial_state, from both
      results.
    Source: `causal_conv1d` of fla and of Dao-AILab, whose states have this layout too.
    """
    check(x, weight, bias, activation)
    B, T, D = x.shape
    W, N = weight.shape[1], check_packing(B, T, cu_seqlens, segment_ids)
    if cu_seqlens is not None:
        if isinstance(cu_seqlens, np.ndarray):
            check_ascending(T, cu_seqlens)
        cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
    if initial_state is not None:
        check_array("initial_state", initial_state, (N, D, W - 1), "N D W-1")
        check_floating("initial_state", initial_state)

    state = "b d w" if cu_seqlens is None else ". d w"
    return on_explicit_shards(
        partial(_convolve, activation),
        (x, weight, bias, initial_state, cu_seqlens, segment_ids),
        ("b t d", "d w", "d", state, ".", "b t"),
        ("b t d", state),
        {"b": B, "d": D},
    )


def _convolve(activation, x, weight, bias, initial_state, cu_seqlens, segment_ids):
    """`causal_conv1d` of arguments that are right."""
    (B, T, D), W = x.shape, weight.shape[1]
    if T == 0:
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        empty = jnp.zeros((N, D, W - 1), x.dtype)
        return x, empty if initial_state is None else initial_state
    if cu_seqlens is not None:
        token = jnp.arange(T)
        # Zero-length sequences mark the same token twice; the end of the last one may lie past the row.
        fresh = jnp.zeros(T, bool).at[cu_seqlens[:-1]].set(True, mode="drop")
        y, final_state = convolve_spans(
            x,
            weight,
            bias,
            activation,
            None if initial_state is None else initial_state[None],
            fresh.at[0].set(True)[None],
            cu_seqlens[None, :-1],
            cu_seqlens[None, 1:],
            inside=(token < cu_seqlens[-1])[None],
        )
        return y, final_state[0]
    if segment_ids is not None:
        y, final_state = convolve_spans(
            x,
            weight,
            bias,
            activation,
            None if initial_state is None else initial_state[:, None],
            segment_starts(segment_ids),
            jnp.zeros((B, 1), jnp.int32),
            jnp.full((B, 1), T, jnp.int32),
        )
        return y, final_state[:, 0]
    return _convolve_whole(x, weight, bias, activation, initial_state)


def causal_conv1d_update(
    x: Float[Array, "B D"],
    state: Float[Array, "B D W1"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    activation: str | None = "silu",
) -> tuple[Float[Array, "B D"], Float[Array, "B D W1"]]:
    """One token of `causal_conv1d`.

    Args:
      x: the new inputs, any floating dtype.
      state: the W - 1 inputs before them, oldest first, any floating dtype.
      weight: filters of width W = 2 to 4, oldest tap first.
      bias: added before the activation; none by default.
      activation: "silu" or None.

    Returns:
      y: [B, D] in x's dtype.
      state: [B, D, W - 1] in the state's dtype, the oldest input dropped and x appended.

    Raises:
      ValueError: naming the argument whose rank, shape, dtype or value is wrong.

    Numerics: as `causal_conv1d`, the same sum in the same order.
    """
    check_array("x", x, (None, None), "B D")
    check(x[:, None], weight, bias, activation)
    B, D = x.shape
    W = weight.shape[1]
    check_array("state", state, (B, D, W - 1), "B D W-1")
    check_floating("state", state)

    acc = accumulation_dtype(x, weight, bias, state)
    w = weight.astype(acc)
    y = jnp.zeros((), acc)
    for j in range(W - 1):
        y = y + state[:, :, j].astype(acc) * w[:, j]
    y = y + x.astype(acc) * w[:, W - 1]
    new_state = jnp.concatenate([state[:, :, 1:], x[:, :, None].astype(state.dtype)], axis=-1)
    return _finish(y, bias, activation, x.dtype), new_state


def segment_starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the first token of every segment: token 0 and every change of id."""
    return changes_segment(segment_ids, first=True)


def last_inputs(
    x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None, width: int
) -> Float[Array, "B D W1"]:
    """Final state of `causal_conv1d` without an initial state, of rows of at least width - 1 tokens."""
    last = x[:, 1 - width :]
    if segment_ids is not None:
        linked = ~segment_starts(segment_ids)[:, x.shape[1] + 2 - width :]
        seen = jnp.cumprod(linked[:, ::-1], axis=1)[:, ::-1].astype(bool)
        last = jnp.where(jnp.pad(seen, ((0, 0), (0, 1)), constant_values=True)[..., None], last, 0)
    return jnp.swapaxes(last, 1, 2)


def convolve_spans(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None,
    activation: str | None,
    initial_state: Float[Array, "B n D W1"] | None,
    fresh: Bool[Array, "B T"],
    begin: Int[Array, "B n"],
    end: Int[Array, "B n"],
    inside: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B n D W1"]]:
    """Convolution of n spans in each row, the form that every kind of packing and padding comes down to.

    Span i of row b is the tokens begin[b, i] to end[b, i] - 1. It takes up from initial_state[b, i] and may
    itself consist of segments; the state belongs to the first of them, the final state to the last.

    Args:
      x, weight, bias, activation: as in `causal_conv1d`, T > 0.
      initial_state: inputs before each span, or None for zeros.
      fresh: True where nothing earlier may be seen: at the first token of every span and segment.
      begin, end: the spans, one after the other; begin = end is an empty one.
      inside: False at tokens of no span; they are read as zeros and their output is 0. None: there are none.

    Returns:
      y [B, T, D] in x's dtype and the final states [B, n, D, W - 1] as in `causal_conv1d`.
    """
    T = x.shape[1]
    W = weight.shape[1]
    acc = accumulation_dtype(x, weight, bias, initial_state)
    w = weight.astype(acc)
    if inside is not None:
        x = jnp.where(inside[..., None], x, 0)

    # reach[t]: how many earlier tokens token t sees, 0 to W - 1.
    linked = ~fresh
    chain, reach = linked, linked.astype(jnp.int32)
    for lag in range(1, W - 1):
        chain = chain & jnp.pad(linked, ((0, 0), (lag, 0)))[:, :T]
        reach = reach + chain.astype(jnp.int32)

    past = jnp.pad(x, ((0, 0), (W - 1, 0), (0, 0)))
    y = jnp.zeros((), acc)
    for j in range(W - 1):
        seen = (reach >= W - 1 - j)[..., None]
        y = y + jnp.where(seen, past[:, j : j + T].astype(acc), 0) * w[:, j]
    y = y + x.astype(acc) * w[:, W - 1]
    if initial_state is not None:
        y = jax.vmap(_add_initial, in_axes=(0, 0, None, 0, 0, 0))(
            y, initial_state.astype(acc), w, reach, begin, end
        )
    y = _finish(y, bias, activation, x.dtype)
    if inside is not None:
        y = jnp.where(inside[..., None], y, 0)
    if initial_state is None:
        initial_state = jnp.zeros((*begin.shape, x.shape[2], W - 1), x.dtype)
    return y, jax.vmap(_last_inputs)(x, initial_state, reach, begin, end)


def _convolve_whole(x, weight, bias, activation, initial_state):
    """`causal_conv1d` of rows that are one sequence each: one padded copy and W slices of it."""
    T = x.shape[1]
    W = weight.shape[1]
    acc = accumulation_dtype(x, weight, bias, initial_state)
    w = weight.astype(acc)
    if initial_state is None:
        past = jnp.pad(x, ((0, 0), (W - 1, 0), (0, 0)))
    else:
        dtype = jnp.promote_types(x.dtype, initial_state.dtype)
        past = jnp.concatenate([jnp.swapaxes(initial_state, 1, 2).astype(dtype), x.astype(dtype)], axis=1)
    y = jnp.zeros((), acc)
    for j in range(W):
        y = y + past[:, j : j + T].astype(acc) * w[:, j]
    final_state = jnp.swapaxes(past[:, T:], 1, 2)
    if initial_state is not None:
        final_state = final_state.astype(initial_state.dtype)
    return _finish(y, bias, activation, x.dtype), final_state


def _add_initial(y, initial_state, w, reach, begin, end):
    """Adds what the first W - 1 tokens of each span of a row see of its initial state [n, D, W - 1].

    Each token reads its part, of which XLA makes one kernel with the sums: parts that are added at some tokens would
    be another.
    """
    T = y.shape[0]
    W = w.shape[1]
    state = jnp.swapaxes(initial_state, 1, 2)  # [n, W-1, D]
    # Token r of a span sees entry m of the state through tap m - r.
    extra = state * w[:, 0]
    for j in range(1, W - 1):
        extra = extra + jnp.pad(state[:, j:], ((0, 0), (0, j), (0, 0))) * w[:, j]
    token = jnp.arange(T)
    span = jnp.searchsorted(end, token, side="right", method="compare_all")
    r = token - begin.at[span].get(mode="fill", fill_value=T)
    # reach = r: the span has not changed segment since its first token.
    touched = (r >= 0) & (r < W - 1) & (reach == r)
    place = jnp.where(touched, span * (W - 1) + r, extra.shape[0] * (W - 1))
    return y + extra.reshape(-1, extra.shape[-1]).at[place].get(mode="fill", fill_value=0)


def _last_inputs(x, initial_state, reach, begin, end):
    """Last W - 1 inputs of each span of a row [T, D]: [n, D, W - 1] in the initial state's dtype."""
    T = x.shape[0]
    W1 = initial_state.shape[-1]
    length = (end - begin)[:, None]
    last = jnp.clip(end - 1, 0, T - 1)
    seen = jnp.where(length > 0, reach[last][:, None], -1)  # the last token sees itself and `seen` before it
    entry = jnp.arange(W1)
    lag = W1 - 1 - entry
    from_x = x[jnp.clip(last[:, None] - lag, 0, T - 1)].astype(initial_state.dtype)  # [n, W-1, D]
    from_initial = jnp.take_along_axis(initial_state, jnp.clip(length + entry, 0, W1 - 1)[:, None, :], axis=2)
    from_initial = jnp.where((seen == length - 1)[:, :, None], from_initial, 0)
    return jnp.where((lag <= seen)[:, None, :], jnp.swapaxes(from_x, 1, 2), from_initial)


def _finish(y, bias, activation, dtype):
    if bias is not None:
        y = y + bias.astype(y.dtype)
    if activation == "silu":
        y = jax.nn.silu(y)
    return y.astype(dtype)


def check(x, weight, bias, activation) -> None:
    """Raises ValueError unless x [B, T, D], weight, bias and activation are those of a convolution."""
    check_choice("activation", activation, ACTIVATIONS)
    check_array("x", x, (None, None, None), "B T D")
    check_floating("x", x)
    D = x.shape[2]
    check_array("weight", weight, (D, None), "D W")
    check_floating("weight", weight)
    if not MIN_WIDTH <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(f"weight: expected width W = {MIN_WIDTH} to {MAX_WIDTH}, got {weight.shape[1]}")
    if bias is not None:
        check_array("bias", bias, (D,), "D")
        check_floating("bias", bias)
