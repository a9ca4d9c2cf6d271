"""Prototype: products of a SwiGLU with the element-wise part behind them in the epilogue (Hopper)."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.layouts import WGMMA
from pallas_kernels.device.memory import tiling, transposed
from pallas_kernels.device.operations import Device

ROWS = 64  # of a warpgroup
DEPTH = 64  # numbers along the sum in a step
SMS = 132


@dataclasses.dataclass(frozen=True)
class Config:
    columns: int = 256
    stages: int = 4
    cluster: int = 2
    lead: int = 0  # steps that the first consumer is ahead
    band: int = 1  # tiles of rows of which all tiles of columns follow one another
    out_columns: int = 64
    out_slots: int = 1
    group: int = 32
    k_major: bool = True  # weight as [columns, depth]
    product: bool = True  # False: the plain product only (to compare with cuBLAS)
    math: bool = True  # False: wrong results, without the sigmoid (to see what it costs)
    sms: int = SMS
    registers: tuple = (24, 240)


def launch(name, body, inputs, outputs, memory, config, clusters, interpret):
    names = [*inputs, *outputs]

    def run(*refs):
        gmem = dict(zip(names, refs[: len(names)], strict=True))
        smem = dict(zip(memory, refs[len(names) :], strict=True))
        with jax.enable_x64(False):
            body(SimpleNamespace(**gmem), SimpleNamespace(**smem))

    run.__name__ = name
    options: dict[str, Any] = {}
    if config.cluster > 1:
        options = dict(cluster=(config.cluster,), cluster_names=("pair",))
    out = plgpu.kernel(
        run,
        out_type=tuple(outputs.values()),
        scratch_types=tuple(memory.values()),
        grid=(clusters,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        **options,
    )(*inputs.values())
    return dict(zip(outputs, out, strict=True))


class Cta:
    def __init__(self, gmem, smem, config, M, N, K, interpreted, extra=0):
        self.gmem, self.smem, self.config = gmem, smem, config
        self.dev = Device(interpreted)
        self.wg = lax.axis_index("wg").astype(jnp.int32)
        self.cta = lax.axis_index("cta").astype(jnp.int32)
        self.pair = lax.axis_index("pair").astype(jnp.int32) if config.cluster > 1 else jnp.int32(0)
        self.num_m = pl.cdiv(M, 2 * ROWS * config.cluster)
        self.num_n = pl.cdiv(N, config.columns)
        self.total = self.num_m * self.num_n
        self.clusters = num_clusters(config, M, N)
        self.tiles = lax.div(jnp.int32(self.total + self.clusters - 1) - self.cta, jnp.int32(self.clusters))
        self.depth_steps = K // DEPTH
        self.steps = self.depth_steps + extra  # of a tile

    def place(self, i):
        """Tile of rows and of columns of the i-th tile of this CTA."""
        band = self.config.band
        t = self.cta + i * self.clusters
        b, r = lax.div(t, band * self.num_n), lax.rem(t, band * self.num_n)
        m = b * band + lax.rem(r, band)
        return m * self.config.cluster + self.pair, lax.div(r, band)

    def slot(self, step):
        return lax.rem(step, self.config.stages)

    def arrive(self, barrier):
        plgpu.barrier_arrive(barrier)


def num_clusters(config, M, N):
    total = pl.cdiv(M, 2 * ROWS * config.cluster) * pl.cdiv(N, config.columns)
    return min(total, config.sms // config.cluster)


def copy(source, destination, barrier, shared=False):
    options = dict(collective_axes="pair") if shared else {}
    plgpu.copy_gmem_to_smem(source, destination, barrier, **options)


def produce(cta, load_depth, load_extra=None, extra=0):
    smem, stages = cta.smem, cta.config.stages
    plgpu.set_max_registers(cta.config.registers[0], action="decrease")

    def free(step):
        slot = cta.slot(step)
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(smem.empty.at[slot]))
        return slot

    def tile(i, _):
        m, n = cta.place(i)

        def step(k, _):
            load_depth(m, n, k, free(i * cta.steps + k))
            return ()

        lax.fori_loop(0, cta.depth_steps, step, ())
        for e in range(extra):
            load_extra(m, n, e, free(i * cta.steps + cta.depth_steps + e))
        return ()

    lax.fori_loop(0, cta.tiles, tile, ())
    total = cta.tiles * cta.steps
    first = jnp.maximum(total - stages, 0)
    lax.fori_loop(first, total, lambda s, _: plgpu.barrier_wait(smem.empty.at[cta.slot(s)]) or (), ())


def multiply(cta, i, acc, operands, at_first=None):
    """acc = the product of the i-th tile; releases the slots."""
    smem, dev, lead = cta.smem, cta.dev, cta.config.lead
    base = i * cta.steps
    if lead:
        pl.when(cta.wg == 1)(lambda: plgpu.barrier_wait(smem.turn))

    def step(k, acc):
        slot = cta.slot(base + k)
        plgpu.barrier_wait(smem.full.at[slot])
        a, b = operands(slot)
        acc = dev.issue(acc, a, b)
        if lead:
            pl.when((cta.wg == 0) & (k == lead - 1))(lambda: plgpu.barrier_arrive(smem.turn))
        if at_first is not None:
            pl.when(k == 0)(at_first)
        dev.finish(1)
        pl.when(k > 0)(lambda: cta.arrive(smem.empty.at[cta.slot(base + k - 1)]))
        return acc

    def body(k, carry):
        step(k, acc)
        return carry

    lax.fori_loop(0, cta.depth_steps, body, ())
    dev.finish(0)
    x = dev.collect(acc)
    cta.arrive(smem.empty.at[cta.slot(base + cta.depth_steps - 1)])
    return x


def sigmoid(dev, a):
    return dev.reciprocal(1.0 + jnp.exp(-a), WGMMA)


# ---- forward: ab = x w, h = silu(a) b --------------------------------------------------------------------------


def _forward(gmem, smem, *, config, interpreted):
    M, K = gmem.x.shape
    N = gmem.ab.shape[1]
    cta = Cta(gmem, smem, config, M, N, K, interpreted)
    g, columns, C = config.group, config.columns, config.out_columns
    shared = config.cluster > 1

    def load(m, n, k, slot):
        depth = pl.ds(k * DEPTH, DEPTH)
        barrier = smem.full.at[slot]
        copy(gmem.x.at[pl.ds(m * 2 * ROWS, 2 * ROWS), depth], smem.a.at[slot], barrier)
        cols = pl.ds(n * columns, columns)
        source = gmem.w.at[cols, depth] if config.k_major else gmem.w.at[depth, cols]
        copy(source, smem.b.at[slot], barrier, shared)

    def operands(slot):
        a = smem.a.at[slot, pl.ds(cta.wg * ROWS, ROWS)]
        b = smem.b.at[slot]
        return a, (transposed(b) if config.k_major else b)

    def consume():
        plgpu.set_max_registers(config.registers[1], action="increase")

        def tile(i, _):
            m, n = cta.place(i)
            x = pl.run_scoped(
                lambda acc: multiply(cta, i, acc, operands), plgpu.ACC((ROWS, columns), jnp.float32)
            )
            rows = pl.ds((m * 2 + cta.wg) * ROWS, ROWS)
            chunks = columns // C
            for c in range(chunks):
                slot = c % config.out_slots
                plgpu.wait_smem_to_gmem(config.out_slots - 1, wait_read_only=True)
                ab_s = smem.ab.at[cta.wg, slot]
                rounded = x[:, c * C : (c + 1) * C].astype(gmem.ab.dtype)
                ab_s[...] = rounded
                if config.product:
                    h_s = smem.h.at[cta.wg, slot]
                    for j in range(C // (2 * g)):
                        wide = cta.dev.widen(rounded[:, 2 * g * j : 2 * g * (j + 1)])
                        a, b = wide[:, :g], wide[:, g:]
                        h_s.at[:, j * g : (j + 1) * g][...] = (a * (sigmoid(cta.dev, a) if config.math else 0.5) * b).astype(gmem.h.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    ab_s, gmem.ab.at[rows, pl.ds(n * columns + c * C, C)], commit_group=not config.product
                )
                if config.product:
                    plgpu.copy_smem_to_gmem(h_s, gmem.h.at[rows, pl.ds((n * columns + c * C) // 2, C // 2)])
            return ()

        lax.fori_loop(0, cta.tiles, tile, ())
        plgpu.wait_smem_to_gmem(0)

    pl.when(cta.wg == 2)(lambda: produce(cta, load))
    pl.when(cta.wg < 2)(consume)


def barriers(config, arrivals):
    if config.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=2, num_barriers=config.stages)
    else:
        empty = plgpu.Barrier(num_arrivals=2, num_barriers=config.stages)
    found = {"full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=config.stages), "empty": empty}
    return found | ({"turn": plgpu.Barrier(num_arrivals=1)} if config.lead else {})


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def forward(x, w, config=Config(), interpret=None):
    """ab = x @ w, h = silu(a) b. x [M, K]; w [N, K] or [K, N], N in groups."""
    M, N = x.shape[0], w.shape[0 if config.k_major else 1]
    S, dtype, g = config.stages, x.dtype, config.group
    b_shape = (config.columns, DEPTH) if config.k_major else (DEPTH, config.columns)
    C = config.out_columns
    memory = {
        "a": plgpu.SMEM((S, 2 * ROWS, DEPTH), dtype, transforms=tiling(128)),
        "b": plgpu.SMEM((S, *b_shape), dtype, transforms=tiling(128)),
        "ab": plgpu.SMEM((2, config.out_slots, ROWS, C), dtype, transforms=tiling(4 * g)),
    }
    outputs = {"ab": jax.ShapeDtypeStruct((M, N), dtype)}
    if config.product:
        memory["h"] = plgpu.SMEM((2, config.out_slots, ROWS, C // 2), dtype, transforms=tiling(2 * g))
        outputs["h"] = jax.ShapeDtypeStruct((M, N // 2), dtype)
    return launch(
        "swiglu_product",
        functools.partial(_forward, config=config, interpreted=interpret is not None),
        {"x": x, "w": w},
        outputs,
        memory | barriers(config, 2),
        config,
        num_clusters(config, M, N),
        interpret,
    )


# ---- backward: dh = dy w_down^T, dab = derivatives of silu(a) b times dh ----------------------------------------

PART = 2 * ROWS  # rows of a part of a slot


def _backward(gmem, smem, *, config, interpreted):
    M, K = gmem.dy.shape
    F = gmem.w.shape[0]
    columns, g = config.columns, 32
    tiles = columns // g  # of [128, 64] branches
    parts = 1 + columns // PART  # of a slot
    extra = pl.cdiv(tiles, parts)
    cta = Cta(gmem, smem, config, M, F, K, interpreted, extra)
    shared = config.cluster > 1

    def load(m, n, k, slot):
        depth, barrier = pl.ds(k * DEPTH, DEPTH), smem.full.at[slot]
        copy(gmem.dy.at[pl.ds(m * PART, PART), depth], smem.ring.at[slot, 0:PART], barrier)
        for p in range(1, parts):
            source = gmem.w.at[pl.ds(n * columns + (p - 1) * PART, PART), depth]
            copy(source, smem.ring.at[slot, p * PART : (p + 1) * PART], barrier, shared)

    def load_branches(m, n, e, slot):
        barrier = smem.full.at[slot]
        for p in range(parts):
            if e * parts + p < tiles:
                cols = pl.ds(2 * n * columns + (e * parts + p) * 64, 64)
                copy(gmem.ab.at[pl.ds(m * PART, PART), cols], smem.ring.at[slot, p * PART : (p + 1) * PART], barrier)
            else:
                plgpu.barrier_arrive(barrier)

    def operands(slot):
        a = smem.ring.at[slot, pl.ds(cta.wg * ROWS, ROWS)]
        return a, transposed(smem.ring.at[slot, PART : parts * PART])

    def release(step):
        plgpu.barrier_arrive(smem.empty.at[cta.slot(step)])

    def consume():
        plgpu.set_max_registers(config.registers[1], action="increase")

        def tile(i, _):
            m, n = cta.place(i)

            def of_previous():
                """The last slot of the tile before is released once its results have been read from it."""

                @pl.when(i > 0)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    release(i * cta.steps - 1)

            x = pl.run_scoped(
                lambda acc: multiply(cta, i, acc, operands, of_previous), plgpu.ACC((ROWS, columns), jnp.float32)
            )
            rows = pl.ds((m * 2 + cta.wg) * ROWS, ROWS)
            for e in range(extra):
                step = i * cta.steps + cta.depth_steps + e
                slot = cta.slot(step)
                plgpu.barrier_wait(smem.full.at[slot])
                here = range(e * parts, min(tiles, (e + 1) * parts))
                refs = [smem.ring.at[slot, pl.ds((t - e * parts) * PART + cta.wg * ROWS, ROWS)] for t in here]
                for t, ref in zip(here, refs, strict=True):
                    wide = cta.dev.widen(plgpu.load(ref, layout=WGMMA))
                    a, b, dh = wide[:, :g], wide[:, g:], x[:, t * g : (t + 1) * g]
                    gate = sigmoid(cta.dev, a) if config.math else a
                    silu = a * gate
                    da = dh * b * (gate + silu * (1.0 - gate))
                    if interpreted:
                        plgpu.commit_smem()
                    ref[...] = lax.concatenate([da, dh * silu], 1).astype(gmem.ab.dtype)
                plgpu.commit_smem()
                for t, ref in zip(here, refs, strict=True):
                    cols = pl.ds(2 * n * columns + t * 64, 64)
                    plgpu.copy_smem_to_gmem(ref, gmem.dab.at[rows, cols], commit_group=t == here[-1])
                if e:
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    release(step - 1)
            return ()

        lax.fori_loop(0, cta.tiles, tile, ())

        @pl.when(cta.tiles > 0)
        def _():
            plgpu.wait_smem_to_gmem(0)
            release(cta.tiles * cta.steps - 1)

    pl.when(cta.wg == 2)(lambda: produce(cta, load, load_branches, extra))
    pl.when(cta.wg < 2)(consume)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def backward(dy, w, ab, config=Config(), interpret=None):
    """dab from dy [M, K], w = down [F, K] and ab [M, 2 F] in groups of 32."""
    M, F = dy.shape[0], w.shape[0]
    S, dtype = config.stages, dy.dtype
    memory = {"ring": plgpu.SMEM((S, PART + config.columns, DEPTH), dtype, transforms=tiling(128))}
    return launch(
        "swiglu_product_backward",
        functools.partial(_backward, config=config, interpreted=interpret is not None),
        {"dy": dy, "w": w, "ab": ab},
        {"dab": jax.ShapeDtypeStruct((M, 2 * F), dtype)},
        memory | barriers(config, 1 + config.columns // PART),
        config,
        num_clusters(config, M, F),
        interpret,
    )["dab"]


# ---- around them ------------------------------------------------------------------------------------------------


def pad_columns(w, group):
    F = w.shape[1]
    return jnp.pad(w, ((0, 0), (0, -F % group)))


def interleave(gate, up, group):
    """[.., F] twice -> [.., 2 F'] in groups, F' a multiple of the group."""
    parts = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group)]) for x in (gate, up)]
    parts = [x.reshape(*x.shape[:-1], -1, 1, group) for x in parts]
    return jnp.concatenate(parts, axis=-2).reshape(*gate.shape[:-1], -1)


def separate(ab, group, F):
    x = ab.reshape(*ab.shape[:-1], -1, 2, group)
    return tuple(x[..., n, :].reshape(*ab.shape[:-1], -1)[..., :F] for n in (0, 1))
