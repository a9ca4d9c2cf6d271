"""Erase-then-Delta Attention: a token erases at one key and writes at another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.rule.arguments import known_lengths
from gdn_jax.rule.call import ERASURES, Arrays, Call, gates_of
from gdn_jax.rule.halves import read, with_strengths
from gdn_jax.rule.ops import delta_step, on_shards, program
from gdn_jax.rule.product import in_steps
from gdn_jax.shapes import (
    AnyLogDecay,
    AnyStates,
    ArgumentError,
    Keys,
    KnownOffsets,
    Outputs,
    Queries,
    Scale,
    SegmentIds,
    Strength,
    Values,
    check_array,
    check_channels,
    check_floating,
    check_packing,
)


def erase_then_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: AnyLogDecay | None = None,
    beta: Strength | None = None,
    erase_key: Keys | None = None,
    erase_strength: Strength | None = None,
    *,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Outputs, AnyStates]:
    """Erase-then-Delta Attention (EDA) over whole sequences: decay, erase at e, then the delta write at k.

        S <- Diag(exp(g)) S;   S <- S - gamma e (S^T e)^T;   u = beta (v - S^T k);   S <- S + k u^T;   o = scale S^T q

    With an erase strength of 0 it is Kimi Delta Attention, and with e = k a stronger correction at one key. A token
    becomes two of `delta_rule`: the first decays and writes no value, the second is read.

    Args:
      q, k, v, g, beta: as for `delta_rule`.
      erase_key: e [B, T, Hk, K] in k's dtype, of the keys' heads; None for k.
      erase_strength: gamma [B, T, HO], in [0, 1], or [0, 2] with negative eigenvalues; None for 1.
      scale, initial_state, cu_seqlens, segment_ids, state_layout, implementation: as for `delta_rule`. Positions of
        cu_seqlens count tokens.
      chunk_size: as for `delta_rule`, of which a token has two.
      use_qk_l2norm: brings q, k and e to unit length.

    Returns:
      o [B, T, HO, V] and the final states, as `delta_rule`.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Source: Qwen Team, "Erase-then-Delta Attention" (arXiv 2606.26560).
    """
    known_lengths(cu_seqlens, k.shape[1])
    erasure = erase_key, erase_strength
    x = ErasingArrays(q, k, v, g, beta, *erasure, initial_state, cu_seqlens, segment_ids)
    call = Call(use_qk_l2norm, state_layout, ERASURES, chunk_size)

    def run(call: Call, x: Arrays) -> tuple[Outputs, AnyStates]:
        return on_shards(*program(call, x, scale, implementation))

    return erase_then_delta_by(run, call, x)


class ErasingArrays(NamedTuple):
    """Array arguments of one call of `erase_then_delta_rule`, as the caller gave them."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    erase_key: Any
    erase_strength: Any
    initial_state: Any
    cu_seqlens: Any
    segment_ids: Any

    def filled(self) -> "ErasingArrays":
        """The same with what stands for keys and strengths that are None.

        Raises:
          ValueError: an argument is wrong.
        """
        q, k, v, g, beta, key, strength, _, cu_seqlens, ids = self
        check_array("k", k, (None,) * 4, "B, T, Hk, K")
        (B, T), K = k.shape[:2], k.shape[3]
        check_array("q", q, (B, T, None, K), "B, T, Hq, K")
        check_array("v", v, (B, T, None, None), "B, T, HV, V")
        HO = max(q.shape[2], v.shape[2])
        _check_tokens(g, beta, key, strength, k, (B, T, HO), "B, T, ")
        check_packing(B, T, cu_seqlens, ids)
        one = jnp.ones((B, T, HO), jnp.float32)
        return self._replace(
            beta=one if beta is None else beta,
            erase_key=k if key is None else key,
            erase_strength=one if strength is None else strength,
        )

    def in_rows(self) -> Arrays:
        """A call of `delta_rule` whose tokens are both halves of these, `filled`: each second one is read."""
        q, k, v, g, beta, key, strength, *rest = self
        keys, values = jnp.stack([key, k], axis=2), jnp.stack([jnp.zeros_like(v), v], axis=2)
        dtype = jnp.result_type(strength, beta)
        strengths = jnp.stack([strength.astype(dtype), beta.astype(dtype)], axis=2)
        return in_steps(Arrays(q, keys, values, g, strengths, None, *rest))

    def at_once(self) -> Arrays:
        """A call with gates `ERASURES`, of what is `filled`."""
        q, k, v, g, beta, key, strength, *rest = self
        return Arrays(q, k, v, g, with_strengths(strength, beta), key, *rest)


def erase_then_delta_by(
    run: Callable[[Call, Arrays], tuple[Outputs, AnyStates]],
    call: Call,
    x: ErasingArrays,
    *,
    in_rows: bool = False,
) -> tuple[Outputs, AnyStates]:
    """`erase_then_delta_rule` by run(call, x), a call of the rule; it checks the arrays.

    Args:
      in_rows: whether both halves of a token become tokens of `delta_rule`, as they do without per-channel decay.
    """
    x = x.filled()
    if x.g is not None and x.g.ndim == 4 and not in_rows:
        return run(call, x.at_once())
    rows = x.in_rows()
    o, state = run(call._replace(gates=gates_of(rows, rows.erase)), rows)
    return read(o), state


def erase_then_delta_step(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HO"] | Float[Array, "B HO K"] | None,
    beta: Float[Array, "B HO"] | None,
    erase_key: Float[Array, "B Hk K"] | None,
    erase_strength: Float[Array, "B HO"] | None,
    state: Float[Array, "B HO _ _"],
    *,
    scale: Scale | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
) -> tuple[Float[Array, "B HO V"], Float[Array, "B HO _ _"]]:
    """One token of `erase_then_delta_rule`: the step of generation.

    Args:
      q, k, v, g, beta, erase_key, erase_strength: as for `erase_then_delta_rule`, without the token axis.
      state: as for `delta_step`.
      scale, use_qk_l2norm, state_layout: as for `delta_step`.

    Returns:
      o [B, HO, V] in q's dtype and the new state in state's own dtype.

    Raises:
      ValueError: an argument is wrong.

    Numerics: as `delta_step`; the state between both halves has the state's dtype.
    """
    check_array("k", k, (None,) * 3, "B, Hk, K")
    check_array("v", v, (k.shape[0], None, None), "B, HV, V")
    check_array("q", q, (k.shape[0], None, k.shape[2]), "B, Hq, K")
    tokens = k.shape[0], max(q.shape[1], v.shape[1])
    _check_tokens(g, beta, erase_key, erase_strength, k, tokens, "B, ")
    options: dict[str, Any] = dict(scale=scale, use_qk_l2norm=use_qk_l2norm, state_layout=state_layout)
    e = k if erase_key is None else erase_key
    _, state = delta_step(q, e, jnp.zeros_like(v), g, erase_strength, state, **options)
    return delta_step(q, k, v, None, beta, state, **options)


def _check_tokens(g, beta, erase_key, erase_strength, k, tokens: tuple, letters: str) -> None:
    """Raises ValueError for a shape or a dtype of a gate or of the erase key."""
    for name, y in (("beta", beta), ("erase_strength", erase_strength)):
        if y is not None:
            check_array(name, y, tokens, f"{letters}HO")
            check_floating(name, y)
    if g is not None:
        check_channels("g", g, tokens, k.shape[-1], f"{letters}HO, K")
    if erase_key is not None:
        check_array("erase_key", erase_key, k.shape, f"{letters}Hk, K")
        if erase_key.dtype != k.dtype:
            raise ArgumentError("erase_key", f"k's dtype {k.dtype}", erase_key.dtype)
