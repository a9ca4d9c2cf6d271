"""The public operations: check the arguments, choose an implementation, call it. No maths here.

Every operation is compiled as a whole, once for each set of shapes and options, also outside `jax.jit`; inside, it is
part of what is compiled there.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gdn_jax import mosaic, xla
from gdn_jax.partitioning import RuleAxes, expected_shards, on_explicit_shards, vary_alike, warn_of_gathers
from gdn_jax.shapes import (
    AnyStates,
    Dims,
    Keys,
    KnownOffsets,
    LogDecay,
    Number,
    Outputs,
    Queries,
    RuleArrays,
    Scale,
    SegmentIds,
    Strength,
    Values,
    accumulation_dtype,
    check_array,
    check_ascending,
    check_choice,
    check_flags,
    check_floating,
    real_number,
    rule_dims,
    widened,
)

IMPLEMENTATIONS = (*mosaic.KERNELS, "chunked", "recurrent")
"""Names of the implementations, fastest first."""

CHUNK_SIZES = (16, 32, 64, 128)

MOST_ERASED = 2.1
"""Largest beta |k|^2 that `debug_checks` lets through: 2, and what rounding adds to normalised keys of 16 bits."""

_debug_checks = False


def debug_checks(enabled: bool) -> None:
    """Switches checks on or off, for functions traced from now on. Off by default.

    Values: g <= 0, beta |k|^2 of about 2 at most (beyond it the state of the delta rule grows without bound, as where
    keys were not normalised), and cu_seqlens ascending. Known arrays are checked at once, with a ValueError; under
    jit they are checked on the host while the program runs, which raises there (jax reports it as a
    `JaxRuntimeError` that carries the ValueError's text) and costs a transfer per call. Layout: fewer tokens than
    heads, as where arrays are [B, heads, T, width], are a UserWarning; it may be right, so that there is none without
    `debug_checks`. Shardings: an argument that lies on a mesh along a dimension that the operation cannot split,
    tokens or heads that do not divide, is a UserWarning while the program is compiled.

    Args:
      enabled: whether they are on.
    """
    global _debug_checks
    _debug_checks = enabled


def debug_checks_are_on() -> bool:
    """Whether `debug_checks` are switched on."""
    return _debug_checks


def gated_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay | None = None,
    beta: Strength | None = None,
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
    """The gated delta rule over whole sequences.

        S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

    Args:
      q, k: queries [B, T, Hq, K] and keys [B, T, Hk, K], float16, bfloat16, float32 or float64. Tokens come before
        heads: arrays [B, heads, T, width] have legal shapes too where q, k and v have equally many heads. Keys should
        have norm at most about 1 (see use_qk_l2norm): the rule itself grows without bound where beta |k|^2 > 2. See
        `debug_checks` for both.
      v: values [B, T, HV, V], q's dtype. Hq, Hk and HV divide HO = max(Hq, HV); head i of the output reads head
        i // (HO // Hx) of each input. K and V from 1 to 256.
      g: log decay [B, T, HO], natural logarithm, <= 0, -inf for a full reset; None for no decay. For a linear
        decay alpha pass `log_decay_from_alpha(alpha)`.
      beta: write strength [B, T, HO], in [0, 1], or [0, 2] with negative eigenvalues; None for 1.
      scale: factor of the output, K ** -0.5 by default; 0.0 is legal. Every other number is another program; an array
        without dimensions is an argument of one.
      initial_state: state before the first token [N, HO, K, V] (or [N, HO, V, K]), None for zeros.
      cu_seqlens: [N + 1] ascending integers from 0; B = 1 and sequence n owns tokens [cu[n], cu[n + 1]). A
        sequence may be empty (its state passes through); tokens past cu[-1] are padding with output 0. Given as a
        NumPy array (or a JAX array that is not traced) the GPU kernels split their work by the true lengths.
      segment_ids: [B, T] integers; the state starts from zero at every change of id. The initial state feeds the
        first segment and the final state belongs to the last one. Exclusive with cu_seqlens. A NaN stays in its
        segment in the plain forms; in the kernels it reaches other segments of its row.
      use_qk_l2norm: replaces q and k by x * rsqrt(sum(x^2) + 1e-6).
      state_layout: "kv" for states [K, V], "vk" for [V, K] (FlashInfer's k-last, fla's `state_v_first`).
      chunk_size: tokens per chunk, one of 16, 32, 64, 128 (ignored by "recurrent"; on a CPU the chunked form computes
        long rows in chunks of at most 32).
      implementation: "recurrent", "chunked", "mosaic_gpu" (the kernels for compute capability 9.0) or "mosaic_mma"
        (those by mma.sync, K and V to 128, from 8.0 on: `docs/devices.md`), run exactly or refused; None for the
        fastest that supports the call on this device.

    Returns:
      o [B, T, HO, V] in q's dtype, and the final state of every sequence, float32 (float64 when an input is),
      in the layout of state_layout.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: see `reference.recurrent_rule` and `chunked.chunked_rule`.
    Source: fla's `chunk_gated_delta_rule` (same argument order, log gates). Its other keywords, such as
      `output_final_state`, are those of `gdn_jax.adapters.fla.chunk_gated_delta_rule`.
    """
    check_flags(use_qk_l2norm=use_qk_l2norm)
    x = RuleArrays(q, k, v, g, beta, initial_state, cu_seqlens, segment_ids)
    dims, scale, implementation = check_call(x, scale, state_layout, chunk_size, implementation)
    by_kernels = implementation in mosaic.KERNELS
    known = known_lengths(cu_seqlens, dims.T, always=by_kernels)
    x = _checked_values(x, dims, use_qk_l2norm)
    results = RuleAxes.of(x).outputs
    if by_kernels:
        call = mosaic.Call(use_qk_l2norm, state_layout, known, expected_shards(x), kernels=implementation)
        return _on_shards(mosaic.rule, call, results, x, scale)
    return _on_shards(
        xla.rule, xla.Call(use_qk_l2norm, state_layout, implementation, chunk_size), results, x, scale
    )


def check_call(
    x: RuleArrays, scale: Any, state_layout: str, chunk_size: int, implementation: str | None
) -> tuple[Dims, Number | jax.Array, str]:
    """Dimensions, scale and implementation of a call of `gated_delta_rule`.

    Raises:
      ValueError, NotImplementedError: as `gated_delta_rule`.
    """
    dims = check_arrays(x, state_layout, chunk_size, implementation)
    scale = check_scale(scale, dims)
    supported = _supported(dims, x, chunk_size)
    if implementation is None:
        implementation = next(name for name in IMPLEMENTATIONS if supported[name] is None)
    elif supported[implementation] is not None:
        raise NotImplementedError(f"implementation {implementation!r}: {supported[implementation]}")
    return dims, scale, implementation


def gated_delta_step(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HO"] | None,
    beta: Float[Array, "B HO"] | None,
    state: Float[Array, "B HO _ _"],
    *,
    scale: Scale | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
) -> tuple[Float[Array, "B HO V"], Float[Array, "B HO _ _"]]:
    """One token of the rule: the step of generation.

    Args:
      q, k, v, g, beta: as for `gated_delta_rule`, without the token axis.
      state: [B, HO, K, V], or [B, HO, V, K] with state_layout "vk", of any floating dtype.
      scale, use_qk_l2norm, state_layout: as for `gated_delta_rule`.

    Returns:
      o [B, HO, V] in q's dtype and the new state in state's own dtype; computed in float32 (float64 when an
      input is).

    Raises:
      ValueError: an argument is wrong.
    """
    check_flags(use_qk_l2norm=use_qk_l2norm)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x, (None,) * 3, "B, heads, width")
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            check_array(name, x, (None,) * 2, "B, HO")
    q, k, v = q[:, None], k[:, None], v[:, None]
    g, beta = (None if x is None else x[:, None] for x in (g, beta))
    dims = rule_dims(q, k, v, g, beta, None, None, None, state_layout)
    shape, letters = ((dims.K, dims.V), "K, V") if state_layout == "kv" else ((dims.V, dims.K), "V, K")
    check_array("state", state, (dims.B, dims.HO, *shape), f"B, HO, {letters}")
    check_floating("state", state)
    x = RuleArrays(q, k, v, g, beta, state, None, None)
    results = "b h v", RuleAxes.of(x).inputs.initial_state
    return _on_shards(xla.step, xla.Call(use_qk_l2norm, state_layout), results, x, check_scale(scale, dims))


def chunk_states(
    k: Keys,
    v: Values,
    g: LogDecay | None = None,
    beta: Strength | None = None,
    *,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_k_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
) -> Float[Array, "B L HO _ _"]:
    """The state at the start of every chunk, as a differentiable result, for those who study what is stored.

    Args:
      k, v, g, beta, initial_state, cu_seqlens, segment_ids, state_layout, chunk_size: as for `gated_delta_rule`;
        HO is the head count of g or beta where given, else max(Hk, HV).
      use_k_l2norm: normalises k.

    Returns:
      h [B, L, HO, K, V] (or [.., V, K]), float32 or float64, L = ceil(T / chunk_size). With cu_seqlens the chunks
      are those of `packing.packed_chunks(cu_seqlens, T, chunk_size)`, sequence after sequence.

    Raises:
      ValueError: an argument is wrong.
    """
    check_flags(use_k_l2norm=use_k_l2norm)
    for name, x in (("k", k), ("v", v)):
        check_array(name, x, (None,) * 4, "B, T, heads, width")
        check_floating(name, x)
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            check_array(name, x, (*k.shape[:2], None), "B, T, HO")
    HO = next((x.shape[-1] for x in (g, beta) if x is not None), max(k.shape[2], v.shape[2]))
    q = jax.ShapeDtypeStruct((*k.shape[:2], HO, k.shape[3]), k.dtype)
    x = RuleArrays(q, k, v, g, beta, initial_state, cu_seqlens, segment_ids)
    dims = check_arrays(x, state_layout, chunk_size, None)
    known_lengths(cu_seqlens, dims.T)
    x = _checked_values(x._replace(q=None), dims, use_k_l2norm)
    call = xla.Call(use_k_l2norm, state_layout, chunk_size=chunk_size)
    return _on_shards(xla.chunk_states, call, "b . h . .", x)


def supported_implementations(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay | None = None,
    beta: Strength | None = None,
    *,
    scale: Any = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
) -> dict[str, str | None]:
    """Says which implementations can run a call of `gated_delta_rule` with these arguments on this device.

    Args: those of `gated_delta_rule`; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
      name -> None where it can, else the reason why not; fastest first.

    Raises:
      ValueError: an argument is wrong.
    """
    check_flags(use_qk_l2norm=use_qk_l2norm)
    x = RuleArrays(q, k, v, g, beta, initial_state, cu_seqlens, segment_ids)
    dims = check_arrays(x, state_layout, chunk_size, None)
    check_scale(scale, dims)
    return _supported(dims, x, chunk_size)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _on_shards(form: Callable[..., Any], call: mosaic.Call | xla.Call, results: Any, x: RuleArrays, *scale):
    """form(call, x, *scale), compiled as a whole, on the shards of arrays that lie on explicit axes of a mesh."""
    axes = RuleAxes.of(x)
    operands = axes.inputs, *jax.tree.map(lambda _: "", scale)
    return on_explicit_shards(partial(form, call), (x, *scale), operands, results, axes.sizes)


def check_arrays(x: RuleArrays, state_layout: str, chunk_size: int, implementation: str | None) -> Dims:
    """Dimensions of a call's arguments, which are checked as far as they are static."""
    dims = rule_dims(*x, state_layout)
    check_chunk_size(chunk_size)
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))
    return dims


def check_chunk_size(chunk_size: Any) -> None:
    """Raises ValueError unless chunks may have so many tokens."""
    # 64.0 == 64, but is no number of tokens.
    check_choice("chunk_size", chunk_size if isinstance(chunk_size, int) else str(chunk_size), CHUNK_SIZES)


def check_scale(scale: Any, dims: Dims) -> Number | jax.Array:
    """The factor of the output, as a number or as an array without dimensions."""
    if scale is None:
        return Number(dims.K**-0.5)
    if isinstance(scale, (int, float, np.number)) and not isinstance(scale, bool):
        return Number(real_number("scale", scale))
    is_array = isinstance(scale, (jax.Array, np.ndarray))
    if not is_array or scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
        got = f"{scale.dtype}{list(scale.shape)}" if is_array else repr(scale)
        raise ValueError(f"scale: expected a number, or a floating array of shape [], got {got}")
    return jnp.asarray(scale)


def _supported(dims: Dims, x: RuleArrays, chunk_size: int) -> dict[str, str | None]:
    options: dict[str, Any] = dict(chunk_size=chunk_size, packed=x.cu_seqlens is not None)
    arrays = x.q, x.g, x.beta, x.initial_state
    reasons = {name: mosaic.check_supported(name, dims, *arrays, **options) for name in mosaic.KERNELS}
    return {**reasons, "chunked": None, "recurrent": None}


def known_lengths(cu_seqlens: Any, T: int, always: bool = False) -> bytes | None:
    """cu_seqlens as int64 where its values are known while tracing, and checked there.

    always: looks at a JAX array too, for which the device must have computed it.
    """
    if not isinstance(cu_seqlens, np.ndarray) and (
        cu_seqlens is None or isinstance(cu_seqlens, jax.core.Tracer) or not always
    ):
        return None
    known = np.asarray(cu_seqlens).astype(np.int64)
    check_ascending(T, known)
    return known.tobytes()


def _checked_values(x: RuleArrays, dims: Dims, normalises: bool) -> RuleArrays:
    """The arguments as arrays of JAX that vary alike, checked as `debug_checks` says."""
    if _debug_checks:
        check_layout(dims)
        check_values(dims.T, x.g, x.cu_seqlens)
        check_keys(None if normalises else x.k, x.beta)
        axes = RuleAxes.of(x)
        arrays = [None if isinstance(y, jax.ShapeDtypeStruct | np.ndarray) else y for y in x]
        warn_of_gathers(x._fields, arrays, axes.inputs, axes.sizes)
    return vary_alike(
        x._replace(cu_seqlens=None if x.cu_seqlens is None else widened(jnp.asarray(x.cu_seqlens)))
    )


def check_layout(dims: Dims) -> None:
    """Warns of tokens and heads that seem to have changed places, as `debug_checks` says."""
    if 1 < dims.T < dims.HO:  # a single token is what generation has
        warnings.warn(
            f"q, k, v: {dims.T} tokens of {dims.HO} heads; arrays are [B, T, heads, width], and if these are "
            "[B, heads, T, width], tokens and heads have to change places first",
            stacklevel=4,
        )


def check_values(T: int, g: Any, cu_seqlens: Any) -> None:
    """Checks values where they are known, else while the program runs, as `debug_checks` says; either may be None."""
    if g is not None:
        check_known(_check_log_decay, jnp.max(g, initial=-jnp.inf), jnp.isnan(g).any())
    if cu_seqlens is not None:
        check_known(partial(check_ascending, T), cu_seqlens)


def check_keys(k: Any, erase: Any) -> None:
    """Checks that no token erases more than twice what its key finds, as `debug_checks` says.

    Args:
      k: keys [B, T, Hk, K]; None for keys that are normalised.
      erase: strengths [B, T, HO] or [B, T, HO, K]; None for 1.
    """
    if k is not None:
        whole = ". . . .", None if erase is None else " ".join("." * erase.ndim)
        check_known(_check_erased, on_explicit_shards(_largest_erased, (k, erase), whole, "", {}))


def check_known(check: Callable[..., None], *arrays: Any) -> None:
    """Runs a check on the host: at once where all arrays are known, else while the program runs."""
    if any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in arrays):
        jax.debug.callback(check, *arrays)
    else:
        check(*map(np.asarray, arrays))


def _largest_erased(k: jax.Array, erase: jax.Array | None) -> jax.Array:
    """The largest erase |k|^2 of a token and head."""
    squares = jnp.square(k.astype(accumulation_dtype(k)))
    if erase is not None:
        of_heads = erase.reshape(*k.shape[:3], -1, 1 if erase.ndim == 3 else k.shape[3])
        squares = of_heads.astype(squares.dtype) * squares[:, :, :, None]
    return jnp.max(jnp.sum(squares, -1), initial=0)


def _check_erased(largest: jax.Array | np.ndarray) -> None:
    if np.any(largest > MOST_ERASED):
        raise ValueError(
            "k: expected keys of unit length, or beta |k|^2 of at most 2, beyond which the state grows without bound "
            f"(use_qk_l2norm=True normalises q and k), got a largest beta |k|^2 of {float(np.max(largest)):.6g}"
        )


def _check_log_decay(largest: jax.Array | np.ndarray, has_nan: jax.Array | np.ndarray) -> None:
    if np.any(has_nan) or np.any(largest > 0):
        got = "nan" if np.any(has_nan) else f"a largest value of {float(np.max(largest)):.6g}"
        raise ValueError(
            f"g: expected log decay <= 0 everywhere (for a linear decay use log_decay_from_alpha), got {got}"
        )
