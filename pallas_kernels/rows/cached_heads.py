"""Queries, keys and values of a token of each row from the products of its input: norm, rotation, and the cache.

    y_h = x_h (mean(x_h^2) + eps)^(-1/2) w,   [a | b | r] = y_h,   [a cos - b sin | b cos + a sin | r]

of every head of the queries and of the keys; a and b are the two halves of the dimensions that are rotated. Keys, and
values as they are, go to the token's slot of the cache.

Inputs (GMEM): x [B, n, K], whose first heads are the H of the queries, then N of the keys and N of the values,
bfloat16 or float16; frequencies [R / 2] float32 of the angles, or none; weights of the norms of queries and of keys
[K] float32, or none; positions and slots [B] int32; the rows of the cache [B] int32, or none, where these are the
queries'. In place (GMEM): keys and values [rows, S, N, K] of x's dtype. A token whose slot is none of S writes
nothing, and its queries are NaN.
Output (GMEM): queries [B, N, G', K], where G' is a multiple of eight that holds the H / N heads of a key head, as
`rows.attention_rows` takes them; the heads that fill it up are 0.
Grid: a warpgroup for each head of each row, each of whose warps has the whole head. No shared memory.
Numerics: float32, rounded once. The same bits in every call. Hardware: `NEEDS`. Limits: `check_supported`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.angles import cos_and_sin
from pallas_kernels.device.lanes import WARP, load, vector_layout
from pallas_kernels.device.launch import grid_index, kernel, launch
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.TMA

REDUCTION_BYTES = 16


class Rotation(NamedTuple):
    """The angles of each row's token: its position times some frequencies."""

    position: Int[Array, " B"]
    frequencies: Float[Array, " half"]


class Norms(NamedTuple):
    """Weights of the norms of queries and keys, float32."""

    q: Float[Array, " K"]
    k: Float[Array, " K"]


class Sizes(NamedTuple):
    """Static sizes of a call."""

    H: int
    N: int
    K: int
    half: int
    """Half of the dimensions that are rotated."""

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.H // self.N

    @property
    def whole(self) -> int:
        """The same, filled up to a multiple of eight."""
        return -(-self.group // 8) * 8

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First number and width of the parts of a head: both halves of what is rotated, and the rest."""
        rotated = 2 * self.half
        found = [(0, self.half), (self.half, self.half), (rotated, self.K - rotated)]
        return [(first, width) for first, width in found if width]


def check_supported(x: Any, cache: Any, H: int, half: int) -> str | None:
    """Why the kernel cannot take channels x [B, F], H heads of them queries, and a cache [rows, S, N, K]; None if it
    can."""
    *_, N, K = cache.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16) or cache.dtype != x.dtype:
        return f"channels of {x.dtype}, a cache of {cache.dtype}; the kernel takes bfloat16 or float16, one for both"
    if half % WARP or (K - 2 * half) % WARP or 2 * half > K:
        return f"heads of {K}, {2 * half} rotated; the kernel takes multiples of {WARP} of each half and of the rest"
    if x.shape[1] % K or H % N or x.shape[1] < (H + 2 * N) * K:
        return f"{x.shape[1]} channels of {H} and {N} heads of {K}; the kernel takes whole heads"
    return None


def _zeros(width: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((width,), jnp.float32), vector_layout(width))


def _body(gmem: Any, smem: Any, *, sizes: Sizes, eps: float) -> None:
    del smem
    heads, count = sizes.H + 2 * sizes.N, jnp.int32(sizes.H + 2 * sizes.N)
    row, head = lax.div(grid_index(), count), lax.rem(grid_index(), count)
    slot, cached = gmem.slots[row], row if gmem.rows is None else gmem.rows[row]
    is_slot = (slot >= 0) & (slot < gmem.k.shape[1])

    def read() -> list[jax.Array]:
        return [
            load(gmem.x.at[row, head, pl.ds(first, width)], vector_layout(width)).astype(jnp.float32)
            for first, width in sizes.pieces
        ]

    def turned(weight: Any) -> list[jax.Array]:
        """The head, normalised and rotated."""
        parts = read()
        if weight is not None:
            squares = functools.reduce(jnp.add, [jnp.sum(x * x) for x in parts])
            scale = lax.rsqrt(squares / sizes.K + eps)
            places = zip(parts, sizes.pieces, strict=True)
            parts = [
                x * load(weight.at[pl.ds(first, width)], vector_layout(width)) * scale
                for x, (first, width) in places
            ]
        if sizes.half:
            a, b, *rest = parts
            frequencies = load(gmem.frequencies, vector_layout(sizes.half))
            cos, sin = cos_and_sin(gmem.positions[row].astype(jnp.float32) * frequencies)
            parts = [a * cos - b * sin, b * cos + a * sin, *rest]
        return parts

    def write(target: Any, parts: list[jax.Array]) -> None:
        for x, (first, width) in zip(parts, sizes.pieces, strict=True):
            store_any(target.at[pl.ds(first, width)], x.astype(target.dtype))

    @pl.when(head < sizes.H)
    def _():
        key, of_group = lax.div(head, jnp.int32(sizes.group)), lax.rem(head, jnp.int32(sizes.group))
        known = jnp.where(is_slot, 1.0, jnp.nan)
        write(gmem.q.at[row, key, of_group], [x * known for x in turned(gmem.q_norm)])
        for more in range(sizes.group, sizes.whole, sizes.group):

            @pl.when(of_group + more < sizes.whole)
            def _(more=more):
                write(gmem.q.at[row, key, of_group + more], [_zeros(width) for _, width in sizes.pieces])

    @pl.when((head >= sizes.H) & (head < sizes.H + sizes.N) & is_slot)
    def _():
        write(gmem.k.at[cached, slot, head - sizes.H], turned(gmem.k_norm))

    @pl.when((head >= sizes.H + sizes.N) & (head < heads) & is_slot)
    def _():
        write(gmem.v.at[cached, slot, head - (sizes.H + sizes.N)], read())


@kernel("heads", "eps")
def cached_heads(
    x: Float[Array, "B F"],
    cache: tuple[Float[Array, "rows S N K"], Float[Array, "rows S N K"]],
    slots: Int[Array, " B"],
    rows: Int[Array, " B"] | None = None,
    norms: Norms | None = None,
    rotation: Rotation | None = None,
    *,
    heads: int,
    eps: float = 0.0,
    interpret: Any = None,
) -> tuple[Float[Array, "B N G K"], tuple[Float[Array, "rows S N K"], Float[Array, "rows S N K"]]]:
    """The queries of a token of each row, and the cache with its keys and values.

    The cache is updated in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      x: channels of a token of each row: heads of queries, keys and values, then any others.
      cache: keys and values.
      slots: of the tokens in their rows of the cache.
      rows: of the cache; None: those of x.
      norms: None: there are none.
      rotation: None: nothing is rotated.
      heads: of the queries; those of the keys are the cache's.
      eps: of the norms.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    (B, _), (*_, N, K) = x.shape, cache[0].shape
    sizes = Sizes(heads, N, K, 0 if rotation is None else rotation.frequencies.shape[0])
    q_norm, k_norm = (None, None) if norms is None else norms
    positions, frequencies = (None, None) if rotation is None else rotation
    made = launch(
        "cached_heads",
        functools.partial(_body, sizes=sizes, eps=eps),
        inputs={
            "x": x.reshape(B, -1, K),
            "slots": slots,
            "rows": rows,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "positions": positions,
            "frequencies": frequencies,
        },
        outputs={"q": jax.ShapeDtypeStruct((B, N, sizes.whole, K), x.dtype)},
        updated={"k": cache[0], "v": cache[1]},
        ctas=B * (heads + 2 * N),
        reduction_bytes=REDUCTION_BYTES,
        interpret=interpret,
    )
    return made["q"], (made["k"], made["v"])
