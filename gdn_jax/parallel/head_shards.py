"""A model's operations over channels, on one device and on a mesh of `MeshShape.make`.

Each device of the head axis has some of the channels that are projected, filtered and gated. XLA splits most of a
model by itself. The functions of this file are for the parts that it splits badly: where a program is traced under
`jax.set_mesh`, they run in a `jax.shard_map` over all axes of the mesh. Elsewhere they are the operations themselves.

`token_shards` has the operations over the tokens of a row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from gdn_jax.gates import l2norm
from gdn_jax.parallel import context_conv
from gdn_jax.parallel.mesh import CONTEXT, DATA, HEAD, ShardAxes, axes_set, check_tokens, dividing, tokens_of
from gdn_jax.partitioning import vary_alike
from gdn_jax.parts.conv import causal_conv1d, last_inputs
from gdn_jax.parts.kernels import usable
from gdn_jax.parts.products import PLAIN, Addend, Prepared, array_of, counter, counting
from gdn_jax.parts.short_conv import short_conv
from gdn_jax.parts.swiglu import BRANCHES_NAME, swiglu


def splits_heads() -> bool:
    """Tells whether the mesh that is set has a head axis. Then q, k and v are best kept in arrays of their own."""
    sizes = axes_set()
    return sizes is not None and sizes[HEAD] > 1


def projections_on_mesh(
    project: Callable[[jax.Array, Any], Any], x: Float[Array, "*S D"], weights: Any
) -> tuple[Float[Array, "*S _"], ...]:
    """Computes project(x, weights), products of x with matrices. Their and the results' last axis is split over head.

    The cotangent of x is summed over the head axis once. XLA by itself would sum the part of each product.

    Args:
      project: a function of x and weights.
      x: the input [.., D].
      weights: a pytree of arrays [.., outputs].
    """
    sizes = axes_set()
    if sizes is None or sizes[HEAD] == 1:
        return project(x, weights)

    def local(x, weights, counter):
        x, weights, counter = vary_alike((x, weights, counter))
        with counting(counter):
            return project(x, weights)

    tokens = tokens_of(sizes, x.shape)
    specs = jax.tree.map(lambda w: PartitionSpec(*(None,) * (w.ndim - 1), HEAD), weights)
    options = dict(in_specs=(tokens, specs, PartitionSpec()), out_specs=PartitionSpec(*tokens, HEAD))
    # What is kept for the backward pass is weights as they lie, not gathered from sharded parameters.
    return jax.checkpoint(jax.shard_map(local, **options))(x, weights, counter())


def swiglu_on_mesh(
    x: Float[Array, "*S D"] | Prepared,
    gate_kernel: Float[Array, "D F"],
    up_kernel: Float[Array, "D F"],
    down_kernel: Float[Array, "F E"],
    *,
    product: Any = PLAIN,
    implementation: str | None = None,
) -> Float[Array, "*S E"] | Addend:
    """`gdn_jax.parts.swiglu.swiglu`, on a mesh too.

    The devices of the head axis share the columns of the branches. Their results and the cotangents of x are summed
    over the axis once. Where the product is not the plain one, each device has its own tokens on other meshes too.
    """
    sizes, kernels = axes_set(), (gate_kernel, up_kernel, down_kernel)
    F = gate_kernel.shape[1]
    if sizes is None or (sizes[HEAD] == 1 and product is PLAIN) or F % sizes[HEAD]:
        return swiglu(x, *kernels, product=product, implementation=implementation)

    def local(x, kernels, counter):
        x, *kernels, counter = vary_alike((x, *kernels, counter))
        with counting(counter):
            y = swiglu(x, *kernels, product=product, implementation=implementation)
        return lax.psum(y, HEAD)

    array = array_of(x)
    kernels = tuple(w.astype(array.dtype) for w in kernels)  # their gradients are summed in this dtype
    tokens = tokens_of(sizes, array.shape)
    columns = PartitionSpec(None, HEAD)
    specs = tokens, (columns, columns, PartitionSpec(HEAD)), PartitionSpec()
    run = jax.shard_map(local, in_specs=specs, out_specs=tokens)
    if sizes[HEAD] == 1:
        return run(array, kernels, counter())
    # What is kept for the backward pass is weights as they lie, not gathered from sharded parameters.
    keep = jax.checkpoint_policies.save_only_these_names(BRANCHES_NAME)
    return jax.checkpoint(run, policy=keep)(array, kernels, counter())


def short_conv_on_mesh(
    x,
    weight,
    bias=None,
    *,
    heads: int,
    width: int,
    normalize: bool = True,
    implementation=None,
    **arrays: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`gdn_jax.parts.short_conv.short_conv`, on a mesh too: every device filters its channels of its tokens."""
    sizes = axes_set()
    how = dict(heads=heads, width=width, normalize=normalize)
    if sizes is None or sizes[CONTEXT] == sizes[HEAD] == 1:
        return short_conv(x, weight, bias, **how, implementation=implementation, **arrays)
    keys, past = heads * width, arrays.pop("initial_state", None)
    ends = (keys, 2 * keys)
    # Parts that are split from one array and never joined: XLA would send the cotangents of joined ones around.
    parts = jnp.split(x, ends, -1), jnp.split(weight, ends)
    if bias is None and past is None and arrays.get("cu_seqlens") is None:
        ids = arrays.get("segment_ids")
        if (found := _by_kernel(sizes, *parts, ids, **how, implementation=implementation)) is not None:
            q, k, v = found
            return q, k, v, last_inputs(x, ids, weight.shape[1])
    biases = (None,) * 3 if bias is None else jnp.split(bias, ends)
    pasts = (None,) * 3 if past is None else jnp.split(past, ends, 1)
    filtered = [
        _filtered(sizes, *part, initial_state=state, **arrays)
        for *part, state in zip(*parts, biases, pasts, strict=True)
    ]
    (q, k, v), states = zip(*filtered, strict=True)
    q, k = (y.reshape(*y.shape[:-1], heads, width) for y in (q, k))
    if normalize:
        q, k = l2norm(q), l2norm(k)
    return q, k, v, jnp.concatenate(states, 1)


def causal_conv1d_on_mesh(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    **arrays: Any,
) -> tuple[jax.Array, jax.Array]:
    """`gdn_jax.causal_conv1d` with SiLU, on a mesh too: every device filters its channels of its tokens."""
    sizes = axes_set()
    if sizes is None:
        return causal_conv1d(x, weight, bias, **arrays)
    return _filtered(sizes, x, weight, bias, **arrays)


def _by_kernel(sizes, xs, weights, ids, *, heads, width, normalize, implementation):
    """Computes q, k and v by the kernels, each from its own channels and filters; None where they cannot run."""
    from pallas_kernels.layer import short_conv as kernel

    rows, parts = dividing(sizes, DATA, xs[0].shape[0]), sizes[HEAD]
    B = xs[0].shape[0] // (sizes[DATA] if rows else 1)
    T, D = xs[0].shape[1], sum(x.shape[2] for x in xs)
    if T % sizes[CONTEXT] or heads % parts or D % parts:
        return None
    shard = jax.ShapeDtypeStruct((B, T // sizes[CONTEXT], D // parts), xs[0].dtype)
    filters = jax.ShapeDtypeStruct((D // parts, weights[0].shape[1]), weights[0].dtype)
    reason = kernel.check_supported(shard, filters, heads // parts, width)
    if not usable(implementation, kernel, part="the short convolution", reason=reason):
        return None
    how = (heads // parts, width, normalize, sizes[CONTEXT] > 1)
    return _kernel_over_tokens(ShardAxes(rows, HEAD), how, tuple(xs), tuple(weights), ids)


# Compiled by themselves, so that the layers of a model share what is traced and lowered of one.
@partial(jax.jit, static_argnums=(0, 1))
def _kernel_over_tokens(axes: ShardAxes, how: tuple[int, int, bool, bool], xs, weights, ids):
    heads, width, normalize, over_tokens = how
    options = dict(heads=heads, width=width, normalize=normalize)

    def local(xs, weights, ids):
        xs, weights, ids = vary_alike((xs, weights, ids))
        x, weight = jnp.concatenate(xs, 2), jnp.concatenate(weights)
        if over_tokens:
            return context_conv.short_conv_by_kernels(x, weight, ids, axis_name=CONTEXT, **options)
        return short_conv(x, weight, segment_ids=ids, implementation="mosaic_gpu", **options)[:3]

    specs = (axes.tokens,) * 3, (PartitionSpec(HEAD),) * 3, PartitionSpec(axes.rows, CONTEXT)
    return jax.shard_map(local, in_specs=specs, out_specs=(axes.tokens,) * 3)(xs, weights, ids)


def _filtered(sizes, x, weight, bias, **arrays) -> tuple[jax.Array, jax.Array]:
    """`causal_conv1d` of channels that may be split over heads, on the tokens of each device."""
    if sizes[CONTEXT] == 1:
        return causal_conv1d(x, weight, bias, **arrays)
    check_tokens(x.shape[1], sizes)
    arrays = {name: arrays.get(name) for name in ("initial_state", "cu_seqlens", "segment_ids")}
    rows = None if arrays["cu_seqlens"] is not None else dividing(sizes, DATA, x.shape[0])
    axes = ShardAxes(rows, dividing(sizes, HEAD, x.shape[2]))
    return _conv_over_tokens(axes, x, weight, bias, arrays)


@partial(jax.jit, static_argnums=0)
def _conv_over_tokens(axes: ShardAxes, x, weight, bias, arrays):
    def local(x, weight, bias, arrays):
        return context_conv.causal_conv1d(x, weight, bias, axis_name=CONTEXT, **arrays)

    channels = PartitionSpec(axes.heads)
    specs = (axes.tokens, channels, channels, axes.named(arrays))
    return jax.shard_map(local, in_specs=specs, out_specs=(axes.tokens, axes.states))(x, weight, bias, arrays)
