"""Operations between the rows of an array in registers: between rows of one block of 16, and between the four blocks.

In the WGMMA layout warp w holds block w, rows 16 w to 16 w + 15 of [64, columns]. Inside a block rows change places
by a shuffle or in a thread; between blocks numbers go through shared memory. As those of `device.operations`, every
operation here computes the same with jnp where it is interpreted.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_kernels.device.layouts import CHUNK, WGMMA, iota
from pallas_kernels.device.operations import Device, _elements, _registers, _warp_and_lane

BLOCKS = 4
"""Blocks of 16 rows in a chunk, one in each warp."""


def exchanged(dev: Device, x: jax.Array, distance: int) -> jax.Array:
    """Row i ^ distance of x [64, columns] float32 in the place of row i; distance is 1, 2, 4 or 8."""
    if dev.interpreted:
        return x.reshape(-1, 2, distance, x.shape[1])[:, ::-1].reshape(x.shape)
    return _exchanged(x.shape, distance)(x)


def second_half(dev: Device, columns: int) -> jax.Array:
    """Marks the last eight rows of every block of [64, columns]: on the device constants, no numbers."""
    if dev.interpreted:
        return (iota((CHUNK, columns), 0) & 8) != 0
    return _second_half(columns)() != 0


def store_first_rows(dev: Device, ref: Any, x: jax.Array) -> None:
    """The first row of every block of x [64, columns] to shared memory [4, columns]."""
    if dev.interpreted:
        ref[...] = x[:: CHUNK // BLOCKS]
    else:
        _store_first_rows(x.shape)(ref, x)


def store_row_sums(dev: Device, ref: Any, x: jax.Array) -> None:
    """The sum of the rows of every block of x [64, columns] to shared memory [4, columns]."""
    for distance in (8, 4, 2, 1):
        x = x + exchanged(dev, x, distance)
    store_first_rows(dev, ref, x)


class BlockDecays(NamedTuple):
    """Decays between the blocks of a chunk, of every channel: [64, columns], the same in all rows of a block w.

    With a_w the decay of the first token of block w and b_w that of the whole block.
    """

    near: jax.Array
    """The decay from the end of block w to the first token of block w + 1, a_{w+1}, where w is even; else 1."""
    far: jax.Array
    """The decay from the block's end to the first token of block 2 where w < 2, b_1 a_2 and a_2; else that behind
    this token up to the first one of block w: 1, and a_3 times the decay of block 2 without its first token."""
    before: jax.Array
    """The decay from the chunk's start to the block's: b_0 ... b_{w-1}."""
    after: jax.Array
    """The decay from the block's end to the chunk's: b_{w+1} ... b_3."""


def block_decays(dev: Device, first: Any, rest: Any, columns: int) -> BlockDecays:
    """Decays between blocks, from those of each block's first token and of its other tokens: [4, columns] in shared
    memory."""
    if dev.interpreted:
        a, z = first[...], rest[...]
        rows = _combined(list(a), list(z), jnp.ones_like(a[0]))
        return BlockDecays(*(jnp.repeat(jnp.stack(x), CHUNK // BLOCKS, 0) for x in rows))
    return BlockDecays(*_block_decays(columns)(first, rest))


def _combined(a: list, z: list, one: Any) -> tuple[list, ...]:
    """`BlockDecays` of every block; arithmetic of numbers or of registers by their operators."""
    b = [x * y for x, y in zip(a, z, strict=True)]
    near = [a[1], one, a[3], one]
    far = [b[1] * a[2], a[2], one, z[2] * a[3]]
    before = [one, b[0], b[0] * b[1], b[0] * b[1] * b[2]]
    after = [b[3] * b[2] * b[1], b[3] * b[2], b[3], one]
    return near, far, before, after


class _Float:
    """A float32 of a thread with the operator that `_combined` uses."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __mul__(self, other: "_Float") -> "_Float":
        return _Float(arith.mulf(self.value, other.value))


@functools.cache
def _exchanged(shape: tuple[int, int], distance: int):
    """The operation for arrays of a shape."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), WGMMA)
    )
    def exchange(ctx, x):
        registers = list(x.registers.flat)
        if distance == 8:  # of each eight columns a thread has two rows, eight apart
            return _registers([registers[n ^ 1] for n in range(len(registers))], x)
        values = []
        for register in registers:
            moved = [utils.shfl_bfly(y, 4 * distance) for y in _elements(register)]
            values.append(vector.from_elements(register.type, moved))
        return _registers(values, x)

    return exchange


@functools.cache
def _second_half(columns: int):
    """The operation for arrays with so many columns."""
    struct = plgpu.ShapeDtypeStruct((CHUNK, columns), jnp.dtype(jnp.int32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(), return_type=struct)
    def marks(ctx):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), i32)
        halves: list[Any] = [vector.from_elements(pair, [utils.c(n, i32)] * 2) for n in (0, 1)]
        return _array(halves * (columns // 8), columns, is_signed=True)

    return marks


def _first_column(lane: ir.Value) -> ir.Value:
    """The first of a thread's two columns of each eight, as an index."""
    i32 = ir.IntegerType.get_signless(32)
    column = arith.shli(arith.andi(lane, utils.c(3, i32)), utils.c(1, i32))
    return arith.index_cast(ir.IndexType.get(), column)


def _pair() -> ir.Type:
    return ir.VectorType.get((2,), ir.F32Type.get())


@functools.cache
def _store_first_rows(shape: tuple[int, int]):
    """The operation for arrays of a shape."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=None)
    def store(ctx, ref, x):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        warp, lane = _warp_and_lane()
        row, column = arith.index_cast(index, warp), _first_column(lane)
        has_row = arith.cmpi(arith.CmpIPredicate.ult, lane, utils.c(4, i32))
        branch = scf.IfOp(has_row)
        with ir.InsertionPoint(branch.then_block):
            for n in range(shape[1] // 8):
                place = arith.addi(column, utils.c(8 * n, index))
                vector.store(x.registers.flat[2 * n], ref, [row, place])
            scf.yield_([])

    return store


@functools.cache
def _block_decays(columns: int):
    """The operation for arrays with so many columns."""
    struct = plgpu.ShapeDtypeStruct((CHUNK, columns), jnp.dtype(jnp.float32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=(struct,) * 4)
    def decays(ctx, first, rest):
        i32, index, f32 = ir.IntegerType.get_signless(32), ir.IndexType.get(), ir.F32Type.get()
        warp, lane = _warp_and_lane()
        column, one = _first_column(lane), _Float(utils.c(1.0, f32))
        is_warp = [arith.cmpi(arith.CmpIPredicate.eq, warp, utils.c(w, i32)) for w in range(BLOCKS)]
        results: list[list[ir.Value]] = [[], [], [], []]
        for n in range(columns // 8):
            place = arith.addi(column, utils.c(8 * n, index))
            places: Any = [[utils.c(w, index), place] for w in range(BLOCKS)]
            a, z = ([_elements(vector.load(_pair(), ref, at)) for at in places] for ref in (first, rest))
            chosen: list[list[ir.Value]] = [[], [], [], []]
            for i in (0, 1):
                rows = _combined([_Float(x[i]) for x in a], [_Float(x[i]) for x in z], one)
                for kind, of_blocks in enumerate(rows):
                    value = of_blocks[3].value
                    for w in (2, 1, 0):
                        value = arith.select(is_warp[w], of_blocks[w].value, value)
                    chosen[kind].append(value)
            for kind in range(4):  # for both of a thread's rows
                results[kind] += [vector.from_elements(_pair(), chosen[kind])] * 2
        return tuple(_array(values, columns) for values in results)

    return decays


def _array(
    values: list[ir.Value], columns: int, is_signed: bool | None = None
) -> fragmented_array.FragmentedArray:
    shape = fragmented_array.WGMMA_LAYOUT.registers_shape((CHUNK, columns))
    registers = np.empty(len(values), dtype=object)
    registers[:] = values
    return fragmented_array.FragmentedArray(
        _registers=registers.reshape(shape), _layout=fragmented_array.WGMMA_LAYOUT, _is_signed=is_signed
    )
