"""A model's operations over the tokens of a row, on one device and on a mesh of `MeshShape.make`.

Each device of the context axis has some tokens of every row. The rule and attention mix them, and the loss is a sum
over them: XLA would gather them. Where a program is traced under `jax.set_mesh`, the functions of this file run in a
`jax.shard_map` over all axes of the mesh. Elsewhere they are the operations themselves.

`head_shards` has the operations over channels.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from gdn_jax import losses
from gdn_jax.parallel import context
from gdn_jax.parallel.mesh import CONTEXT, DATA, HEAD, ShardAxes, axes_set, check_tokens, dividing
from gdn_jax.partitioning import vary_alike
from gdn_jax.rule import arguments, ops
from gdn_jax.rule.call import Arrays
from gdn_jax.rule.erase_then_delta import erase_then_delta_rule
from gdn_jax.rule.product import in_steps
from gdn_jax.shapes import accumulation_dtype


def splits_tokens() -> bool:
    """Tells whether the mesh that is set has a context axis: each device then has some tokens of every row."""
    sizes = axes_set()
    return sizes is not None and sizes[CONTEXT] > 1


class ByTokens(NamedTuple):
    """A rule of q, k, v and gates over rows, whose tokens a mesh may split over devices.

    Fields:
      whole: the operation on whole rows.
      split: the same of `gdn_jax.parallel.context`, on the tokens of one device.
    """

    whole: Callable[..., Any]
    split: Callable[..., Any]

    def here(self) -> Callable[..., Any]:
        """Chooses: `whole`, or, where a mesh has a context axis, `split` on the tokens of each device."""
        sizes = axes_set()
        if sizes is None or sizes[CONTEXT] == 1:
            return self.whole
        return partial(_over_tokens, self.split, sizes)


GATED_DELTA_RULE = ByTokens(ops.gated_delta_rule, context.gated_delta_rule)
DELTA_RULE = ByTokens(ops.delta_rule, context.delta_rule)
ERASE_THEN_DELTA_RULE = ByTokens(erase_then_delta_rule, context.erase_then_delta_rule)


def gated_delta_rule_on_mesh(q, k, v, g=None, beta=None, **options: Any) -> tuple[jax.Array, jax.Array]:
    """`gdn_jax.gated_delta_rule`, on a mesh too: by `context.gated_delta_rule` where there is a context axis.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.gated_delta_rule`; ValueError where the devices along context do
        not divide the tokens.
    """
    return GATED_DELTA_RULE.here()(q, k, v, g, beta, **options)


def delta_rule_on_mesh(q, k, v, g=None, beta=None, **options: Any) -> tuple[jax.Array, jax.Array]:
    """`gdn_jax.delta_rule`, on a mesh too: by `context.delta_rule` where there is a context axis.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.delta_rule`; ValueError where the devices along context do not
        divide the tokens.
    """
    return DELTA_RULE.here()(q, k, v, g, beta, **options)


def gated_delta_product_on_mesh(
    q, k, v, g=None, beta=None, *, cu_seqlens=None, segment_ids=None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """`gdn_jax.gated_delta_product`, on a mesh too: every device has all steps of its tokens.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.gated_delta_product`; ValueError where the devices along context do
        not divide the tokens.
    """
    *tokens, _, _, cu_seqlens, ids = in_steps(Arrays(q, k, v, g, beta, None, None, cu_seqlens, segment_ids))
    o, state = gated_delta_rule_on_mesh(*tokens, cu_seqlens=cu_seqlens, segment_ids=ids, **options)
    n = k.shape[2]
    return o[:, n - 1 :: n], state


def erase_then_delta_on_mesh(
    q, k, v, g, beta, erase_key, erase_strength, *, cu_seqlens=None, segment_ids=None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """`gdn_jax.erase_then_delta_rule`, on a mesh too: every device has both halves of its tokens.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.delta_rule`; ValueError where the devices along context do not
        divide the tokens.
    """
    erasure = dict(erase_key=erase_key, erase_strength=erase_strength)
    packing = dict(cu_seqlens=cu_seqlens, segment_ids=segment_ids)
    return ERASE_THEN_DELTA_RULE.here()(q, k, v, g, beta, **erasure, **packing, **options)


def _over_tokens(
    rule: Callable[..., Any], sizes: dict[str, int], q, k, v, g=None, beta=None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """A rule of tokens that are split over the context axis."""
    check_tokens(q.shape[1], sizes)
    names = "erase", "write", "erase_key", "erase_strength"
    apart = {name: options.pop(name) for name in names if name in options}
    arrays = {name: options.pop(name, None) for name in ("initial_state", "cu_seqlens", "segment_ids")}
    if isinstance(options.get("scale"), jax.Array):
        arrays["scale"] = options.pop("scale")
    rows = None if arrays["cu_seqlens"] is not None else dividing(sizes, DATA, q.shape[0])
    axes = ShardAxes(rows, dividing(sizes, HEAD, math.gcd(q.shape[2], k.shape[2], v.shape[2])))
    return _rule_over_tokens(rule, axes, tuple(options.items()), (q, k, v, g, beta), apart, arrays)


# Compiled by itself, so that the layers of a model share what is traced and lowered of one.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _rule_over_tokens(
    rule: Callable[..., Any], axes: ShardAxes, options: tuple[tuple[str, Any], ...], tokens, apart, arrays
):
    def local(tokens, apart, arrays):
        return rule(*tokens, axis_name=CONTEXT, **apart, **arrays, **dict(options))

    specs = axes.tokens, axes.tokens, axes.named(arrays)
    return jax.shard_map(local, in_specs=specs, out_specs=(axes.tokens, axes.states))(tokens, apart, arrays)


def attention_on_mesh(
    attend: Callable[..., jax.Array],
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv V"],
    *,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H V"]:
    """Computes attend(q, k, v, lengths=lengths, segment_ids=segment_ids), on a mesh too.

    `attend` treats every head by itself. The devices of the context axis exchange their tokens of all heads for all
    tokens of some heads, and exchange the results back. These are four all-to-alls, of q, k, v and the result, and
    a device keeps 1 / devices of each. A key head that several devices read is sent to each. Where the devices do
    not divide the query heads, XLA gathers keys and values; `gdn_jax.debug_checks` warns of it.

    Args:
      attend: a function of q, k, v, lengths and segment_ids.
      q, k, v: queries [B, T, H, D], keys [B, T, Hkv, D] and values [B, T, Hkv, V] of whole rows.
      lengths: tokens of each row [B] that are none of padding; None: all.
      segment_ids: [B, T] integers; a token sees its own segment.

    Returns:
      [B, T, H, V], as attend gives it.

    Raises:
      ValueError: the devices along context do not divide the tokens.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    rows = dict(lengths=lengths, segment_ids=segment_ids)
    sizes = axes_set()
    if sizes is None or sizes[CONTEXT] == 1:
        return attend(q, k, v, **rows)
    parts = sizes[HEAD] * sizes[CONTEXT]
    if q.shape[2] % parts:
        if arguments.debug_checks_are_on():
            warnings.warn(
                f"attention: {q.shape[2]} heads cannot be split over the {parts} devices of a row; keys and values "
                "are gathered",
                stacklevel=2,
            )
        return attend(q, k, v, **rows)
    check_tokens(q.shape[1], sizes)
    data, devices = dividing(sizes, DATA, q.shape[0]), sizes[CONTEXT]
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
    """Repeats every head until the number of heads is a multiple of the parts."""
    return jnp.repeat(x, math.lcm(x.shape[2], parts) // x.shape[2], axis=2)


def loss_on_mesh(
    x: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    label_weights: Float[Array, "B T"],
    **options: Any,
) -> losses.LossSums:
    """`gdn_jax.losses.linear_softmax_cross_entropy`, on a mesh too: summed over the tokens of all devices.

    The devices of the head axis share a row's tokens here, because the weight has no heads: each needs all of it.

    Raises:
      ValueError: as `gdn_jax.losses.linear_softmax_cross_entropy`, and where the devices along context do not divide
        the tokens.
    """
    call = partial(losses.linear_softmax_cross_entropy, **options)
    return _by_tokens(call, x, weight, targets, label_weights, are_summed=True)


def log_probs_on_mesh(
    x: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    label_weights: Float[Array, "B T"] | None = None,
    **options: Any,
) -> Float[Array, "B T"]:
    """`gdn_jax.losses.token_log_probs`, on a mesh too: each device has those of its own tokens.

    The devices of the head axis share a row's tokens here, as in `loss_on_mesh`.

    Raises:
      ValueError: as `gdn_jax.losses.token_log_probs`, and where the devices along context do not divide the tokens.
    """
    if label_weights is None:
        label_weights = jnp.ones(targets.shape, accumulation_dtype(x))
    call = partial(losses.token_log_probs, **options)
    return _by_tokens(call, x, weight, targets, label_weights, are_summed=False)


def _by_tokens(call: Callable[..., Any], x, weight, targets, label_weights, *, are_summed: bool) -> Any:
    """A function of tokens by a loss, on the tokens of each device, and summed over those of all or not."""
    sizes = axes_set()
    if sizes is None:
        return call(x, weight, targets, label_weights=label_weights)
    rows = dividing(sizes, DATA, x.shape[0])
    check_tokens(x.shape[1], sizes)
    heads = (HEAD,) if x.shape[1] % (sizes[CONTEXT] * sizes[HEAD]) == 0 else ()
    over = (*([rows] if rows else []), CONTEXT, *heads)
    tokens = PartitionSpec(rows, (CONTEXT, *heads))

    def local(*args):
        x, weight, targets, label_weights = vary_alike(args)
        found = call(x, weight, targets, label_weights=label_weights)
        return jax.tree.map(lambda y: lax.psum(y, over), found) if are_summed else found

    # Else XLA would carry this cut of the tokens back through the model.
    x = lax.with_sharding_constraint(x, PartitionSpec(rows, CONTEXT))
    specs = (tokens, PartitionSpec(), tokens, tokens)
    out_specs = PartitionSpec() if are_summed else tokens
    return jax.shard_map(local, in_specs=specs, out_specs=out_specs)(x, weight, targets, label_weights)
