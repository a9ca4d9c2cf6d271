"""The walk over the chunks of a sequence, by warpgroups that hold 64 rows of the transposed state in registers.

What `states` and `adjoints` share: which CTA walks over what, and how tiles come. A warpgroup computes and loads by
cp.async; there are no other roles. Tiles that the last product of a step reads have two slots, so that the next
chunk's come while this one is computed. The others are free earlier in a step: with one slot they are loaded then,
beside the last product, and with two at the start of the step.

| place in a step     | warpgroups                                                         |
|---------------------|--------------------------------------------------------------------|
| `begin`             | wait for their own copies, then for each other: chunk i is there,  |
|                     | and no one reads chunk i - 1 any more. Start late copies of i + 1  |
| `leave_early_tiles` | wait for each other where early tiles have one slot, start theirs  |
| after the last step | wait for the copies that nobody reads                              |

Work: one CTA takes `warpgroups` tiles of 64 rows of the state of one output head of one sequence.
Hardware: compute capability 8.0 and later. Limits: K 64 or 128; V a multiple of 64.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ampere import spans
from pallas_kernels.device.launch import grid_index, launch, num_sms, shared_memory, warpgroup_index
from pallas_kernels.device.layouts import CHUNK, COL, along_columns, zeros
from pallas_kernels.device.memory import Barriers, Buffer, Memory, load_state, smem_bytes, transposed
from pallas_kernels.device.mma import SWIZZLE, MmaDevice

ROWS = 64
"""Rows of the transposed state that a warpgroup holds."""

TOKENS = ("q", "k", "v", "do")
"""Names of arrays of tokens, whose heads lie side by side. Of the others each chunk and head has rows of its own."""

KEYS = ("q", "k", "kg", "qg", "kr")
"""Names of arrays with the channels of keys."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a walk runs, not what it computes."""

    warpgroups: int = 2
    """1 or 2. Two share a head's tiles; one gives twice the CTAs."""
    early_slots: int = 1
    """1 fits into the 99 KB of compute capability 8.6, 8.9 and 12.0 at K = V = 128, 2 does not."""

    @classmethod
    def default(cls, V: int, walks: int, bytes_of: Callable[["Config"], int]) -> "Config":
        """The configuration for a number of (sequence, output head) to walk over.

        Two warpgroups a CTA where the CTAs then still are as many as the device's SMs. Where CTAs of one are no
        more than these, two slots if the device has the memory: (16, 64) 1x32768 takes 1.83 ms with them and 2.06
        without (H100, 2026-11-25; 2.75 with two warpgroups).

        Args:
          bytes_of: shared memory of a CTA of a configuration.
        """
        tiles, sms = V // ROWS, num_sms()
        if tiles % 2 == 0 and walks * tiles // 2 >= sms:
            return cls(2)
        wide = cls(1, 2)
        return wide if walks * tiles <= sms and bytes_of(wide) <= shared_memory() else cls(1)


class Sizes(NamedTuple):
    """Static sizes of one kernel."""

    heads: Mapping[str, int]
    """Heads that lie side by side in a row of each array of tokens."""
    HO: int
    K: int
    V: int
    tiles: int
    """Tiles of `warpgroups` x 64 rows of a head."""
    chunks: int
    """Chunks of all sequences, used or not."""
    scale: float
    kv_layout: bool


class Cta:
    """All that a warpgroup knows."""

    def __init__(
        self, gmem: Any, smem: Any, *, config: Config, sizes: Sizes, is_backwards: bool, interpreted: bool
    ):
        self.gmem, self.smem, self.config, self.sizes = gmem, smem, config, sizes
        self.is_backwards, self.dev, self.dtype = is_backwards, MmaDevice(interpreted), gmem.t.dtype
        self.wg = warpgroup_index()
        self.tile = lax.rem(grid_index(), sizes.tiles)
        self.head = lax.rem(lax.div(grid_index(), sizes.tiles), sizes.HO)
        self.sequence = lax.div(grid_index(), sizes.tiles * sizes.HO)
        self.first = gmem.first_chunk[self.sequence]
        self.chunks = gmem.first_chunk[self.sequence + 1] - self.first
        """Chunks to walk over."""
        self.rows = pl.ds((self.tile * config.warpgroups + self.wg) * ROWS, ROWS)
        """Rows of the state that this warpgroup holds."""

    def chunk_of(self, i) -> jax.Array:
        """Number of the i-th chunk of the walk."""
        return self.first + (self.chunks - 1 - i if self.is_backwards else i)

    def states_of(self, i) -> Any:
        """This warpgroup's rows of the states [chunks HO V, K] at a border of the i-th chunk."""
        first = (self.chunk_of(i) * self.sizes.HO + self.head) * self.sizes.V
        return pl.ds(first + self.rows.start, ROWS)

    def tokens_of(self, i) -> tuple[Any, Any]:
        """Rows and this warpgroup's columns of [places, HO V] that belong to the i-th chunk."""
        columns = pl.ds(self.head * self.sizes.V + self.rows.start, ROWS)
        return pl.ds(self.chunk_of(i) * CHUNK, CHUNK), columns

    def slot(self, name: str, i) -> Any:
        """The tile of the i-th chunk."""
        ref = getattr(self.smem, name)
        return ref.at[lax.rem(i, ref.shape[0])]

    def own_columns(self, name: str, i) -> Any:
        """This warpgroup's 64 columns of a tile of values, transposed: [64, C]."""
        ref = getattr(self.smem, name)
        return transposed(ref.at[lax.rem(i, ref.shape[0]), :, pl.ds(self.wg * ROWS, ROWS)])

    def factor(self, number: int, i) -> jax.Array:
        """A vector of the i-th chunk, repeated over the rows of the state."""
        vectors = self.slot("factors", i).at[self.wg, CHUNK * number : CHUNK * (number + 1)]
        return along_columns(plgpu.load(vectors, layout=COL), ROWS)

    def number(self, place: int, i) -> jax.Array:
        """A number of the vectors of the i-th chunk."""
        slots = self.smem.factors.shape[0]
        return self.smem.factors[lax.rem(i, slots), self.wg, place]

    def _load(self, i, names: Sequence[str]) -> None:
        """Starts the copies of tiles of the i-th chunk. Past the end they load a chunk that nobody reads."""
        n = jnp.minimum(i, jnp.maximum(self.chunks - 1, 0))
        chunk = jnp.clip(self.chunk_of(n), 0, self.sizes.chunks - 1)  # of no chunks there is no last one
        share = CHUNK // self.config.warpgroups  # of the rows of a tile
        square = (chunk * self.sizes.HO + self.head) * CHUNK
        for name in names:
            source, tile = getattr(self.gmem, name), self.slot(name, i)
            if name == "factors":
                self.dev.copy(source, chunk * self.sizes.HO + self.head, 0, tile.at[self.wg])
                continue
            row, column = square, 0
            if name in self.sizes.heads:
                per_head = self.sizes.HO // self.sizes.heads[name]
                width = self.sizes.K if name in ("q", "k") else self.sizes.V
                row, column = spans.first_row_of(self.gmem, chunk), lax.div(self.head, per_head) * width
                if name not in ("q", "k"):
                    column = column + self.tile * self.config.warpgroups * ROWS
            mine = self.wg * share
            self.dev.copy(source, row + mine, column, tile.at[pl.ds(mine, share)])

    def begin(self, i, early: Sequence[str], late: Sequence[str]) -> None:
        """Makes sure that the i-th chunk is there, and starts copies of the next one."""
        self.dev.arrived()
        self.dev.meet(self.smem.met)
        if self.gmem.first_token is not None:
            pl.when(spans.is_partial(self.gmem, self.chunk_of(i)))(lambda: self._clear_foreign(i))
        self._load(i + 1, late if self.config.early_slots == 1 else (*late, *early))

    def _clear_foreign(self, i) -> None:
        """Makes keys and values that are not the i-th chunk's zeros. Outputs of such queries are not read."""
        for name, wg in (("k", 0), ("v", self.config.warpgroups - 1)):
            tile = self.slot(name, i)
            call = functools.partial(spans.clear, self.dev, self.gmem, self.chunk_of(i), tile)
            pl.when(self.wg == wg)(call)
        self.dev.meet(self.smem.met)

    def leave_early_tiles(self, i, early: Sequence[str]) -> None:
        """Says that this warpgroup has read them."""
        if self.config.early_slots == 1:
            self.dev.meet(self.smem.met)
            self._load(i + 1, early)

    def read(self, source: Any) -> jax.Array:
        """This warpgroup's rows of a state of every sequence and head, zeros where source is None."""
        if source is None:
            return zeros((ROWS, self.sizes.K), jnp.float32)
        return load_state(source.at[self.sequence, self.head], self.rows, self.sizes.kv_layout)

    def walk(self, step: Callable, start: jax.Array, early: Sequence[str], late: Sequence[str]) -> jax.Array:
        """Repeats h <- step(cta, i, h) over the chunks.

        Args:
          early, late: names of tiles that the step reads before and after `leave_early_tiles`.
        """
        self._load(jnp.int32(0), (*late, *early))

        def one(i, h):
            self.begin(i, early, late)
            return step(self, i, h)

        h = lax.fori_loop(0, self.chunks, one, start)
        self.dev.arrived()
        return h


def memory(
    config: Config,
    K: int,
    dtype,
    early: Sequence[str],
    late: Sequence[str],
    *,
    vectors: int = 2,
    interpreted: bool = False,
) -> Memory:
    """Shared memory of a CTA, whose tiles are those named. vectors: those that come side by side as "factors"."""
    n, slots = config.warpgroups, dict.fromkeys(late, 2) | dict.fromkeys(early, config.early_slots)
    columns = dict.fromkeys(KEYS, K) | dict(v=ROWS * n, do=ROWS * n, t=CHUNK, p=CHUNK)
    parts: dict[str, Any] = {
        name: Buffer((count, CHUNK, columns[name]), dtype, swizzle=SWIZZLE)
        for name, count in slots.items()
        if name != "factors"
    }
    parts["factors"] = Buffer((slots["factors"], n, vectors * CHUNK))
    parts["met"] = Barriers(arrivals=n) if interpreted and n > 1 else None
    return parts


def start(
    name: str,
    body: Callable[[Cta], None],
    arrays: Mapping[str, jax.Array],
    states: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    *,
    early: Sequence[str],
    late: Sequence[str],
    is_backwards: bool,
    scale: float,
    kv_layout: bool,
    config: Config | None,
    interpret: Any,
    most_slots: int = 2,
) -> dict[str, jax.Array]:
    """Launches a walk.

    Args:
      most_slots: slots of early tiles, at most, where config is None.
      arrays: by name: the tiles' sources, tokens as [places, heads, width], what belongs to a chunk and head as
        [chunks, HO, C, width], factors [chunks, HO, vectors C] and first_chunk.
      states: other inputs, by name.
    """
    (chunks, HO), K = arrays["t"].shape[:2], next(arrays[name].shape[-1] for name in KEYS if name in arrays)
    V = next(arrays[name].shape[2] for name in ("v", "do") if name in arrays)
    sequences = arrays["first_chunk"].shape[0] - 1
    vectors, interpreted = arrays["factors"].shape[2] // CHUNK, interpret is not None
    make_memory = functools.partial(
        memory,
        K=K,
        dtype=arrays["t"].dtype,
        early=early,
        late=late,
        vectors=vectors,
        interpreted=interpreted,
    )
    if config is None:
        config = Config.default(V, sequences * HO, lambda config: smem_bytes(make_memory(config)))
        config = dataclasses.replace(config, early_slots=min(config.early_slots, most_slots))
    if V % (ROWS * config.warpgroups):
        raise ValueError(
            f"config.warpgroups: expected a divisor of {V // ROWS} row tiles, got {config.warpgroups}"
        )
    heads = {key: arrays[key].shape[1] for key in TOKENS if key in arrays}
    sizes = Sizes(heads, HO, K, V, V // (ROWS * config.warpgroups), chunks, scale, kv_layout)
    flat = {key: x if key == "first_chunk" else _flat(key, x) for key, x in arrays.items()}
    static = dict(config=config, sizes=sizes, is_backwards=is_backwards, interpreted=interpreted)
    return launch(
        name,
        functools.partial(_body, body, **static),
        inputs=flat | spans.inputs(None) | dict(states),
        outputs=outputs,
        memory=make_memory(config),
        ctas=sequences * HO * sizes.tiles,
        warpgroups=config.warpgroups,
        reduction_bytes=0,
        interpret=interpret,
    )


def _body(body: Callable[[Cta], None], gmem: Any, smem: Any, **static) -> None:
    body(Cta(gmem, smem, **static))


def _flat(name: str, x: jax.Array) -> jax.Array:
    """An array as the kernel has it: tokens in rows, or one square below another."""
    columns = x.shape[1] * x.shape[2] if name in TOKENS else x.shape[-1]
    return x.reshape(-1, columns)
