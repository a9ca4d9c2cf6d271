"""The family's public operations: check the arguments, choose an implementation, call it. No maths here."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gdn_jax.family import forms, mosaic
from gdn_jax.family.arrays import Arrays, array_names, rule_axes
from gdn_jax.ops import (
    check_arrays,
    check_keys,
    check_layout,
    check_scale,
    check_values,
    chunk_states,
    debug_checks_are_on,
    gated_delta_rule,
    known_lengths,
)
from gdn_jax.partitioning import expected_shards, on_explicit_shards, vary_alike, warn_of_gathers
from gdn_jax.shapes import (
    AnyStates,
    ArgumentError,
    Dims,
    Keys,
    KnownOffsets,
    Outputs,
    Queries,
    RuleArrays,
    Scale,
    SegmentIds,
    Strength,
    Values,
    check_array,
    check_channels,
    check_flags,
    check_floating,
    check_packing,
    widened,
)
from gdn_jax.xla import Call

IMPLEMENTATIONS = ("mosaic_gpu", "chunked", "recurrent")
"""Names of the implementations for gates or strengths of each channel, fastest first."""


def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None = None,
    beta: Strength | None = None,
    *,
    erase: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None = None,
    write: Float[Array, "B T HO"] | Float[Array, "B T HO V"] | None = None,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Outputs, AnyStates]:
    """The delta rule over whole sequences, with a decay of each key channel, and erase and write apart.

        S <- Diag(exp(g)) S;   u = write * v - S^T (erase * k);   S <- S + k u^T;   o = scale S^T q

    With g of each head and beta this is `gated_delta_rule`, which then runs, to the bit. With g of each channel and
    beta it is Kimi Delta Attention (KDA), with erase and write of each channel Gated DeltaNet-2.

    Args:
      q, k, v: as for `gated_delta_rule`.
      g: log decay, natural logarithm, <= 0, -inf for a reset: of each head [B, T, HO], or of each key channel
        [B, T, HO, K]; None for no decay. Any decay is exact, however strong; there is no lower bound.
      beta: strength of both erasing and writing [B, T, HO], in [0, 1], or [0, 2] with negative eigenvalues; None
        for 1. It takes the place of erase and write: giving both is an error.
      erase: strength of what is erased [B, T, HO] or [B, T, HO, K]; None for 1.
      write: strength of what is written [B, T, HO] or [B, T, HO, V]; None for 1.
      scale, initial_state, cu_seqlens, segment_ids, use_qk_l2norm, state_layout, chunk_size: as for
        `gated_delta_rule`.
      implementation: as for `gated_delta_rule`. For gates or strengths of each channel "mosaic_mma" is refused, and
        "mosaic_gpu" takes K to 128; in float16 its derivative is that of the chunked form in plain JAX.

    Returns:
      o [B, T, HO, V] in q's dtype, and the final state of every sequence, float32 (float64 when an input is), in
      the layout of state_layout.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: see `family.definition.recurrent_rule` and `family.chunked.chunked_rule`. The output at a token does not
      depend on later gates, not even in its rounding.
    Source: Kimi Team, "Kimi Linear" (arXiv 2510.26692); fla's `chunk_kda` (same argument order, log gates).
    """
    apart = strengths(beta, erase, write)
    options: dict[str, Any] = dict(
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        use_qk_l2norm=use_qk_l2norm,
        state_layout=state_layout,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    if is_of_heads(g, erase, write):
        return gated_delta_rule(q, k, v, g, beta, **options)
    x = Arrays(q, k, v, g, *apart, initial_state, cu_seqlens, segment_ids)
    check_flags(use_qk_l2norm=use_qk_l2norm)
    dims, scale, implementation = check_call(x, scale, state_layout, chunk_size, implementation)
    by_kernels, results = implementation == "mosaic_gpu", rule_axes(x).outputs
    known = known_lengths(cu_seqlens, dims.T, always=by_kernels)
    is_beta = apart[0] is apart[1] and getattr(apart[0], "ndim", 3) == 3
    x = _checked(x, dims, use_qk_l2norm)
    if not by_kernels:
        call = Call(use_qk_l2norm, state_layout, implementation, chunk_size)
        return _on_shards(forms.rule, call, results, x, scale)
    x = x._replace(write=None) if is_beta else x
    kernels_call = mosaic.Call(use_qk_l2norm, state_layout, known, is_beta, expected_shards(x))
    return _on_shards(mosaic.rule, kernels_call, results, x, scale)


def delta_step(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HO"] | Float[Array, "B HO K"] | None,
    beta: Float[Array, "B HO"] | None,
    state: Float[Array, "B HO _ _"],
    *,
    erase: Float[Array, "B HO"] | Float[Array, "B HO K"] | None = None,
    write: Float[Array, "B HO"] | Float[Array, "B HO V"] | None = None,
    scale: Scale | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
) -> tuple[Float[Array, "B HO V"], Float[Array, "B HO _ _"]]:
    """One token of `delta_rule`: the step of generation.

    Args:
      q, k, v, g, beta, erase, write: as for `delta_rule`, without the token axis.
      state: [B, HO, K, V], or [B, HO, V, K] with state_layout "vk", of any floating dtype.
      scale, use_qk_l2norm, state_layout: as for `delta_rule`.

    Returns:
      o [B, HO, V] in q's dtype and the new state in state's own dtype; computed in float32 (float64 when an input
      is).

    Raises:
      ValueError: an argument is wrong.
    """
    for name, y in (("q", q), ("k", k), ("v", v)):
        check_array(name, y, (None,) * 3, "B, heads, width")
    for name, y in (("g", g), ("beta", beta), ("erase", erase), ("write", write)):
        if y is not None and (name == "beta" or getattr(y, "ndim", None) != 3):
            check_array(name, y, (None,) * 2, "B, HO")
            check_floating(name, y)
    *tokens, beta, erase, write = (
        None if y is None else y[:, None] for y in (q, k, v, g, beta, erase, write)
    )
    x = Arrays._make((*tokens, *strengths(beta, erase, write), None, None, None))
    check_flags(use_qk_l2norm=use_qk_l2norm)
    dims = _check(x, state_layout, 64, None)
    shape, letters = ((dims.K, dims.V), "K, V") if state_layout == "kv" else ((dims.V, dims.K), "V, K")
    check_array("state", state, (dims.B, dims.HO, *shape), f"B, HO, {letters}")
    check_floating("state", state)
    x = x._replace(initial_state=state)
    results = "b h v", rule_axes(x).inputs.initial_state
    return _on_shards(forms.step, Call(use_qk_l2norm, state_layout), results, x, check_scale(scale, dims))


def delta_chunk_states(
    k: Keys,
    v: Values,
    g: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None = None,
    beta: Strength | None = None,
    *,
    erase: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None = None,
    write: Float[Array, "B T HO"] | Float[Array, "B T HO V"] | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_k_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
) -> Float[Array, "B L HO _ _"]:
    """The state at the start of every chunk, as a differentiable result.

    With g of each head and beta this is `chunk_states`, to the bit.

    Args: those of `delta_rule`; HO is the head count of g or of a strength where given, else max(Hk, HV).
      use_k_l2norm: normalises k.

    Returns:
      h [B, L, HO, K, V] (or [.., V, K]), as `chunk_states` returns them.

    Raises:
      ValueError: an argument is wrong.
    """
    if is_of_heads(g, erase, write):
        sequences = dict(initial_state=initial_state, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
        options = dict(use_k_l2norm=use_k_l2norm, state_layout=state_layout, chunk_size=chunk_size)
        return chunk_states(k, v, g, beta, **sequences, **options)
    for name, y in (("k", k), ("v", v)):
        check_array(name, y, (None,) * 4, "B, T, heads, width")
    for name, y in (("g", g), ("erase", erase), ("write", write)):
        if y is not None and getattr(y, "ndim", None) != 3:
            check_array(name, y, (None,) * 4, "B, T, HO, channels")
    erase, write = strengths(beta, erase, write)
    HO = next((y.shape[2] for y in (g, erase, write) if y is not None), max(k.shape[2], v.shape[2]))
    q = jax.ShapeDtypeStruct((*k.shape[:2], HO, k.shape[3]), k.dtype)
    x = Arrays(q, k, v, g, erase, write, initial_state, cu_seqlens, segment_ids)
    check_flags(use_k_l2norm=use_k_l2norm)
    dims = _check(x, state_layout, chunk_size, None)
    call = Call(use_k_l2norm, state_layout, chunk_size=chunk_size)
    return _on_shards(forms.chunk_states, call, "b . h . .", _checked(x._replace(q=None), dims, use_k_l2norm))


def gated_delta_product(
    q: Queries,
    k: Float[Array, "B T n Hk K"],
    v: Float[Array, "B T n HV V"],
    g: Float[Array, "B T HO"] | None = None,
    beta: Float[Array, "B T n HO"] | None = None,
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
    """Gated DeltaProduct: n steps of the delta rule for every token.

        S <- exp(g) S;   n times: u_i = beta_i (v_i - k_i^T S), S <- S + k_i u_i^T;   o = scale q^T S

    The steps become a sequence of n T tokens that the gated delta rule computes: only the first step of a token
    decays, and its last one is read. With n = 1 this is `gated_delta_rule`, to the bit.

    Args:
      q: queries [B, T, Hq, K].
      k, v: keys [B, T, n, Hk, K] and values [B, T, n, HV, V] of every step.
      g: log decay of every token [B, T, HO]; None for no decay.
      beta: strength of every step [B, T, n, HO], in [0, 2] for products of reflections; None for 1.
      The other arguments: as for `gated_delta_rule`. Positions of cu_seqlens count tokens.

    Returns:
      o [B, T, HO, V] and the final states, as `gated_delta_rule`.

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Source: Siems et al., "DeltaProduct" (arXiv 2502.10297); fla's `chunk_gated_delta_product`.
    """
    check_array("k", k, (None,) * 5, "B, T, n, Hk, K")
    check_array("q", q, (*k.shape[:2], None, k.shape[4]), "B, T, Hq, K")
    B, T, n = k.shape[:3]
    check_array("v", v, (B, T, n, None, None), "B, T, n, HV, V")
    if n < 1:
        raise ArgumentError("k", "at least one step", list(k.shape))
    HO = max(q.shape[2], v.shape[3])
    for name, y, shape, letters in (
        ("g", g, (B, T, HO), "B, T, HO"),
        ("beta", beta, (B, T, n, HO), "B, T, n, HO"),
    ):
        if y is not None:
            check_array(name, y, shape, letters)
    check_packing(B, T, cu_seqlens, segment_ids)
    known_lengths(cu_seqlens, T)

    options: dict[str, Any] = dict(
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm,
        state_layout=state_layout,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    return product_by(gated_delta_rule, q, k, v, g, beta, cu_seqlens, segment_ids, **options)


def product_by(
    rule: Callable[..., Any],
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    cu_seqlens: Any,
    ids: Any,
    **options: Any,
) -> tuple[Outputs, AnyStates]:
    """`gated_delta_product` by a gated delta rule of n T tokens; the arguments are not checked."""
    B, T, n = k.shape[:3]

    def steps(x: jax.Array) -> jax.Array:
        return x.reshape(B, T * n, *x.shape[3:])

    def at(x: jax.Array, step: int) -> jax.Array:
        return x if n == 1 else steps(jnp.zeros((B, T, n, *x.shape[2:]), x.dtype).at[:, :, step].set(x))

    o, state = rule(
        at(q, n - 1),
        steps(k),
        steps(v),
        None if g is None else at(g, 0),
        None if beta is None else steps(beta),
        cu_seqlens=None if cu_seqlens is None else widened(cu_seqlens) * n,
        segment_ids=None if ids is None else jnp.repeat(ids, n, 1),
        **options,
    )
    return o[:, n - 1 :: n], state


def is_of_heads(g: Any, erase: Any, write: Any) -> bool:
    """Whether `gated_delta_rule` is what these gates ask for."""
    return erase is None and write is None and (g is None or getattr(g, "ndim", 3) == 3)


def check_call(
    x: Arrays, scale: Any, state_layout: str, chunk_size: int, implementation: str | None
) -> tuple[Dims, Any, str]:
    """Dimensions, scale and implementation of a call of `delta_rule` with gates of each channel.

    Raises:
      ValueError, NotImplementedError: as `delta_rule`.
    """
    dims = _check(x, state_layout, chunk_size, implementation)
    scale, reason = check_scale(scale, dims), None
    if implementation in (None, "mosaic_gpu"):
        reason = mosaic.check_supported(dims, x, chunk_size=chunk_size)
    elif implementation not in IMPLEMENTATIONS:
        reason = "its kernels have no gates or strengths of each channel"
    if implementation is None:
        return dims, scale, IMPLEMENTATIONS[0 if reason is None else 1]
    if reason is not None:
        raise NotImplementedError(f"implementation {implementation!r}: {reason}")
    return dims, scale, implementation


def strengths(beta: Any, erase: Any, write: Any) -> tuple[Any, Any]:
    """The two strengths, which beta stands for."""
    if beta is None:
        return erase, write
    check_array("beta", beta, (None,) * 3, "B, T, HO")
    check_floating("beta", beta)
    if erase is not None or write is not None:
        raise ArgumentError("beta", "None where erase or write is given, since it stands for both", "both")
    return beta, beta


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _on_shards(form: Callable[..., Any], call: Call | mosaic.Call, results: Any, x: Arrays, *scale):
    """form(call, x, *scale), compiled as a whole, on the shards of arrays that lie on explicit axes of a mesh."""
    axes = rule_axes(x)
    operands = array_names(x, axes), *jax.tree.map(lambda _: "", scale)
    return on_explicit_shards(partial(form, call), (x, *scale), operands, results, axes.sizes)


def _check(x: Arrays, state_layout: str, chunk_size: int, implementation: str | None) -> Dims:
    """Dimensions of a call whose arguments can be used."""
    rest = x.initial_state, x.cu_seqlens, x.segment_ids
    dims = check_arrays(
        RuleArrays(x.q, x.k, x.v, None, None, *rest), state_layout, chunk_size, implementation
    )
    B, T, HO = dims.B, dims.T, dims.HO
    for name, y, width, letter in (
        ("g", x.g, dims.K, "K"),
        ("beta" if x.erase is x.write else "erase", x.erase, dims.K, "K"),  # which stands for both
        ("write", x.write, dims.V, "V"),
    ):
        if y is not None:
            check_channels(name, y, (B, T, HO), width, f"B, T, HO, {letter}")
    return dims


def _checked(x: Arrays, dims: Dims, normalises: bool) -> Arrays:
    """The arguments as arrays of JAX that vary alike; values are checked as `debug_checks` says."""
    known_lengths(x.cu_seqlens, dims.T)
    if debug_checks_are_on():
        check_layout(dims)
        check_values(dims.T, x.g, x.cu_seqlens)
        check_keys(None if normalises else x.k, x.erase)
        axes = rule_axes(x)
        arrays = [None if isinstance(y, jax.ShapeDtypeStruct | np.ndarray) else y for y in x]
        warn_of_gathers(x._fields, arrays, array_names(x, axes), axes.sizes)
    return vary_alike(
        x._replace(cu_seqlens=None if x.cu_seqlens is None else widened(jnp.asarray(x.cu_seqlens)))
    )
