"""The backward of the short convolution with SiLU, in one pass over its inputs and the cotangent of its output.

    z[t] = sum over j < W of w[j] x[t - (W - 1) + j],   y = silu(z)
    dz = dy silu'(z)
    dx[t] = sum over j < W of w[j] dz[t + (W - 1) - j],   dw[j] = sum over t of dz[t] x[t - (W - 1) + j]

for every channel by itself. Left to XLA, the sums over tokens and the shifts end in one fusion that takes several
times as long as the memory needs; here x and dy are read once and dx is written once.

Inputs (GMEM): x, dy [B, T, D] bfloat16 or float16; w [W, R, D] float32, every row repeated R times (`launch` does
it).
Outputs (GMEM): dx [B, T, D]; dw [strips, R, W, D] float32, whose sums over strips and R are the gradient of w: they
are taken in a fixed order, so results repeat bit for bit.
Grid: one CTA for each (row of the batch, strip of `tiles` x 64 tokens, `warpgroups` x 64 channels). A warpgroup walks
over the tiles of its strip and 64 channels from the last to the first, so that the dz of the tokens behind a tile are
there; those behind the strip are made first, from the 8 tokens that follow it.
Shared memory: `_memory`, 69 KB a warpgroup with two stages.
Numerics: float32 inside. Hardware: compute capability 9.0. Limits: W = 4, T a multiple of 64, D of 64 warpgroups.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.launch import launch, warpgroup_index
from pallas_kernels.device.memory import Barriers, Buffer, Memory

WIDTH = 4
"""Taps."""

TILE = 64
"""Tokens of a tile, and channels of a warpgroup."""

HALO = 8
"""Rows kept beside a tile: at least WIDTH - 1, and what a warpgroup has at once."""

GROUP = (HALO, TILE)
"""What a warpgroup has in registers at once: four neighbouring numbers a thread."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs, not what it computes."""

    warpgroups: int = 1
    """Warpgroups of a CTA, each with 64 channels of its own. Two take 20 % more time (H200, 2026-11-22)."""
    tiles: int = 16
    """Tiles of a strip. 8 and 32 take 2 and 7 % more time."""
    stages: int = 2
    """Tiles in flight. Three take 12 % more time: fewer CTAs fit."""


def check_supported(
    x: jax.ShapeDtypeStruct | jax.Array, weight: jax.ShapeDtypeStruct | jax.Array
) -> str | None:
    """Why the kernel cannot take a convolution; None if it can."""
    B, T, D = x.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {jnp.dtype(x.dtype).name}; the kernel takes bfloat16 and float16"
    if weight.shape[1] != WIDTH:
        return f"W = {weight.shape[1]}; the kernel is written for {WIDTH}"
    if not B or not T or T % TILE or D % (TILE * Config.warpgroups):
        return f"T = {T}, D = {D}; the kernel takes multiples of {TILE} and {TILE * Config.warpgroups}"
    return None


def _memory(config: Config, dtype) -> Memory:
    """Shared memory of a CTA. x has HALO rows before its tile, dz has HALO rows behind it."""
    n, stages = config.warpgroups, config.stages
    return {
        "x": Buffer((n, stages, HALO + TILE, TILE), dtype),
        "dy": Buffer((n, stages, TILE, TILE), dtype),
        "w": Buffer((n, WIDTH, *GROUP)),
        "dz": Buffer((n, TILE + HALO, TILE)),
        "dx": Buffer((n, TILE, TILE), dtype),
        "loaded": Barriers(arrivals=2, count=n * stages),
        "loaded_w": Barriers(arrivals=WIDTH, count=n),
    }


def _group(ref: Any, row) -> jax.Array:
    """Eight rows of a tile as float32."""
    layout = plgpu.Layout.WG_STRIDED(GROUP, vec_size=4)
    return plgpu.load(ref.at[pl.ds(row, HALO)], layout=layout, optimized=False).astype(jnp.float32)


class _Strip:
    """What a warpgroup knows."""

    def __init__(self, gmem: Any, smem: Any, *, config: Config, T: int, D: int):
        self.gmem, self.smem, self.config, self.T = gmem, smem, config, T
        self.wg = warpgroup_index()
        columns, tiles = D // (TILE * config.warpgroups), -(-T // TILE)
        strips = -(-tiles // config.tiles)
        index = lax.axis_index("cta").astype(jnp.int32)
        column = lax.rem(index, columns)
        self.number = lax.div(index, columns)
        self.row = lax.div(self.number, strips)
        self.first = lax.rem(self.number, strips) * config.tiles
        self.count = jnp.minimum(config.tiles, tiles - self.first)
        self.channels = pl.ds((column * config.warpgroups + self.wg) * TILE, TILE)

    def barrier(self, stage) -> Any:
        """Barrier of a stage of this warpgroup."""
        return self.smem.loaded.at[self.wg * self.config.stages + stage]

    def load(self, i) -> None:
        """Starts the copies of the i-th tile from the end of the strip."""
        stage = lax.rem(i, self.config.stages)
        token = (self.first + self.count - 1 - i) * TILE
        x, tile = self.gmem.x.at[self.row], self.smem.x.at[self.wg, stage]
        dy = self.gmem.dy.at[self.row, pl.ds(token, TILE), self.channels]
        plgpu.copy_gmem_to_smem(dy, self.smem.dy.at[self.wg, stage], self.barrier(stage))

        @pl.when(token == 0)
        def _():
            plgpu.copy_gmem_to_smem(
                x.at[pl.ds(0, TILE), self.channels], tile.at[pl.ds(HALO, TILE)], self.barrier(stage)
            )

        @pl.when(token > 0)
        def _():
            tokens = pl.ds(token - HALO, HALO + TILE)
            plgpu.copy_gmem_to_smem(x.at[tokens, self.channels], tile, self.barrier(stage))


def _dot(w: list[jax.Array], taps: list[jax.Array]) -> jax.Array:
    """Sum over the taps, oldest first."""
    return functools.reduce(jnp.add, [a * b for a, b in zip(w, taps, strict=True)])


def _derivative(z: jax.Array) -> jax.Array:
    """silu'(z)."""
    s = 1.0 / (1.0 + jnp.exp(-z))
    return s * (1.0 + z * (1.0 - s))


def _behind(strip: _Strip, w: list[jax.Array]) -> None:
    """dz of the 8 tokens behind the strip; zeros behind the row."""
    gmem, smem, wg = strip.gmem, strip.smem, strip.wg
    end = (strip.first + strip.count) * TILE
    layout = plgpu.Layout.WG_STRIDED(GROUP, vec_size=4)
    tail = smem.dz.at[wg, pl.ds(0, HALO)]
    tail[...] = plgpu.layout_cast(jnp.zeros(GROUP, jnp.float32), layout)

    @pl.when(end < strip.T)
    def _():
        def rows(ref, token):
            source = ref.at[strip.row, pl.ds(token, HALO), strip.channels]
            return plgpu.load(source, layout=layout, optimized=False).astype(jnp.float32)

        z = _dot(w, [rows(gmem.x, end - (WIDTH - 1) + j) for j in range(WIDTH)])
        tail[...] = rows(gmem.dy, end) * _derivative(z)


def _walk(strip: _Strip) -> None:
    gmem, smem, wg, config = strip.gmem, strip.smem, strip.wg, strip.config
    layout = plgpu.Layout.WG_STRIDED(GROUP, vec_size=4)
    for j in range(config.stages):
        pl.when(j < strip.count)(functools.partial(strip.load, jnp.int32(j)))
    for j in range(WIDTH):
        source = gmem.w.at[j, :, strip.channels]
        plgpu.copy_gmem_to_smem(source, smem.w.at[wg, j], smem.loaded_w.at[wg])
    plgpu.barrier_wait(smem.loaded_w.at[wg])
    w = [plgpu.load(smem.w.at[wg, j], layout=layout, optimized=False) for j in range(WIDTH)]
    dz, out = smem.dz.at[wg], smem.dx.at[wg]
    _behind(strip, w)
    plgpu.commit_smem()

    def tile(i, sums):
        stage = lax.rem(i, config.stages)
        x = smem.x.at[wg, stage]
        first = strip.first + strip.count - 1 - i
        # What lay behind the tile before is behind this one's place now.
        dz[TILE : TILE + HALO] = _group(dz, 0)
        plgpu.barrier_wait(strip.barrier(stage))

        @pl.when(first == 0)
        def _():
            x[0:HALO] = plgpu.layout_cast(jnp.zeros(GROUP, x.dtype), layout)

        plgpu.commit_smem()

        def group(n, sums):
            row = n * HALO
            taps = [_group(x, row + HALO - (WIDTH - 1) + j) for j in range(WIDTH)]
            z = _dot(w, taps)
            d = _group(smem.dy.at[wg, stage], row) * _derivative(z)
            dz[pl.ds(row, HALO)] = d
            return tuple(s + d * tap for s, tap in zip(sums, taps, strict=True))

        sums = lax.fori_loop(0, TILE // HALO, group, sums)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        pl.when(i + config.stages < strip.count)(lambda: strip.load(i + config.stages))

        def shift(n, _):
            row = n * HALO
            dx = _dot(w, [_group(dz, row + (WIDTH - 1) - j) for j in range(WIDTH)])
            out[pl.ds(row, HALO)] = dx.astype(out.dtype)
            return ()

        lax.fori_loop(0, TILE // HALO, shift, ())
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, gmem.dx.at[strip.row, pl.ds(first * TILE, TILE), strip.channels])
        return sums

    zero = plgpu.layout_cast(jnp.zeros(GROUP, jnp.float32), layout)
    sums = lax.fori_loop(0, strip.count, tile, (zero,) * WIDTH)
    for j in range(WIDTH):
        gmem.dw.at[strip.number, j, :, strip.channels][...] = sums[j]
    plgpu.wait_smem_to_gmem(0)


def _body(gmem: Any, smem: Any, **static) -> None:
    _walk(_Strip(gmem, smem, **static))


def short_conv_backward(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    dy: Float[Array, "B T D"],
    *,
    config: Config | None = None,
    interpret=None,
) -> tuple[Float[Array, "B T D"], Float[Array, "D W"]]:
    """Gradients of <dy, silu(conv(x))> with respect to x, in its dtype, and weight, in float32.

    Args:
      x: inputs that `check_supported` accepts.
      weight: filters, oldest tap first.
      dy: cotangent of the output, x's dtype.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    config = config or Config()
    run = _compiled if interpret is None else _run  # the interpreter hangs inside a compiled function
    return run(config, interpret, x, weight, dy)


def _run(config: Config, interpret: Any, x: jax.Array, weight: jax.Array, dy: jax.Array):
    B, T, D = x.shape
    strips = B * -(-T // (TILE * config.tiles))
    w = jnp.broadcast_to(weight.astype(jnp.float32).T[:, None], (WIDTH, HALO, D))
    results = launch(
        "short_conv_backward",
        functools.partial(_body, config=config, T=T, D=D),
        inputs={"x": x, "dy": dy, "w": w},
        outputs={
            "dx": jax.ShapeDtypeStruct(x.shape, x.dtype),
            "dw": jax.ShapeDtypeStruct((strips, WIDTH, HALO, D), jnp.float32),
        },
        memory=_memory(config, x.dtype),
        ctas=strips * (D // (TILE * config.warpgroups)),
        warpgroups=config.warpgroups,
        auto_barriers=False,
        interpret=interpret,
    )
    return results["dx"], jnp.sum(results["dw"], axis=(0, 2)).T


_compiled = jax.jit(_run, static_argnums=(0, 1))
"""So that a model's layers share one kernel, and a call outside jit compiles once."""
