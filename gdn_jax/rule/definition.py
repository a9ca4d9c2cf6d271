"""The recurrence, token by token: the definition of the rule. Changing this file changes the maths.

The gated delta rule (`recurrent_step`), with a decay and a strength of each head:

S   <- exp(g) S                 decay first
u    = beta (v - k^T S)         prediction error of the decayed state, gated
S   <- S + k u^T
o    = scale q^T S              read after the write

With per-channel decay, and with what is erased apart from what is written (`channel_step`):

S   <- Diag(exp(g)) S
u    = write * v - S^T (erase * k)
S   <- S + k u^T
o    = scale S^T q

With g equal in all channels and erase = write = beta the second is the first.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.shapes import (
    Keys,
    Offsets,
    Outputs,
    Queries,
    Scale,
    States,
    Strength,
    Values,
    split_heads,
)

# Tokens whose states the backward pass recomputes from one saved state: memory T / 64 + 64 states, not T.
_TOKENS_PER_CHECKPOINT = 64


def recurrent_step(
    S: Float[Array, "*H K V"],
    q: Float[Array, "*Hq K"],
    k: Float[Array, "*Hk K"],
    v: Float[Array, "*HV V"],
    g: Float[Array, "*H"],
    beta: Float[Array, "*H"],
    *,
    scale: Scale,
) -> tuple[Float[Array, "*H K V"], Float[Array, "*H V"]]:
    """One token of the rule. Leading axes broadcast: an input shared by several heads has size 1 there.

        S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

    Args:
      S: states before the token [.., K, V], in the dtype that all is computed in.
      q, k, v: query, key and value [.., K], [.., K] and [.., V].
      g: log decay [..], <= 0; -inf clears the state.
      beta: write strength [..].
      scale: factor of the output.

    Returns:
      The new state and the output, in the dtype of S.

    Source: the paper writes the transpose, S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T. The
      blog's code takes the error against the undecayed state, which is another rule.
    """
    einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    S = jnp.exp(g)[..., None, None] * S
    u = beta[..., None] * (v - einsum("...k,...kv->...v", k, S))
    S = S + k[..., :, None] * u[..., None, :]
    return S, scale * einsum("...k,...kv->...v", q, S)


def channel_step(
    S: Float[Array, "*H K V"],
    q: Float[Array, "*Hq K"],
    k: Float[Array, "*Hk K"],
    v: Float[Array, "*HV V"],
    g: Float[Array, "*H K"],
    erase: Float[Array, "*H _"],
    write: Float[Array, "*H _"],
    *,
    scale: Scale,
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
    q: Queries,
    k: Keys,
    v: Values,
    g: Float[Array, "B T HO *K"],
    beta: Strength | None = None,
    erase: Float[Array, "B T HO _"] | None = None,
    write: Float[Array, "B T HO _"] | None = None,
    initial_state: States | None = None,
    *,
    scale: Scale,
    cu_seqlens: Offsets | None = None,
) -> tuple[Outputs, States]:
    """The rule over T tokens by `lax.scan`, in the dtype of g (float32 or float64).

    A reset is a gate of -inf.

    Args:
      q, k, v: queries, keys and values, whose heads divide HO, of any floating dtype.
      g: log decay <= 0 [B, T, HO] with beta, and of each key channel [B, T, HO, K] with erase and write, in the dtype
        that all is computed in; so are the strengths.
      beta: write strength [B, T, HO] of the gated delta rule.
      erase, write: [B, T, HO, K] and [B, T, HO, V], or [B, T, HO, 1], in place of beta.
      initial_state: states before the first token, in that dtype; None: zeros.
      scale: factor of the output.
      cu_seqlens: where packed sequences begin, as for `gated_delta_rule`.

    Returns:
      o [B, T, HO, V] and the final states [N, HO, K, V], in the dtype of g.
    """
    HO, V = g.shape[2], v.shape[3]
    counts = (q.shape[2], k.shape[2], v.shape[2], HO)
    step, strengths = (channel_step, (erase, write)) if beta is None else (recurrent_step, (beta,))
    gates = (y for y in (g, *strengths) if y is not None)
    tokens = [jnp.moveaxis(split_heads(x.astype(g.dtype), 2, counts), 1, 0) for x in (q, k, v, *gates)]
    if initial_state is None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = jnp.zeros_like(g, shape=(N, HO, q.shape[3], V))
    states = split_heads(initial_state, 1, counts)
    final, o = scan_tokens(partial(step, scale=scale), states, tokens, cu_seqlens)
    return o.reshape(*q.shape[:2], HO, V), final.reshape(initial_state.shape)


def scan_tokens(
    step: Callable[..., tuple[jax.Array, jax.Array]],
    states: Float[Array, "N *H K V"],
    tokens: Sequence[Float[Array, "T B ..."]],
    cu_seqlens: Offsets | None,
) -> tuple[Float[Array, "N *H K V"], Float[Array, "B T *H V"]]:
    """A recurrence over the tokens of rows, or of packed sequences, by `lax.scan`.

    With cu_seqlens (B = 1) the scan walks the packed tokens, loads a sequence's initial state at its first token and
    stores the running state as its final one; a sequence without tokens keeps its initial state, tokens past the last
    one give 0.

    Args:
      step: maps a state and the inputs of one token to the next state and the output.
      states: states before the first token, of every row or sequence.
      tokens: the inputs, with their tokens along the first axis.
      cu_seqlens: where packed sequences begin.

    Returns:
      Final states and outputs.
    """
    if cu_seqlens is None:

        def token(S, x):
            return step(S, *x)

        final, o = _checkpointed_scan(token, states, tokens)
    else:
        positions = jnp.arange(tokens[0].shape[0])
        n = jnp.searchsorted(cu_seqlens, positions, side="right") - 1
        real = (n >= 0) & (n < states.shape[0])
        n = jnp.clip(n, 0, states.shape[0] - 1)
        first = real & (positions == cu_seqlens[n])

        def packed_token(carry, x):
            S, finals = carry
            n, first, real, *x = x
            S, o = step(jnp.where(first, finals[n], S), *x)
            finals = finals.at[n].set(jnp.where(real, S, finals[n]))
            return (S, finals), jnp.where(real, o, 0)

        # Padding is cleared before the scan: what it holds must not reach a gradient either.
        tokens = [jnp.where(real.reshape(-1, *(1,) * (x.ndim - 2)), x[:, 0], 0) for x in tokens]
        tokens = [n, first, real, *tokens]
        (_, final), o = _checkpointed_scan(packed_token, (jnp.zeros_like(states[0]), states), tokens)
        o = o[:, None]
    return final, jnp.moveaxis(o, 0, 1)


def _checkpointed_scan(f, carry, xs):
    """lax.scan whose backward pass keeps one carry per block of tokens and recomputes inside the block."""
    T = xs[0].shape[0]
    block = _TOKENS_PER_CHECKPOINT
    whole = T // block * block

    @jax.checkpoint
    def scan_block(carry, xs):
        return lax.scan(f, carry, xs)

    head = [x[:whole].reshape(T // block, block, *x.shape[1:]) for x in xs]
    carry, o_head = lax.scan(scan_block, carry, head)
    carry, o_tail = lax.scan(f, carry, [x[whole:] for x in xs])
    return carry, jnp.concatenate([o_head.reshape(whole, *o_tail.shape[1:]), o_tail])
