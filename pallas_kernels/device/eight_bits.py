"""Arrays of 8-bit numbers of which a thread puts what it has of a column side by side, and how many numbers are too
large for 8 bits."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.device.layouts import WGMMA

TOGETHER = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 64), (16, 64), (8, 64), (16,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
"""Layout of [64, 64] that is WGMMA's, but for the columns: a thread has 16 neighbours of a row."""


BELOW = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 128), (8, 32), (2, 4))), warp_dims=(-5,), lane_dims=(-4, -3), vector_dim=-1
)
"""Layout of [64, 128] of which a thread has rows 8 i + 2 j + k of its own j, and of each 4 neighbours."""

BESIDE = plgpu.Layout.TILED(
    plgpu.Tiling(((128, 64), (32, 64), (4, 64), (16,))), warp_dims=(-7,), lane_dims=(-2, -5), vector_dim=-1
)
"""Layout of [128, 64] of which a thread has 16 neighbours of 4 rows each."""


LANES = 128
"""Threads of a warpgroup."""

THREADS = plgpu.Layout.WG_STRIDED((LANES,), 1)
"""Layout of [LANES] of which each thread has one."""

_SIGNS = 0x80008000
"""The highest bits of two 16-bit numbers."""


@functools.cache
def count_beyond(shape: tuple[int, ...], dtype: str, layout: Any):
    """The operation for arrays of a shape: four instructions for two numbers, and one number in registers.

    The 16-bit numbers of one sign are ordered as their bits. So the highest bit of their sum with what is left to the
    largest bits says which are larger. Those of up to 16 pairs lie side by side before they are counted.
    """

    @plgpu.inline_mgpu(
        arg_types=(THREADS, THREADS, layout),
        return_type=plgpu.ShapeDtypeStruct((LANES,), jnp.dtype(jnp.int32), THREADS),
    )
    def count_beyond(ctx, count, left, x):
        i32 = ir.IntegerType.get_signless(32)
        total, left = (vector.extract(y.registers.flat[0], [], [0]) for y in (count, left))
        one, signs, others = (utils.c(n, i32) for n in (1, _SIGNS, _SIGNS ^ 0xFFFFFFFF))
        pairs: list[Any] = []
        for register in x.registers.flat:
            n = register.type.shape[0] // 2
            words = vector.bitcast(ir.VectorType.get((n,), i32), register)
            pairs += [vector.extract(words, [], [i]) for i in range(n)]
        for first in range(0, len(pairs), 16):
            found: Any = None
            for pair in pairs[first : first + 16]:
                larger = arith.andi(arith.addi(arith.andi(pair, others), left), signs)
                found = larger if found is None else arith.ori(arith.shrui(found, one), larger)
            total = arith.addi(total, math.ctpop(found))
        registers = np.empty(count.registers.shape, dtype=object)
        registers.flat[0] = vector.broadcast(ir.VectorType.get((1,), i32), total)
        return fragmented_array.FragmentedArray(
            _registers=registers, _layout=count.layout, _is_signed=count.is_signed
        )

    return count_beyond


@functools.cache
def together(dtype: str):
    """The operation for a dtype."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.dtype(dtype), TOGETHER)
    )
    def together(ctx, x):
        i16, layout = ir.IntegerType.get_signless(16), TOGETHER.to_mgpu()
        pairs = [utils.bitcast(register, i16) for register in x.registers.flat]
        words = ir.VectorType.get((8,), i16)
        whole = ir.VectorType.get((16,), ir.VectorType(x.registers.flat[0].type).element_type)
        registers = np.empty(2, dtype=object)
        for half in (0, 1):  # rows of a warp, eight apart
            registers[half] = vector.bitcast(whole, vector.from_elements(words, pairs[half::2]))
        return fragmented_array.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape((64, 64))), _layout=layout, _is_signed=None
        )

    return together


@functools.cache
def columns_together(dtype: str):
    """The operation for a dtype."""

    def permuted(a: ir.Value, b: ir.Value, selection: int) -> Any:
        """Four of the eight bytes of two words."""
        i32 = ir.IntegerType.get_signless(32)
        return llvm.inline_asm(
            i32, [a, b], f"prmt.b32 $0, $1, $2, {selection};", "=r,r,r", has_side_effects=False
        )

    @plgpu.inline_mgpu(
        arg_types=(BELOW,), return_type=plgpu.ShapeDtypeStruct((128, 64), jnp.dtype(dtype), BESIDE)
    )
    def columns_together(ctx, x):
        i32, layout = ir.IntegerType.get_signless(32), BESIDE.to_mgpu()
        rows = [utils.bitcast(register, i32) for register in x.registers.flat]
        columns: list[list[Any]] = [[], [], [], []]
        for first in range(0, len(rows), 4):
            a, b, c, d = rows[first : first + 4]
            for i, selection in enumerate((0x5140, 0x7362)):  # the bytes 0 and 1, 2 and 3 of both
                ab, cd = permuted(a, b, selection), permuted(c, d, selection)
                columns[2 * i].append(permuted(ab, cd, 0x5410))
                columns[2 * i + 1].append(permuted(ab, cd, 0x7632))
        whole = ir.VectorType.get((16,), ir.VectorType(x.registers.flat[0].type).element_type)
        words = ir.VectorType.get((4,), i32)
        registers = np.empty(4, dtype=object)
        for i, column in enumerate(columns):
            registers[i] = vector.bitcast(whole, vector.from_elements(words, column))
        return fragmented_array.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape((128, 64))), _layout=layout, _is_signed=None
        )

    return columns_together
