"""The experts of a mixture: SwiGLUs, of which every token has a few, and the sum of these with its weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.partitioning import expected_shards, lie_on_explicit_axes
from gdn_jax.parts.kernels import fused_op, run, usable

FEW = 128
"""Rows up to which to read the weights of an expert takes longer than to multiply by them."""


def mixture(
    rows: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    chosen: Int[Array, "N k"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    *,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """sum_j weights_j (silu(x A_e) * (x B_e)) W_e with e = chosen_j and [A_e | B_e] = gate_up_e, for every row x.

    The kernels take bfloat16 and float16 with D and F multiples of 64, and read those experts alone that a row has
    chosen. Rows may be split over devices, or experts, whose parts of the sum are then added. The result can be
    differentiated once, in reverse: by kernels too, or, where devices share the work, as the plain form.

    The plain form of many rows is `jax.lax.ragged_dot`, which XLA makes a product of all rows with all experts where
    it has no better form, on GPUs too. That of a few rows copies the weights of their experts.

    Args:
      rows: inputs, in the dtype in which all is multiplied.
      weights: of the choices, float32.
      chosen: numbers of the experts, below E, those of a row all different.
      gate_up: both branches of every expert side by side.
      down: their projections down.
      implementation: as for `parts.kernels.usable`; "mosaic_gpu" warns where the kernels take no such arrays.

    Returns:
      [N, D] float32 (float64 when a weight is). Numerics: the result of an expert is rounded to the dtype of rows, by
      kernels and by a plain form of many rows; the sum over them is not.
    """
    from pallas_kernels.layer import expert_product

    gate_up, down = gate_up.astype(rows.dtype), down.astype(rows.dtype)
    reason = _check_supported(rows, gate_up, down)
    if usable(implementation, expert_product, part="a mixture of experts", reason=reason):
        return _mixture(None, rows, weights, chosen, gate_up, down)
    return plain_mixture(rows, weights, chosen, gate_up, down)


def plain_mixture(rows, weights, chosen, gate_up, down):
    """`mixture` without kernels."""
    # Weights that are gathered are read, written and read again.
    few = 3 * chosen.size <= gate_up.shape[0]
    return (_copied if few else _ragged)(rows, weights, chosen, gate_up, down)


def _ragged(rows, weights, chosen, gate_up, down):
    """All tokens of an expert side by side."""
    k = chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1), stable=True)  # pairs (token, choice) by expert
    sizes = jnp.bincount(chosen.reshape(-1), length=gate_up.shape[0])
    gate, up = jnp.split(jax.lax.ragged_dot(rows[order // k], gate_up, sizes), 2, axis=-1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
    y = y[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(weights[..., None] * y, axis=1)


def _copied(rows, weights, chosen, gate_up, down):
    """From copies of the chosen experts alone, where `ragged_dot` would read all of them."""
    gate_up, down = gate_up[chosen], down[chosen]
    gate, up = jnp.split(jnp.einsum("nd,nkdf->nkf", rows, gate_up), 2, axis=-1)
    y = jnp.einsum("nkf,nkfd->nkd", jax.nn.silu(gate) * up, down)
    return jnp.sum(weights[..., None] * y, axis=1)


def _check_supported(rows, gate_up, down) -> str | None:
    """Why the kernels cannot take a call; None if they can."""
    from pallas_kernels.layer.expert_product import check_supported

    if lie_on_explicit_axes(rows, gate_up, down):
        return "arrays lie on explicit axes of a mesh"
    if gate_up.shape[2] % 128:
        return f"experts of {gate_up.shape[2] // 2} inner columns; the kernel takes a multiple of 64"
    return check_supported(rows, gate_up) or check_supported(down[0], down)


class Tiles(NamedTuple):
    """Rows in tiles, each of one expert."""

    x: Float[Array, "M D"]
    """The rows of the tiles one after the other."""
    experts: Int[Array, " tiles"]
    used: Int[Array, "1"]
    places: Int[Array, "N k"]
    """Where each choice lies; after all tiles, or -1, where it is nobody's."""


class Shares(NamedTuple):
    """The tiles of experts whose rows lie side by side."""

    first: Int[Array, " E"]
    """The first tile of each expert."""
    count: Int[Array, " E"]
    """How many it has."""
    experts: Int[Array, " tiles"]
    """The expert of each tile."""
    places: Int[Array, "N k"]
    """Where each choice lies; after all tiles where it is nobody's."""
    pairs: Int[Array, " M"]
    """The choice that lies in each place, n k + j; N k in those that fill a tile up."""


def _shares(chosen, num_experts: int, size: int) -> Shares:
    """Tiles of `size` rows: as many for each expert as its rows fill."""
    N, k = chosen.shape
    key = chosen.reshape(-1)
    order = jnp.argsort(key, stable=True)
    among_all = jnp.zeros(N * k, jnp.int32).at[order].set(jnp.arange(N * k, dtype=jnp.int32))
    count = jnp.bincount(key, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    tiles = (count + size - 1) // size
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    most = (N * k + (size - 1) * min(num_experts, N * k)) // size
    numbers = jnp.arange(most, dtype=jnp.int32)[:, None]
    experts = jnp.minimum(jnp.sum(numbers >= ends, axis=1, dtype=jnp.int32), num_experts - 1)
    clipped = jnp.minimum(key, num_experts - 1)
    places = (ends - tiles)[clipped] * size + among_all - first[clipped]
    places = jnp.where(key < num_experts, places, most * size)
    pairs = jnp.full(most * size, N * k, jnp.int32)
    pairs = pairs.at[places].set(jnp.arange(N * k, dtype=jnp.int32), mode="drop")
    return Shares(ends - tiles, tiles, experts, places.reshape(N, k), pairs)


def _tiles_of_many(rows, chosen, num_experts: int, size: int) -> Tiles:
    """The rows of an expert side by side, in as many tiles as they fill."""
    shares, (N, k) = _shares(chosen, num_experts, size), chosen.shape
    row_of = jnp.minimum(shares.pairs, N * k - 1) // k
    return Tiles(rows[row_of], shares.experts, shares.first[-1:] + shares.count[-1:], shares.places)


def _by_kernels(_, rows, weights, chosen, gate_up, down, ids):
    """`mixture` by kernels; where ids are those of some experts, the part of the sum that is theirs."""
    chosen = _own(chosen, gate_up.shape[0], ids)
    if rows.shape[0] <= FEW and (config := _config_of_few(chosen, rows, gate_up)) is not None:
        return _few_by_kernels(config, rows, weights, chosen, gate_up, down, ids)
    return _many_by_kernels(rows, weights, chosen, gate_up, down, ids)


def _config_of_few(chosen, rows, gate_up):
    """How the kernels of few rows cut a call: tiles hold about four times the rows that an expert has in the mean, so
    that few experts fill more than one. None where they cannot take one."""
    from pallas_kernels.rows import expert_swiglu, expert_tiles

    if expert_tiles.check_supported(*rows.shape) is not None:
        return None
    mean = chosen.size / gate_up.shape[0]
    for size in [n for n in (8, 16, 32) if n >= min(4 * mean, 32)] + [16, 8]:
        if expert_swiglu.check_supported(rows, gate_up, size) is None:
            return expert_swiglu.Config.default(size, rows.shape[1])
    return None


def _few_by_kernels(config, rows, weights, chosen, gate_up, down, ids):
    from pallas_kernels.rows.expert_swiglu import expert_swiglu
    from pallas_kernels.rows.expert_tiles import expert_tiles

    num_experts = gate_up.shape[0]
    made = expert_tiles(rows, chosen, experts=num_experts, size=config.rows)
    x, experts, counts, used, places = made
    if ids is not None:
        places = jnp.where(chosen < num_experts, places[: len(rows)], -1)
    return expert_swiglu(x, gate_up, down, experts, counts, used, weights, places, config=config)


def _many_by_kernels(rows, weights, chosen, gate_up, down, ids):
    from pallas_kernels.layer.expert_product import Config, expert_product

    num_experts, config = gate_up.shape[0], Config()
    tiles = _tiles_of_many(rows, chosen, num_experts, config.rows)
    of_tiles = dict(experts=tiles.experts, used=tiles.used, config=config)
    h = expert_product(tiles.x, gate_up, **of_tiles, swiglu=True)
    y = expert_product(h, down, **of_tiles)[tiles.places]
    if ids is not None:
        y = jnp.where((chosen < num_experts)[..., None], y, 0)
    return jnp.sum(weights[..., None] * y, axis=1)


def _own(chosen, num_experts: int, ids):
    """Numbers among the experts with these ids, num_experts for others; as they are where there are no ids."""
    chosen = chosen.astype(jnp.int32)
    if ids is None:
        return chosen
    chosen = chosen - ids[0]
    return jnp.where((chosen >= 0) & (chosen < num_experts), chosen, num_experts)


OPERANDS = "n .", "n .", "n .", "e . .", "e . .", "e"
"""Names of the dimensions of rows, weights, choices, both projections and the numbers of the experts."""


def _forward(_, rows, weights, chosen, gate_up, down):
    args = rows, weights, chosen, gate_up, down
    if expected_shards(args) is None:
        return _by_kernels(None, *args, None), args
    sizes = {"n": rows.shape[0], "e": gate_up.shape[0]}
    ids = jnp.arange(gate_up.shape[0], dtype=jnp.int32)
    return run(_by_kernels, None, (*args, ids), OPERANDS, "n . +e", sizes), args


def _backward(_, saved, dy):
    rows, weights, chosen, gate_up, down = saved
    args = rows, weights, chosen, gate_up, down, dy
    if expected_shards(args) is None:
        drows, dweights, *others = _gradients(None, *args, None)
    else:
        sizes, ids = (
            {"n": rows.shape[0], "e": gate_up.shape[0]},
            jnp.arange(gate_up.shape[0], dtype=jnp.int32),
        )
        operands, results = (*OPERANDS[:-1], "n .", "e"), ("n . +e", "n . +e", "e . . +n", "e . . +n")
        drows, dweights, *others = run(_gradients, None, (*args, ids), operands, results, sizes)
    return drows, dweights, None, *others


def _gradients(_, rows, weights, chosen, gate_up, down, dy, ids):
    """Gradients of `mixture` by kernels, from the rows of each expert alone: their branches are made again.

    Where ids are those of some experts, the parts of the sums that are theirs.
    """
    from pallas_kernels.layer.expert_gradient import expert_gradient
    from pallas_kernels.layer.expert_product import Config, expert_product

    (N, k), config, dtype = chosen.shape, Config(), rows.dtype
    chosen = _own(chosen, gate_up.shape[0], ids)
    shares = _shares(chosen, gate_up.shape[0], config.rows)
    of_tiles = dict(experts=shares.experts, used=shares.first[-1:] + shares.count[-1:], config=config)
    of_experts = dict(first=shares.first, count=shares.count, rows=config.rows)
    pair = jnp.minimum(shares.pairs, N * k - 1)
    # Rows that fill a tile up are 0, and not copies: Inf or NaN times a cotangent of 0 is NaN. What comes after the
    # used tiles nobody reads.
    arrays, is_pair = (
        (rows[pair // k], weights.reshape(-1)[pair][:, None], dy[pair // k]),
        shares.pairs < N * k,
    )
    x, weight, dy = (jnp.where(is_pair[:, None], y, 0) for y in arrays)
    dy = dy.astype(dtype)
    a, b = jnp.split(expert_product(x, gate_up, **of_tiles).astype(jnp.float32), 2, axis=-1)
    gate = jax.nn.sigmoid(a)
    h = a * gate * b
    dh = expert_product(dy, down, **of_tiles, transpose=True).astype(jnp.float32)
    dweights, dh = jnp.sum(dh * h, axis=-1)[shares.places], weight * dh
    branches = jnp.concatenate([dh * b * gate * (1 + a * (1 - gate)), dh * a * gate], axis=-1).astype(dtype)
    drows = expert_product(branches, gate_up, **of_tiles, transpose=True)[shares.places]
    dgate_up = expert_gradient(x, branches, **of_experts)
    ddown = expert_gradient(h.astype(dtype), (weight * dy).astype(dtype), **of_experts)
    if ids is not None:
        is_own = chosen < gate_up.shape[0]
        drows, dweights = jnp.where(is_own[..., None], drows, 0), jnp.where(is_own, dweights, 0)
    return jnp.sum(drows.astype(jnp.float32), axis=1), dweights, dgate_up, ddown


_mixture = fused_op(_forward, _backward)


class SharedExpert(NamedTuple):
    """Projections of an expert that every token has."""

    gate: Float[Array, "D S"]
    up: Float[Array, "D S"]
    down: Float[Array, "S D"]
