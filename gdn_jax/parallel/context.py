"""The rule over tokens that are split over the devices of a mesh axis, exactly.

Every device holds the same number of tokens, in order. It finds what its tokens do to a state, receives the state that
enters (`prefix.entering`) and runs its own tokens from there. Only states travel: what is sent does not grow with the
length. In the backward pass the cotangent of the state travels the other way through the same maps, and every device
then differentiates its own tokens alone.

The function is that of `gdn_jax` for use inside `jax.shard_map`, with the name of the mesh axis.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gdn_jax import xla
from gdn_jax.ops import check_call
from gdn_jax.parallel.borders import Borders, last_states, local_offsets, reset_across
from gdn_jax.parallel.prefix import Affine, entering
from gdn_jax.partitioning import vary_alike
from gdn_jax.shapes import RuleArrays, accumulation_dtype


def gated_delta_rule(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None = None,
    beta: Float[Array, "B T HO"] | None = None,
    *,
    axis_name: str,
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
    """`gdn_jax.gated_delta_rule` of rows whose tokens are split over a mesh axis in order, inside `jax.shard_map`.

    Args: those of `gdn_jax.gated_delta_rule`. q, k, v, g, beta and segment_ids are this device's tokens; initial_state
      and cu_seqlens are those of the whole rows, the same on every device of the axis.
      axis_name: the mesh axis.

    Returns:
      o of this device's tokens, and the final states of the whole sequences, the same on every device of the axis.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.gated_delta_rule`.

    Numerics: those of `gdn_jax.gated_delta_rule` with a chunk's border at every device's; the maps of whole devices
      are merged in float32. Differentiable once, in reverse.
    """
    arrays = RuleArrays(q, k, v, g, beta, initial_state, cu_seqlens, segment_ids)
    options = scale, state_layout, chunk_size, implementation, backward_head_slices
    dims, scale, implementation = check_call(arrays, *options)
    if isinstance(scale, jax.Array):
        number, factor = 1.0, scale
    else:
        number, factor = scale, None
    dtype = accumulation_dtype(q, g, beta, initial_state)
    h_0 = initial_state
    if h_0 is not None and state_layout == "vk":
        h_0 = jnp.swapaxes(h_0, -1, -2)
    if segment_ids is not None:
        g = reset_across(jnp.zeros_like(q, dtype, (dims.B, dims.T, dims.HO)) if g is None else g, segment_ids, axis_name)
    if cu_seqlens is None:
        local_cu, borders = None, Borders.of_rows(axis_name)
    else:
        cu_seqlens = jnp.asarray(cu_seqlens)
        local_cu = local_offsets(cu_seqlens, dims.T, axis_name)
        borders = Borders.of_packed(cu_seqlens, dims.T, axis_name)
    starts = jnp.zeros((dims.N, dims.HO, dims.K, dims.V), dtype) if h_0 is None else h_0.astype(dtype)
    x, borders = vary_alike((RuleArrays(q, k, v, g, beta, starts, local_cu, None), borders))
    o, final = _rule(_Static(axis_name, number, use_qk_l2norm, chunk_size, implementation), x, borders)
    final = last_states(final, h_0, cu_seqlens, dims.T, axis_name)
    if factor is not None:
        o = (factor * o).astype(o.dtype)
    return o, final if state_layout == "kv" else jnp.swapaxes(final, -1, -2)


class _Static(NamedTuple):
    """Static options of a call."""

    axis_name: str
    scale: float
    use_qk_l2norm: bool
    chunk_size: int
    implementation: str


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(static: _Static, x: RuleArrays, borders: Borders) -> tuple[jax.Array, jax.Array]:
    """o and the final states of this device's tokens. x.initial_state holds the states that start on this device."""
    return _rule_fwd(static, x, borders)[0]


def _rule_fwd(static: _Static, x: RuleArrays, borders: Borders):
    own = _affine(static, x, borders)
    enters = entering(own, static.axis_name)
    start = borders.put(x.initial_state, borders.first, enters, borders.enters)
    rest = x[6:]

    def run(*primals):
        return _local(static, RuleArrays(*primals, *rest))

    outputs, vjp = jax.vjp(run, *x[:5], start)
    return outputs, (vjp, own.m, borders)


def _rule_bwd(static: _Static, saved, cotangents):
    vjp, m, borders = saved
    do, dfinal = cotangents
    ends = borders.put(dfinal, borders.last, jnp.zeros_like(borders.pick(dfinal, borders.last)), borders.leaves)
    e = borders.pick(vjp((do, ends))[5], borders.first)
    leaves = entering(Affine(e, m), static.axis_name, backwards=True)
    ends = borders.put(dfinal, borders.last, leaves, borders.leaves)
    *gradients, dstart = vjp((do, ends))
    dinitial = borders.put(dstart, borders.first, jnp.zeros_like(leaves), borders.enters)
    return RuleArrays(*gradients, dinitial, None, None), None


_rule.defvjp(_rule_fwd, _rule_bwd)


def _local(static: _Static, x: RuleArrays) -> tuple[jax.Array, jax.Array]:
    """The rule of this device's tokens."""
    return xla.rule(
        x,
        static.scale,
        implementation=static.implementation,
        use_qk_l2norm=static.use_qk_l2norm,
        state_layout="kv",
        chunk_size=static.chunk_size,
    )


def _affine(static: _Static, x: RuleArrays, borders: Borders) -> Affine:
    """What this device's tokens do to the states that enter: to those that leave.

    The rule from zeros beside the identity as one wide state, over values beside zeros. States that start on this device
    are part of e, and where no state passes through m is 0.
    """
    K, V = x.k.shape[3], x.v.shape[3]
    start = borders.put(x.initial_state, borders.first, jnp.zeros_like(borders.pick(x.initial_state, borders.first)), borders.enters)
    identity = jnp.broadcast_to(jnp.eye(K, dtype=start.dtype), (*start.shape[:2], K, K))
    wide = x._replace(
        v=jnp.concatenate([x.v, jnp.zeros_like(x.v, shape=(*x.v.shape[:3], K))], 3),
        initial_state=jnp.concatenate([start, identity], 3),
    )
    final = borders.pick(_local(static, wide)[1], borders.last)
    return Affine(final[..., :V], jnp.where(borders.passes, final[..., V:], 0))
