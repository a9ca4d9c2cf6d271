"""The ground of `channel_gradients`: shared memory, what a warpgroup knows, and its copies from and to memory.

A step is 16 channels of an item: what its products need stays in registers, and its code is short. Tokens (do, dv
and u) and gl are those of an item; states (h, dh) and the inputs (q, k, e, g) are those of a step. Gradients leave
through the tiles of the inputs, so with two stages the inputs of a step are loaded while the one before it runs, as
soon as the gradients of the one before that have left.

| barrier  | arrives                                  | waits                                         |
|----------|------------------------------------------|-----------------------------------------------|
| loaded_x | bulk copies of do, dv, u and gl          | the warpgroup, at the item's start            |
| loaded_h | bulk copies of h and dh of a step        | the warpgroup, behind the levels              |
| loaded   | bulk copies of the inputs of a stage     | the warpgroup, at the step's start            |
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backward.channel_gradients_levels import TOTALS, Score
from pallas_kernels.backward.channel_gradients_step import WIDTH
from pallas_kernels.chunks.merging import BLOCK, HALF
from pallas_kernels.device import rows as block_rows
from pallas_kernels.device.launch import num_sms, warpgroup_index
from pallas_kernels.device.layouts import CHUNK, WGMMA, zeros
from pallas_kernels.device.memory import Barriers, Buffer, Memory, fitting
from pallas_kernels.work import halves
from pallas_kernels.work.foreign import store_owned
from pallas_kernels.work.workers import Place, Worker, owned


@dataclasses.dataclass(frozen=True)
class Config:
    """How the gradients run, not what they compute."""

    warpgroups: int = 2
    """Independent warpgroups of a CTA."""
    stages: int = 2
    """Steps whose inputs are in shared memory, 1 or 2."""
    ctas: int = dataclasses.field(default_factory=num_sms)

    @classmethod
    def default(cls, K: int, V: int, erases: bool, packed: bool) -> "Config":
        """Most warpgroups that fit, and then most stages."""
        configs = cls(2, 2), cls(2, 1), cls(1, 2), cls(1, 1)
        return fitting(configs, lambda x: memory(x, K, V, jnp.bfloat16, erases=erases, packed=packed))


def memory(
    config: Config,
    K: int,
    V: int,
    dtype,
    *,
    erases: bool,
    packed: bool = False,
    tokens: int = CHUNK,
) -> Memory:
    """Shared memory of a CTA: 109 KB a warpgroup at K = V = 128.

    Args:
      tokens: of a chunk.
    """
    n, stages, copies = config.warpgroups, config.stages, 1 if tokens == CHUNK else halves.COPIES
    tile = Buffer((n, stages, tokens, WIDTH), dtype, swizzle=32)
    return {
        "x": Buffer((n, 3, CHUNK, V), dtype, swizzle=32),  # do, dv and u of an item
        "h": Buffer((n, 2, V, WIDTH), dtype, swizzle=32),  # h and dh of a step
        "q": tile,
        "k": tile,
        "e": tile if erases else None,
        "g": Buffer((n, stages, tokens, WIDTH), swizzle=64),
        "gl": Buffer((n, K)),
        "squares": Buffer((n, 2, 2, CHUNK, BLOCK), dtype, swizzle=32),  # of both scores `within` and `near`
        "far": Buffer((n, 2, CHUNK, HALF), dtype, swizzle=64),
        "gates": Buffer((n, 8, CHUNK, BLOCK), dtype, swizzle=32),
        # Gradients of a chunk that several sequences share, which leave row by row.
        "rows": Buffer((n, 3, CHUNK, WIDTH), dtype) if packed else None,
        "rows_of_g": Buffer((n, CHUNK, WIDTH)) if packed else None,
        "operands": Buffer((n, 2, CHUNK, WIDTH), dtype, swizzle=32),
        "decays": Buffer((n, 2, block_rows.BLOCKS, WIDTH)),
        "totals": Buffer((n, TOTALS, block_rows.BLOCKS, WIDTH)),
        "loaded_x": Barriers(arrivals=3 + copies, count=n),
        "loaded_h": Barriers(arrivals=2, count=n),
        "loaded": Barriers(arrivals=3 + erases, count=n * stages),
    }


class Sizes(NamedTuple):
    """Static sizes and switches of one kernel."""

    Hq: int
    Hk: int
    He: int
    HO: int
    K: int
    V: int
    scale: float
    halves: bool

    @property
    def steps(self) -> int:
        """Steps of an item."""
        return self.K // WIDTH


class At(NamedTuple):
    """A step, where its item lies, and where its inputs are in shared memory."""

    step: jax.Array
    place: Place
    wg: jax.Array
    stage: jax.Array


class Warpgroup(Worker):
    """One of the independent warpgroups."""

    def __init__(self, gmem: Any, smem: Any, *, config: Config, sizes: Sizes, **static):
        super().__init__(gmem, smem, config=config, **static)
        self.sizes, self.stages = sizes, config.stages
        self.dtype = gmem.k.dtype
        self.erases = gmem.e is not None and not sizes.halves

    def at(self, step, place: Place) -> "At":
        """A step of an item. The number of this warpgroup is asked for anew in every step: addresses that are made of
        it then do not wait in registers."""
        return At(step, place, warpgroup_index(), lax.rem(step, self.stages))

    def scores(self, wg) -> tuple[Score, Score]:
        """The scores of dP and of dL."""
        squares, far = self.smem.squares, self.smem.far
        read, erased = (Score(squares.at[wg, n, 0], squares.at[wg, n, 1], far.at[wg, n]) for n in range(2))
        return read, erased

    def tile(self, name: str, at: "At") -> Any:
        """The tile of an input, or of a gradient, of a step."""
        return getattr(self.smem, name).at[at.wg, at.stage]

    def load(self, name: str, at: "At") -> jax.Array:
        """An input of a step, with zeros at tokens of other sequences.

        Where tokens are two rows, it is [32, WIDTH] in layout HALF.
        """
        layout = block_rows.HALF if self.sizes.halves else WGMMA
        x, span = plgpu.load(self.tile(name, at), layout=layout), at.place.span
        return x if span is None else jnp.where(owned(span, 0, (CHUNK, WIDTH)), x, jnp.zeros((), x.dtype))

    def store(self, name: str, at: "At", x: jax.Array, target: Any) -> None:
        """Starts the copy of a gradient [C, WIDTH] to its tokens, through the tile of an input."""
        tile, place, smem = self.tile(name, at), at.place, self.smem
        channels = pl.ds(lax.rem(at.step, self.sizes.steps) * WIDTH, WIDTH)

        def destination(tokens):
            return target.at[place.row, tokens, place.head, channels]

        x = x.astype(target.dtype)
        if place.span is None:
            tile[...] = x
            plgpu.commit_smem()
            return plgpu.copy_smem_to_gmem(tile, destination(place.tokens))
        flat = smem.rows_of_g.at[at.wg] if name == "g" else smem.rows.at[at.wg, "qke".index(name)]
        store_owned(place.span, place.span.first_chunk, x, (tile, tile), (flat, flat), destination)

    def gradients(self) -> list[tuple[str, Any]]:
        """Inputs whose tiles gradients leave through, and where these go."""
        gmem = self.gmem
        pairs = (("q", gmem.dq), ("k", gmem.dk), ("e", gmem.de), ("g", gmem.dg))
        return [(name, target) for name, target in pairs if target is not None]


def load_tokens(own: Warpgroup, n) -> None:
    """Starts the copies of do, dv, u and gl of the n-th item."""
    gmem, smem, wg, place = own.gmem, own.smem, warpgroup_index(), own.place(n)
    sources = [gmem.dv.at[place.row, own.rows(place), place.head], gmem.u.at[place.visit, place.head]]
    if own.sizes.halves:  # the rows of first halves are 0 since `clear_first_halves`
        do = gmem.do.at[place.row, :, place.head]
        halves.load(do, place.tokens.start, smem.x.at[wg, 0], smem.loaded_x.at[wg])
    else:
        sources.insert(0, gmem.do.at[place.row, place.tokens, place.head])
    for i, source in enumerate(sources, 3 - len(sources)):
        plgpu.copy_gmem_to_smem(source, smem.x.at[wg, i], smem.loaded_x.at[wg])
    plgpu.copy_gmem_to_smem(gmem.gl.at[place.visit, place.head], smem.gl.at[wg], smem.loaded_x.at[wg])


def clear_first_halves(own: Warpgroup) -> None:
    """Zeros for the rows of do that no copy brings."""
    tile = own.smem.x.at[own.wg, 0]
    for column in range(0, own.sizes.V, CHUNK):
        tile.at[:, column : column + CHUNK][...] = zeros((CHUNK, CHUNK), own.dtype)
    plgpu.commit_smem()


def load_states(own: Warpgroup, step) -> None:
    """Starts the copies of h and dh of a step."""
    gmem, smem, wg, steps = own.gmem, own.smem, warpgroup_index(), own.sizes.steps
    place, channels = own.place(lax.div(step, steps)), pl.ds(lax.rem(step, steps) * WIDTH, WIDTH)
    for i, source in enumerate((gmem.h, gmem.dh)):
        source = source.at[place.visit, place.head, :, channels]
        plgpu.copy_gmem_to_smem(source, smem.h.at[wg, i], smem.loaded_h.at[wg])


def load_inputs(own: Warpgroup, step) -> None:
    """Starts the copies of q, k, e and g of a step."""
    gmem, smem, sizes = own.gmem, own.smem, own.sizes
    at = own.at(step, own.place(lax.div(step, sizes.steps)))
    place, loaded = at.place, smem.loaded.at[at.wg * own.stages + at.stage]
    channels = pl.ds(lax.rem(step, sizes.steps) * WIDTH, WIDTH)
    for name, heads in (("q", sizes.Hq), ("k", sizes.Hk), ("e", sizes.He), ("g", sizes.HO)):
        source = getattr(gmem, name)
        if source is not None:
            head = lax.div(place.head, sizes.HO // heads)
            source = source.at[place.row, place.tokens, head, channels]
            plgpu.copy_gmem_to_smem(source, own.tile(name, at), loaded)


def load_next(own: Warpgroup, step, load: Callable, count=None) -> None:
    """Starts load(own, step + 1), if there is one: of all steps, or of `count`."""
    count = own.num_items * own.sizes.steps if count is None else count
    pl.when(step + 1 < count)(lambda: load(own, step + 1))


def load_next_inputs(own: Warpgroup, step) -> None:
    """Waits until the gradients whose tiles are loaded into have left, and starts the next step's copies."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    load_next(own, step, load_inputs)


def clear_item(own: Warpgroup, n, _):
    """Zeros for the gradients of the n-th item, which is padding."""
    place, steps = own.place(n), own.sizes.steps

    def clear(j, _):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for name, target in own.gradients():
            own.store(name, own.at(n * steps + j, place), zeros((CHUNK, WIDTH), target.dtype), target)
        return ()

    return lax.fori_loop(0, steps, clear, ())
