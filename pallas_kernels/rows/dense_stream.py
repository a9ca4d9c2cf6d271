"""The second half of a layer with a SwiGLU for one row, as one kernel: sum, norm, branches and projection down.

    s = x + y,   v = s (mean(s^2) + eps)^(-1/2) w,   h = silu(A v) * (B v),   z = h W

A CTA has a slice of the inner width, and all that belongs to it: rows of A and B, and rows of W. So h never leaves
the CTA, nothing between the branches and the projection down waits for another CTA, and every copy is of whole rows
that lie one after the other. What CTAs exchange is z: each writes its part [D] of the sum, and after a barrier over
all CTAs (`device.grid_barrier`) each adds up some columns of all parts, so z is whole for the next kernel.

    stage    a CTA makes                          what is copied meanwhile
    parts    s w, again in every CTA; its slice   tiles of A, of B and of W, from the start on
             of h, and its part of z
    sum      some columns of z                    what the kernels after this one read first

Inputs (GMEM): x [1, D] and y [P, D], which are added up, or none; w [D] float32; A and B one after the other as
gate_up [2 F, D], W as down [F, D], of one dtype, bfloat16 or float16, or codes of E4M3 with scales of their blocks
(`weights`). Between the stages (GMEM): parts of z
[slices, D] float32. Outputs (GMEM): s [1, D] of x's dtype, where there is y; z [1, D] float32.
Grid: as many CTAs of four warpgroups as there are multiprocessors, of which a multiple of 16 have a slice. A tile is
four rows of A, B or W, or some of their columns, of which a warpgroup has always the same. Shared memory: `_memory`.

    barrier     arrivals                           who waits
    full        a bulk copy of a tile              the warpgroup whose slot it is
    made        all warpgroups                     all, for s w, h and sums of the CTA

Numerics: float32; v and h are not rounded. The same bits in every call. Hardware: `NEEDS`. Limits:
`check_supported`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.device import generations
from pallas_kernels.device.ahead import bring, rows_of
from pallas_kernels.device.grid_barrier import launch_stages
from pallas_kernels.device.lanes import WARPS
from pallas_kernels.device.launch import Shaped, grid_index, kernel, room, warpgroup_index
from pallas_kernels.device.memory import Barriers, Buffer, Memory, smem_bytes, store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import rows as r
from pallas_kernels.rows import stream
from pallas_kernels.rows.dense_stages import (
    COLUMNS,
    LONGEST,
    PIECES,
    WIDEST,
    Config,
    Sizes,
    Slice,
    Tiles,
    add_parts,
    rows_of_columns,
)
from pallas_kernels.rows.weights import of_dtype

NEEDS = Needs.MMA

REDUCTION_BYTES = 16


def check_supported(x: Shaped, gate_up: Shaped, down: Shaped, ctas: int) -> str | None:
    """Why so many CTAs cannot take a row x [1, D], the branches [2 F, D] and W [F, D]; None if they can."""
    D, F = x.shape[1], down.shape[0]
    if reason := stream.check_supported(x):
        return reason
    weights = of_dtype(down.dtype)
    if down.dtype != gate_up.dtype or weights is None:
        return f"weights of {gate_up.dtype} and {down.dtype}; the kernel takes 16 bits, or E4M3, one for both"
    config = Config.of(ctas)
    warps = config.warpgroups * WARPS
    if ctas < warps:
        return f"{ctas} multiprocessors; the kernel takes {warps} or more"
    unit, most = stream.PART, COLUMNS[-1] * ctas
    sizes = Sizes(D, F, config.warpgroups, config.slices, weights)
    if D % unit or not 0 < D <= most or not sizes.chunks:
        return f"rows of {D}; the kernel takes multiples of {unit} up to {most}, in few pieces"
    if not generations.has_bulk_copies() and (sizes.chunks > 1 or down.dtype.itemsize < 2):
        taken = f"up to {PIECES * WIDEST} numbers of 16 bits"
        return f"rows of {D} in {down.dtype}; below compute capability 9.0 the kernel takes {taken}"
    if not sizes.rows <= sizes.own <= LONGEST:
        of = f"{config.slices * (sizes.rows - 1) + 1} to {config.slices * LONGEST}"
        return f"an inner width of {F}; the kernel takes {of} on {ctas} multiprocessors"
    if reason := weights.reason(F, sizes.own):
        return reason
    taken = smem_bytes(_memory(sizes, dataclasses.replace(config, slots=1), down.dtype), REDUCTION_BYTES)
    return f"{taken} bytes of shared memory; a CTA has {room()}" if taken > room() else None


def _memory(sizes: Sizes, config: Config, dtype: Any) -> Memory:
    n, columns, weights = config.warpgroups, sizes.columns(config.ctas), of_dtype(dtype)
    assert weights is not None
    return {
        "tiles": Buffer((config.slots * n, sizes.rows, sizes.pieces, WIDEST), dtype),
        **weights.memory(sizes.D),
        "squares": Buffer((sizes.D // stream.LINE,)),
        "parts": Buffer((2, sizes.chunks, sizes.room)),
        "h": Buffer((n, sizes.room)),
        "z": Buffer((n, sizes.pieces, WIDEST)),
        "sums": Buffer((n, rows_of_columns(columns), columns)),
        "full": Barriers(arrivals=1, count=config.slots * n),
        "made": Barriers(arrivals=n),
    }


def _fitting(sizes: Sizes, config: Config, dtype: Any) -> Config:
    """The configuration with as many slots as there is room and use for."""
    if config.slots:
        return config
    used = pl.cdiv(3 * sizes.tiles, config.warpgroups)
    every = (dataclasses.replace(config, slots=n) for n in range(used, 0, -1))
    return next(c for c in every if smem_bytes(_memory(sizes, c, dtype), REDUCTION_BYTES) <= room())


def _body(
    gmem: Any, smem: Any, barrier: Any, *, sizes: Sizes, config: Config, eps: float, interpreted: bool
) -> None:
    wg, own, dev = warpgroup_index(), Slice(sizes), Device(interpreted)

    meet = functools.partial(generations.meet, smem.made)
    tiles = Tiles(gmem, smem, sizes, wg, own, dev)

    def keep(part: Any, lines: Any, s: jax.Array, w: jax.Array, asked: Any) -> None:
        store_any(smem.squares.at[lines], r.row_sum(s * s))
        dev.store_flat(smem.v.at[pl.ds(part * s.size, s.size)], s * w)
        sizes.weights.keep(smem, asked, lines)

    ask = functools.partial(sizes.weights.ask, gmem, own.first)
    stream.make(gmem, wg, config.warpgroups, ask, tiles.begin, keep)
    meet()
    tiles.multiply_branches()
    meet()
    tiles.make_h(stream.scale(smem.squares, sizes.D, eps))
    tiles.multiply_down()
    meet()
    pl.when(grid_index() < sizes.slices)(tiles.write_part)
    barrier.arrive()
    pl.when(wg == config.warpgroups - 1)(lambda: bring(gmem.ahead, config.ctas))
    barrier.wait()
    barrier.leave()
    add_parts(gmem, smem, sizes, config.ctas, wg, meet)


@kernel("eps", "config", chosen=lambda x: dict(config=x.config or Config.default(), ahead=rows_of(x.ahead)))
def dense_stream(
    x: Float[Array, "1 D"],
    y: Float[Array, "P D"] | None,
    norm: Float[Array, " D"],
    gate_up: Float[Array, "F2 D"],
    down: Float[Array, "F D"],
    scales: Float[Array, "3 M N"] | None = None,
    *,
    eps: float,
    ahead: Sequence[jax.Array] = (),
    words: Any = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "1 D"], Float[Array, "1 D"]]:
    """The stream x + y, and the SwiGLU of its norm, float32.

    Args:
      x: stream, for which, with the weights, `check_supported` is None.
      y: what is added to it, in parts; None: nothing.
      norm: weight of the norm.
      gate_up: rows of both branches, one branch after the other.
      down: rows of the projection down.
      scales: of the blocks of both branches and of W, where these are codes of E4M3, see `weights`; else None.
      eps: of the norm.
      ahead: arrays that the kernels after this one read first, see `device.ahead`.
      words: of the barrier, as for `grid_barrier.launch_stages`.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    assert config is not None
    (F, D), like, f32 = down.shape, jax.ShapeDtypeStruct, jnp.float32
    weights = of_dtype(down.dtype)
    assert weights is not None
    sizes = Sizes(D, F, config.warpgroups, config.slices, weights)
    config = _fitting(sizes, config, down.dtype)
    pieces, of_stream = (D // WIDEST, WIDEST), stream.inputs(x, y, norm)
    made = launch_stages(
        "dense_stream",
        functools.partial(_body, sizes=sizes, config=config, eps=eps, interpreted=interpret is not None),
        2,
        inputs={
            **of_stream,
            "gate_up": gate_up.reshape(2 * F, *pieces),
            "down": down.reshape(F, *pieces),
            "scales": scales,
        },
        between={"part": like((config.slices, *pieces), f32)},
        outputs={"s": None if y is None else like(of_stream["x"].shape, x.dtype), "z": like((1, D), f32)},
        words=words,
        memory=_memory(sizes, config, down.dtype),
        ahead=ahead,
        reduction_bytes=REDUCTION_BYTES,
        ctas=config.ctas,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
    return x if y is None else made["s"].reshape(x.shape), made["z"]
