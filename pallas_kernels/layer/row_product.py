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
Numerics: float32; v is not rounded. The same bits in every call. Hardware: compute capability 9.0. Limits:
`check_stream`, `check_heads`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.lanes import WARP, lane_layout, load
from pallas_kernels.device.launch import NUM_SMS, compiled, grid_index, launch
from pallas_kernels.device.memory import SMEM_LIMIT, Barriers, Buffer, Memory, smem_bytes, store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.gated_norm import ACTIVATIONS

WIDEST = 256
"""Columns of a piece at most: what is copied at once."""

BYTES = 192 * 1024
"""Shared memory of a multiprocessor's CTAs for tiles of W, at most."""

MOST_BYTES = 200 * 1024
"""The same of one CTA, where its share would be less than two tiles."""

REDUCTION_BYTES = 2048


@runtime_checkable
class Row(Protocol):
    """How the row is made: static, and hashable."""

    def make(self, gmem: Any, x: Any, is_first: Any) -> None:
        """Writes the row to shared memory x; the first CTA also writes what else is asked for."""
        ...


@dataclasses.dataclass(frozen=True)
class Stream:
    """The norm of the residual stream."""

    eps: float
    first: int = 0
    """Number of the channel that x begins with; without y the stream may be some channels of an array."""

    def make(self, gmem: Any, x: Any, is_first: Any) -> None:
        """See `Row.make`."""
        D = gmem.w.shape[0]
        s = r.load(gmem.x.at[:, pl.ds(self.first, D)], 0, D, 1)
        if gmem.y is not None:
            for part in range(gmem.y.shape[0]):
                s = s + r.load(gmem.y, part, D, 1)
        scale = lax.rsqrt(r.row_sum(s * s) / D + self.eps)
        v = s * r.spread(scale, D) * r.load_along(gmem.w, 1)
        store_any(x, v)

        @pl.when(is_first)
        def _():
            if gmem.s is not None:
                r.store(gmem.s, 0, s)
            if gmem.v is not None:
                r.store(gmem.v, 0, v)


@dataclasses.dataclass(frozen=True)
class Heads:
    """The gated norm of each head."""

    eps: float
    activation: str

    def make(self, gmem: Any, x: Any, is_first: Any) -> None:
        """See `Row.make`."""
        H, V = gmem.o.shape
        o, z = r.load(gmem.o, 0, V, H), r.load(gmem.z, gmem.z.shape[0] - H, V, H)
        scale = r.spread(lax.rsqrt(r.row_sum(o * o) / V + self.eps), V)
        store_any(
            x, o * scale * r.load_along(gmem.w, H) * ACTIVATIONS[self.activation].value(z, r.sigmoid(z))
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """How the matrix is walked over, not what is computed."""

    rows: int
    """Rows of a tile, a multiple of 4."""
    ctas: int = NUM_SMS

    @classmethod
    def heads(cls) -> "Config":
        """For a row that is soon made: three CTAs multiply on a multiprocessor.

        (H200, 2026-11-26, 1536 x 2048: 3.5 us; one CTA 4.2; two with tiles of 8 rows 3.7.)
        """
        return cls(4, 3 * NUM_SMS)

    @classmethod
    def stream(cls, F: int) -> "Config":
        """The tallest tiles that keep the multiprocessors as busy as any. Every CTA adds up all parts of y.

        (H200, 2026-11-26, 10368 x 1536 behind 11 parts, with a convolution: 12.3 us; with two and three CTAs on a
        multiprocessor 13.1 and 17.2, with tiles of 4 rows 15.7 and more.)
        """

        def longest(rows):
            """Rows of the multiprocessor that has most."""
            return pl.cdiv(pl.cdiv(F, rows), NUM_SMS) * rows

        return cls(min((8, 4), key=longest))


def _check_matrix(weight) -> str | None:
    F = weight.shape[0]
    if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the weight is {weight.dtype}; the kernel takes float32, bfloat16 and float16"
    return f"{F} outputs; the kernel takes a multiple of 8" if F % 8 or not F else None


def check_stream(x: jax.ShapeDtypeStruct | jax.Array, weight: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel cannot take a stream [1, D], or D of more channels, and a matrix [F, D]; None if it can."""
    if x.shape[0] != 1:
        return f"{x.shape[0]} rows; the kernel takes one"
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x is {x.dtype}; the kernel takes float32, bfloat16 and float16"
    D = weight.shape[1]
    if D % WIDEST or D > r.WIDEST:
        return f"rows of {D}; the kernel takes multiples of {WIDEST} up to {r.WIDEST}"
    if 8 * D * weight.dtype.itemsize > BYTES:
        return f"rows of {D} numbers of {weight.dtype}; the kernel takes {BYTES // 8} bytes"
    return _check_matrix(weight)


def check_heads(
    o: jax.ShapeDtypeStruct | jax.Array, channels: int, weight: jax.ShapeDtypeStruct | jax.Array
) -> str | None:
    """Why the kernel cannot take heads [H, V], gates among so many channels and a matrix [F, H V]; None if it can."""
    H, V = o.shape
    if V not in (64, 128, 256) or H % r.WARPS or H * V > r.WIDEST:
        return f"{H} heads of {V}; the kernel takes multiples of 4, of 64, 128 or 256"
    if channels % V:
        return f"{channels} channels; the kernel takes whole heads of {V}"
    if o.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"o is {o.dtype}; the kernel takes float32, bfloat16 and float16"
    return _check_matrix(weight)


def check_convolution(
    weight: jax.ShapeDtypeStruct | jax.Array, convolution: "Convolution", dtype: Any
) -> str | None:
    """Why the kernel cannot pass the first results, in a dtype, through a convolution; None if it can."""
    channels, taps = convolution.filters.shape
    if any(jnp.dtype(x).itemsize > 4 for x in (dtype, *(y.dtype for y in convolution if y is not None))):
        return "an array of the convolution has more than 32 bits; the kernel takes at most these"
    if channels % 8 or channels > weight.shape[0] or taps < 2:
        return f"{channels} channels and {taps} taps; the kernel takes a multiple of 8, and 2 taps or more"
    return None


def _memory(config: Config, shape: tuple[int, int], D: int, tiles: int, dtype: Any) -> Memory:
    columns = min(shape[1], WIDEST)
    pieces = D // columns
    tile = pieces * config.rows * columns * jnp.dtype(dtype).itemsize
    room = BYTES // pl.cdiv(config.ctas, NUM_SMS)
    room = room if 2 * tile <= room else MOST_BYTES
    stages = max(1, min(room // tile, pl.cdiv(tiles, config.ctas)))
    return {
        "tiles": Buffer((stages, pieces, config.rows, columns), dtype),
        "row": Buffer(shape),
        "full": Barriers(arrivals=pieces, count=stages),
    }


def _body(gmem: Any, smem: Any, *, row: Row, config: Config) -> None:
    stages, pieces, rows, columns = smem.tiles.shape
    layout = lane_layout(WARP, columns // WARP)
    tiles = gmem.weight.shape[0] // rows
    count = lax.div(jnp.int32(tiles + config.ctas - 1) - grid_index(), jnp.int32(config.ctas))

    def first_row(i):
        return (grid_index() + i * config.ctas) * rows

    def start(i):
        slot = lax.rem(i, jnp.int32(stages))
        for piece in range(pieces):
            own = gmem.weight.at[pl.ds(first_row(i), rows), pl.ds(piece * columns, columns)]
            plgpu.copy_gmem_to_smem(own, smem.tiles.at[slot, piece], smem.full.at[slot])

    lax.fori_loop(0, jnp.minimum(count, stages), lambda i, _: start(i), None)
    row.make(gmem, smem.row, grid_index() == 0)
    plgpu.commit_smem()

    def piece_of_row(piece):
        if smem.row.shape[0] == 1:
            return smem.row.at[0, pl.ds(piece * columns, columns)]
        return smem.row.at[piece]

    def tile(i, _):
        slot = lax.rem(i, jnp.int32(stages))
        past = None if gmem.state is None else _load_past(gmem, pl.ds(first_row(i), rows), layout.reduce(1))
        plgpu.barrier_wait(smem.full.at[slot])
        total = None
        for piece in range(pieces):
            v = load(piece_of_row(piece), layout.reduce(0))
            v = plgpu.layout_cast(lax.broadcast_in_dim(v, (rows, columns), [1]), layout)
            part = load(smem.tiles.at[slot, piece], layout).astype(jnp.float32) * v
            total = part if total is None else total + part
        assert total is not None
        sums = jnp.sum(total, axis=1)
        own, sums = pl.ds(first_row(i), rows), sums.astype(gmem.out.dtype)
        if past is None:
            store_any(gmem.out.at[own], sums)
        else:
            is_filtered = first_row(i) < gmem.filters.shape[0]
            pl.when(is_filtered)(lambda: _filter(gmem, own, sums, *past))
            pl.when(jnp.logical_not(is_filtered))(lambda: store_any(gmem.out.at[own], sums))

        @pl.when(i + stages < count)
        def _():
            plgpu.commit_smem()  # a barrier: every thread has read the tile
            start(i + stages)

        return ()

    lax.fori_loop(0, count, tile, ())


def _load_past(gmem: Any, own: Any, layout: Any) -> tuple[list[jax.Array], list[jax.Array], jax.Array | None]:
    """States, oldest first, filters and bias of a tile's channels; those of the last channels where it has none."""
    C, taps = gmem.filters.shape
    own = pl.ds(jnp.minimum(own.start, C - own.size), own.size)
    states = [load(gmem.state.at[0, own, j], layout) for j in range(taps - 1)]
    filters = [load(gmem.filters.at[own, j], layout) for j in range(taps)]
    return states, filters, None if gmem.bias is None else load(gmem.bias.at[own], layout)


def _filter(gmem: Any, own: Any, x: jax.Array, states: list, filters: list, bias: jax.Array | None) -> None:
    """The convolution of a tile's channels, as in `decode.conv_update`."""
    inputs = [*states, x]
    total = sum(s.astype(jnp.float32) * w.astype(jnp.float32) for s, w in zip(inputs, filters, strict=True))
    total = total if bias is None else total + bias.astype(jnp.float32)
    store_any(gmem.out.at[own], (total / (1.0 + jnp.exp(-total))).astype(gmem.out.dtype))
    for j, s in enumerate(inputs[1:]):
        store_any(gmem.state.at[0, own, j], s.astype(gmem.state.dtype))


class Convolution(NamedTuple):
    """A short convolution of the first channels."""

    state: Float[Array, "1 C W1"]
    """Inputs before the token, oldest first."""
    filters: Float[Array, "C W"]
    bias: Float[Array, " C"] | None


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
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[
    Float[Array, "1 C"], Float[Array, "1 D"] | None, Float[Array, "1 F"], Float[Array, "1 B W1"] | None
]:
    """The stream x + y, its norm, the norm times the matrix, and the state of a convolution after it.

    The state is updated in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      x: stream that `check_stream` accepts.
      y: what is added to it, in parts.
      norm: weight of the norm.
      weight: the matrix.
      eps: of the norm.
      dtype: of the product.
      keep: dtype of the norm as a result; None where it is none.
      convolution: of the first channels, that `check_convolution` accepts; None: there is none.
      first: without y, the channel of x with which the stream begins, a multiple of 4.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    assert y is not None or first % 4 == 0, first
    row = Stream(eps, first)
    config = config or Config.stream(weight.shape[0])
    keep = None if keep is None else jnp.dtype(keep)
    static = row, config, jnp.dtype(dtype), keep, interpret
    return compiled(_run_stream, interpret, static=5)(*static, x, y, norm, weight, convolution)


def _run_stream(row, config, dtype, keep, interpret, x, y, norm, weight, convolution):
    D, like = weight.shape[1], jax.ShapeDtypeStruct
    inputs = {"x": x, "y": y, "w": norm.astype(jnp.float32)}
    outputs = {
        "s": None if y is None else like(x.shape, x.dtype),
        "v": None if keep is None else like((1, D), keep),
    }
    state, filters, bias = (None,) * 3 if convolution is None else convolution
    inputs |= {"filters": filters, "bias": bias}
    options: dict[str, Any] = dict(updated={"state": state}, interpret=interpret)
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
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "1 F"]:
    """The gated norm of heads times the matrix.

    Args:
      o: heads that `check_heads` accepts.
      z: heads whose last H are the gates.
      norm: weight of the norm.
      weight: the matrix.
      eps: of the norm.
      activation: of the gate, one of `gated_norm.ACTIVATIONS`.
      dtype: of the result.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    row = Heads(eps, activation)
    config = config or Config.heads()
    return compiled(_run_heads, interpret, static=4)(
        row, config, jnp.dtype(dtype), interpret, o, z, norm, weight
    )


def _run_heads(row, config, dtype, interpret, o, z, norm, weight):
    inputs = {"o": o, "z": z, "w": norm.astype(jnp.float32), "filters": None, "bias": None}
    options: dict[str, Any] = dict(updated={"state": None}, interpret=interpret)
    return _launch("heads_product", row, config, o.shape, inputs, {}, dtype, weight, **options)["out"][None]


def _launch(name, row, config, shape, inputs, outputs, dtype, weight, *, updated, interpret):
    F, D = weight.shape
    config = dataclasses.replace(config, ctas=min(config.ctas, F // config.rows))
    memory = _memory(config, shape, D, F // config.rows, weight.dtype)
    assert smem_bytes(memory, REDUCTION_BYTES) <= SMEM_LIMIT, f"{config}: {smem_bytes(memory)} bytes"
    return launch(
        name,
        functools.partial(_body, row=row, config=config),
        inputs=inputs | {"weight": weight},
        outputs=outputs | {"out": jax.ShapeDtypeStruct((F,), dtype)},
        updated=updated,
        memory=memory,
        auto_barriers=False,
        reduction_bytes=REDUCTION_BYTES,
        ctas=config.ctas,
        interpret=interpret,
    )
