"""A product of matrices in tiles that stay in registers, for kernels that do more with a tile than to write it.

    X = A B,   A [M, D],  B [D, N]

Grid: persistent, one CTA on each multiprocessor, in clusters of two that have the same columns and neighbouring rows:
each loads half of what both read of B. A CTA has two warpgroups that multiply, `ROWS` rows of its tile each, and one
that loads. The tiles of one cluster after another have the same rows and the next columns, or the other way round.

The sum may be cut into parts, each of which has tiles of its own: then there are tiles for every multiprocessor where
X is small and the sum is long.

Operands pass through a ring of slots, `DEPTH` numbers of the sum at a time: a step. A kernel may add steps to those
of a tile, in which slots hold something else.

Barriers:

    barrier       who arrives                                            who waits
    full[slot]    every copy into the slot, `copies` of them             the multiplying warpgroups
    empty[slot]   the multiplying warpgroups of both CTAs                the loading warpgroup of each CTA
    turn          the first multiplying warpgroup, `lead` steps into     the second one, before a tile
                  a tile

The first warpgroup may be some steps ahead of the second, so that one multiplies while the other is busy with what it
makes of its tile. In tiles of few steps neither is.

Hardware: compute capability 9.0. Limits: `check_supported`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.launch import Shaped, cluster_index, grid_index, launch, num_sms, warpgroup_index
from pallas_kernels.device.memory import CLUSTER, Barriers, Memory
from pallas_kernels.device.operations import Device
from pallas_kernels.layer.operand_ring import DEPTH, ROWS, Ring, roles

TILE_ROWS = 2 * ROWS
"""Rows of a CTA's tile."""

COLUMNS = 256
"""Columns of a tile: as many as a wgmma takes, so that operands are read least often."""

CLUSTER_CTAS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """How the tiles are walked over, not what is computed."""

    stages: int = 4
    """Slots of the ring."""
    lead: int = 0
    """Steps that the first multiplying warpgroup is ahead; 0 leaves that to chance. Less than the stages."""
    clusters: int | None = None
    """None: as many as the device has room for."""
    down: bool = False
    """Whether one tile after another has the same columns and the next rows."""

    def __post_init__(self):
        assert 0 <= self.lead < self.stages, f"lead {self.lead} of {self.stages} stages"


def check_supported(a: Shaped) -> str | None:
    """Why the left matrix [.., M, D] of a product cannot be taken; None if it can."""
    M, D = a.size // a.shape[-1], a.shape[-1]
    if a.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(a.dtype).name}; the kernel takes bfloat16 and float16"
    if not M or M % 8:
        return f"{M} rows; the kernel takes a multiple of 8"
    if D % DEPTH:
        return f"rows of {D}; the kernel takes a multiple of {DEPTH}"
    return None


def barriers(config: Config, copies: int) -> Memory:
    """The barriers of a kernel whose slots are filled by so many copies."""
    return {
        "full": Barriers(arrivals=copies, count=config.stages),
        "empty": Barriers(arrivals=2, count=config.stages, of_cluster=True),
        "turn": Barriers(arrivals=1) if config.lead else None,
    }


def num_tiles(M: int, N: int) -> int:
    """Tiles of a product [M, N], each of which a cluster takes."""
    return pl.cdiv(M, CLUSTER_CTAS * TILE_ROWS) * pl.cdiv(N, COLUMNS)


def most_clusters(config: Config) -> int:
    """Clusters that are at work at once."""
    return num_sms() // CLUSTER_CTAS if config.clusters is None else config.clusters


def num_clusters(config: Config, M: int, N: int, parts: int = 1) -> int:
    """Clusters that walk over the tiles of a product [M, N], whose sum is cut into so many parts."""
    return min(most_clusters(config), num_tiles(M, N) * parts)


class Cta:
    """The knowledge of every warpgroup of a CTA.

    Args:
      gmem, smem: of the kernel.
      M, N, D: sizes of the product.
      more_steps: steps of a tile after those of the product.
      parts: of the sum, equally long; where D ends before the last one, its copies read zeros.
    """

    def __init__(
        self,
        gmem: Any,
        smem: Any,
        *,
        M: int,
        N: int,
        D: int,
        config: Config,
        interpreted: bool,
        more_steps: int = 0,
        parts: int = 1,
    ):
        self.gmem, self.smem, self.config = gmem, smem, config
        self.dev, self.ring, self.wg = Device(interpreted), Ring(smem, config.stages), warpgroup_index()
        self.clusters = num_clusters(config, M, N, parts)
        self.rows, self.columns = pl.cdiv(M, CLUSTER_CTAS * TILE_ROWS), pl.cdiv(N, COLUMNS)
        """Tiles along the rows, and along the columns."""
        self.parts, self.tiles_of_part = parts, self.rows * self.columns
        tiles = parts * self.tiles_of_part
        self.tiles = lax.div(jnp.int32(tiles + self.clusters - 1) - grid_index(), jnp.int32(self.clusters))
        """Tiles of this CTA."""
        self.depth_steps, self.more_steps = pl.cdiv(D, DEPTH * parts), more_steps
        self.steps = self.depth_steps + more_steps
        """Steps of a tile."""
        lead = min(config.lead, self.depth_steps)
        # A short tile has no lead: the first warpgroup could arrive for the next tile before the second one has seen
        # that it arrived for this one, and that would wait for ever. Otherwise no slot is free so far ahead.
        self.lead = lead if self.steps + lead > config.stages else 0

    def part(self, i) -> jax.Array:
        """The part of the sum that the i-th tile of this CTA belongs to."""
        return lax.div(grid_index() + i * self.clusters, self.tiles_of_part)

    def first_depth(self, i) -> jax.Array | int:
        """The depth at which the part of the i-th tile begins."""
        return 0 if self.parts == 1 else self.part(i) * self.depth_steps * DEPTH

    def place(self, i) -> tuple[jax.Array, jax.Array]:
        """First row and first column of the i-th tile of this CTA."""
        tile = grid_index() + i * self.clusters
        if self.parts > 1:
            tile = lax.rem(tile, self.tiles_of_part)
        if self.config.down:
            row, column = lax.rem(tile, self.rows), lax.div(tile, self.rows)
        else:
            row, column = lax.div(tile, self.columns), lax.rem(tile, self.columns)
        return (row * CLUSTER_CTAS + cluster_index()) * TILE_ROWS, column * COLUMNS

    def own_rows(self, first) -> Any:
        """The rows of this warpgroup in an array that begins with the first row of its CTA's tile."""
        return pl.ds(first + self.wg * ROWS, ROWS)


def start(
    name: str,
    work: Callable[[Cta], None],
    sizes: tuple[int, ...],
    *,
    config: Config,
    interpret: Any,
    parts: int = 1,
    more_steps: int = 0,
    **options: Any,
) -> dict[str, jax.Array]:
    """Launches a kernel over the tiles of a product.

    Args:
      work: all roles of a CTA, such as `work` with functions of the kernel.
      sizes: M, N and D of the product.
      config, parts, more_steps: of the `Cta`.
      name, interpret, options: of `launch`.
    """
    M, N, D = sizes
    static: dict[str, Any] = dict(M=M, N=N, D=D, config=config, parts=parts, more_steps=more_steps)

    def body(gmem, smem):
        work(Cta(gmem, smem, interpreted=interpret is not None, **static))

    ctas = num_clusters(config, M, N, parts)
    return launch(name, body, ctas=ctas, cluster=CLUSTER_CTAS, warpgroups=3, interpret=interpret, **options)


def copy_shared(source: Any, destination: Any, barrier: Any) -> None:
    """Starts a copy into both CTAs of a cluster, each of which calls this and copies half."""
    plgpu.copy_gmem_to_smem(source, destination, barrier, collective_axes=CLUSTER)


def load_tiles(cta: Cta, load: Callable, load_more: Callable | None = None) -> None:
    """The role of the loading warpgroup.

    Args:
      load: load(row, column, depth, slot) starts the copies of a step from `depth` on, for the tile that begins at
        this row and this column.
      load_more: load_more(row, column, n, slot), those of the n-th step after them.
    """
    ring = cta.ring

    def tile(i, _):
        place, first, depth = cta.place(i), i * cta.steps, cta.first_depth(i)

        def step(k, _):
            load(*place, depth + k * DEPTH, ring.free(first + k)[0])
            return ()

        lax.fori_loop(0, cta.depth_steps, step, ())
        for n in range(cta.more_steps):
            assert load_more is not None
            load_more(*place, n, ring.free(first + cta.depth_steps + n)[0])
        return ()

    lax.fori_loop(0, cta.tiles, tile, ())

    # No CTA may end while the other one copies into its memory or arrives on its barriers.
    def last(step, _):
        plgpu.barrier_wait(ring.empty.at[ring.slot(step)])
        return ()

    steps = cta.tiles * cta.steps
    lax.fori_loop(jnp.maximum(steps - ring.stages, 0), steps, last, ())


def work(cta: Cta, load: Callable, operands: Callable, finish: Callable) -> None:
    """The roles of all warpgroups of a kernel whose tiles are done when their last bulk store is.

    Args:
      load, operands, finish: of `load_tiles` and `multiply_tiles`, behind an argument for the CTA.
    """

    def multiply():
        multiply_tiles(cta, functools.partial(operands, cta), functools.partial(finish, cta))
        plgpu.wait_smem_to_gmem(0)

    roles(cta.wg, 2, lambda: load_tiles(cta, functools.partial(load, cta)), multiply)


def multiply_tiles(
    cta: Cta, operands: Callable, finish: Callable, in_first_step: Callable | None = None
) -> None:
    """The role of a multiplying warpgroup.

    Args:
      operands: operands(slot) are this warpgroup's rows of A and the columns of B in a slot.
      finish: finish(i, row, column, x) does with the rows x [ROWS, COLUMNS] of the i-th tile what is to be done, in
        float32.
      in_first_step: in_first_step(i) is called beside the first products of the i-th tile.
    """
    smem, lead = cta.smem, cta.lead

    def product(i, acc):
        first = i * cta.steps
        if lead:
            pl.when(cta.wg == 1)(lambda: plgpu.barrier_wait(smem.turn))

        def issue(k, slot):
            cta.dev.issue(acc, *operands(slot))
            if lead:
                pl.when((cta.wg == 0) & (k == lead - 1))(lambda: plgpu.barrier_arrive(smem.turn))
            if in_first_step is not None:
                pl.when(k == 0)(lambda: in_first_step(i))

        return cta.ring.sums(cta.dev, first, cta.depth_steps, [acc], issue)

    def tile(i, _):
        (x,) = pl.run_scoped(lambda acc: product(i, acc), plgpu.ACC((ROWS, COLUMNS), jnp.float32))
        finish(i, *cta.place(i), x)
        return ()

    lax.fori_loop(0, cta.tiles, tile, ())
