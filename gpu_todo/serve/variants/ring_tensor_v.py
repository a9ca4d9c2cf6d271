"""A ring becomes part of a chunk of its state by tensor cores: mma.sync m16n8k16, warps beside each other along V.

A warp has 32 of 128 columns. A thread's numbers of a chunk are 16 bytes of the state beside each other; which column
of a product they are is free, as the columns of the values are taken in the order that this gives. Compiled only.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels.decode.tiles import WARP, WARPS, lane_layout

COLUMNS = WARP * WARPS
FRAGMENTS = (64, WARP)
"""16 registers of a thread: for each of four times eight columns two pairs of values, and what their rounding left."""


def layout_of(itemsize: int) -> Any:
    """Of a chunk [rows, 128]."""
    if itemsize == 2:
        tiling = plgpu.Tiling(((8, COLUMNS), (32,), (8,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)
    tiling = plgpu.Tiling(((8, COLUMNS), (32,), (16,), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-5, -2), vector_dim=-1)


def _i32():
    return ir.IntegerType.get_signless(32)


def _c(x):
    return utils.c(x, _i32())


def _place():
    """Warp of the warpgroup, row of a fragment (lane / 4), and lane % 4."""
    thread = utils.thread_idx()
    lane, warp = arith.andi(thread, _c(31)), arith.andi(arith.shrui(thread, _c(5)), _c(3))
    return warp, arith.shrui(lane, _c(2)), arith.andi(lane, _c(3))


def _at(ref, row, column):
    index = ir.IndexType.get()
    return memref.load(ref, [arith.index_cast(index, row), arith.index_cast(index, column)])


def _pair(low, high):
    """Two float32 numbers as bfloat16 in one register."""
    return llvm.inline_asm(_i32(), [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", has_side_effects=False)


def _wide(pair):
    """The float32 numbers of a pair."""
    f32 = ir.F32Type.get()
    return arith.bitcast(f32, arith.shli(pair, _c(16))), arith.bitcast(f32, arith.andi(pair, _c(-65536)))


def _rows_of_pairs(c):
    """Tokens of a thread's pairs: 2 c, and 2 c + 8."""
    two = arith.shli(c, _c(1))
    return two, arith.addi(two, _c(8))


@functools.cache
def fragments(itemsize: int):
    """Of values [at least 16, 128] float32 in shared memory."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(FRAGMENTS, jnp.dtype(jnp.int32), lane_layout(WARP, 1)),
    )
    def op(ctx, values):
        warp, g, c = _place()
        first = arith.addi(arith.shli(warp, _c(5)), arith.andi(g, _c(1)))
        half = arith.shrui(g, _c(1))
        found = []
        for t in range(4):
            if itemsize == 2:
                column = arith.addi(arith.addi(first, arith.shli(half, _c(3))), _c(2 * t))
            else:
                column = arith.addi(arith.addi(first, arith.shli(half, _c(2))), _c(16 * (t // 2) + 2 * (t % 2)))
            rest = []
            for row in _rows_of_pairs(c):
                low, high = (_at(values, arith.addi(row, _c(i)), column) for i in (0, 1))
                pair = _pair(low, high)
                found.append(pair)
                x, y = _wide(pair)
                rest.append(_pair(arith.subf(low, x), arith.subf(high, y)))
            found += rest
        one = ir.VectorType.get((1,), _i32())
        registers = np.empty(16, dtype=object)
        registers[:] = [vector.from_elements(one, [x]) for x in found]
        layout = lane_layout(WARP, 1).to_mgpu()
        return fragmented_array.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(FRAGMENTS)), _layout=layout, _is_signed=True
        )

    return op


@functools.cache
def add(rows: int, itemsize: int):
    """S + K^T U of a chunk S [rows, 128] float32, keys [at least 16, K] float32 (of 8 bits) in shared memory, of
    which the chunk's begin at `first`, and fragments."""
    layout = layout_of(itemsize)

    @plgpu.inline_mgpu(
        arg_types=(
            layout,
            lane_layout(WARP, 1),
            plgpu.RefType(),
        ),
        return_type=plgpu.ShapeDtypeStruct((rows, COLUMNS), jnp.dtype(jnp.float32), layout),
    )
    def op(ctx, S, fragments, keys):
        _, g, c = _place()
        f32 = ir.F32Type.get()

        def elements(register):
            n = ir.VectorType(register.type).shape[0]
            return [
                vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
                for i in range(n)
            ]

        b = [elements(r)[0] for r in fragments.registers.flat]
        flat = list(S.registers.flat)
        per_row = len(flat) // (rows // 8)
        numbers = [sum((elements(r) for r in flat[i * per_row : (i + 1) * per_row]), []) for i in range(rows // 8)]
        for m in range(rows // 16):
            a = []
            for row in _rows_of_pairs(c):
                for up in (0, 8):
                    column = arith.addi(g, _c(16 * m + up))
                    a.append(_pair(*(_at(keys, arith.addi(row, _c(i)), column) for i in (0, 1))))
            upper, lower = numbers[2 * m], numbers[2 * m + 1]
            for t in range(4):
                d = [*upper[2 * t : 2 * t + 2], *lower[2 * t : 2 * t + 2]]
                for term in (0, 2):
                    pairs = b[4 * t + term : 4 * t + term + 2]
                    struct: Any = llvm.inline_asm(
                        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
                        [*d, *a, *pairs],
                        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                        "{$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};",
                        "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r",
                        has_side_effects=False,
                    )
                    d = [llvm.extractvalue(f32, struct, [i]) for i in range(4)]
                upper[2 * t : 2 * t + 2], lower[2 * t : 2 * t + 2] = d[:2], d[2:]
        results = []
        for i, r in enumerate(flat):
            n = ir.VectorType(r.type).shape[0]
            part = i % per_row
            results.append(vector.from_elements(r.type, numbers[i // per_row][part * n : (part + 1) * n]))
        registers = np.empty(len(results), dtype=object)
        registers[:] = results
        return fragmented_array.FragmentedArray(
            _registers=registers.reshape(S.registers.shape), _layout=S.layout, _is_signed=None
        )

    return op
