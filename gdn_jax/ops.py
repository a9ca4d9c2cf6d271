"""The public operations: check the arguments, choose an implementation, call it. No maths here."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas  # adds to JAX's tracing context: inside a jit, its first call would compile twice
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from gdn_jax import chunked, gates, packing, reference
from gdn_jax.shapes import (
    STATE_LAYOUTS,
    Dims,
    accumulation_dtype,
    check_array,
    check_choice,
    rule_dims,
    split_heads,
)

IMPLEMENTATIONS = ("mosaic_gpu", "chunked", "recurrent")
"""Names of the implementations, fastest first."""

CHUNK_SIZES = (16, 32, 64, 128)

_debug_checks = False


def debug_checks(enabled: bool) -> None:
    """Switches checks of values on or off, for functions traced from now on: g <= 0, cu_seqlens ascending.

    Under jit the check runs on the host while the program runs and raises there (jax reports it as a
    `JaxRuntimeError` that carries the ValueError's text). It costs a transfer per call; off by default.
    """
    global _debug_checks
    _debug_checks = enabled


def gated_delta_rule(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None = None,
    beta: Float[Array, "B T HO"] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "N HO _ _"] | None = None,
    cu_seqlens: Int[Array, "N1"] | Int[np.ndarray, "N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
    backward_head_slices: int = 1,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO _ _"]]:
    """The gated delta rule over whole sequences.

        S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

    Args:
      q, k: queries [B, T, Hq, K] and keys [B, T, Hk, K], float16, bfloat16, float32 or float64. Keys should have
        norm at most about 1 (see use_qk_l2norm): the rule itself grows without bound where beta |k|^2 > 2.
      v: values [B, T, HV, V], q's dtype. Hq, Hk and HV divide HO = max(Hq, HV); head i of the output reads head
        i // (HO // Hx) of each input. K and V from 1 to 256.
      g: log decay [B, T, HO], natural logarithm, <= 0, -inf for a full reset; None for no decay. For a linear
        decay alpha pass `log_decay_from_alpha(alpha)`.
      beta: write strength [B, T, HO], in [0, 1], or [0, 2] with negative eigenvalues; None for 1.
      scale: factor of the output, K ** -0.5 by default; 0.0 is legal.
      initial_state: state before the first token [N, HO, K, V] (or [N, HO, V, K]), None for zeros.
      cu_seqlens: [N + 1] ascending integers from 0; B = 1 and sequence n owns tokens [cu[n], cu[n + 1]). A
        sequence may be empty (its state passes through); tokens past cu[-1] are padding with output 0. Given as a
        NumPy array (or a JAX array that is not traced) the GPU kernels split their work by the true lengths.
      segment_ids: [B, T] integers; the state starts from zero at every change of id. The initial state feeds the
        first segment and the final state belongs to the last one. Exclusive with cu_seqlens.
      use_qk_l2norm: replaces q and k by x * rsqrt(sum(x^2) + 1e-6).
      state_layout: "kv" for states [K, V], "vk" for [V, K] (FlashInfer's k-last, fla's `state_v_first`).
      chunk_size: tokens per chunk, one of 16, 32, 64, 128 (ignored by "recurrent"; on a CPU the chunked form computes
        long rows in chunks of at most 32).
      implementation: "recurrent", "chunked" or "mosaic_gpu", run exactly or refused; None for the fastest that
        supports the call on this device.
      backward_head_slices: slices of the heads that the backward of "mosaic_gpu" works on one after the other, a
        divisor of Hq, Hk and HV. More take less memory and more time, see `pallas_kernels.backward.Config`; what is
        computed stays the same. The others ignore it.

    Returns:
      o [B, T, HO, V] in q's dtype, and the final state of every sequence, float32 (float64 when an input is),
      in the layout of state_layout.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: see `reference.recurrent_rule` and `chunked.chunked_rule`.
    Source: fla's `chunk_gated_delta_rule` (same argument order, log gates).
    """
    dims = _check(
        q, k, v, g, beta, initial_state, cu_seqlens, segment_ids, state_layout, chunk_size, implementation
    )
    _check_head_slices(backward_head_slices, dims)
    supported = _supported(dims, q, g, beta, initial_state, chunk_size)
    if implementation is None:
        implementation = next(name for name in IMPLEMENTATIONS if supported[name] is None)
    elif supported[implementation] is not None:
        raise NotImplementedError(f"implementation {implementation!r}: {supported[implementation]}")
    known = _known_lengths(cu_seqlens) if implementation == "mosaic_gpu" else None
    cu_seqlens = None if cu_seqlens is None else jnp.asarray(cu_seqlens)
    if _debug_checks:
        _check_values(dims.T, g, cu_seqlens)

    scale = dims.K**-0.5 if scale is None else scale
    arrays = _vary_alike(_Arrays(q, k, v, g, beta, initial_state, cu_seqlens, segment_ids))
    if implementation != "mosaic_gpu":
        options = _Options(implementation, use_qk_l2norm, state_layout, chunk_size)
        return _run_xla(arrays, scale, options)
    options = _Options("chunked", use_qk_l2norm, state_layout, chunk_size, known, backward_head_slices)
    if isinstance(scale, (int, float)):
        return _run_kernels(arrays, float(scale), options)
    o, final = _run_kernels(arrays, 1.0, options)
    return (scale * o).astype(o.dtype), final


def gated_delta_step(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HO"] | None,
    beta: Float[Array, "B HO"] | None,
    state: Float[Array, "B HO _ _"],
    *,
    scale: float | Float[Array, ""] | None = None,
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
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x, (None,) * 3, "B, heads, width")
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            check_array(name, x, (None,) * 2, "B, HO")
    q, k, v = q[:, None], k[:, None], v[:, None]
    g, beta = (None if x is None else x[:, None] for x in (g, beta))
    dims = rule_dims(q, k, v, g, beta, state, None, None, state_layout)
    if use_qk_l2norm:
        q, k = gates.l2norm(q), gates.l2norm(k)
    g, beta = _full_gates(dims.HV, q, g, beta, state)
    counts = (dims.Hq, dims.Hk, dims.HV, dims.HO)
    tokens = (split_heads(x[:, 0].astype(g.dtype), 1, counts) for x in (q, k, v, g, beta))
    S = split_heads(_kv(state.astype(g.dtype), state_layout), 1, counts)
    S, o = reference.recurrent_step(S, *tokens, scale=dims.K**-0.5 if scale is None else scale)
    S = S.reshape(dims.B, dims.HO, dims.K, dims.V)
    return o.reshape(dims.B, dims.HO, dims.V).astype(v.dtype), _kv(S, state_layout).astype(state.dtype)


def chunk_states(
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None = None,
    beta: Float[Array, "B T HO"] | None = None,
    *,
    initial_state: Float[Array, "N HO _ _"] | None = None,
    cu_seqlens: Int[Array, "N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
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
    for name, x in (("k", k), ("v", v)):
        check_array(name, x, (None,) * 4, "B, T, heads, width")
    HO = next((x.shape[-1] for x in (g, beta) if x is not None), max(k.shape[2], v.shape[2]))
    q = jax.ShapeDtypeStruct((*k.shape[:2], HO, k.shape[3]), k.dtype)
    dims = _check(q, k, v, g, beta, initial_state, cu_seqlens, segment_ids, state_layout, chunk_size, None)
    if _debug_checks:
        _check_values(dims.T, g, cu_seqlens)
    arrays = (k, v, g, beta, initial_state, cu_seqlens, segment_ids)
    k, v, g, beta, initial_state, cu_seqlens, segment_ids = _vary_alike(arrays)
    k = gates.l2norm(k) if use_k_l2norm else k
    g, beta = _full_gates(dims.HO, k, g, beta, initial_state)
    if segment_ids is not None:
        g = packing.reset_at_segments(g, segment_ids)
    if initial_state is not None:
        initial_state = _kv(initial_state.astype(g.dtype), state_layout)
    states = chunked.chunk_states_of(
        k, v, g, beta, initial_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size
    )
    return _kv(states, state_layout)


def supported_implementations(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None = None,
    beta: Float[Array, "B T HO"] | None = None,
    *,
    scale: Any = None,
    initial_state: Float[Array, "N HO _ _"] | None = None,
    cu_seqlens: Int[Array, "N1"] | Int[np.ndarray, "N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    backward_head_slices: int = 1,
) -> dict[str, str | None]:
    """Which implementations can run a call of `gated_delta_rule` with these arguments on this device.

    Args: those of `gated_delta_rule`; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
      name -> None where it can, else the reason why not; fastest first.

    Raises:
      ValueError: an argument is wrong.
    """
    dims = _check(q, k, v, g, beta, initial_state, cu_seqlens, segment_ids, state_layout, chunk_size, None)
    _check_head_slices(backward_head_slices, dims)
    return _supported(dims, q, g, beta, initial_state, chunk_size)


def _check(
    q, k, v, g, beta, initial_state, cu_seqlens, segment_ids, state_layout, chunk_size, implementation
) -> Dims:
    dims = rule_dims(q, k, v, g, beta, initial_state, cu_seqlens, segment_ids, state_layout)
    check_choice("chunk_size", chunk_size, CHUNK_SIZES)
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))
    return dims


def _check_head_slices(slices: int, dims: Dims) -> None:
    from pallas_kernels import backward

    backward.check_head_slices("backward_head_slices", slices, dims)


def _supported(dims: Dims, q, g, beta, initial_state, chunk_size: int) -> dict[str, str | None]:
    from pallas_kernels import gdn

    reason = gdn.check_supported(dims, q.dtype, chunk_size=chunk_size)
    if reason is None and accumulation_dtype(q, g, beta, initial_state) != jnp.float32:
        reason = "a gate or the state is float64; the kernels compute in float32"
    return {"mosaic_gpu": reason or gdn.device_reason(), "chunked": None, "recurrent": None}


class _Arrays(NamedTuple):
    """Array arguments of a call, as the caller gave them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array | None
    beta: jax.Array | None
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None
    segment_ids: jax.Array | None


def _vary_alike(arrays: Any) -> Any:
    """The arrays of a pytree, inside jax.shard_map all varying over the mesh axes that one of them varies over.

    A loop's carry must be of one type, and so must a primal and the cotangent that a custom_vjp gives for it. In
    reverse mode this sums the cotangents of an array that came replicated. Outside shard_map it
    does nothing, nor with check_vma=False.
    """

    def varying(x) -> frozenset:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: lax.pcast(x, tuple(axes - varying(x)), to="varying"), arrays)


class _Options(NamedTuple):
    """Static options of a call."""

    implementation: str
    use_qk_l2norm: bool
    state_layout: str
    chunk_size: int
    known_lengths: bytes | None = None
    """cu_seqlens as int64, where its values are known while tracing: the kernels split their work by them."""
    backward_head_slices: int = 1


def _known_lengths(cu_seqlens: jax.Array | np.ndarray | None) -> bytes | None:
    if cu_seqlens is None or isinstance(cu_seqlens, jax.core.Tracer):
        return None
    return np.asarray(cu_seqlens).astype(np.int64).tobytes()


def _run_xla(x: _Arrays, scale: float | jax.Array, options: _Options) -> tuple[jax.Array, jax.Array]:
    """The call by one of the two forms in plain JAX."""
    q, k, v = x.q, x.k, x.v
    if options.use_qk_l2norm:
        q, k = gates.l2norm(q), gates.l2norm(k)
    g, beta = _full_gates(x.v.shape[2], q, x.g, x.beta, x.initial_state)
    if x.segment_ids is not None:
        g = packing.reset_at_segments(g, x.segment_ids)
    h0 = x.initial_state
    if h0 is not None:
        h0 = _kv(h0.astype(g.dtype), options.state_layout)
    if options.implementation == "recurrent":
        o, final = reference.recurrent_rule(q, k, v, g, beta, h0, scale=scale, cu_seqlens=x.cu_seqlens)
    else:
        o, final = chunked.chunked_rule(
            q, k, v, g, beta, h0, scale=scale, cu_seqlens=x.cu_seqlens, chunk_size=options.chunk_size
        )
    return o.astype(v.dtype), _kv(final, options.state_layout)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _run_kernels(x: _Arrays, scale: float, options: _Options) -> tuple[jax.Array, jax.Array]:
    """The call by the GPU kernels, forward and backward."""
    return _kernel_forward(x, scale, options)[:2]


def _kernel_options(x: _Arrays, options: _Options) -> dict[str, Any]:
    known = options.known_lengths
    return {
        "cu_seqlens": x.cu_seqlens if known is None else np.frombuffer(known, np.int64),
        "segment_ids": x.segment_ids,
        "state_layout": options.state_layout,
    }


def _kernel_forward(x: _Arrays, scale: float, options: _Options):
    from pallas_kernels import gdn

    return gdn.forward(
        *x[:6], scale=scale, use_qk_l2norm=options.use_qk_l2norm, **_kernel_options(x, options)
    )


def _normalized(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gates.l2norm(q), gates.l2norm(k)


def _backward_reason(x: _Arrays, scale: float, options: _Options) -> str | None:
    """Why the backward kernels cannot run the call; None if they can. Else the chunked form's gradients serve."""
    from pallas_kernels import backward, gdn

    dims = rule_dims(*x, options.state_layout)
    if not gdn.FOLDED_SCALES[0] <= scale <= gdn.FOLDED_SCALES[1]:
        return f"scale is {scale}"
    return backward.backward_supported(dims, packed=x.cu_seqlens is not None)


def _run_kernels_fwd(x: _Arrays, scale: float, options: _Options):
    if _backward_reason(x, scale, options) is not None:
        return _run_kernels(x, scale, options), (x, None)
    from pallas_kernels.gradients import BETA_FLOOR

    # The kernels divide by beta. Where it is 0 a token writes 2^-20 of its value: less than the state's rounding.
    floored = x if x.beta is None else x._replace(beta=jnp.maximum(x.beta, BETA_FLOOR))
    plain = floored
    if options.use_qk_l2norm:  # the backward kernels take them normalised; alone the forward does it inside
        q, k = _normalized(x.q, x.k)
        plain, options = floored._replace(q=q, k=k), options._replace(use_qk_l2norm=False)
    o, final, residuals = _kernel_forward(plain, scale, options)
    residuals = residuals._replace(t=checkpoint_name(residuals.t, chunked.INVERSE_NAME))
    return (o, final), (floored, residuals)


def _run_kernels_bwd(scale: float, options: _Options, saved, cotangents):
    x, residuals = saved
    if residuals is None:
        return jax.vjp(lambda x: _run_xla(x, scale, options), x)[1](cotangents)
    from pallas_kernels import backward

    do, dfinal = cotangents
    q, k, through_norm = x.q, x.k, None
    if options.use_qk_l2norm:
        (q, k), through_norm = jax.vjp(_normalized, q, k)
    primals = (q, k, x.v, x.g, x.beta, x.initial_state)
    config = backward.Config(head_slices=options.backward_head_slices)
    out = backward.backward(
        *primals, residuals, do, dfinal, scale=scale, config=config, **_kernel_options(x, options)
    )
    if through_norm is not None:
        dq, dk = through_norm((out.dq, out.dk))
        out = out._replace(dq=dq, dk=dk)
    return (_Arrays(*out, None, None),)


_run_kernels.defvjp(_run_kernels_fwd, _run_kernels_bwd)


def _full_gates(HV: int, q, g, beta, state) -> tuple[jax.Array, jax.Array]:
    """g and beta as full arrays of the accumulation dtype."""
    dtype = accumulation_dtype(q, g, beta, state)
    shape = (*q.shape[:2], max(q.shape[2], HV))
    g = jnp.zeros_like(q, dtype, shape) if g is None else g.astype(dtype)
    beta = jnp.ones_like(q, dtype, shape) if beta is None else beta.astype(dtype)
    return g, beta


def _kv(state: jax.Array, layout: str) -> jax.Array:
    """Between [.., K, V] and the caller's layout; its own inverse."""
    return state if layout == STATE_LAYOUTS[0] else jnp.swapaxes(state, -1, -2)


def _check_values(T: int, g: jax.Array | None, cu_seqlens: jax.Array | None) -> None:
    if g is not None:
        jax.debug.callback(_check_log_decay, jnp.max(g, initial=-jnp.inf), jnp.isnan(g).any())
    if cu_seqlens is not None:
        jax.debug.callback(partial(_check_ascending, T), cu_seqlens)


def _check_log_decay(largest: jax.Array | np.ndarray, has_nan: jax.Array | np.ndarray) -> None:
    if np.any(has_nan) or np.any(largest > 0):
        got = "nan" if np.any(has_nan) else f"a largest value of {float(np.max(largest)):.6g}"
        raise ValueError(
            f"g: expected log decay <= 0 everywhere (for a linear decay use log_decay_from_alpha), got {got}"
        )


def _check_ascending(T: int, cu_seqlens: jax.Array | np.ndarray) -> None:
    if np.any(cu_seqlens[..., 0] != 0) or np.any(np.diff(cu_seqlens) < 0) or np.any(cu_seqlens[..., -1] > T):
        raise ValueError(
            f"cu_seqlens: expected ascending values from 0 to at most T = {T}, got {cu_seqlens.tolist()}"
        )
