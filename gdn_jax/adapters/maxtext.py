"""The gated delta rule as MaxText's Qwen3-Next layer calls it: two functions to put into their places.

    from maxtext.models import qwen3
    from gdn_jax.adapters import maxtext

    qwen3.jax_chunk_gated_delta_rule = maxtext.jax_chunk_gated_delta_rule
    qwen3.jax_ar_gated_delta_rule = maxtext.jax_ar_gated_delta_rule

The layer repeats keys and queries to the value heads; heads that are not repeated are understood too.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax import gated_delta_rule, gated_delta_step
from gdn_jax.adapters.arguments import named
from gdn_jax.parallel import context
from gdn_jax.shapes import (
    Keys,
    LogDecay,
    Outputs,
    Queries,
    States,
    Strength,
    Values,
    check_array,
    check_floating,
)

NAMES = {"q": "query", "k": "key", "v": "value", "use_qk_l2norm": "use_qk_norm_in_gdn"}
"""MaxText's names of our arguments."""


def jax_chunk_gated_delta_rule(
    query: Queries,
    key: Keys,
    value: Values,
    g: LogDecay,
    beta: Strength,
    chunk_size: int = 64,
    initial_state: States | None = None,
    use_qk_norm_in_gdn: bool = False,
    cp_axis: str | tuple[str, ...] | None = None,
    compute_dtype: Any = jnp.bfloat16,
) -> tuple[Outputs, States | None]:
    """MaxText's `jax_chunk_gated_delta_rule`: the rule over whole rows.

    Args:
      query, key: [B, T, H, K]. value: [B, T, HV, V]. All are rounded to compute_dtype, as there.
      g: log decay [B, T, HV], read in float32 or wider. beta: write strength [B, T, HV], which is not rounded.
      chunk_size: 16, 32, 64 or 128.
      initial_state: [B, HV, K, V] of any floating dtype, None for zeros.
      use_qk_norm_in_gdn: replaces query and key by x * rsqrt(sum(x^2) + 1e-6), in float32.
      cp_axis: the mesh axis, or the only one of a tuple, over which tokens are split inside `jax.shard_map`.
      compute_dtype: dtype of the operands, and of the final state.

    Returns:
      o [B, T, HV, V] in query's dtype, and the final state in compute_dtype, or None without an initial state.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: cp_axis has several names.

    Numerics: sums and states in float32. With compute_dtype float32 the result equals MaxText's within
      rounding; with bfloat16 this function rounds less often.
    Source: maxtext 0.2.5, `maxtext.models.qwen3.jax_chunk_gated_delta_rule`.
    """
    rule = gated_delta_rule
    if cp_axis is not None:
        names = (cp_axis,) if isinstance(cp_axis, str) else tuple(cp_axis)
        if len(names) != 1:
            raise NotImplementedError(
                f"cp_axis: expected one mesh axis over which tokens are split, got {names}"
            )
        rule = partial(context.gated_delta_rule, axis_name=names[0])
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_array(name, x, (None,) * 4, "B, T, heads, width")
        check_floating(name, x)
    q, k, v = (x.astype(compute_dtype) for x in (query, key, value))
    with named(**NAMES):
        o, final_state = rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=initial_state,
            use_qk_l2norm=use_qk_norm_in_gdn,
            chunk_size=chunk_size,
        )
    return o.astype(query.dtype), None if initial_state is None else final_state.astype(compute_dtype)


def jax_ar_gated_delta_rule(
    query: Float[Array, "B 1 H K"],
    key: Float[Array, "B 1 H K"],
    value: Float[Array, "B 1 HV V"],
    g: Float[Array, "B 1 HV"],
    beta: Float[Array, "B 1 HV"],
    initial_state: States,
    use_qk_norm_in_gdn: bool = False,
    compute_dtype: Any = jnp.bfloat16,
) -> tuple[Float[Array, "B 1 HV V"], States]:
    """MaxText's `jax_ar_gated_delta_rule`: one token of every row.

    Args: as for `jax_chunk_gated_delta_rule`, with T = 1; initial_state is not None.

    Returns:
      o [B, 1, HV, V] in query's dtype, and the new state in float32.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.

    Source: maxtext 0.2.5, `maxtext.models.qwen3.jax_ar_gated_delta_rule`.
    """
    for name, x, letters in (
        ("query", query, "B, 1, H, K"),
        ("key", key, "B, 1, H, K"),
        ("value", value, "B, 1, HV, V"),
        ("g", g, "B, 1, HV"),
        ("beta", beta, "B, 1, HV"),
    ):  # tokens after the first would not be read
        check_array(name, x, tuple(1 if letter == "1" else None for letter in letters.split(", ")), letters)
        check_floating(name, x)
    check_array("initial_state", initial_state, (None,) * 4, "B, HV, K, V")
    check_floating("initial_state", initial_state)
    q, k, v = (x[:, 0].astype(compute_dtype) for x in (query, key, value))
    state = initial_state.astype(jnp.float32)
    with named(**NAMES, state="initial_state"):
        o, state = gated_delta_step(q, k, v, g[:, 0], beta[:, 0], state, use_qk_l2norm=use_qk_norm_in_gdn)
    return o[:, None].astype(query.dtype), state
