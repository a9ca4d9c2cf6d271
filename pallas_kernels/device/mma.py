"""`Device` without wgmma: products by mma.sync, loads by cp.async, and barriers, from compute capability 8.0 on.

Kernels that run below 9.0 call nothing else that differs between generations, for there the other operations do not
work: the fence of `commit_smem` ends the process while the kernel is compiled, an arrival on a barrier cannot expect
bytes, and there are no bulk copies, wgmma, clusters or changes of register counts.

Left operands are in registers, right ones in shared memory, in tiles swizzled over `SWIZZLE` bytes (ldmatrix). The
accumulator's layout is WGMMA, so vectors, masks and the triangular inverse are those of the other kernels, and an
accumulator rounded to 16 bits is a left operand: the registers are the same and only their layout has another name.

cp.async checks no bounds and copies no part of a tile. So arrays hold whole tiles.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, launch_context, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from pallas_kernels.device.layouts import WGMMA, zeros
from pallas_kernels.device.memory import store_any, tiling
from pallas_kernels.device.operations import Device

SWIZZLE = 64
"""Bytes over which tiles are swizzled: products take slices of 32 of their columns."""

STEP = 32
"""Rows of a right operand that are in registers at a time, for every warp holds all of their columns."""


class MmaDevice(Device):
    """`Device` below wgmma. Interpreted, every operation computes the same with jnp."""

    def commit(self) -> None:
        """Waits for all of this warpgroup, whose stores to shared memory it sees then."""
        if self.interpreted:
            plgpu.commit_smem()
        else:
            _warpgroup_barrier()

    def meet(self, barrier: Any) -> None:
        """Waits for all warpgroups of the CTA.

        Args:
          barrier: of as many arrivals, which only the interpreter uses; it runs warpgroups as threads of their own.
            None for one warpgroup.
        """
        if not self.interpreted:
            _cta_barrier()
            return
        plgpu.commit_smem()
        if barrier is not None:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

    def copy(self, source: Any, row: Any, column: Any, destination: Any, *, swizzle: int = SWIZZLE) -> None:
        """Starts a copy to a tile, from the place in source [rows, columns] at which its first number lies; to a
        vector, from a row of source. All threads of the warpgroup take part.

        Args:
          swizzle: bytes over which the tile is swizzled.
        """
        if self.interpreted:
            *rows, columns = destination.shape
            part = pl.ds(row, rows[0]) if rows else row
            destination[...] = source[part, pl.ds(column, columns)]
            return
        shape = tuple(destination.shape)
        _copy(shape, swizzle)(
            source, destination, jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32)
        )

    def arrived(self) -> None:
        """Waits for all copies that this warpgroup has started."""
        if self.interpreted:
            plgpu.commit_smem()
        else:
            _arrived()

    def left(self, a: jax.Array) -> jax.Array:
        """An array of 16-bit numbers in the WGMMA layout as a left operand. It costs nothing."""
        return a if self.interpreted else _left(a.shape, jnp.dtype(a.dtype).name)(a)

    def add(self, acc: jax.Array, a: jax.Array, b_ref: Any, step: int = STEP) -> jax.Array:
        """acc + a @ b, a a left operand.

        Args:
          step: rows of b in registers at a time.
        """
        if self.interpreted:
            return acc + _dot(a, b_ref[...])
        for k in range(0, b_ref.shape[0], step):
            b = plgpu.load(b_ref.at[k : k + step], layout=_right_layout(b_ref.dtype))
            acc = plgpu.mma(acc, a[:, k : k + step], b)
        return acc

    def add_transposed(self, acc: jax.Array, a: jax.Array, b_ref: Any) -> jax.Array:
        """acc + a @ b^T, a a left operand."""
        if self.interpreted:
            return acc + _dot(a, b_ref[...].T)
        for k in range(0, b_ref.shape[1], STEP):
            part = b_ref.at[:, k : k + STEP].transpose((1, 0))
            acc = plgpu.mma(acc, a[:, k : k + STEP], plgpu.load(part, layout=_right_layout(b_ref.dtype)))
        return acc

    def operand(self, a_ref: Any) -> jax.Array:
        """A tile, or a transposed view of one, as a left operand."""
        return a_ref[...] if self.interpreted else plgpu.load(a_ref, layout=_left_layout(a_ref.dtype))

    def accumulate(self, starts: list[jax.Array], body: Callable) -> list[jax.Array]:
        """starts with the products that body(add) adds by add(n, a, b): a @ b to number n, a in the WGMMA layout."""
        sums = list(starts)

        def add(n, a, b_ref):
            sums[n] = self.add(sums[n], self.left(a), b_ref)

        body(add)
        return sums

    def product(self, a: jax.Array, b_ref: Any) -> jax.Array:
        """a @ b in float32, a in the WGMMA layout."""
        return self.add(zeros((a.shape[0], b_ref.shape[1]), jnp.float32), self.left(a), b_ref)

    def product_transposed(self, a_ref: Any, b_ref: Any) -> jax.Array:
        """a @ b^T of two tiles, in float32."""
        acc = zeros((a_ref.shape[0], b_ref.shape[0]), jnp.float32)
        for k in range(0, b_ref.shape[1], STEP):
            part = slice(k, k + STEP)
            acc = self.add_transposed(acc, self.operand(a_ref.at[:, part]), b_ref.at[:, part])
        return acc

    def store_transposed(self, ref: Any, x: jax.Array) -> None:
        """ref[...] = x^T to global memory, x [64, columns] of 16-bit numbers in the WGMMA layout."""
        self.store(ref, x.T if self.interpreted else _transposed(x.shape, jnp.dtype(x.dtype).name)(x))

    def store(self, ref: Any, x: jax.Array) -> None:
        """ref[...] = x to global memory."""
        store_any(ref, x)

    def vector(self, ref: Any, layout: Any) -> jax.Array:
        """A vector in global memory."""
        return ref[...] if self.interpreted else plgpu.load(ref, layout=layout, optimized=False)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))


def _left_layout(dtype: Any) -> Any:
    return plgpu.Layout.MMA_LHS(jnp.dtype(dtype), m_warps=4)


def _right_layout(dtype: Any) -> Any:
    return plgpu.Layout.MMA_RHS(jnp.dtype(dtype), m_warps=4)


@plgpu.inline_mgpu(arg_types=())
def _warpgroup_barrier(ctx):
    utils.warpgroup_barrier()


@plgpu.inline_mgpu(arg_types=())
def _cta_barrier(ctx):
    gpu.barrier()


@plgpu.inline_mgpu(arg_types=())
def _arrived(ctx):
    ctx.await_cp_async_copy(0)


@functools.cache
def _left(shape: tuple[int, int], dtype: str):
    """The operation for arrays of a shape."""
    struct = plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), _left_layout(dtype))

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=struct)
    def left(ctx, x):
        layout = _left_layout(dtype).to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(shape))
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return left


@functools.cache
def _copy(shape: tuple[int, ...], swizzle: int):
    """The operation for tiles, or vectors, of a shape."""
    is_tile = len(shape) == 2
    number = plgpu.Layout.WG_SPLAT(())
    types = plgpu.RefType(), plgpu.RefType(tiling(swizzle) if is_tile else ()), number, number

    @plgpu.inline_mgpu(arg_types=types)
    def copy(ctx, source, destination, row, column):
        index = ir.IndexType.get()
        row, column = (arith.index_cast(index, x.registers.item()) for x in (row, column))
        columns = utils.DynamicSlice(column, shape[-1])
        options: dict[str, Any] = {}
        if is_tile:
            row = utils.DynamicSlice(row, shape[0])
            transform = launch_context.TileTransform((8, swizzle // 2))
            options = dict(swizzle=swizzle, gmem_transform=transform)
        ctx.async_copy(
            src_ref=source,
            dst_ref=destination,
            gmem_slice=(row, columns),
            barrier=None,
            arrive=False,
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            implementation=launch_context.AsyncCopyImplementation.CP_ASYNC,
            **options,
        )

    return copy


def _tokens_layout() -> fragmented_array.TiledLayout:
    """The layout of [columns, 64] in which warp w has columns 16 w to 16 w + 15, and each thread pairs of a row."""
    return fragmented_array.TiledLayout(
        fragmented_array.Tiling(((8, 64), (8, 16), (8, 8), (2,))),
        warp_dims=(-6,),
        lane_dims=(-3, -2),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()


@functools.cache
def _transposed(shape: tuple[int, int], dtype: str):
    """The operation for arrays of a shape: one movmatrix for each 8x8 block of a warp."""
    layout = _tokens_layout()
    tiled = plgpu.Layout.TILED(
        layout.tiling, warp_dims=layout.warp_dims, lane_dims=layout.lane_dims, vector_dim=layout.vector_dim
    )
    struct = plgpu.ShapeDtypeStruct(shape[::-1], jnp.dtype(dtype), tiled)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=struct)
    def transpose(ctx, x):
        i32, instruction = ir.IntegerType.get_signless(32), "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
        registers = x.registers.reshape(shape[1] // 8, 2)  # columns in eights, halves of a warp's 16 rows
        results = np.empty(registers.shape, dtype=object)
        for place in np.ndindex(registers.shape):
            moved: Any = llvm.inline_asm(
                i32, [utils.bitcast(registers[place], i32)], instruction, "=r,r", has_side_effects=False
            )
            results[place] = utils.bitcast(moved, registers[place].type)
        results = results.reshape(layout.registers_shape(shape[::-1]))
        return fragmented_array.FragmentedArray(_registers=results, _layout=layout, _is_signed=None)

    return transpose
