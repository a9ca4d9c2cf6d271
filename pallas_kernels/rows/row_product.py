"""One row times a matrix, made by every CTA as it needs it, while the matrix is on its way.

    s = x + y,  v = s (mean(s^2) + eps)^(-1/2) w        `Stream`: the sum of the residual stream and its norm
    v = o (mean(o^2) + eps)^(-1/2) w f(z), for each head    `Heads`: the gated norm
    v = o sigmoid(z), for each head                         `Attended`: what heads of softmax attention see, in parts
    out = v W^T

A token of one row is many short kernels, each of which begins when the one before has ended. Here the copies of the
first rows of W are on their way while v is made.

Inputs (GMEM): W [F, D] float32, bfloat16 or float16, or codes of E4M3 with scales, see `made_rows.Blocks`; for
`Stream` x [1, D], y [P, D], which are added up, or none, w [D] float32; for `Heads` o [H, V], z [G, V], whose last H
rows are the gates, w [V] float32. Outputs (GMEM): out [1, F] in the dtype asked for; for `Stream` s [1, D] of x's
dtype, where there is y.
Grid: persistent, CTAs of one warpgroup, see `Config`, which take every ctas-th tile of `Config.rows` rows of W, in
pieces of `columns` columns. Shared memory: `_memory`.
Numerics: float32; v is not rounded. The same bits in every call. Hardware: `NEEDS`. Limits: `check_supported`, here
and of the rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device import generations
from pallas_kernels.device.ahead import bring, rows_of
from pallas_kernels.device.lanes import WARP, lane_layout, load, spread
from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch, num_sms, room, warpgroup_index
from pallas_kernels.device.memory import Barriers, Buffer, Memory, store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.rows.attention_rows import Parts
from pallas_kernels.rows.made_rows import WIDEST, Attended, Blocks, Heads, Row, Stream, bytes_for_tiles
from pallas_kernels.rows.weights import BLOCK

NEEDS = Needs.MMA

MANY_TILES = 4
"""Tiles of a CTA from which on two warpgroups share them."""

MORE_BYTES = 8 * 1024
"""Bytes that one CTA has beyond `bytes_for_tiles`, where its share of them would be less than two tiles."""

REDUCTION_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class Config:
    """How the matrix is walked over, not what is computed."""

    rows: int
    """Rows of a tile, a multiple of 4."""
    ctas: int = dataclasses.field(default_factory=num_sms)
    warpgroups: int = 1
    """Warpgroups of a CTA, which take its tiles in turn. The first one makes the row."""

    @classmethod
    def heads(cls) -> "Config":
        """For a row that is soon made: three CTAs multiply on a multiprocessor.

        (H200, 2026-11-26, 1536 x 2048: 3.5 us; one CTA 4.2; two with tiles of 8 rows 3.7.)
        """
        return cls(4, 3 * num_sms())

    @classmethod
    def stream(cls, F: int) -> "Config":
        """The tallest tiles that keep the multiprocessors as busy as any. Every CTA adds up all parts of y.

        Where a CTA has many tiles, one warpgroup multiplies them hardly faster than they come, and begins when the
        row is made: two catch up.

        (H200, 2026-11-26, 10368 x 1536 after 11 parts, with a convolution that this kernel had then: 12.3 us; with
        two and three CTAs on a multiprocessor 13.1 and 17.2, with tiles of 4 rows 15.7 and more.)
        """

        def longest(rows):
            """Rows of the multiprocessor that has most."""
            return pl.cdiv(pl.cdiv(F, rows), num_sms()) * rows

        rows = min((8, 4), key=longest)
        return cls(rows, warpgroups=2 if pl.cdiv(F // rows, num_sms()) >= MANY_TILES else 1)


def check_supported(weight: Shaped, scales: Shaped | None = None) -> str | None:
    """Why the kernels cannot take a matrix [F, D]; None if they can. `Row`s refuse for themselves."""
    F, D = weight.shape
    if scales is not None:
        if 16 * D + 4096 > room():  # a tile and two rows
            return f"rows of {D} codes; the kernel takes {(room() - 4096) // 16}"
        if weight.dtype != jnp.float8_e4m3fn:
            return f"the weight is {weight.dtype}; the kernel takes scales of float8_e4m3fn"
        if not generations.has_bulk_copies():
            return "a weight in 8 bits; the kernel takes one from compute capability 9.0"
        most = 2 * BLOCK * num_sms()
        if F % BLOCK or not 0 < F <= most:
            return f"{F} outputs in 8 bits; the kernel takes multiples of {BLOCK} up to {most}"
        return None
    if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the weight is {weight.dtype}; the kernel takes float32, bfloat16 and float16"
    if F % 8 or not F:
        return f"{F} outputs; the kernel takes a multiple of 8"
    if 4 * D * weight.dtype.itemsize > bytes_for_tiles():
        return f"rows of {D} numbers of {weight.dtype}; the kernel takes {bytes_for_tiles() // 4} bytes"
    return None


def _memory(config: Config, shape: tuple[int, int], weight: jax.Array, tiles: int) -> Memory:
    _, pieces, columns = weight.shape
    tile, own = pieces * config.rows * columns * weight.dtype.itemsize, pl.cdiv(tiles, config.ctas)
    free = bytes_for_tiles() // pl.cdiv(config.ctas, num_sms())
    if weight.dtype == jnp.float8_e4m3fn:  # tiles leave more room unused, and there may be two rows
        free = min(free, room() - REDUCTION_BYTES - 1024 - 4 * math.prod(shape))
    free = free if 2 * tile <= free else bytes_for_tiles() + MORE_BYTES
    groups = config.warpgroups
    stages = max(1, min(free // tile // groups, pl.cdiv(own, groups))) * groups
    return {
        "tiles": Buffer((stages, config.rows, pieces, columns), weight.dtype),
        "row": Buffer(shape),
        "full": Barriers(arrivals=1, count=stages),
        "made": Barriers(arrivals=groups) if groups > 1 else None,
    }


def _body(gmem: Any, smem: Any, *, row: Row, config: Config) -> None:
    stages, rows, pieces, columns = smem.tiles.shape
    layout, warpgroups = lane_layout(WARP, columns // WARP), config.warpgroups
    wg = warpgroup_index() if warpgroups > 1 else jnp.int32(0)
    own_stages = stages // warpgroups
    tiles = gmem.weight.shape[0] // rows
    each = pl.cdiv(tiles, config.ctas)
    first = grid_index() * each
    count = jnp.clip(tiles - first, 0, each)

    def start(i):
        slot = lax.rem(i, jnp.int32(stages))
        own = gmem.weight.at[pl.ds((first + i) * rows, rows)]
        generations.copy(own, smem.tiles.at[slot], smem.full.at[slot])

    def prepare(makes: bool):
        """Starts the first copies of a warpgroup, and makes the row, if it does.

        What the row is made of is asked for after one tile: after all of them it would come late.
        """
        pl.when(wg < count)(lambda: start(wg))
        loaded = row.load(gmem) if makes else None
        others = lax.div(jnp.minimum(count, stages) - wg + (warpgroups - 1), jnp.int32(warpgroups))
        lax.fori_loop(1, others, lambda i, _: start(wg + i * warpgroups), None)
        generations.skip(lambda: own_stages - jnp.maximum(others, 0))
        if makes:
            row.make(gmem, loaded, smem.row, grid_index() == 0)
        generations.commit()

    if warpgroups == 1:
        prepare(True)
    else:
        for n in range(warpgroups):
            pl.when(wg == n)(functools.partial(prepare, n == 0))
        plgpu.barrier_arrive(smem.made)
        plgpu.barrier_wait(smem.made)

    def piece_of_row(piece, i):
        block = 0 if row.blocks is None else row.blocks.of((first + i) * rows)
        if smem.row.shape[1] > columns:
            return smem.row.at[block, pl.ds(piece * columns, columns)]
        return smem.row.at[block * pieces + piece]

    last = jnp.maximum(lax.div(count - 1, jnp.int32(warpgroups)), 0) * warpgroups
    """The last tile of the first warpgroup, after whose copies it asks for what others need."""

    def tile(n, _):
        i = wg + n * warpgroups
        if gmem.ahead:
            pl.when(i == last)(lambda: bring(gmem.ahead, config.ctas))
        slot = lax.rem(i, jnp.int32(stages))
        generations.arrived(smem.full.at[slot], own_stages - 1)
        total = None
        for piece in range(pieces):
            v = spread(load(piece_of_row(piece, i), layout.reduce(0)), (rows, columns), 1, layout)
            part = load(smem.tiles.at[slot, :, piece], layout).astype(jnp.float32) * v
            total = part if total is None else total + part
        assert total is not None
        sums = jnp.sum(total, axis=1)
        store_any(gmem.out.at[pl.ds((first + i) * rows, rows)], sums.astype(gmem.out.dtype))

        @pl.when(i + stages < count)
        def _():
            generations.commit()  # a barrier: every thread of the warpgroup has read the tile
            start(i + stages)

        generations.skip(lambda: i + stages >= count)

        return ()

    lax.fori_loop(0, lax.div(count - wg + (warpgroups - 1), jnp.int32(warpgroups)), tile, ())


def _chosen(default: Callable[[Any], Config]) -> Callable[[Any], dict[str, Any]]:
    """The configuration of a call that has none, and what the kernel brings nearer."""
    return lambda x: dict(config=x.config or default(x), ahead=rows_of(x.ahead))


@kernel("eps", "dtype", "first", "config", chosen=_chosen(lambda x: Config.stream(len(x.weight))))
def stream_product(
    x: Float[Array, "1 C"],
    y: Float[Array, "P D"] | None,
    norm: Float[Array, " D"],
    weight: Float[Array, "F D"],
    scales: Float[Array, "M D"] | None = None,
    *,
    eps: float,
    dtype: Any,
    first: int = 0,
    ahead: Sequence[jax.Array] = (),
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "1 C"], Float[Array, "1 F"]]:
    """The stream x + y, and its norm times the matrix.

    Args:
      x: stream that `Stream.check_supported` accepts.
      y: what is added to it, in parts.
      norm: weight of the norm.
      weight: the matrix.
      scales: for every column of each block of 128 rows, where the matrix is codes of E4M3; else None.
      eps: of the norm.
      dtype: of the product.
      first: without y, the channel of x with which the stream begins, a multiple of 4.
      ahead: arrays that the kernels after this one read first, see `device.ahead`.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    assert y is not None or first % 4 == 0, first
    results = _launch(
        "stream_product",
        Stream(eps, first),
        config,
        (1, weight.shape[1]),
        {"x": x, "y": y, "w": norm.astype(jnp.float32)},
        (weight, scales, dtype, ahead),
        interpret,
        outputs={"s": None if y is None else jax.ShapeDtypeStruct(x.shape, x.dtype)},
    )
    return results.get("s", x), results["out"][None]


@kernel(
    *("eps", "activation", "dtype", "config"),
    chosen=_chosen(lambda x: Config.heads() if x.scales is None else Config(8)),
)
def heads_product(
    o: Float[Array, "H V"],
    z: Float[Array, "G V"],
    norm: Float[Array, " V"],
    weight: Float[Array, "F D"],
    scales: Float[Array, "M D"] | None = None,
    *,
    eps: float,
    activation: str,
    dtype: Any,
    ahead: Sequence[jax.Array] = (),
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "1 F"]:
    """The gated norm of heads times the matrix.

    Args:
      o: heads that `Heads.check_supported` accepts.
      z: heads whose last H are the gates.
      activation: of the gate, one of `gated_norm.ACTIVATIONS`.
      norm, weight, scales, eps, dtype, ahead, config, interpret: as for `stream_product`.
    """
    inputs, product = {"o": o, "z": z, "w": norm.astype(jnp.float32)}, (weight, scales, dtype, ahead)
    row = Heads(eps, activation)
    return _launch("heads_product", row, config, o.shape, inputs, product, interpret)["out"][None]


@kernel(
    *("group", "dtype", "config"),
    chosen=_chosen(lambda x: Config.stream(len(x.weight)) if x.scales is None else Config(8)),
)
def attended_product(
    o: Parts,
    length: Int[Array, "1"],
    z: Float[Array, "H V"] | None,
    weight: Float[Array, "F D"],
    scales: Float[Array, "M D"] | None = None,
    *,
    group: int,
    dtype: Any = None,
    ahead: Sequence[jax.Array] = (),
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "1 F"], Int[Array, "1"]]:
    """Heads of softmax attention, times the sigmoids of their gates, times the matrix; and the length with the token.

    The length is changed in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      o: heads of one row that `Attended.check_supported` accepts, `MOST_NUMBERS` in all their parts at most.
      length: tokens of the row before this one.
      z: heads whose last ones are the gates; None: there are none.
      weight: the matrix.
      scales: as for `stream_product`.
      group: query heads of a key head.
      dtype: of the result; None: the matrix'.
      ahead, config, interpret: as for `stream_product`.
    """
    results = _launch(
        "attended_product",
        Attended(group),
        config,
        (weight.shape[1] // o.o.shape[-1], o.o.shape[-1]),
        {name: None if x is None else x[0] for name, x in o._asdict().items()} | {"z": z},
        (weight, scales, dtype or weight.dtype, ahead),
        interpret,
        updated={"length": length},
    )
    return results["out"][None], results["length"]


def _launch(
    name: str,
    row: Any,
    config: Config | None,
    shape: tuple[int, ...],
    inputs: dict[str, Any],
    product: tuple[Any, Any, Any, Any],
    interpret: Any,
    outputs: dict[str, Any] | None = None,
    updated: dict[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """Launches a kernel for a `Row` of a shape, made of inputs.

    Args:
      product: the matrix, its scales or None, the dtype of the product, and arrays for `device.ahead`.
      outputs, updated: of `launch`, without the product.
    """
    assert config is not None
    weight, scales, dtype, ahead = product
    F, D = weight.shape
    if scales is not None:
        blocks = Blocks(pl.cdiv(F // config.rows, config.ctas) * config.rows)
        row, scales = dataclasses.replace(row, blocks=blocks), scales.reshape(-1, *shape)
    config = dataclasses.replace(config, ctas=min(config.ctas, F // config.rows))
    columns = min(shape[1], WIDEST)
    weight = weight.reshape(F, D // columns, columns)  # one copy then brings a tile
    shape = (1 if row.blocks is None else row.blocks.count) * shape[0], shape[1]
    return launch(
        name,
        functools.partial(_body, row=row, config=config),
        inputs=inputs | {"scales": scales, "weight": weight},
        outputs={**(outputs or {}), "out": jax.ShapeDtypeStruct((F,), dtype)},
        updated=updated,
        ahead=ahead,
        memory=_memory(config, shape, weight, F // config.rows),
        reduction_bytes=REDUCTION_BYTES,
        ctas=config.ctas,
        warpgroups=config.warpgroups if config.warpgroups > 1 else None,
        interpret=interpret,
    )
