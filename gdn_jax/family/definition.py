"""The recurrence, token by token: the definition of the family. Changing this file changes the maths.

S   <- Diag(exp(g)) S           decay first, each key channel by its own
u    = write * v - S^T (erase * k)
S   <- S + k u^T
o    = scale S^T q              read after the write

With g equal in all channels and erase = write = beta this is `gdn_jax.reference`, the gated delta rule.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.reference import scan_tokens
from gdn_jax.shapes import split_heads


def recurrent_step(
    S: Float[Array, "*H K V"],
    q: Float[Array, "*Hq K"],
    k: Float[Array, "*Hk K"],
    v: Float[Array, "*HV V"],
    g: Float[Array, "*H K"],
    erase: Float[Array, "*H _"],
    write: Float[Array, "*H _"],
    *,
    scale: float | Float[Array, ""],
) -> tuple[Float[Array, "*H K V"], Float[Array, "*H V"]]:
    """One token of the rule. Leading axes broadcast: an input shared by several heads has size 1 there.

        S <- Diag(exp(g)) S;   u = write * v - S^T (erase * k);   S <- S + k u^T;   o = scale S^T q

    Args:
      S: states before the token [.., K, V], in the dtype that all is computed in.
      q, k, v: query, key and value [.., K], [.., K] and [.., V].
      g: log decay of each key channel [.., K], <= 0; -inf clears the channel.
      erase: strength of what is erased, of each key channel [.., K] or one number [.., 1].
      write: strength of what is written, of each value channel [.., V] or one number [.., 1].
      scale: factor of the output.

    Returns:
      The new state and the output, in the dtype of S.
    """
    einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    S = jnp.exp(g)[..., None] * S
    u = write * v - einsum("...k,...kv->...v", erase * k, S)
    S = S + k[..., :, None] * u[..., None, :]
    return S, scale * einsum("...k,...kv->...v", q, S)


def recurrent_rule(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO K"],
    erase: Float[Array, "B T HO _"],
    write: Float[Array, "B T HO _"],
    initial_state: Float[Array, "N HO K V"] | None,
    *,
    scale: float | Float[Array, ""],
    cu_seqlens: Int[Array, "N1"] | None = None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
    """The rule over T tokens by `lax.scan`, in the dtype of g (float32 or float64).

    Args:
      q, k, v: queries, keys and values, whose heads divide HO, of any floating dtype.
      g: log decay <= 0 of each key channel [B, T, HO, K], in the dtype that all is computed in.
      erase: [B, T, HO, K] or [B, T, HO, 1], in that dtype.
      write: [B, T, HO, V] or [B, T, HO, 1], in that dtype.
      initial_state: states before the first token, in that dtype; None: zeros.
      scale: factor of the output.
      cu_seqlens: where packed sequences begin, as for `reference.recurrent_rule`.

    Returns:
      o [B, T, HO, V] and the final states [N, HO, K, V], in the dtype of g.
    """
    HO, V = g.shape[2], v.shape[3]
    counts = (q.shape[2], k.shape[2], v.shape[2], HO)
    tokens = [
        jnp.moveaxis(split_heads(x.astype(g.dtype), 2, counts), 1, 0) for x in (q, k, v, g, erase, write)
    ]
    if initial_state is None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = jnp.zeros_like(g, shape=(N, HO, q.shape[3], V))
    states = split_heads(initial_state, 1, counts)
    final, o = scan_tokens(partial(recurrent_step, scale=scale), states, tokens, cu_seqlens)
    return o.reshape(*q.shape[:2], HO, V), final.reshape(initial_state.shape)
