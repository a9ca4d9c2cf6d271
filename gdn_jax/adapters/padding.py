"""The gated delta rule over rows whose padding leaves the state alone, as adapters call it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn_jax import gated_delta_rule
from gdn_jax.adapters.arguments import named
from gdn_jax.shapes import Keys, LogDecay, Outputs, Queries, States, Strength, Values, check_array

Mask = Bool[Array, "B T"] | Int[Array, "B T"] | Float[Array, "B T"]


def masked_rule(
    query: Queries,
    key: Keys,
    value: Values,
    g: LogDecay,
    beta: Strength,
    initial_state: States | None,
    mask: Mask | None,
    mask_name: str = "attention_mask",
    **options: Any,
) -> tuple[Outputs, States]:
    """`gated_delta_rule` with query, key and value as the caller names them, and with unit keys and queries.

    Args:
      query, key, value, g, beta, initial_state, options: as for `gated_delta_rule`.
      mask: [B, T], 0 or False at padding, on either side: the state passes through, and the output is 0.
      mask_name: the caller's name of it, for errors.
    """
    if mask is not None:
        check_array(mask_name, mask, query.shape[:2], "B, T")
        for name, x in (("query", query), ("key", key), ("value", value)):  # where() would broadcast them
            check_array(name, x, (*mask.shape, None, None), "B, T, heads, width")
        for name, x in (("g", g), ("beta", beta)):
            check_array(name, x, (*mask.shape, None), "B, T, HV")
        is_token = mask.astype(bool)[..., None]
        # A token that decays nothing and writes nothing. Padding may hold anything, so values go too.
        g, beta = (jnp.where(is_token, x, 0) for x in (g, beta))
        query, key, value = (jnp.where(is_token[..., None], x, 0) for x in (query, key, value))
    with named(q="query", k="key", v="value"):
        return gated_delta_rule(
            query, key, value, g, beta, initial_state=initial_state, use_qk_l2norm=True, **options
        )
