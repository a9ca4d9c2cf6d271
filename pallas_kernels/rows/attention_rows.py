"""Softmax attention of a token of each row over a cache that is read once.

    s_hj = q_h . k_j scale,   o_h = sum_{j < length} softmax_j(s_h) v_j

The G query heads of a key head read the same keys and values. So a tile of tokens is the M of the tensor cores and
the query heads are their N: a tile gives the scores of all of them, and then its part of all o, [v, heads], which
stay in registers. In latent attention one key head has all query heads, its keys lie in two arrays, [c | k], and its
values are c, which is read once for both.

Inputs (GMEM): queries [B, N, G, K_i] of each array of keys; the cache, arrays [R, S, N W_i], bfloat16 or float16,
all of one dtype: first keys, then values, or none, where these are the first keys; length [B] int32, tokens of each
row, at least 1: what the slots after them hold does not matter; where the cache is a pool, its row for each of the
queries', [B] int32. Outputs (GMEM), for each part of a row's tokens:
o [B, N, parts, G, V], not divided by the sum of its weights; maxima and sums [B, N, parts, G], float32, of scores in
base 2.
Grid: persistent, one CTA on each multiprocessor. An item is a part of a row's tiles of tokens, of one key head. A CTA
has a warpgroup that multiplies and one that loads. The cache passes through a ring of slots [`TOKENS`, 64], a tile in
as many as have its keys and values, which are free once the tile has been multiplied twice: `layer.operand_ring`.

Barriers:

    barrier     who arrives                                  who waits
    full        the copies of a row's queries                the multiplying warpgroup
    empty       the multiplying warpgroup, after the item    the loading warpgroup

Shared memory: `_memory`.
Numerics: float32 scores and sums; weights are rounded before they are multiplied with v. The same bits in every call.
Hardware: compute capability 9.0. Limits: `check_supported`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.launch import grid_index, kernel, launch, num_sms, warpgroup_index
from pallas_kernels.device.layouts import COL, LOG2_E, WGMMA, WGMMA_TRANSPOSED, along_columns, iota, zeros
from pallas_kernels.device.memory import Barriers, Buffer, Memory, store_any, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer.operand_ring import Ring, barriers, roles, share

NEEDS = Needs.TMA | Needs.WGMMA

TOKENS = 64
"""Tokens of a tile, the M of a product."""

PIECE = 64
"""Numbers of a token in a slot: 128 bytes, over which rows are swizzled."""

SUMS = 64
"""Registers of a thread that hold sums of o, at most."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut, not what is computed."""

    parts: int
    """Parts of a row's tokens."""
    stages: int = 22
    """Slots of the ring."""
    ctas: int = dataclasses.field(default_factory=num_sms)

    @classmethod
    def default(cls, rows: int, slots: int) -> "Config":
        """Takes as many parts as need the least time. One costs about two more tiles: its o is written and read."""
        tiles = pl.cdiv(slots, TOKENS)

        def time(parts: int) -> float:
            return pl.cdiv(rows * parts, num_sms()) * (tiles / parts + 2)

        return cls(min(range(1, max(1, min(num_sms(), tiles)) + 1), key=time))

    @classmethod
    def of(cls, queries: Sequence[Any], cache: Sequence[Any]) -> "Config":
        """The default of a call."""
        return cls.default(queries[0].shape[0] * queries[0].shape[1], cache[0].shape[1])


def check_supported(queries: Sequence[Any], cache: Sequence[Any]) -> str | None:
    """Why the kernel cannot take queries [B, N, G, K_i] and a cache [B, S, N, W_i]; None if it can."""
    (_, _, G, _), S, dtype = queries[0].shape, cache[0].shape[1], queries[0].dtype
    widths = [x.shape[-1] for x in cache]
    if dtype not in (jnp.bfloat16, jnp.float16) or any(x.dtype != dtype for x in (*queries, *cache)):
        return f"queries are {dtype}, the cache {cache[0].dtype}; the kernel takes bfloat16 or float16"
    if any(w % PIECE for w in widths) or _whole(G) * widths[_values(queries, cache)] > SUMS * 128:
        return (
            f"{G} heads, widths {widths}; the kernel takes multiples of {PIECE}, and of values times heads up to "
            f"{SUMS * 128}"
        )
    return f"{S} slots; the kernel takes multiples of 8" if S % 8 or not S else None


def _values(queries: Sequence[Any], cache: Sequence[Any]) -> int:
    """The array of the cache that has the values: the one after the keys, or the first keys where there is none."""
    return len(queries) if len(cache) > len(queries) else 0


def _whole(heads: int) -> int:
    """The N of a product with these heads: a multiple of eight."""
    return pl.cdiv(heads, 8) * 8


class Pieces(NamedTuple):
    """How a tile of tokens lies in slots."""

    places: tuple[tuple[int, int], ...]
    """Array and first column of each piece."""
    keys: int
    """Pieces that are keys, the first ones."""
    values: tuple[int, ...]

    @classmethod
    def of(cls, queries: Sequence[Any], cache: Sequence[Any]) -> "Pieces":
        """The pieces of a cache [B, S, N, W_i]."""
        widths, values = [x.shape[-1] for x in cache], _values(queries, cache)
        places = tuple((i, n) for i, width in enumerate(widths) for n in range(0, width, PIECE))
        of_values = tuple(n for n, (i, _) in enumerate(places) if i == values)
        return cls(places, sum(widths[: len(queries)]) // PIECE, of_values)


def _memory(config: Config, heads: int, pieces: Pieces, dtype: Any) -> Memory:
    return {
        "tiles": Buffer((config.stages, TOKENS, PIECE), dtype, swizzle=128),
        "q": Buffer((pieces.keys, heads, PIECE), dtype, swizzle=128),
        "p": Buffer((heads, TOKENS), dtype, swizzle=128),
        "q_full": Barriers(arrivals=pieces.keys),
        "q_empty": Barriers(arrivals=1),
        **barriers(1, 1, config.stages),
    }


class _Place(NamedTuple):
    """An item: the part of a row's tokens that one key head reads."""

    row: Any
    """Its row of the queries."""
    cached: Any
    """Its row of the cache."""
    head: Any
    part: Any
    length: Any
    begin: Any
    """Its first tile."""
    end: Any
    """The tile after its last one."""


class _Cta:
    """The knowledge of every warpgroup of a CTA."""

    def __init__(
        self,
        gmem: Any,
        smem: Any,
        *,
        config: Config,
        pieces: Pieces,
        scale: float,
        more: int,
        interpreted: bool,
    ):
        self.gmem, self.smem, self.config, self.scale, self.more = gmem, smem, config, scale, more
        self.dev, self.ring, self.wg = Device(interpreted), Ring(smem, config.stages), warpgroup_index()
        rows, self.N, self.G = gmem.q0.shape[:3]
        self.pieces, self.count = pieces, len(pieces.places)
        self.queries: list[Any] = [gmem.q0, getattr(gmem, "q1", None)]
        self.cache: list[Any] = [gmem.x0, gmem.x1]
        self.items = share(rows * self.N * config.parts, config.ctas)

    def place(self, i) -> _Place:
        """The i-th item of this CTA."""
        item, parts = grid_index() + i * self.config.ctas, jnp.int32(self.config.parts)
        row, part, head = lax.div(item, parts), lax.rem(item, parts), 0
        if self.N > 1:
            row, head = lax.div(row, jnp.int32(self.N)), lax.rem(row, jnp.int32(self.N))
        length = jnp.minimum(self.gmem.length[row] + self.more, self.gmem.x0.shape[1])
        tiles = lax.div(length + (TOKENS - 1), jnp.int32(TOKENS))
        cached = row if self.gmem.rows is None else self.gmem.rows[row]
        begin, end = lax.div(tiles * part, parts), lax.div(tiles * (part + 1), parts)
        return _Place(row, cached, head, part, length, begin, end)

    def walk(self, item: Any) -> None:
        """item(i, first) for all items of this CTA, with the number of the item's first slot."""

        def body(i, first):
            own = self.place(i)
            item(i, first)
            return first + (own.end - own.begin) * self.count

        lax.fori_loop(0, self.items, body, jnp.int32(0))


def _load(cta: _Cta) -> None:
    """The role of the loading warpgroup."""
    smem, pieces = cta.smem, cta.pieces

    def item(i, first):
        own = cta.place(i)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(smem.q_empty))
        for n, (array, column) in enumerate(pieces.places[: pieces.keys]):
            source = cta.queries[array].at[own.row, own.head, :, pl.ds(column, PIECE)]
            plgpu.copy_gmem_to_smem(source, smem.q.at[n], smem.q_full)

        def tile(t, _):
            tokens = pl.ds(t * TOKENS, TOKENS)
            for n, (array, column) in enumerate(pieces.places):
                slot, barrier = cta.ring.free(first + (t - own.begin) * cta.count + n)
                x = cta.cache[array]
                begin = own.head * (x.shape[2] // cta.N) + column
                source = x.at[own.cached, tokens, pl.ds(begin, PIECE)]
                plgpu.copy_gmem_to_smem(source, smem.tiles.at[slot], barrier)
            return ()

        lax.fori_loop(own.begin, own.end, tile, ())

    cta.walk(item)


def _multiply(cta: _Cta) -> None:
    """The role of the multiplying warpgroup."""
    smem, dev, ring, pieces = cta.smem, cta.dev, cta.ring, cta.pieces
    shape = TOKENS, cta.G
    # Keys have been waited for when their scores are made; values in an array of their own have not.
    value = ring.slot if pieces.values[0] < pieces.keys else ring.filled

    def scores(first, acc):
        for n in range(pieces.keys):
            dev.issue(acc, smem.tiles.at[ring.filled(first + n)], transposed(smem.q.at[n]))
        dev.finish(0)
        return dev.collect(acc)

    def item(i, first):
        own = cta.place(i)
        plgpu.barrier_wait(smem.q_full)

        def tile(t, carry):
            largest, total, *sums = carry
            slots = first + (t - own.begin) * cta.count
            s = pl.run_scoped(functools.partial(scores, slots), plgpu.ACC(shape, jnp.float32))
            token = iota(shape, 0) + t * TOKENS
            s = jnp.where(token < own.length, s * (cta.scale * LOG2_E), -jnp.inf)
            new = jnp.maximum(largest, jnp.max(s, axis=0))
            p, factor = (
                jnp.exp2(s - along_columns(new, TOKENS)),
                along_columns(jnp.exp2(largest - new), TOKENS),
            )
            transposed(smem.p)[...] = p.astype(smem.p.dtype)
            values = [smem.tiles.at[value(slots + n)] for n in pieces.values]

            @pl.when(own.length < (t + 1) * TOKENS)
            def _():
                # A weight of 0 is not enough: the slots after the tokens may hold NaN, of a request before this one.
                for v in values:
                    x = plgpu.load(v, layout=WGMMA, optimized=False)
                    is_token = iota((TOKENS, PIECE), 0) + t * TOKENS < own.length
                    store_any(v, jnp.where(is_token, x, jnp.zeros_like(x)))

            dev.commit()

            def add(add):
                for n, v in enumerate(values):
                    add(n, transposed(v), transposed(smem.p))

            sums = dev.accumulate([x * factor for x in sums], add)
            for n in range(cta.count):
                ring.release(slots + n)
            return new, total * factor + p, *sums

        start = zeros((cta.G,), jnp.float32, COL) - jnp.inf
        largest, total, *sums = lax.fori_loop(
            own.begin, own.end, tile, (start, *[zeros(shape, jnp.float32)] * (1 + len(pieces.values)))
        )
        plgpu.barrier_arrive(smem.q_empty)
        place = own.row, own.head, own.part
        for n, x in enumerate(sums):
            target = cta.gmem.o.at[*place, :, pl.ds(n * PIECE, PIECE)]
            store_any(transposed(target), plgpu.layout_cast(x, WGMMA_TRANSPOSED))
        store_any(cta.gmem.largest.at[*place], largest)
        store_any(cta.gmem.total.at[*place], jnp.sum(total, axis=0))

    cta.walk(item)


def _body(gmem: Any, smem: Any, **static: Any) -> None:
    cta = _Cta(gmem, smem, **static)
    roles(cta.wg, 1, lambda: _load(cta), lambda: _multiply(cta))


class Parts(NamedTuple):
    """Mixed values of heads in parts of a row's tokens."""

    o: Float[Array, "B N P G V"]
    """Not divided by the sum of weights; of one part without sums: divided. There may be more heads than count."""
    largest: Float[Array, "B N P G"] | None = None
    """Maxima of scores in base 2."""
    total: Float[Array, "B N P G"] | None = None
    """Sums of the weights."""

    def whole(self) -> Float[Array, "B N G V"]:
        """The mixed values of all tokens; of parts with sums."""
        assert self.largest is not None and self.total is not None
        factor = jnp.exp2(self.largest - jnp.max(self.largest, axis=2, keepdims=True))
        return jnp.sum(factor[..., None] * self.o, axis=2) / jnp.sum(factor * self.total, axis=2)[..., None]


@kernel("scale", "more", "config", chosen=lambda x: dict(config=x.config or Config.of(x.queries, x.cache)))
def attention_rows(
    queries: Sequence[Float[Array, "B N G _"]],
    cache: Sequence[Float[Array, "R S N _"]],
    length: Int[Array, " B"],
    rows: Int[Array, " B"] | None = None,
    *,
    scale: float,
    more: int = 0,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "B N G V"]:
    """`attention_parts`, added up, in the queries' dtype.

    Args: as for `attention_parts`.
    """
    parts = _launch(queries, cache, length, rows, scale, more, config, interpret)
    return parts.whole().astype(queries[0].dtype)[:, :, : queries[0].shape[2]]


@kernel("scale", "more", "config", chosen=lambda x: dict(config=x.config or Config.of(x.queries, x.cache)))
def attention_parts(
    queries: Sequence[Float[Array, "B N G _"]],
    cache: Sequence[Float[Array, "R S N _"]],
    length: Int[Array, " B"],
    rows: Int[Array, " B"] | None = None,
    *,
    scale: float,
    more: int = 0,
    config: Config | None = None,
    interpret: Any = None,
) -> Parts:
    """Mixed values of a query of each row and head, where `check_supported` says so, in parts of the tokens.

    Args:
      queries: of G heads of each key head, for every array of keys.
      cache: the arrays of keys, then the values; no values where the first keys are these too.
      length: tokens of each row, with `more` at least 1; more than there are slots count as all slots.
      rows: rows of the cache, of which there may be others; None: the first one for the first queries, and so on.
      scale: factor of the scores.
      more: tokens of every row after its length.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    return _launch(queries, cache, length, rows, scale, more, config, interpret)


def _launch(queries, cache, length, rows, scale, more, config, interpret) -> Parts:
    (B, N, G, _), (R, S, *_), wide = queries[0].shape, cache[0].shape, jnp.float32
    pieces, dtype, heads = Pieces.of(queries, cache), queries[0].dtype, _whole(G)
    filled = [jnp.pad(q, ((0, 0), (0, 0), (0, heads - G), (0, 0))) for q in queries]
    of_parts = B, N, config.parts, heads
    found = launch(
        "attention_rows",
        functools.partial(
            _body,
            config=config,
            pieces=pieces,
            scale=scale,
            more=more,
            interpreted=interpret is not None,
        ),
        inputs={
            **{f"q{i}": q for i, q in enumerate(filled)},
            **{f"x{i}": x.reshape(R, S, -1) for i, x in enumerate(cache)},
            "length": length,
            "rows": rows,
        },
        outputs={
            "o": jax.ShapeDtypeStruct((*of_parts, len(pieces.values) * PIECE), wide),
            "largest": jax.ShapeDtypeStruct(of_parts, wide),
            "total": jax.ShapeDtypeStruct(of_parts, wide),
        },
        memory=_memory(config, heads, pieces, dtype),
        ctas=config.ctas,
        warpgroups=2,
        interpret=interpret,
    )
    return Parts(found["o"], found["largest"], found["total"])
