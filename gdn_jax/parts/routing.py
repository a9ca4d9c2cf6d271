"""Which experts a token gets, and with which weights: the largest of a softmax, or of sigmoids in groups."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.parts.experts import FEW, SharedExpert
from gdn_jax.parts.kernels import fused_op, is_whole, run, token_op, usable
from gdn_jax.shapes import Choice


def choose(
    x: Float[Array, "N E"],
    bias: Float[Array, " E"] | None,
    choice: Choice,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """The experts e with the k largest sigmoid(x)_e + bias_e or softmax(x)_e of each row, and these as their weights.

    A kernel chooses by sigmoids for up to 128 rows and 64, 128 or 256 experts; plain JAX would be ten kernels. The
    result can be differentiated once, in reverse; the bias takes part in the choice alone.

    Args:
      x: scores, float32.
      bias: what is added to sigmoids to choose by, float32; None with softmax.
      choice: how many, and from what.
      implementation: as for `parts.kernels.usable`.

    Returns:
      Weights in x's dtype and numbers int32, the expert with the largest sum first, of equal ones the first, and
      before all those whose sum is NaN. The k numbers of a row differ.
    """
    from pallas_kernels.rows import routing

    few = x.shape[0] <= FEW and usable(implementation)
    wide = all(y is None or y.dtype == jnp.float32 for y in (x, bias))
    if few and wide and routing.check_supported(x.shape[1], choice) is None:
        return _choose(choice, x, bias)
    return plain_choose(choice, x, bias, few)


def plain_choose(choice: Choice, x, bias, counts: bool = False):
    """`choose` without the kernel.

    Args:
      counts: as for `largest`.
    """
    scores = jax.nn.softmax(x, axis=-1) if choice.scoring == "softmax" else jax.nn.sigmoid(x)
    biased = _nan_first(scores if bias is None else scores + bias)
    if choice.kept_groups < choice.groups:
        biased = biased.reshape(len(x), choice.groups, -1)
        of_groups = _nan_first(jnp.sum(largest(biased, 2, counts)[0], axis=-1))
        _, kept = largest(of_groups, choice.kept_groups, counts)
        stays = jnp.any(kept[..., None] == jnp.arange(choice.groups), axis=1)
        biased = jnp.where(stays[..., None], biased, -jnp.inf).reshape(scores.shape)
    _, chosen = largest(biased, choice.per_token, counts)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if choice.normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * choice.factor, chosen


def _nan_first(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """x, but inf for NaN: whether a sort has it first or last hangs on a sign that devices give differently."""
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def largest(x: Float[Array, "*S n"], k: int, counts: bool) -> tuple[Float[Array, "*S _"], Int[Array, "*S _"]]:
    """`jax.lax.top_k`: the k largest numbers of each row and their places, the first of equal ones first.

    The order is total: NaN is above every number (below, if its sign bit is set), and 0 is above -0. So no place
    comes twice.

    Args:
      x: rows.
      k: how many, up to n.
      counts: whether the place of a number is found by counting the larger ones, n^2 comparisons without a sort.
    """
    if not counts:
        values, chosen = jax.lax.top_k(x, k)
        return values, chosen
    places = jnp.arange(x.shape[-1], dtype=jnp.int32)
    order = _ordered(x)
    other, own = order[..., None, :], order[..., None]
    before = (other > own) | ((other == own) & (places < places[:, None]))
    rank = jnp.sum(before, axis=-1, dtype=jnp.int32)
    is_one = rank[..., None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]  # [.., k, n]
    chosen = jnp.sum(jnp.where(is_one, places, 0), axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.where(is_one, x[..., None, :], 0), axis=-1), chosen


def _ordered(x: Float[Array, "*S"]) -> Int[Array, "*S"]:
    """Integers in the order in which a sort has floating numbers, NaN among them."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _by_kernel(choice: Choice, x, bias):
    from pallas_kernels.rows import routing

    return routing.choose(x, bias, choice)


def _forward(choice: Choice, x, bias):
    return run(_by_kernel, choice, (x, bias), ("n .", "."), ("n .", "n ."), {"n": x.shape[0]}), (x, bias)


def _backward(choice: Choice, saved, cotangents):
    return jax.vjp(lambda x, bias: plain_choose(choice, x, bias)[0], *saved)[1](cotangents[0])


_choose = fused_op(_forward, _backward)


def takes(
    x: Float[Array, "*S D"],
    router: Float[Array, "R D"],
    choice: Choice,
    gate_up: Float[Array, "E D F2"],
    shared: SharedExpert,
    implementation: str | None,
) -> bool:
    """Whether `routed_stream` takes a stream and experts: one row, on one device."""
    if x.size != x.shape[-1] or not usable(implementation) or not is_whole(x, router, gate_up, *shared):
        return False
    from pallas_kernels.device.grid_barrier import most_ctas
    from pallas_kernels.rows.routed_stream import check_supported

    return check_supported(x.reshape(1, -1), gate_up, shared.gate.shape[1], choice, most_ctas()) is None


@token_op
def routed_stream(
    x: Float[Array, "*S D"],
    y: Float[Array, "*P D"] | None,
    norm: Float[Array, " D"],
    router: Float[Array, "R D"],
    bias: Float[Array, " E"] | None,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    shared: SharedExpert,
    choice: Choice,
    *,
    eps: float,
    ahead: Sequence[jax.Array] = (),
    words: Any = None,
) -> tuple[Float[Array, "*S D"], Float[Array, "P 1 D"]]:
    """The stream s = x + y, and the experts of its norm n = s (mean(s^2) + eps)^(-1/2) norm, in one kernel.

    `choose` gives these for the scores n router^T, and `parts.experts.mixture` their sum; the shared expert is added,
    times the sigmoid of the last score where the router has a row more than there are experts.

    Args: as for the kernel's function; x, for which `takes` is true, and y may have more axes, of length 1.

    Returns:
      s in x's dtype, and the experts' sum in parts, float32. Numerics: nothing in between is rounded.
    """
    from pallas_kernels.rows import routed_stream as kernels

    parts = None if y is None else y.reshape(-1, y.shape[-1])
    arrays = x.reshape(1, -1), parts, norm, router, bias, gate_up, down, tuple(shared)
    s, z = kernels.routed_stream(*arrays, choice=choice, eps=eps, ahead=tuple(ahead), words=words)
    return s.reshape(x.shape), z[:, None]
