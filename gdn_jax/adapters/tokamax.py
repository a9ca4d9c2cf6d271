"""Kimi Delta Attention as tokamax calls it, and an implementation of ours in its table.

    from gdn_jax.adapters import tokamax

    op = tokamax.register()        # tokamax's table now has "mosaic_gpu"
    o, final_state = op(query, key, value, gate, beta, output_final_state=True)

tokamax lists a row's sequences by `segment_ids` from 1, and a state for each. Here tokens are put into the order of
their sequences, run as packed ones, and put back.
"""

import functools
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax import channel_log_decay, delta_rule
from gdn_jax.adapters.arguments import named
from gdn_jax.shapes import (
    ArgumentError,
    Scale,
    check_array,
    check_choice,
    check_floating,
    check_integer,
    widened,
)

IMPLEMENTATIONS = ("mosaic_gpu", "chunked", "recurrent")
"""Implementations of `delta_rule` that may be registered."""


def register(implementation: str = "mosaic_gpu") -> Any:
    """Enters an implementation of `delta_rule` into tokamax's table for `kimi_delta_attention`, under its name.

    Args:
      implementation: "mosaic_gpu", or for a device without its kernels "chunked" or "recurrent".

    Returns:
      The operation, a `tokamax` Op that is called with the arguments of `tokamax.ops.kimi_delta_attention`. That
      function takes the name too where `JAXTYPING_DISABLE=1` switches its type checks off: its annotation knows only
      tokamax's own names.

    Raises:
      ValueError: there is no such implementation.
      ModuleNotFoundError: tokamax is not installed.

    Source: tokamax 0.0.17.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    public = import_module("tokamax.ops").kimi_delta_attention
    # The table has no public name; it lies beside the public function.
    table = import_module(public.__module__).IMPLEMENTATIONS
    Reference = type(
        table["xla"]
    )  # binds and checks arguments, and makes the derivative of what `_fwd` computes

    class GatedDeltaRuleKimiDeltaAttention(Reference):
        """`kimi_delta_attention` of gdn_jax."""

        @functools.wraps(Reference._fwd)
        def _fwd(self, *tokens, config, return_residuals, **options):
            return kimi_delta_attention(*tokens, **options, implementation=implementation), None

    table[implementation] = GatedDeltaRuleKimiDeltaAttention()
    return table[implementation]


def kimi_delta_attention(
    query: Float[Array, "H B T K"],
    key: Float[Array, "H B T K"],
    value: Float[Array, "H B T V"],
    gate: Float[Array, "H B T K"],
    beta: Float[Array, "H B T"],
    *,
    a_log: Float[Array, " H"] | None = None,
    delta_time_bias: Float[Array, " HK"] | None = None,
    scale: Scale | None = None,
    initial_state: Float[Array, "B N H K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    use_gate_in_kernel: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    lower_bound: float | None = None,
    context_parallel_metadata: Any = None,
    max_num_segments: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "H B T V"], Float[Array, "B N H K V"] | None]:
    """tokamax's `kimi_delta_attention` by `delta_rule`.

    Args:
      query, key, gate: [H, B, T, K]. value: [H, B, T, V]. beta: [H, B, T]. query, key and value have one dtype.
      gate: log decay, or its raw input.
      a_log, delta_time_bias, lower_bound: [H], [H * K] (None for 0) and a number or None, parameters of
        `channel_log_decay`; they are read only with use_gate_in_kernel.
      scale: factor of the output, K ** -0.5 by default.
      initial_state: [B, N, H, K, V], a state for each of a row's sequences; None for zeros.
      output_final_state: whether the second result is the final states; None else.
      use_qk_l2norm: replaces query and key by x * rsqrt(sum(x^2) + 1e-6).
      use_gate_in_kernel: gate is the raw input of `channel_log_decay`.
      segment_ids: [B, T] integers: token t of row b is of sequence segment_ids[b, t] - 1, and one of 0 or above N is
        padding. Without them a row is one sequence, which has state 0.
      context_parallel_metadata: None, or one that is not enabled.
      max_num_segments: N, with segment_ids and no initial_state.
      implementation: of `delta_rule`.

    Returns:
      o [H, B, T, V] in query's dtype, 0 at padding, and the final states [B, N, H, K, V] in float32 (float64 for
      such a query), or None.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: context_parallel_metadata is enabled, or the named implementation cannot run this call.

    Source: tokamax 0.0.17, `tokamax.ops.kimi_delta_attention`.
    """
    if getattr(context_parallel_metadata, "is_cp_enabled", False):
        raise NotImplementedError(
            "context_parallel_metadata: expected None or one that is not enabled; for tokens split over devices use "
            "gdn_jax.parallel.context.delta_rule"
        )
    check_array("query", query, (None,) * 4, "H, B, T, K")
    H, B, T, K = query.shape
    for name, x in (("key", key), ("gate", gate)):
        check_array(name, x, (H, B, T, K), "H, B, T, K")
    check_array("value", value, (H, B, T, None), "H, B, T, V")
    check_array("beta", beta, (H, B, T), "H, B, T")
    q, k, v, g, strength = (jnp.moveaxis(x, 0, 2) for x in (query, key, value, gate, beta))
    if use_gate_in_kernel:
        if a_log is None:
            raise ArgumentError("a_log", "an array [H] with use_gate_in_kernel", "None")
        bias = jnp.zeros((H, K), jnp.float32) if delta_time_bias is None else delta_time_bias
        check_array("delta_time_bias", bias.reshape(-1), (H * K,), "H * K")
        check_array("a_log", a_log, (H,), "H")
        g = channel_log_decay(g, a_log, bias.reshape(H, K), lower_bound)
    rule = functools.partial(
        delta_rule, scale=scale, use_qk_l2norm=use_qk_l2norm, implementation=implementation
    )
    if initial_state is not None:
        check_array("initial_state", initial_state, (B, None, H, K, v.shape[-1]), "B, N, H, K, V")
    N = _number_of_states(segment_ids, initial_state, max_num_segments)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    states = jnp.zeros((B, N, H, K, v.shape[-1]), dtype)
    if initial_state is not None:
        states = jnp.asarray(initial_state, dtype)
    with named(q="query", k="key", v="value", g="gate"):
        if segment_ids is None:
            o, final = rule(q, k, v, g, strength, initial_state=states[:, 0])
            states = states.at[:, 0].set(final.astype(dtype))
        else:
            check_array("segment_ids", segment_ids, (B, T), "B, T")
            check_integer("segment_ids", segment_ids)
            o, states = _by_sequence(rule, (q, k, v, g, strength), states, segment_ids)
    return jnp.moveaxis(o, 2, 0), states if output_final_state else None


def _number_of_states(segment_ids: Any, initial_state: Any, max_num_segments: int | None) -> int:
    if initial_state is not None:
        check_array("initial_state", initial_state, (None,) * 5, "B, N, H, K, V")
        check_floating("initial_state", initial_state)
    given = None if initial_state is None else initial_state.shape[1]
    if None not in (given, max_num_segments) and given != max_num_segments:
        raise ArgumentError("max_num_segments", f"initial_state's {given} or None", max_num_segments)
    if given is None and segment_ids is not None:
        if max_num_segments is None:
            raise ArgumentError("max_num_segments", "a number with segment_ids and no initial_state", "None")
        return max_num_segments
    return 1 if given is None else given


def _by_sequence(
    rule: Any, tokens: tuple[jax.Array, ...], states: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rule with a state for every sequence of every row: they are packed one after another, padding last."""
    B, N = states.shape[:2]
    segment_ids = widened(segment_ids)
    is_token = (segment_ids > 0) & (segment_ids <= N)
    sequence = jnp.where(is_token, jnp.arange(B)[:, None] * N + segment_ids - 1, B * N).reshape(-1)
    order = jnp.argsort(sequence, stable=True)
    cu_seqlens = jnp.searchsorted(sequence[order], jnp.arange(B * N + 1)).astype(jnp.int32)
    packed = (x.reshape(1, -1, *x.shape[2:])[:, order] for x in tokens)
    o, final = rule(*packed, initial_state=states.reshape(B * N, *states.shape[2:]), cu_seqlens=cu_seqlens)
    o = jnp.zeros_like(o).at[:, order].set(o).reshape(*segment_ids.shape, *o.shape[2:])
    return o, final.reshape(states.shape).astype(states.dtype)
