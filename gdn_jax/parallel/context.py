"""The rule over tokens that are split over the devices of a mesh axis, exactly.

Every device holds the same number of tokens, in order. It finds what its tokens do to a state, receives the state
that enters (`prefix.entering`) and runs its own tokens from there. Only states travel: the bytes that are sent do not
grow with the length. In the backward pass the cotangent of the state travels the other way through the same maps, and
every device then differentiates its own tokens alone.

What a device's tokens do to a state is a matrix [K, K] for every kind of gates, and so is all that is handed over.
One device's part is the implementation's, a `rule.state_passing.StatePassing`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.parallel import exchange
from gdn_jax.parallel.borders import Borders, last_states, local_offsets, reset_across
from gdn_jax.parallel.prefix import entering
from gdn_jax.partitioning import vary_alike
from gdn_jax.rule.arguments import strengths
from gdn_jax.rule.call import ERASURES, HEADS, Arrays, Call, gates_of
from gdn_jax.rule.erase_then_delta import ErasingArrays, erase_then_delta_by
from gdn_jax.rule.implementations import TABLE, Implementation
from gdn_jax.rule.ops import check_call, on_shards, program
from gdn_jax.rule.state_passing import Affine, StatePassing
from gdn_jax.shapes import (
    AnyLogDecay,
    AnyStates,
    ArgumentError,
    Dims,
    Erase,
    Keys,
    KnownOffsets,
    LogDecay,
    Outputs,
    Queries,
    Scale,
    SegmentIds,
    Strength,
    Values,
    Write,
    accumulation_dtype,
    widened,
)


def gated_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay | None = None,
    beta: Strength | None = None,
    *,
    axis_name: str,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
    by: str | None = None,
) -> tuple[Outputs, AnyStates]:
    """`gdn_jax.gated_delta_rule` of rows whose tokens are split over a mesh axis in order, inside `jax.shard_map`.

    Args: as for `gdn_jax.gated_delta_rule`. q, k, v, g, beta and segment_ids are this device's tokens;
      initial_state and cu_seqlens belong to the whole rows, the same on every device of the axis.
      axis_name: the mesh axis.
      by: "states" sends maps of states between devices, "heads" gives every device all tokens of some heads
        (`exchange`). Default: the faster one as predicted by `exchange.pays`.

    Returns:
      o of this device's tokens, and the final states of the whole sequences, the same on every device of the axis.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.gated_delta_rule`; ValueError where heads cannot be exchanged;
        NotImplementedError where by states an implementation is named that hands over none, "mosaic_mma".

    Numerics: by states as `gdn_jax.gated_delta_rule` with a chunk that ends at each device's last token; the maps of
      whole devices are merged in float32. Kernels leave out what reaches the token of another device with less than
      2^-64 of its size. Differentiable once, in reverse mode.
    """
    x = Arrays(q, k, v, g, beta, None, initial_state, cu_seqlens, segment_ids)
    call = Call(use_qk_l2norm, state_layout, chunk_size=chunk_size)
    return _split(call, x, scale, implementation, axis_name, by)


def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: AnyLogDecay | None = None,
    beta: Strength | None = None,
    erase: Erase | None = None,
    write: Write | None = None,
    *,
    axis_name: str,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
    by: str | None = None,
) -> tuple[Outputs, AnyStates]:
    """`gdn_jax.delta_rule` of rows whose tokens are split over a mesh axis in order, inside `jax.shard_map`.

    Args: as for `gdn_jax.delta_rule`. q, k, v, g, beta, erase, write and segment_ids are this device's tokens;
      initial_state and cu_seqlens belong to the whole rows, the same on every device of the axis.
      axis_name, by: as for `gated_delta_rule`.

    Returns:
      o of this device's tokens, and the final states of the whole sequences, the same on every device of the axis.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.delta_rule`; ValueError where heads cannot be exchanged.

    Numerics: as `gated_delta_rule`.
    """
    erase, write = strengths(beta, erase, write)
    x = Arrays(q, k, v, g, erase, write, initial_state, cu_seqlens, segment_ids)
    call = Call(use_qk_l2norm, state_layout, gates_of(x, beta), chunk_size)
    return _split(call, x, scale, implementation, axis_name, by)


def erase_then_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: AnyLogDecay | None = None,
    beta: Strength | None = None,
    erase_key: Keys | None = None,
    erase_strength: Strength | None = None,
    *,
    axis_name: str,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
    by: str | None = None,
) -> tuple[Outputs, AnyStates]:
    """`gdn_jax.erase_then_delta_rule` of rows whose tokens are split over a mesh axis, inside `jax.shard_map`.

    Both halves of a token are on its device. In packed sequences they are tokens of `delta_rule`.

    Args: as for `gdn_jax.erase_then_delta_rule`. Arrays of tokens are this device's; initial_state and cu_seqlens are
      those of the whole rows, the same on every device of the axis.
      axis_name, by: as for `gated_delta_rule`.

    Returns:
      o of this device's tokens, and the final states of the whole sequences, the same on every device of the axis.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.erase_then_delta_rule` and `delta_rule`.

    Numerics: as `gated_delta_rule`.
    """
    erasure = erase_key, erase_strength
    x = ErasingArrays(q, k, v, g, beta, *erasure, initial_state, cu_seqlens, segment_ids)
    call = Call(use_qk_l2norm, state_layout, ERASURES, chunk_size)

    def run(call: Call, x: Arrays) -> tuple[Outputs, AnyStates]:
        return _split(call, x, scale, implementation, axis_name, by)

    return erase_then_delta_by(run, call, x, in_rows=cu_seqlens is not None)


def _split(
    call: Call, x: Arrays, scale: Any, implementation: str | None, axis_name: str, by: str | None
) -> tuple[Outputs, AnyStates]:
    """A call of the rule whose tokens are split, by states or by heads."""
    dims, scale, chosen = check_call(call, x, scale, implementation)
    devices = lax.axis_size(axis_name)
    if by is None:
        gates = x[3:5] if call.gates == ERASURES else x[3:6]
        numbers = [1 if y.ndim == 3 else y.shape[3] for y in gates if y is not None]
        sent = 2 if call.gates == HEADS else sum(numbers), len(call.keys) - 1
        by = "heads" if exchange.pays(dims, x.q.dtype.itemsize, devices, *sent) else "states"
    if by not in ("states", "heads"):
        raise ArgumentError("by", "'states' or 'heads'", repr(by))
    if by == "heads":
        if reason := exchange.reason(dims, devices):
            raise ValueError(f"by: expected 'states', for {reason}; got 'heads'")

        def rule(x: Arrays) -> tuple[Outputs, AnyStates]:
            return on_shards(*program(call, x, scale, chosen.name))

        return exchange.rule_by_heads(rule, x, dims, axis_name=axis_name)
    passing = _passing(call, x, dims, chosen, implementation)
    how: dict[str, Any] = dict(axis_name=axis_name, scale=scale, state_layout=call.state_layout)
    return by_states(lambda scale: passing(call._replace(scale=scale)), x, dims, **how)


def _passing(
    call: Call, x: Arrays, dims: Dims, chosen: Implementation, asked: str | None
) -> Callable[[Call], Any]:
    """The state passing of the chosen implementation, or of the first one that has it and runs the call.

    Raises:
      NotImplementedError: the implementation that was asked for hands over no states.
    """
    able = [one for one in TABLE if call.gates in one.gates and one.state_passing(call, x) is not None]
    if chosen in able:
        return lambda call: chosen.state_passing(call, x)
    if asked is not None:
        raise NotImplementedError(
            f"implementation {asked!r}: states are handed over by {', '.join(repr(one.name) for one in able)}; "
            "by='heads' runs the others"
        )
    first = next(one for one in able if one.reason(call, x, dims) is None)
    return lambda call: first.state_passing(call, x)


def by_states(
    make_part: Callable[[float], StatePassing],
    x: Arrays,
    dims: Dims,
    *,
    axis_name: str,
    scale: Scale,
    state_layout: str,
) -> tuple[Outputs, AnyStates]:
    """A rule whose tokens are split, by handing over states: see `gated_delta_rule`.

    Args:
      make_part: makes one device's part for a scale.
      x: the arrays, as the caller gave them.
      dims: of x.
      axis_name, scale, state_layout: as for `context.gated_delta_rule`.
    """
    if isinstance(scale, jax.Array):
        number, factor = 1.0, scale
    else:
        number, factor = scale, None
    h_0, cu_seqlens = x.initial_state, x.cu_seqlens
    dtype = accumulation_dtype(x.q, *x[3:7])
    if h_0 is not None and state_layout == "vk":
        h_0 = jnp.swapaxes(h_0, -1, -2)
    if x.segment_ids is not None:
        g = jnp.zeros_like(x.q, dtype, (dims.B, dims.T, dims.HO)) if x.g is None else x.g
        x = x._replace(g=reset_across(g, x.segment_ids, axis_name), segment_ids=None)
    if cu_seqlens is None:
        borders = Borders.of_rows(axis_name)
    else:
        cu_seqlens = widened(jnp.asarray(cu_seqlens))
        x = x._replace(cu_seqlens=local_offsets(cu_seqlens, dims.T, axis_name))
        borders = Borders.of_packed(cu_seqlens, dims.T, axis_name)
    starts = jnp.zeros((dims.N, dims.HO, dims.K, dims.V), dtype) if h_0 is None else h_0.astype(dtype)
    x, borders = vary_alike((x._replace(initial_state=starts), borders))
    o, final = _rule(axis_name, make_part(number), x, borders)
    final = last_states(final, h_0, cu_seqlens, dims.T, axis_name)
    if factor is not None:
        o = (factor * o).astype(o.dtype)
    return o, final if state_layout == "kv" else jnp.swapaxes(final, -1, -2)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(axis_name: str, part: Any, x: Arrays, borders: Borders) -> tuple[jax.Array, jax.Array]:
    """o and the final states of this device's tokens. x.initial_state holds the states that start on this device."""
    return _rule_fwd(axis_name, part, x, borders)[0]


def _rule_fwd(axis_name: str, part: StatePassing, x: Arrays, borders: Borders):
    nothing = jnp.zeros_like(borders.pick(x.initial_state, borders.first))
    begins = borders.put(x.initial_state, borders.first, nothing, borders.enters)
    own, rest = part.forward(x, begins, borders)
    own = Affine(jnp.where(borders.leaves, own.e, 0), jnp.where(borders.passes, own.m, 0))
    start = borders.put(x.initial_state, borders.first, entering(own, axis_name), borders.enters)
    outputs, saved = rest(start)
    return outputs, (saved, own.m, borders)


def _rule_bwd(axis_name: str, part: StatePassing, kept, cotangents):
    saved, m, borders = kept
    do, dfinal = cotangents
    nothing = jnp.zeros_like(borders.pick(dfinal, borders.last))
    ends = borders.put(dfinal, borders.last, nothing, borders.leaves)
    de, rest = part.backward(saved, borders, do, ends)
    own = Affine(jnp.where(borders.enters, de, 0), m)
    entered = entering(own, axis_name, backwards=True)
    # The next sum over the devices waits for all gradients: a sum that begins before the last kernel holds
    # multiprocessors while it waits for the other devices, whose own kernel leaves none for it.
    *gradients, dstart = lax.optimization_barrier(
        rest(borders.put(dfinal, borders.last, entered, borders.leaves))
    )
    dinitial = borders.put(dstart, borders.first, nothing, borders.enters)
    return Arrays._make((*gradients, dinitial, None, None)), None


_rule.defvjp(_rule_fwd, _rule_bwd)
