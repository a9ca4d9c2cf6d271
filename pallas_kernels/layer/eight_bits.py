"""An array of 16-bit numbers as 8-bit operands of products, in one pass: its rows as they are, and its columns.

    x8[t, d] = to 8 bits (x[t, d] scale),   x8_t[d, order(t)] = x8[t, d]

On compute capability 9.0 a product of 8-bit numbers reads both operands along what it sums over. A weight's gradient
sums over tokens, and so needs x and the cotangents by columns. In what order it meets the tokens does not matter, if
it is the same for both. So each `TOKENS` of them lie in the order in which the threads hold them (`Device.together`),
and a thread writes 16 bytes at once.

Inputs (GMEM): x [T, D] bfloat16 or float16; scale [1] float32, and `left` of it, int32.
Outputs (GMEM): x8 [T, D], x8_t [D, T]; how many numbers each CTA saturated, int32.
Grid: as many CTAs of one warpgroup as run at once, each of which walks over tiles of `TOKENS` by `COLUMNS` numbers
and loads the next one while it writes. Shared memory: a tile, 8 KB, in which it is transposed.
Numerics: scaled in float32, rounded to the nearest. A number beyond the largest of the dtype saturates to that one;
NaN and infinite ones become NaN, and count as saturated too.
Hardware: `NEEDS`. Limits: `check_supported`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.device.eight_bits import LANES, THREADS
from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch
from pallas_kernels.device.layouts import WGMMA
from pallas_kernels.device.memory import Buffer, store_any, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import rows as r

NEEDS = Needs.TMA

TOKENS = COLUMNS = 64
"""Sizes of a tile."""

CTAS_PER_SM = 8

_PIECE = 8
"""Neighbouring numbers of a thread: 16 bytes."""

_LANES = COLUMNS // _PIECE
"""Threads along a row of a tile."""

_ROWS = r.LANES // _LANES
"""Rows of a tile that a warp holds at once."""

LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((r.WARPS * _ROWS, COLUMNS), (_ROWS, _PIECE))),
    warp_dims=(-4,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)
"""Layout of a tile as it is read from memory."""


def check_supported(x: Shaped) -> str | None:
    """Why the kernel cannot take an array [T, D]; None if it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {jnp.dtype(x.dtype).name}; the kernel takes bfloat16 and float16"
    T, D = x.shape
    if not x.size or T % TOKENS or D % COLUMNS:
        return f"x is {x.shape}; the kernel takes multiples of {TOKENS} tokens and {COLUMNS} columns"
    return None


class Source(NamedTuple):
    """Where tiles come from."""

    read: Callable[[Any, Any], tuple[jax.Array, ...]]
    """From places of tokens and columns to arrays in `LAYOUT`."""
    tiles: Callable[..., Sequence[jax.Array]]
    """From these to 16-bit tiles in `LAYOUT`, which lie side by side."""
    columns: int
    """Columns of `read`."""
    ctas_per_sm: int
    """CTAs for each multiprocessor: as many as their registers allow."""


def load(ref: Any, tokens: Any, columns: Any) -> jax.Array:
    """A tile in memory."""
    return plgpu.load(ref.at[tokens, columns], layout=LAYOUT, optimized=False)


def write(gmem: Any, smem: Any, source: Source, interpreted: bool) -> None:
    """Makes gmem.x8, gmem.x8_t and gmem.saturated of a source, with gmem.scale."""
    dev, scale, T = Device(interpreted), gmem.scale[0], gmem.x8.shape[0]
    width = source.columns // COLUMNS
    tiles = T // TOKENS * width
    ctas, first = r.num_ctas(tiles, source.ctas_per_sm), grid_index()

    def place(tile) -> tuple[Any, Any]:
        return lax.div(tile, width) * TOKENS, lax.rem(tile, width) * COLUMNS

    def read(tile) -> tuple[jax.Array, ...]:
        token, column = place(tile)
        return source.read(pl.ds(token, TOKENS), column)

    def rounded(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        # The conversion would make the largest number of an infinite one.
        wide = jnp.where(jnp.abs(wide) < jnp.inf, wide * scale, jnp.nan)
        return dev.to_eight_bits(wide, gmem.x8.dtype)

    def one(n, carry):
        (arrays, count), tile = carry, first + n * ctas
        (token, column), made = place(tile), source.tiles(*arrays)
        following = read(jnp.minimum(tile + ctas, tiles - 1))
        for i, x in enumerate(made):
            tokens, columns = pl.ds(token, TOKENS), pl.ds(column * len(made) + i * COLUMNS, COLUMNS)
            plgpu.commit_smem()  # all have read the tile before
            store_any(smem.tile, x)
            count = dev.count_beyond(count, left, x, LAYOUT)
            store_any(gmem.x8.at[tokens, columns], rounded(x))
            plgpu.commit_smem()
            x_t = plgpu.load(transposed(smem.tile), layout=WGMMA)
            store_any(gmem.x8_t.at[columns, tokens], dev.together(rounded(x_t)))
        return following, count

    left, carry = of_threads(gmem.left[0]), (read(first), of_threads(0))
    _, count = lax.fori_loop(0, lax.div(tiles - 1 - first + ctas, ctas), one, carry)
    gmem.saturated[first] = jnp.sum(count)


def of_threads(n: Any) -> jax.Array:
    """An int32 in every thread, for `Device.count_beyond`."""
    return plgpu.layout_cast(jnp.full((LANES,), n, jnp.int32), THREADS)


def start(
    name: str,
    source: Callable[[Any], tuple[Callable, Callable]],
    inputs: dict[str, jax.Array],
    scale: jax.Array,
    dtype: Any,
    *,
    columns: int,
    tiles: int,
    ctas_per_sm: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches a kernel that makes x8 and x8_t of a source's tiles, and counts the numbers that it saturates.

    Args:
      source: read and tiles of a `Source`, from gmem.
      columns: of x8.
      tiles: that the source makes at once.
    """
    dtype, read_columns = jnp.dtype(dtype), columns // tiles
    x = next(iter(inputs.values()))
    T = x.shape[0]
    ctas = r.num_ctas(T // TOKENS * (read_columns // COLUMNS), ctas_per_sm)
    results = launch(
        name,
        lambda gmem, smem: write(
            gmem, smem, Source(*source(gmem), read_columns, ctas_per_sm), interpret is not None
        ),
        inputs=inputs | {"scale": scale.astype(jnp.float32).reshape(1), "left": left(scale, dtype, x.dtype)},
        outputs={
            "x8": jax.ShapeDtypeStruct((T, columns), dtype),
            "x8_t": jax.ShapeDtypeStruct((columns, T), dtype),
            "saturated": jax.ShapeDtypeStruct((ctas,), jnp.int32),
        },
        memory={"tile": Buffer((TOKENS, COLUMNS), x.dtype, swizzle=128)},
        ctas=ctas,
        interpret=interpret,
    )
    return results["x8"], results["x8_t"], total(results["saturated"])


def left(scale: jax.Array, codes: Any, dtype: Any) -> Int[Array, "1"]:
    """The argument of that name of `Device.count_beyond`, for numbers of a dtype and codes of a scale."""
    bound = (float(jnp.finfo(jnp.dtype(codes)).max) / scale.astype(jnp.float32)).astype(dtype)
    bits = lax.bitcast_convert_type(bound, jnp.uint16).astype(jnp.int32) & 0x7FFF
    return ((0x7FFF - bits) * 0x10001).reshape(1)


def total(saturated: jax.Array) -> Float[Array, ""]:
    """The count of all CTAs, as the products add it up."""
    return jnp.sum(saturated).astype(jnp.float32)


@kernel("dtype")
def eight_bits(
    x: Float[Array, "T D"], scale: Float[Array, ""], dtype: DTypeLike, *, interpret: Any = None
) -> tuple[Float[Array, "T D"], Float[Array, "D T"], Float[Array, ""]]:
    """x8 and x8_t of a dtype, for an array that `check_supported` accepts, and how many numbers are saturated; see
    the module docstring.

    Args:
      dtype: float8_e4m3fn or float8_e5m2.
    """
    D = x.shape[1]

    def source(gmem):
        def read(tokens, column):
            return (load(gmem.x, tokens, pl.ds(column, COLUMNS)),)

        return read, lambda x: (x,)

    options = dict(columns=D, tiles=1, ctas_per_sm=CTAS_PER_SM, interpret=interpret)
    return start("eight_bits", source, {"x": x}, scale, dtype, **options)
