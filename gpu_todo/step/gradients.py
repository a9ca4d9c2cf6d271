"""Prototype: gradient of weights x^T y of many rows, the rows in parts that fill the GPU evenly, float32 sums of each part."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from pallas_kernels.device.memory import tiling, transposed
from products import DEPTH, ROWS, Config, barriers, copy, launch
from products import Cta as _Cta


def clusters_of(config, M, N, parts):
    total = pl.cdiv(M, 2 * ROWS * config.cluster) * pl.cdiv(N, config.columns) * parts
    return min(total, config.sms // config.cluster)


def _body(gmem, smem, *, config, parts, interpreted):
    T, M = gmem.x.shape
    N = gmem.y.shape[1]
    columns, stages, OUT = config.columns, config.stages, 32
    cta = _Cta(gmem, smem, config, M, N, DEPTH, interpreted)
    num_m, num_n = pl.cdiv(M, 2 * ROWS * config.cluster), pl.cdiv(N, columns)
    total, clusters = num_m * num_n * parts, clusters_of(config, M, N, parts)
    tiles = lax.div(jnp.int32(total + clusters - 1) - cta.cta, jnp.int32(clusters))
    steps = pl.cdiv(T, DEPTH)
    shared = config.cluster > 1

    def place(i):
        t = cta.cta + i * clusters
        part, rest = lax.div(t, num_m * num_n), lax.rem(t, num_m * num_n)
        first, end = lax.div(part * steps, parts), lax.div((part + 1) * steps, parts)
        return part, lax.div(rest, num_n) * config.cluster + cta.pair, lax.rem(rest, num_n), first, end - first

    def slot(step):
        return lax.rem(step, stages)

    def produce():
        plgpu.set_max_registers(config.registers[0], action="decrease")

        def tile(i, begun):
            _, m, n, first, count = place(i)

            def step(k, _):
                s = begun + k
                at = slot(s)
                pl.when(s >= stages)(lambda: plgpu.barrier_wait(smem.empty.at[at]))
                depth, full = pl.ds((first + k) * DEPTH, DEPTH), smem.full.at[at]
                copy(gmem.x.at[depth, pl.ds(m * 2 * ROWS, 2 * ROWS)], smem.a.at[at], full)
                copy(gmem.y.at[depth, pl.ds(n * columns, columns)], smem.b.at[at], full, shared)
                return ()

            lax.fori_loop(0, count, step, ())
            return begun + count

        all_steps = lax.fori_loop(0, tiles, tile, jnp.int32(0))

        def last(s, _):
            plgpu.barrier_wait(smem.empty.at[slot(s)])
            return ()

        lax.fori_loop(jnp.maximum(all_steps - stages, 0), all_steps, last, ())

    def consume():
        plgpu.set_max_registers(config.registers[1], action="increase")

        def tile(i, begun):
            part, m, n, _, count = place(i)

            def product(acc):
                def step(k, carry):
                    at = slot(begun + k)
                    plgpu.barrier_wait(smem.full.at[at])
                    a = smem.a.at[at, :, pl.ds(cta.wg * ROWS, ROWS)]
                    cta.dev.issue(acc, transposed(a), smem.b.at[at])
                    cta.dev.finish(1)
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[slot(begun + k - 1)]))
                    return carry

                lax.fori_loop(0, count, step, ())
                cta.dev.finish(0)
                x = cta.dev.collect(acc)
                plgpu.barrier_arrive(smem.empty.at[slot(begun + count - 1)])
                return x

            x = pl.run_scoped(product, plgpu.ACC((ROWS, columns), jnp.float32))
            out = smem.out.at[cta.wg]
            for c in range(0, columns, OUT):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out[...] = x[:, c : c + OUT]
                plgpu.commit_smem()
                rows = pl.ds((m * 2 + cta.wg) * ROWS, ROWS)
                plgpu.copy_smem_to_gmem(out, gmem.dw.at[part, rows, pl.ds(n * columns + c, OUT)])
            return begun + count

        lax.fori_loop(0, tiles, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    pl.when(cta.wg == 2)(produce)
    pl.when(cta.wg < 2)(consume)


@functools.partial(jax.jit, static_argnames=("parts", "config", "interpret"))
def gradient(x, y, parts=3, config=Config(), interpret=None):
    """x^T y of [T, M] and [T, N], multiples of 64, in their dtype; float32 sums of parts of the rows, added in order."""
    (T, M), N, dtype = x.shape, y.shape[1], x.dtype
    memory = {
        "a": plgpu.SMEM((config.stages, DEPTH, 2 * ROWS), dtype, transforms=tiling(128)),
        "b": plgpu.SMEM((config.stages, DEPTH, config.columns), dtype, transforms=tiling(128)),
        "out": plgpu.SMEM((2, ROWS, 32), jnp.float32, transforms=tiling(128, 4)),
    }
    dw = launch(
        "gradient_of_weights",
        functools.partial(_body, config=config, parts=parts, interpreted=interpret is not None),
        {"x": x, "y": y},
        {"dw": jax.ShapeDtypeStruct((parts, M, N), jnp.float32)},
        memory | barriers(config, 2),
        config,
        clusters_of(config, M, N, parts),
        interpret,
    )["dw"]
    return jnp.sum(dw, axis=0).astype(dtype)
