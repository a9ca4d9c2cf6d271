"""Which experts a token gets, and with which weights: the largest of sigmoids, in groups."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.fused.experts import FEW, SharedExpert, row_gradients
from gdn_jax.fused.kernels import fused_op, kernels_run, run
from gdn_jax.shapes import Choice


def choose(
    x: Float[Array, "N E"],
    bias: Float[Array, " E"],
    choice: Choice,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """The experts e with the k largest sigmoid(x)_e + bias_e of each row, and their sigmoids as weights.

    A kernel chooses for up to 128 rows and 64, 128 or 256 experts; plain JAX would be ten kernels. The result can be
    differentiated once, in reverse; the bias takes part in the choice alone.

    Args:
      x: scores, float32.
      bias: what is added to sigmoids to choose by, float32.
      choice: how many, and from what.
      implementation: as for `fused.kernels.kernels_run`.

    Returns:
      Weights in x's dtype and numbers int32, the expert with the largest sum first, of equal ones the first.
    """
    few = x.shape[0] <= FEW and kernels_run(implementation)
    if few and x.dtype == bias.dtype == jnp.float32 and _reason(x, choice) is None:
        return _choose(choice, x, bias)
    return plain_choose(choice, x, bias, few)


def _reason(x, choice: Choice) -> str | None:
    from pallas_kernels.layer import routing

    return routing.check_supported(x.shape[1], choice)


def plain_choose(choice: Choice, x, bias, counts: bool = False):
    """`choose` without the kernel.

    Args:
      counts: as for `largest`.
    """
    scores = jax.nn.sigmoid(x)
    biased = scores + bias
    if choice.kept_groups < choice.groups:
        biased = biased.reshape(len(x), choice.groups, -1)
        of_groups = jnp.sum(largest(biased, 2, counts)[0], axis=-1)
        _, kept = largest(of_groups, choice.kept_groups, counts)
        stays = jnp.any(kept[..., None] == jnp.arange(choice.groups), axis=1)
        biased = jnp.where(stays[..., None], biased, -jnp.inf).reshape(scores.shape)
    _, chosen = largest(biased, choice.per_token, counts)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if choice.normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * choice.factor, chosen


def largest(x: Float[Array, "*S n"], k: int, counts: bool) -> tuple[Float[Array, "*S _"], Int[Array, "*S _"]]:
    """`jax.lax.top_k`: the k largest numbers of each row and their places, the first of equal ones first.

    NaN is larger than every number (with the sign bit set: smaller), and 0 than -0: each place is named once at most.

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
    from pallas_kernels.layer import routing

    return routing.choose(x, bias, choice)


def _forward(choice: Choice, x, bias):
    return run(_by_kernel, choice, (x, bias), ("n .", "."), ("n .", "n ."), {"n": x.shape[0]}), (x, bias)


def _backward(choice: Choice, saved, cotangents):
    return jax.vjp(lambda x, bias: plain_choose(choice, x, bias)[0], *saved)[1](cotangents[0])


_choose = fused_op(_forward, _backward)


def takes_row(scores: Float[Array, "1 E"], choice: Choice) -> bool:
    """Whether `routed_mixture` takes the scores of a row."""
    from pallas_kernels.layer import expert_row, row_choice

    warpgroups = expert_row.Config().warpgroups
    reason = row_choice.check_supported(scores.shape[1], choice, warpgroups)
    return scores.dtype == jnp.float32 and reason is None


def routed_mixture(
    row: Float[Array, "1 D"],
    scores: Float[Array, "1 E"],
    bias: Float[Array, " E"],
    choice: Choice,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    shared: SharedExpert,
    weight: Float[Array, "1"] | None = None,
    ahead: Sequence[jax.Array] = (),
) -> Float[Array, "P D"]:
    """`fused.experts.row_mixture` of the experts that `choose` gives for scores and bias, by two kernels, in parts.

    Args: those of `choose`, for which `takes_row` is true, and of `row_mixture`; ahead as for
      `fused.row_product.stream_product`. The result can be differentiated once, in reverse.

    Returns:
      [P, D] float32, whose sum it is. Numerics: nothing in between is rounded.
    """
    gate_up, down = gate_up.astype(row.dtype), down.astype(row.dtype)
    return _routed(choice, row, scores, bias, gate_up, down, tuple(shared), weight, tuple(ahead))


def _routed_forward(choice: Choice, *args):
    from pallas_kernels.layer import expert_row

    row, scores, bias, *others, ahead = args
    return expert_row.routed_row(row, scores, bias, choice, *others, ahead=ahead), args[:-1]


def _routed_backward(choice: Choice, saved, dy):
    row, scores, bias, *others = saved
    weights, pull, chosen = jax.vjp(lambda x: plain_choose(choice, x, bias, True), scores, has_aux=True)
    drow, dweights, _, *gradients = row_gradients((row, weights, chosen, *others), dy)
    return drow, *pull(dweights), None, *gradients, None


_routed = fused_op(_routed_forward, _routed_backward)
