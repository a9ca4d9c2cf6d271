"""The public operations: check the arguments, choose an implementation, call it. No maths here.

Every operation is compiled as a whole, once for each set of shapes and options, also outside `jax.jit`; inside, it is
part of what is compiled there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from gdn_jax.partitioning import lie_on_explicit_axes, on_explicit_shards
from gdn_jax.rule import plain
from gdn_jax.rule.arguments import check_arrays, check_scale, checked, known_lengths, strengths
from gdn_jax.rule.call import HEADS, Arrays, Call, RuleAxes, gates_of
from gdn_jax.rule.implementations import IMPLEMENTATIONS, TABLE, Implementation, first
from gdn_jax.shapes import (
    AnyLogDecay,
    AnyStates,
    Dims,
    Erase,
    Keys,
    KnownOffsets,
    LogDecay,
    Number,
    Outputs,
    Queries,
    Scale,
    SegmentIds,
    Strength,
    Values,
    Write,
    check_array,
    check_choice,
    check_flags,
    check_floating,
)


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

    Numerics: see `definition.recurrent_rule` and `chunked.chunked_rule`.
    Source: fla's `chunk_gated_delta_rule` (same argument order, log gates). Its other keywords, such as
      `output_final_state`, are those of `gdn_jax.adapters.fla.chunk_gated_delta_rule`.
    """
    x = Arrays(q, k, v, g, beta, None, initial_state, cu_seqlens, segment_ids)
    call = Call(use_qk_l2norm, state_layout, chunk_size=chunk_size)
    return on_shards(*program(call, x, scale, implementation))


def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: AnyLogDecay | None = None,
    beta: Strength | None = None,
    *,
    erase: Erase | None = None,
    write: Write | None = None,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Outputs, AnyStates]:
    """The delta rule over whole sequences, with per-channel decay and separate erase and write strengths.

        S <- Diag(exp(g)) S;   u = write * v - S^T (erase * k);   S <- S + k u^T;   o = scale S^T q

    With g for each head and beta the call is `gated_delta_rule`, bit for bit. With per-channel g and beta it is Kimi
    Delta Attention (KDA); with per-channel erase and write it is Gated DeltaNet-2.

    Args:
      q, k, v: as for `gated_delta_rule`.
      g: log decay, natural logarithm, <= 0, -inf for a reset: for each head [B, T, HO], or for each key channel
        [B, T, HO, K]; None for no decay. Any decay is exact, however strong; there is no lower bound.
      beta: one strength for erasing and writing [B, T, HO], in [0, 1], or [0, 2] with negative eigenvalues; None
        for 1. Give either beta or erase and write: both together are an error.
      erase: erase strength [B, T, HO], or for each key channel [B, T, HO, K]; None for 1.
      write: write strength [B, T, HO], or for each value channel [B, T, HO, V]; None for 1.
      scale, initial_state, cu_seqlens, segment_ids, use_qk_l2norm, state_layout, chunk_size: as for
        `gated_delta_rule`.
      implementation: as for `gated_delta_rule`. With per-channel gates or strengths "mosaic_gpu" takes K to 128; in
        float16 it takes its derivative from the chunked form in plain JAX.

    Returns:
      o [B, T, HO, V] in q's dtype, and the final state of every sequence, float32 (float64 when an input is), in
      the layout of state_layout.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: see `definition.recurrent_rule` and `channels.chunked_rule`. The output at a token does not
      depend on later gates, not even in its rounding.
    Source: Kimi Team, "Kimi Linear" (arXiv 2510.26692); fla's `chunk_kda` (same argument order, log gates).
    """
    erase, write = strengths(beta, erase, write)
    x = Arrays(q, k, v, g, erase, write, initial_state, cu_seqlens, segment_ids)
    call = Call(use_qk_l2norm, state_layout, gates_of(x, beta), chunk_size)
    return on_shards(*program(call, x, scale, implementation))


def check_call(
    call: Call, x: Arrays, scale: Any, implementation: str | None
) -> tuple[Dims, Number | jax.Array, Implementation]:
    """Dimensions, scale and implementation of a call of `delta_rule`.

    Raises:
      ValueError, NotImplementedError: as `delta_rule`.
    """
    check_flags(use_qk_l2norm=call.use_qk_l2norm)
    dims = check_arrays(call, x)
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))
    return dims, check_scale(scale, dims), first(call, x, dims, implementation)


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
    if g is not None:
        check_array("g", g, (None,) * 2, "B, HO")
    options: dict[str, Any] = dict(scale=scale, use_qk_l2norm=use_qk_l2norm, state_layout=state_layout)
    return delta_step(q, k, v, g, beta, state, **options)


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

    With g of each head and beta this is `gated_delta_step`, to the bit.

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
    call = Call(use_qk_l2norm, state_layout, gates_of(x, beta))
    dims = check_arrays(call, x)
    shape, letters = ((dims.K, dims.V), "K, V") if state_layout == "kv" else ((dims.V, dims.K), "V, K")
    check_array("state", state, (dims.B, dims.HO, *shape), f"B, HO, {letters}")
    check_floating("state", state)
    x = x._replace(initial_state=state)
    results = "b h v", RuleAxes.of(x).inputs.initial_state
    return on_shards(plain.step, call, results, x, check_scale(scale, dims))


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
    """The state at the start of every chunk, as a differentiable result, to study what a state stores.

    Args:
      k, v, g, beta, initial_state, cu_seqlens, segment_ids, state_layout, chunk_size: as for `gated_delta_rule`;
        HO is the head count of g or beta where given, else max(Hk, HV).
      use_k_l2norm: normalises k.

    Returns:
      h [B, L, HO, K, V] (or [.., V, K]), float32 or float64, L = ceil(T / chunk_size). With cu_seqlens
      `packing.packed_chunks(cu_seqlens, T, chunk_size)` says which chunks they are, sequence after sequence.

    Raises:
      ValueError: an argument is wrong.
    """
    check_flags(use_k_l2norm=use_k_l2norm)
    x = Arrays(None, k, v, g, beta, None, initial_state, cu_seqlens, segment_ids)
    call = Call(use_k_l2norm, state_layout, chunk_size=chunk_size)
    return on_shards(*_states_program(call, x))


def delta_chunk_states(
    k: Keys,
    v: Values,
    g: AnyLogDecay | None = None,
    beta: Strength | None = None,
    *,
    erase: Erase | None = None,
    write: Write | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_k_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
) -> Float[Array, "B L HO _ _"]:
    """The state at the start of every chunk, as a differentiable result.

    With g for each head and beta the call is `chunk_states`, bit for bit.

    Args: as for `delta_rule`; HO is the head count of g or of a strength where given, else max(Hk, HV).
      use_k_l2norm: normalises k.

    Returns:
      h [B, L, HO, K, V] (or [.., V, K]), as `chunk_states` returns them.

    Raises:
      ValueError: an argument is wrong.
    """
    erase, write = strengths(beta, erase, write)
    check_flags(use_k_l2norm=use_k_l2norm)
    x = Arrays(None, k, v, g, erase, write, initial_state, cu_seqlens, segment_ids)
    call = Call(use_k_l2norm, state_layout, gates_of(x, beta), chunk_size)
    return on_shards(*_states_program(call, x))


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
    """Returns which implementations can run a call of `gated_delta_rule` with these arguments on this device.

    Args: as for `gated_delta_rule`; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
      implementation -> None if it can run the call, else the reason why not; fastest first.

    Raises:
      ValueError: an argument is wrong.
    """
    check_flags(use_qk_l2norm=use_qk_l2norm)
    x = Arrays(q, k, v, g, beta, None, initial_state, cu_seqlens, segment_ids)
    call = Call(use_qk_l2norm, state_layout, chunk_size=chunk_size)
    dims = check_arrays(call, x)
    check_scale(scale, dims)
    return {one.name: one.reason(call, x, dims) for one in TABLE if call.gates in one.gates}


def program(call: Call, x: Arrays, scale: Any, implementation: str | None) -> tuple[Any, ...]:
    """Arguments of `on_shards` for a call of the rule."""
    dims, scale, chosen = check_call(call, x, scale, implementation)
    known = known_lengths(x.cu_seqlens, dims.T, always=chosen.by_kernels)
    x = checked(call, x, dims)
    form, call, factor = chosen.program(call, x, known, scale)
    return form, call, RuleAxes.of(x).outputs, x, *factor


def _states_program(call: Call, x: Arrays) -> tuple[Any, ...]:
    """Arguments of `on_shards` for the states at the start of every chunk."""
    for name, y in (("k", x.k), ("v", x.v)):
        check_array(name, y, (None,) * 4, "B, T, heads, width")
        check_floating(name, y)
    of_heads = call.gates == HEADS
    for name, y in (("g", x.g), ("beta" if call.is_beta else "erase", x.erase), ("write", x.write)):
        if y is not None and of_heads:
            check_array(name, y, (*x.k.shape[:2], None), "B, T, HO")
        elif y is not None and getattr(y, "ndim", None) != 3:
            check_array(name, y, (None,) * 4, "B, T, HO, channels")
    q = jax.ShapeDtypeStruct((*x.k.shape[:2], x.num_heads, x.k.shape[3]), x.k.dtype)
    dims = check_arrays(call, x._replace(q=q))
    known_lengths(x.cu_seqlens, dims.T)
    return plain.chunk_states, call, "b . h . .", checked(call, x, dims)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def on_shards(form: Callable[..., Any], call: Call, results: Any, x: Arrays, *scale):
    """form(call, x, *scale), compiled as a whole, on the shards of arrays that lie on explicit axes of a mesh."""
    if not lie_on_explicit_axes(*jax.tree.leaves((x, scale))):
        return form(call, x, *scale)
    axes = RuleAxes.of(x)
    operands = axes.inputs, *jax.tree.map(lambda _: "", scale)
    return on_explicit_shards(partial(form, call), (x, *scale), operands, results, axes.sizes)
