"""The experts of one row, chosen by every CTA as it needs them: `layer.routing` inside another kernel.

    s = sigmoid(x),  c = s + bias;   of the groups those with the largest sums of their two largest c are kept;
    of these the experts e with the k largest c, the first of equal ones first;   w_e = factor s_e / sum of the k s

A kernel of its own, that of `layer.routing`, takes longer than this choice: it ends before the experts are read, and
what it finds goes through memory.

Inputs (GMEM): x, bias [E] float32, and once more as [groups, E / groups]. Shared memory: `memory`, where the numbers
and the weights are for each warpgroup. Numerics: float32; of a row with NaN the numbers mean nothing. Limits:
`check_supported`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax.shapes import Choice
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load
from pallas_kernels.device.memory import Buffer, Memory, store_any


def check_supported(experts: int, choice: Choice, warpgroups: int) -> str | None:
    """Why a CTA cannot choose among so many experts; None if it can."""
    if experts not in (64, 128, 256) or experts % (warpgroups * WARPS):
        return f"{experts} experts; the kernel takes 64, 128 and 256"
    if choice.per_token % WARPS:
        return f"{choice.per_token} experts of a token; the kernel takes multiples of {WARPS}"
    if choice.kept_groups == choice.groups:
        return None
    size = experts // choice.groups
    if experts % choice.groups or size < 4 or size & (size - 1) or choice.groups > min(size, 32):
        of = "of 4, 8, 16 .. experts, as many and 32 at most"
        return f"{choice.groups} groups of {experts} experts; the kernel takes groups {of}"
    if choice.groups % _rows_at_once(size):
        return f"{choice.groups} groups of {size}; the kernel takes multiples of {_rows_at_once(size)}"
    return None


def _lanes(size: int) -> int:
    return min(size, WARP)


def _rows_at_once(size: int) -> int:
    """Groups that a warpgroup has in a register."""
    return WARPS * WARP // _lanes(size)


def memory(experts: int, choice: Choice, warpgroups: int) -> Memory:
    """Shared memory of a choice; each warpgroup has a part of all but `places`."""
    some = choice.kept_groups < choice.groups
    return {
        "groups": Buffer((warpgroups, experts // choice.groups)) if some else None,
        "kept": Buffer((warpgroups, choice.groups), jnp.int32) if some else None,
        "places": Buffer((experts,)),
        "chosen": Buffer((warpgroups, choice.per_token), jnp.int32),
        "weights": Buffer((warpgroups, choice.per_token)),
    }


def choose(gmem: Any, smem: Any, choice: Choice, wg: Any, meet: Any) -> None:
    """Writes numbers and weights of the experts to this warpgroup's part of smem.chosen and smem.weights.

    Args:
      gmem: its references scores and bias are the inputs, and scores_of_groups and bias_of_groups, if only some
        groups are kept.
      smem: its references are those of `memory`.
      choice: how experts are chosen.
      wg: number of the warpgroup.
      meet: waits for all warpgroups of the CTA.
    """
    E, warpgroups, k = gmem.scores.shape[0], smem.chosen.shape[0], choice.per_token
    layout, own = lane_layout(WARP, E // WARP), E // warpgroups
    # All is asked for at once: the first of it has been long on its way when the last is used.
    whole, part = (pl.ds(0, E), layout.reduce(0)), (pl.ds(wg * own, own), layout.reduce(1))
    loaded = [
        [load(ref.at[numbers], spread) for ref in (gmem.scores, gmem.bias)]
        for numbers, spread in (whole, part)
    ]
    mask = _keep(gmem, smem, choice, wg) if choice.kept_groups < choice.groups else None

    def biased(score, bias, first, layout):
        """The score, and the biased one, which is -inf in groups that are not kept."""
        (count,), score = score.shape, _sigmoid(score)
        c = score + bias
        if mask is None:
            return score, c
        number = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout) + first
        bit = lax.shift_right_logical(
            lax.broadcast(mask, (count,)), lax.div(number, jnp.int32(E // choice.groups))
        )
        return score, jnp.where((bit & 1) == 1, c, -jnp.inf)

    (scores, bias), (own_scores, own_bias) = loaded
    _, mine = biased(own_scores, own_bias, wg * own, layout.reduce(1))
    score, other = biased(scores, bias, 0, layout.reduce(0))
    mine, other = _pair(mine, other, layout)
    i, j = (plgpu.broadcasted_iota(jnp.int32, mine.shape, d, layout=layout) for d in (0, 1))
    store_any(smem.places.at[pl.ds(wg * own, own)], jnp.sum(_before(other, mine, j < i + wg * own), axis=1))
    meet()
    place = load(smem.places, layout.reduce(0))
    place, score = (plgpu.layout_cast(lax.broadcast_in_dim(x, (k, E), [1]), layout) for x in (place, score))
    rank, number = (
        plgpu.broadcasted_iota(jnp.int32, (k, E), d, layout=layout).astype(jnp.float32) for d in (0, 1)
    )
    weight = jnp.sum(jnp.where(place == rank, score, 0.0), axis=1)
    if choice.normalise:
        weight = weight / (jnp.sum(jnp.where(place < float(k), score, 0.0), axis=1) + 1e-20)
    store_any(smem.weights.at[wg], weight * choice.factor)
    # With NaN several would have one place, and none others.
    chosen = jnp.minimum(jnp.sum(jnp.where(place == rank, number, 0.0), axis=1), E - 1.0)
    store_any(smem.chosen.at[wg], chosen.astype(jnp.int32))
    plgpu.commit_smem()


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _pair(mine: jax.Array, other: jax.Array, layout: Any) -> list[jax.Array]:
    """A vector along rows and one along columns, as matrices."""
    shape = *mine.shape, *other.shape
    return [
        plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [d]), layout) for d, x in enumerate((mine, other))
    ]


def _before(other: jax.Array, mine: jax.Array, is_first: jax.Array) -> jax.Array:
    """1 where `other` comes before `mine`: it is larger, or equal and the first."""
    return jnp.where(other > mine, 1.0, jnp.where((other == mine) & is_first, 1.0, 0.0))


def _keep(gmem: Any, smem: Any, choice: Choice, wg: Any) -> jax.Array:
    """An integer whose bits are the groups that are kept."""
    shape, size = gmem.scores_of_groups.shape, gmem.scores_of_groups.shape[1]
    layout = lane_layout(_lanes(size), size // _lanes(size))
    c = _sigmoid(load(gmem.scores_of_groups, layout)) + load(gmem.bias_of_groups, layout)
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, shape, d, layout=layout).astype(jnp.float32) for d in (0, 1)
    )

    def along(x):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), layout)

    largest = jnp.max(c, axis=1)
    first = -jnp.max(jnp.where(c == along(largest), -column, -float(size)), axis=1)
    total = largest + jnp.max(jnp.where(column == along(first), -jnp.inf, c), axis=1)
    store_any(smem.groups.at[wg, pl.ds(0, choice.groups)], total)
    plgpu.commit_smem()
    mine, other = _pair(total, load(smem.groups.at[wg], layout.reduce(0)), layout)
    before = jnp.where(column < float(choice.groups), _before(other, mine, column < row), 0.0)
    kept = jnp.where(jnp.sum(before, axis=1) < float(choice.kept_groups), 1.0, 0.0)
    store_any(smem.kept.at[wg], kept.astype(jnp.int32))
    plgpu.commit_smem()
    mask = jnp.int32(0)
    for group in range(choice.groups):
        mask = mask | (smem.kept[wg, group] << group)
    return mask
