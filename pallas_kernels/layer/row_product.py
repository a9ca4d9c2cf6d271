"""One row times a matrix, made by every CTA as it needs it, while the matrix is on its way.

    s = x + y,  v = s (mean(s^2) + eps)^(-1/2) w        `Stream`: the sum of the residual stream and its norm
    v = o (mean(o^2) + eps)^(-1/2) w f(z), for each head    `Heads`: the gated norm
    out = v W^T

A token of one row is many short kernels, each of which begins when the one before has ended. Here the copies of the
first rows of W are on their way while v is made. The first C results may pass through the short convolution of
`decode.conv_update`, each with the state of its channel.

Inputs (GMEM): W [F, D] float32, bfloat16 or float16; for `Stream` x [1, D], y [P, D], which are added up, or none,
w [D] float32; for `Heads` o [H, V], z [G, V], whose last H rows are the gates, w [V] float32; with a convolution its
filters [C, taps] and bias [C] or none. In place (GMEM): states of the convolution [1, C, taps - 1]. Outputs (GMEM):
out [1, F] in the dtype asked for; for `Stream` s [1, D] of x's dtype, and v [1, D], if asked for.
Grid: persistent, CTAs of one warpgroup, see `Config`, which take every ctas-th tile of `Config.rows` rows of W, in
pieces of `columns` columns. Shared memory: `_memory`.
Numerics: float32; v is not rounded. The same bits in every call. Hardware: `NEEDS`. Limits: `check_supported`, here
and of the rows.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.shapes import Convolution
from pallas_kernels.device.ahead import bring, rows_of
from pallas_kernels.device.lanes import WARP, lane_layout, load
from pallas_kernels.device.launch import compiled, grid_index, launch, num_sms, warpgroup_index
from pallas_kernels.device.layouts import round_up
from pallas_kernels.device.memory import SMEM_LIMIT, Barriers, Buffer, Memory, smem_bytes, store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer.made_rows import BYTES, WIDEST, Heads, Row, Stream

NEEDS = Needs.TMA

MANY_TILES = 4
"""Tiles of a CTA from which on two warpgroups share them."""

WARPGROUP = 128
"""Threads of a warpgroup."""

MOST_BYTES = 200 * 1024
"""`BYTES` of one CTA, where its share would be less than two tiles."""

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

        (H200, 2026-11-26, 10368 x 1536 behind 11 parts, with a convolution: 12.3 us; with two and three CTAs on a
        multiprocessor 13.1 and 17.2, with tiles of 4 rows 15.7 and more.)
        """

        def longest(rows):
            """Rows of the multiprocessor that has most."""
            return pl.cdiv(pl.cdiv(F, rows), num_sms()) * rows

        rows = min((8, 4), key=longest)
        return cls(rows, warpgroups=2 if pl.cdiv(F // rows, num_sms()) >= MANY_TILES else 1)


def check_supported(
    weight: jax.ShapeDtypeStruct | jax.Array, convolution: Convolution | None = None
) -> str | None:
    """Why the kernels cannot take a matrix [F, D] and a convolution; None if they can. `Row`s refuse for themselves.

    Args:
      convolution: that of the first results in the matrix' dtype; None: there is none.
    """
    F = weight.shape[0]
    if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the weight is {weight.dtype}; the kernel takes float32, bfloat16 and float16"
    if F % 8 or not F:
        return f"{F} outputs; the kernel takes a multiple of 8"
    if convolution is None:
        return None
    channels, taps = convolution.filters.shape
    if any(jnp.dtype(y.dtype).itemsize > 4 for y in (weight, *convolution) if y is not None):
        return "an array of the convolution has more than 32 bits; the kernel takes at most these"
    if channels % 8 or channels > F or taps < 2:
        return f"{channels} channels and {taps} taps; the kernel takes a multiple of 8, and 2 taps or more"
    config = Config.stream(F)
    least = _channels(config, F // config.rows)
    return f"{channels} channels; the kernel takes {least} or more" if channels < least else None


def _memory(
    config: Config, shape: tuple[int, int], weight: jax.Array, tiles: int, filters: jax.Array | None
) -> Memory:
    _, pieces, columns = weight.shape
    tile, own = pieces * config.rows * columns * weight.dtype.itemsize, pl.cdiv(tiles, config.ctas)
    room = BYTES // pl.cdiv(config.ctas, num_sms())
    room = room if 2 * tile <= room else MOST_BYTES
    groups = config.warpgroups
    stages = max(1, min(room // tile // groups, pl.cdiv(own, groups))) * groups
    past = None if filters is None else Buffer((2 * filters.shape[1], _channels(config, tiles)))
    return {
        "tiles": Buffer((stages, config.rows, pieces, columns), weight.dtype),
        "row": Buffer(shape),
        "past": past,
        "full": Barriers(arrivals=1, count=stages),
        "made": Barriers(arrivals=groups) if groups > 1 else None,
    }


def _channels(config: Config, tiles: int) -> int:
    """Channels of a convolution whose states, filters and biases a CTA reads: its own, and some to fill up."""
    return round_up(pl.cdiv(tiles, config.ctas) * config.rows, WARPGROUP)


def _body(gmem: Any, smem: Any, *, row: Row, config: Config) -> None:
    stages, rows, pieces, columns = smem.tiles.shape
    layout, warpgroups = lane_layout(WARP, columns // WARP), config.warpgroups
    wg = warpgroup_index() if warpgroups > 1 else jnp.int32(0)
    tiles = gmem.weight.shape[0] // rows
    each = pl.cdiv(tiles, config.ctas)
    first = grid_index() * each
    count = jnp.clip(tiles - first, 0, each)
    past = None if smem.past is None else _Past(gmem, smem.past, first * rows)

    def start(i):
        slot = lax.rem(i, jnp.int32(stages))
        own = gmem.weight.at[pl.ds((first + i) * rows, rows)]
        plgpu.copy_gmem_to_smem(own, smem.tiles.at[slot], smem.full.at[slot])

    def prepare(makes: list[Any]):
        """Starts the first copies of a warpgroup, and makes its part of what all read.

        What that is made of is asked for behind one tile: behind all of them it would come after them.
        """
        pl.when(wg < count)(lambda: start(wg))
        loaded = [load() for load, _ in makes]
        others = lax.div(jnp.minimum(count, stages) - wg + (warpgroups - 1), jnp.int32(warpgroups))
        lax.fori_loop(1, others, lambda i, _: start(wg + i * warpgroups), None)
        for (_, make), x in zip(makes, loaded, strict=True):
            make(x)
        plgpu.commit_smem()

    makes: list[Any] = [
        (lambda: row.load(gmem), lambda loaded: row.make(gmem, loaded, smem.row, grid_index() == 0))
    ]
    makes += [] if past is None else [(past.load, past.keep)]
    if warpgroups == 1:
        prepare(makes)
    else:
        for n in range(warpgroups):
            own = makes[n : n + 1] if n + 1 < warpgroups else makes[n:]
            pl.when(wg == n)(functools.partial(prepare, own))
        plgpu.barrier_arrive(smem.made)
        plgpu.barrier_wait(smem.made)

    def piece_of_row(piece):
        if smem.row.shape[0] == 1:
            return smem.row.at[0, pl.ds(piece * columns, columns)]
        return smem.row.at[piece]

    last = jnp.maximum(lax.div(count - 1, jnp.int32(warpgroups)), 0) * warpgroups
    """The last tile of the first warpgroup, behind whose copies it asks for what others need."""

    def tile(n, _):
        i = wg + n * warpgroups
        if gmem.ahead:
            pl.when(i == last)(lambda: bring(gmem.ahead, config.ctas))
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(smem.full.at[slot])
        total = None
        for piece in range(pieces):
            v = load(piece_of_row(piece), layout.reduce(0))
            v = plgpu.layout_cast(lax.broadcast_in_dim(v, (rows, columns), [1]), layout)
            part = load(smem.tiles.at[slot, :, piece], layout).astype(jnp.float32) * v
            total = part if total is None else total + part
        assert total is not None
        sums = jnp.sum(total, axis=1)
        own, sums = pl.ds((first + i) * rows, rows), sums.astype(gmem.out.dtype)
        if past is None:
            store_any(gmem.out.at[own], sums)
        else:
            is_filtered = own.start < gmem.filters.shape[0]
            pl.when(is_filtered)(lambda: past.filter(own, sums, layout.reduce(1)))
            pl.when(jnp.logical_not(is_filtered))(lambda: store_any(gmem.out.at[own], sums))

        @pl.when(i + stages < count)
        def _():
            plgpu.commit_smem()  # a barrier: every thread of the warpgroup has read the tile
            start(i + stages)

        return ()

    lax.fori_loop(0, lax.div(count - wg + (warpgroups - 1), jnp.int32(warpgroups)), tile, ())


class _Past:
    """States, filters and biases of a CTA's channels, which it reads at once: one behind the other they would take as
    long as its tiles."""

    def __init__(self, gmem: Any, kept: Any, first: Any) -> None:
        """Takes as many channels as there is room for in shared memory, from the first one on."""
        self.gmem, self.kept, (C, self.taps) = gmem, kept, gmem.filters.shape
        self.channels = pl.ds(jnp.minimum(first, C - kept.shape[1]), kept.shape[1])

    def load(self) -> list[jax.Array]:
        """Asks for them."""
        gmem, own = self.gmem, self.channels
        layout = plgpu.Layout.WG_STRIDED((own.size,), vec_size=1)
        refs = [gmem.state.at[0, own, j] for j in range(self.taps - 1)]
        refs += [gmem.filters.at[own, j] for j in range(self.taps)]
        refs += [] if gmem.bias is None else [gmem.bias.at[own]]
        return [load(ref, layout) for ref in refs]

    def keep(self, loaded: list[jax.Array]) -> None:
        """Writes them to shared memory."""
        for n, x in enumerate(loaded):
            store_any(self.kept.at[n], x.astype(jnp.float32))

    def filter(self, own: Any, x: jax.Array, layout: Any) -> None:
        """The convolution of a tile's channels, as in `decode.conv_update`."""
        gmem, taps, place = self.gmem, self.taps, pl.ds(own.start - self.channels.start, own.size)
        kept = [load(self.kept.at[n, place], layout) for n in range(2 * taps - (gmem.bias is None))]
        inputs = [*kept[: taps - 1], x.astype(jnp.float32)]
        total = sum(s * w for s, w in zip(inputs, kept[taps - 1 :], strict=False))
        total = total if gmem.bias is None else total + kept[-1]
        store_any(gmem.out.at[own], (total / (1.0 + jnp.exp(-total))).astype(gmem.out.dtype))
        for j, s in enumerate(inputs[1:]):
            store_any(gmem.state.at[0, own, j], s.astype(gmem.state.dtype))


def stream_product(
    x: Float[Array, "1 C"],
    y: Float[Array, "P D"] | None,
    norm: Float[Array, " D"],
    weight: Float[Array, "F D"],
    *,
    eps: float,
    dtype: Any,
    keep: Any = None,
    convolution: Convolution | None = None,
    first: int = 0,
    ahead: Sequence[jax.Array] = (),
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[
    Float[Array, "1 C"], Float[Array, "1 D"] | None, Float[Array, "1 F"], Float[Array, "1 B W1"] | None
]:
    """The stream x + y, its norm, the norm times the matrix, and the state of a convolution after it.

    The state is updated in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      x: stream that `Stream.check_supported` accepts.
      y: what is added to it, in parts.
      norm: weight of the norm.
      weight: the matrix.
      eps: of the norm.
      dtype: of the product.
      keep: dtype of the norm as a result; None where it is none.
      convolution: of the first channels, that `check_supported` accepts; None: there is none.
      first: without y, the channel of x with which the stream begins, a multiple of 4.
      ahead: arrays that the kernels after this one read first, see `device.ahead`.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    assert y is not None or first % 4 == 0, first
    row = Stream(eps, first)
    config = config or Config.stream(weight.shape[0])
    keep = None if keep is None else jnp.dtype(keep)
    static = row, config, jnp.dtype(dtype), keep, interpret
    return compiled(_run_stream, interpret, static=5)(
        *static, x, y, norm, weight, convolution, rows_of(ahead)
    )


def _run_stream(row, config, dtype, keep, interpret, x, y, norm, weight, convolution, ahead):
    D, like = weight.shape[1], jax.ShapeDtypeStruct
    inputs = {"x": x, "y": y, "w": norm.astype(jnp.float32)}
    outputs = {
        "s": None if y is None else like(x.shape, x.dtype),
        "v": None if keep is None else like((1, D), keep),
    }
    state, filters, bias = (None,) * 3 if convolution is None else convolution
    inputs |= {"filters": filters, "bias": bias}
    options: dict[str, Any] = dict(updated={"state": state}, ahead=ahead, interpret=interpret)
    results = _launch("stream_product", row, config, (1, D), inputs, outputs, dtype, weight, **options)
    return results.get("s", x), results.get("v"), results["out"][None], results.get("state")


def heads_product(
    o: Float[Array, "H V"],
    z: Float[Array, "G V"],
    norm: Float[Array, " V"],
    weight: Float[Array, "F D"],
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
      norm: weight of the norm.
      weight: the matrix.
      eps: of the norm.
      activation: of the gate, one of `gated_norm.ACTIVATIONS`.
      dtype: of the result.
      ahead: arrays that the kernels after this one read first, see `device.ahead`.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    row = Heads(eps, activation)
    config = config or Config.heads()
    return compiled(_run_heads, interpret, static=4)(
        row, config, jnp.dtype(dtype), interpret, o, z, norm, weight, rows_of(ahead)
    )


def _run_heads(row, config, dtype, interpret, o, z, norm, weight, ahead):
    inputs = {"o": o, "z": z, "w": norm.astype(jnp.float32), "filters": None, "bias": None}
    options: dict[str, Any] = dict(updated={"state": None}, ahead=ahead, interpret=interpret)
    return _launch("heads_product", row, config, o.shape, inputs, {}, dtype, weight, **options)["out"][None]


def _launch(name, row, config, shape, inputs, outputs, dtype, weight, *, updated, ahead, interpret):
    (F, D), filters = weight.shape, inputs.get("filters")
    config = dataclasses.replace(config, ctas=min(config.ctas, F // config.rows))
    columns = min(shape[1], WIDEST)
    weight = weight.reshape(F, D // columns, columns)  # one copy then brings a tile
    memory = _memory(config, shape, weight, F // config.rows, filters)
    assert smem_bytes(memory, REDUCTION_BYTES) <= SMEM_LIMIT, f"{config}: {smem_bytes(memory)} bytes"
    return launch(
        name,
        functools.partial(_body, row=row, config=config),
        inputs=inputs | {"weight": weight},
        outputs=outputs | {"out": jax.ShapeDtypeStruct((F,), dtype)},
        updated=updated,
        ahead=ahead,
        memory=memory,
        auto_barriers=False,
        reduction_bytes=REDUCTION_BYTES,
        ctas=config.ctas,
        warpgroups=config.warpgroups if config.warpgroups > 1 else None,
        interpret=interpret,
    )
