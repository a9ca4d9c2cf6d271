"""What a model calls in the place of single operations: the same on one device and on a mesh of `MeshShape.make`.

XLA splits most of a model by itself. Four operations it cannot split well: the rule and the convolution over tokens,
attention over tokens, and the loss, which walks over tiles of tokens. Where a program is traced under `jax.set_mesh`,
they run in a `jax.shard_map` over all axes of the mesh; elsewhere these functions are the operations themselves.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from gdn_jax import losses, ops
from gdn_jax.conv import causal_conv1d, last_inputs
from gdn_jax.fused.kernels import usable
from gdn_jax.fused.short_conv import short_conv as fused_short_conv
from gdn_jax.fused.swiglu import BRANCHES_NAME
from gdn_jax.fused.swiglu import swiglu as fused_swiglu
from gdn_jax.gates import l2norm
from gdn_jax.parallel import context
from gdn_jax.parallel.conv import short_conv as short_conv_over_tokens
from gdn_jax.parallel.conv import short_conv_by_kernel
from gdn_jax.parallel.mesh import AXES, CONTEXT, DATA, HEAD
from gdn_jax.partitioning import vary_alike


def _axes() -> dict[str, int] | None:
    """Devices along each axis of the mesh that is set; None without one, and inside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != AXES or any(kind != AxisType.Auto for kind in mesh.axis_types) or mesh.size == 1:
        return None
    return dict(mesh.shape)


def _dividing(sizes: dict[str, int], axis: str, *dimensions: int) -> str | None:
    """The axis, where its devices divide the dimensions."""
    return axis if all(n % sizes[axis] == 0 for n in dimensions) else None


def _check_tokens(T: int, sizes: dict[str, int]) -> None:
    if T % sizes[CONTEXT]:
        raise ValueError(
            f"x: expected rows of a multiple of {sizes[CONTEXT]} tokens, the devices of context, got {T}"
        )


def gated_delta_rule(q, k, v, g=None, beta=None, **options: Any) -> tuple[jax.Array, jax.Array]:
    """`gdn_jax.gated_delta_rule`, over tokens too where the mesh that is set has a context axis."""
    sizes = _axes()
    if sizes is None or sizes[CONTEXT] == 1:
        return ops.gated_delta_rule(q, k, v, g, beta, **options)
    _check_tokens(q.shape[1], sizes)
    arrays = {name: options.pop(name, None) for name in ("initial_state", "cu_seqlens", "segment_ids")}
    if isinstance(options.get("scale"), jax.Array):
        arrays["scale"] = options.pop("scale")
    rows = None if arrays["cu_seqlens"] is not None else _dividing(sizes, DATA, q.shape[0])
    heads = _dividing(sizes, HEAD, math.gcd(q.shape[2], k.shape[2], v.shape[2]))
    return _rule_over_tokens(_Lies(rows, heads), tuple(options.items()), (q, k, v, g, beta), arrays)


class _Lies(NamedTuple):
    """Mesh axes that arrays are split over beside context; None where they are not."""

    rows: str | None
    heads: str | None

    @property
    def tokens(self) -> PartitionSpec:
        """Of [B, T, heads or channels, ..]."""
        return PartitionSpec(self.rows, CONTEXT, self.heads)

    @property
    def states(self) -> PartitionSpec:
        """Of [N, heads or channels, ..]."""
        return PartitionSpec(self.rows, self.heads)

    def named(self, arrays: dict[str, Any]) -> dict[str, PartitionSpec]:
        """Of arguments by name; of one that is not named here, the same on every device."""
        known = {"initial_state": self.states, "segment_ids": PartitionSpec(self.rows, CONTEXT)}
        return {name: known.get(name, PartitionSpec()) for name in arrays}


# Compiled by themselves, so that the layers of a model share what is traced and lowered of one.


@partial(jax.jit, static_argnums=(0, 1))
def _rule_over_tokens(lies: _Lies, options: tuple[tuple[str, Any], ...], tokens, arrays):
    def local(tokens, arrays):
        return context.gated_delta_rule(*tokens, axis_name=CONTEXT, **arrays, **dict(options))

    specs = (lies.tokens,) * 5, lies.named(arrays)
    return jax.shard_map(local, in_specs=specs, out_specs=(lies.tokens, lies.states))(tokens, arrays)


@partial(jax.jit, static_argnums=0)
def _conv_over_tokens(lies: _Lies, x, weight, bias, arrays):
    def local(x, weight, bias, arrays):
        return short_conv_over_tokens(x, weight, bias, axis_name=CONTEXT, **arrays)

    channels = PartitionSpec(lies.heads)
    specs = (lies.tokens, channels, channels, lies.named(arrays))
    return jax.shard_map(local, in_specs=specs, out_specs=(lies.tokens, lies.states))(x, weight, bias, arrays)


def splits_heads() -> bool:
    """Whether the mesh that is set has a head axis: then what holds the channels of q, k and v is best left apart."""
    sizes = _axes()
    return sizes is not None and sizes[HEAD] > 1


def _tokens(sizes: dict[str, int], x: jax.Array) -> PartitionSpec:
    """How rows and tokens of [B, T, .., D] lie."""
    axes = [_dividing(sizes, axis, n) for axis, n in zip((DATA, CONTEXT), x.shape[:-1], strict=False)]
    return PartitionSpec(*axes, *[None] * (x.ndim - 1 - len(axes)))


def projections(
    project: Callable[[jax.Array, Any], Any], x: Float[Array, "*S D"], weights: Any
) -> tuple[Float[Array, "*S _"], ...]:
    """project(x, weights): products of x with matrices whose last axis is split over head, as that of each result is.

    The cotangent of x is summed over the head axis once. XLA by itself would sum what each product adds to it.

    Args:
      weights: a pytree of arrays.
    """
    sizes = _axes()
    if sizes is None or sizes[HEAD] == 1:
        return project(x, weights)

    def local(x, weights):
        return project(*vary_alike((x, weights)))

    tokens = _tokens(sizes, x)
    specs = jax.tree.map(lambda w: PartitionSpec(*(None,) * (w.ndim - 1), HEAD), weights)
    options = dict(in_specs=(tokens, specs), out_specs=PartitionSpec(*tokens, HEAD))
    # What is kept for the backward pass is weights as they lie, not gathered from sharded parameters.
    return jax.checkpoint(jax.shard_map(local, **options))(x, weights)


def swiglu(
    x: Float[Array, "*S D"],
    gate_kernel: Float[Array, "D F"],
    up_kernel: Float[Array, "D F"],
    down_kernel: Float[Array, "F E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*S E"]:
    """`gdn_jax.fused.swiglu.swiglu`; on a mesh with a head axis its devices share the columns of the branches, and
    their results and the cotangents of x are summed over it once."""
    sizes, kernels = _axes(), (gate_kernel, up_kernel, down_kernel)
    F = gate_kernel.shape[1]
    if sizes is None or sizes[HEAD] == 1 or F % sizes[HEAD]:
        return fused_swiglu(x, *kernels, implementation=implementation)

    def local(x, kernels):
        y = fused_swiglu(*vary_alike((x, *kernels)), implementation=implementation)
        return lax.psum(y, HEAD)

    tokens = _tokens(sizes, x)
    columns = PartitionSpec(None, HEAD)
    run = jax.shard_map(local, in_specs=(tokens, (columns, columns, PartitionSpec(HEAD))), out_specs=tokens)
    # What is kept for the backward pass is weights as they lie, not gathered from sharded parameters.
    keep = jax.checkpoint_policies.save_only_these_names(BRANCHES_NAME)
    return jax.checkpoint(run, policy=keep)(x, kernels)


def short_conv(
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
    """`gdn_jax.fused.short_conv.short_conv`; on a mesh with a head or context axis every device filters its channels
    of its tokens."""
    sizes = _axes()
    how = dict(heads=heads, width=width, normalize=normalize)
    if sizes is None or sizes[CONTEXT] == sizes[HEAD] == 1:
        return fused_short_conv(x, weight, bias, **how, implementation=implementation, **arrays)
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


def _by_kernel(sizes, xs, weights, ids, *, heads, width, normalize, implementation):
    """q, k and v by the kernels, from their channels and filters apart; None where the kernels cannot run."""
    from pallas_kernels.layer import short_conv as kernel

    rows, parts = _dividing(sizes, DATA, xs[0].shape[0]), sizes[HEAD]
    B = xs[0].shape[0] // (sizes[DATA] if rows else 1)
    T, D = xs[0].shape[1], sum(x.shape[2] for x in xs)
    if T % sizes[CONTEXT] or heads % parts or D % parts:
        return None
    shard = jax.ShapeDtypeStruct((B, T // sizes[CONTEXT], D // parts), xs[0].dtype)
    filters = jax.ShapeDtypeStruct((D // parts, weights[0].shape[1]), weights[0].dtype)
    if not usable(implementation, kernel.check_supported(shard, filters, heads // parts, width)):
        return None
    how = (heads // parts, width, normalize, sizes[CONTEXT] > 1)
    return _kernel_over_tokens(_Lies(rows, HEAD), how, tuple(xs), tuple(weights), ids)


@partial(jax.jit, static_argnums=(0, 1))
def _kernel_over_tokens(lies: _Lies, how: tuple[int, int, bool, bool], xs, weights, ids):
    heads, width, normalize, over_tokens = how
    options = dict(heads=heads, width=width, normalize=normalize)

    def local(xs, weights, ids):
        xs, weights, ids = vary_alike((xs, weights, ids))
        x, weight = jnp.concatenate(xs, 2), jnp.concatenate(weights)
        if over_tokens:
            return short_conv_by_kernel(x, weight, ids, axis_name=CONTEXT, **options)
        return fused_short_conv(x, weight, segment_ids=ids, implementation="mosaic_gpu", **options)[:3]

    specs = (lies.tokens,) * 3, (PartitionSpec(HEAD),) * 3, PartitionSpec(lies.rows, CONTEXT)
    return jax.shard_map(local, in_specs=specs, out_specs=(lies.tokens,) * 3)(xs, weights, ids)


def _filtered(sizes, x, weight, bias, **arrays) -> tuple[jax.Array, jax.Array]:
    """`causal_conv1d` of channels that may be split over heads, on the tokens of each device."""
    if sizes[CONTEXT] == 1:
        return causal_conv1d(x, weight, bias, **arrays)
    _check_tokens(x.shape[1], sizes)
    arrays = {name: arrays.get(name) for name in ("initial_state", "cu_seqlens", "segment_ids")}
    rows = None if arrays["cu_seqlens"] is not None else _dividing(sizes, DATA, x.shape[0])
    lies = _Lies(rows, _dividing(sizes, HEAD, x.shape[2]))
    return _conv_over_tokens(lies, x, weight, bias, arrays)


def attention(
    attend: Callable[..., jax.Array],
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    *,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H D"]:
    """attend(q, k, v, lengths=lengths, segment_ids=segment_ids), which treats every head by itself.

    Where the mesh that is set has a context axis, its devices exchange their tokens of all heads for all tokens of
    some heads, and the result back: four all-to-alls of what a device holds, of which it keeps 1 / devices. A key
    head that several devices read is sent to each. Query heads that do not divide leave it to XLA, which gathers
    keys and values; `gdn_jax.debug_checks` tells of it.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    rows = dict(lengths=lengths, segment_ids=segment_ids)
    sizes = _axes()
    if sizes is None or sizes[CONTEXT] == 1:
        return attend(q, k, v, **rows)
    parts = sizes[HEAD] * sizes[CONTEXT]
    if q.shape[2] % parts:
        if ops.debug_checks_are_on():
            warnings.warn(
                f"attention: {q.shape[2]} heads cannot be split over the {parts} devices of a row; keys and values "
                "are gathered",
                stacklevel=2,
            )
        return attend(q, k, v, **rows)
    _check_tokens(q.shape[1], sizes)
    data, devices = _dividing(sizes, DATA, q.shape[0]), sizes[CONTEXT]
    tokens = PartitionSpec(data, CONTEXT, HEAD)

    def local(q, k, v, rows):
        q, k, v, rows = vary_alike((q, k, v, rows))
        k, v = (_repeated(x, devices) for x in (k, v))
        q, k, v = (lax.all_to_all(x, CONTEXT, 2, 1, tiled=True) for x in (q, k, v))
        return lax.all_to_all(attend(q, k, v, **rows), CONTEXT, 1, 2, tiled=True)

    k, v = (_repeated(x, sizes[HEAD]) for x in (k, v))
    specs = ((tokens,) * 3) + (PartitionSpec(data),)
    return jax.shard_map(local, in_specs=specs, out_specs=tokens)(q, k, v, rows)


def _repeated(x: Float[Array, "B T H D"], parts: int) -> Float[Array, "B T HR D"]:
    """Every head as often as makes their number a multiple of the parts."""
    return jnp.repeat(x, math.lcm(x.shape[2], parts) // x.shape[2], axis=2)


def linear_softmax_cross_entropy(
    x: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    label_weights: Float[Array, "B T"],
    **options: Any,
) -> losses.LossSums:
    """`gdn_jax.losses.linear_softmax_cross_entropy`, of each device's tokens, summed over the mesh that is set.

    The devices of the head axis share a row's tokens here: each needs the whole weight, which has no heads.
    """
    call = partial(losses.linear_softmax_cross_entropy, **options)
    sizes = _axes()
    if sizes is None:
        return call(x, weight, targets, label_weights=label_weights)
    rows = _dividing(sizes, DATA, x.shape[0])
    _check_tokens(x.shape[1], sizes)
    heads = (HEAD,) if x.shape[1] % (sizes[CONTEXT] * sizes[HEAD]) == 0 else ()
    over = (*([rows] if rows else []), CONTEXT, *heads)
    tokens = PartitionSpec(rows, (CONTEXT, *heads))

    def local(*args):
        x, weight, targets, label_weights = vary_alike(args)
        sums = call(x, weight, targets, label_weights=label_weights)
        return jax.tree.map(lambda y: lax.psum(y, over), sums)

    # Else XLA would carry this cut of the tokens back through the model.
    x = lax.with_sharding_constraint(x, PartitionSpec(rows, CONTEXT))
    specs = (tokens, PartitionSpec(), tokens, tokens)
    return jax.shard_map(local, in_specs=specs, out_specs=PartitionSpec())(x, weight, targets, label_weights)
