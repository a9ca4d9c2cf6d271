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

HALF = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""Layout of eight rows of every block of [64, columns], as [32, columns].

A thread has the same of them as in the layout WGMMA.
"""


def exchanged(dev: Device, x: jax.Array, distance: int) -> jax.Array:
    """Row i ^ distance of x [64, columns] float32 in the place of row i; distance is 1, 2, 4 or 8."""
    if dev.interpreted:
        return x.reshape(-1, 2, distance, x.shape[1])[:, ::-1].reshape(x.shape)
    return _exchanged(x.shape, distance)(x)


def exchanged_tokens(dev: Device, x: jax.Array, distance: int) -> jax.Array:
    """Row i ^ distance of the first eight rows of every block in the place of row i and of row i + 8, float32;
    distance is 1, 2 or 4. A thread's two rows are then one number, and so is what is computed of them."""
    if dev.interpreted:
        first = x.reshape(BLOCKS, 2, -1, 2, distance, x.shape[1])[:, :1, :, ::-1]
        return jnp.broadcast_to(first, (BLOCKS, 2, *first.shape[2:])).reshape(x.shape)
    return _exchanged(x.shape, distance, True)(x)


def second_half(dev: Device, columns: int) -> jax.Array:
    """Marks the last eight rows of every block of [64, columns]: on the device constants, no numbers."""
    if dev.interpreted:
        return (iota((CHUNK, columns), 0) & 8) != 0
    return _second_half(columns)() != 0


def token_bit(dev: Device, columns: int, n: int) -> jax.Array:
    """Marks rows of [64, columns] whose number has bit n, 0 to 2. On the device both rows of a thread have one."""
    if dev.interpreted:
        return ((iota((CHUNK, columns), 0) >> n) & 1) == 1
    return _token_bit(columns, n)() != 0


def half_of(dev: Device, x: jax.Array, n: int) -> jax.Array:
    """The first eight rows of every block of x [64, columns], n = 0, or its last eight: [32, columns] in layout
    HALF."""
    if dev.interpreted:
        return x.reshape(BLOCKS, 2, 8, -1)[:, n].reshape(CHUNK // 2, -1)
    return _half_of(x.shape[1], x.dtype, n)(x)


def joined(dev: Device, first: jax.Array, last: jax.Array) -> jax.Array:
    """The array [64, columns] whose parts are those of `half_of`; all float32."""
    if dev.interpreted:
        parts = [x.reshape(BLOCKS, 1, 8, -1) for x in (first, last)]
        return jnp.concatenate(parts, 1).reshape(CHUNK, -1)
    return _joined(first.shape[1])(first, last)


def in_rows(dev: Device, x: jax.Array) -> jax.Array:
    """x [64, 32], float32, in the last eight of every 16 columns of [64, 64], with zeros in the others; x [64, 64] as
    it is."""
    if x.shape[1] == CHUNK:
        return x
    if dev.interpreted:
        parts = x.reshape(CHUNK, BLOCKS, 1, 8)
        return jnp.concatenate([jnp.zeros_like(parts), parts], 2).reshape(CHUNK, CHUNK)
    return _in_rows()(x)


def store_first_rows(dev: Device, ref: Any, x: jax.Array) -> None:
    """The first row of every block of x [64, columns] to shared memory [4, columns]."""
    if dev.interpreted:
        ref[...] = x[:: CHUNK // BLOCKS]
    else:
        _store_first_rows(x.shape)(ref, x)


def store_row_sums(dev: Device, ref: Any, x: jax.Array, halves: bool = False) -> None:
    """The sum of the rows of every block of x [64, columns] to shared memory [4, columns].

    halves: of the first eight rows of every block.
    """
    for distance in (4, 2, 1) if halves else (8, 4, 2, 1):
        x = x + (exchanged_tokens if halves else exchanged)(dev, x, distance)
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
def _exchanged(shape: tuple[int, int], distance: int, of_first: bool = False):
    """The operation for arrays of a shape.

    of_first: whether both rows of a thread get what its first one gets.
    """

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), WGMMA)
    )
    def exchange(ctx, x):
        registers = list(x.registers.flat)
        if distance == 8:  # of each eight columns a thread has two rows, eight apart
            return _registers([registers[n ^ 1] for n in range(len(registers))], x)
        values = []
        for n, register in enumerate(registers):
            if of_first and n % 2:
                values.append(values[-1])
                continue
            moved = [utils.shfl_bfly(y, 4 * distance) for y in _elements(register)]
            values.append(vector.from_elements(register.type, moved))
        return _registers(values, x)

    return exchange


@functools.cache
def _second_half(columns: int):
    """The operation for arrays with this number of columns."""
    struct = plgpu.ShapeDtypeStruct((CHUNK, columns), jnp.dtype(jnp.int32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(), return_type=struct)
    def marks(ctx):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), i32)
        halves: list[Any] = [vector.from_elements(pair, [utils.c(n, i32)] * 2) for n in (0, 1)]
        return _array(halves * (columns // 8), columns, is_signed=True)

    return marks


@functools.cache
def _token_bit(columns: int, n: int):
    """The operation for arrays with this number of columns."""
    struct = plgpu.ShapeDtypeStruct((CHUNK, columns), jnp.dtype(jnp.int32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(), return_type=struct)
    def marks(ctx):
        i32 = ir.IntegerType.get_signless(32)
        bit = arith.andi(_warp_and_lane()[1], utils.c(4 << n, i32))
        both = vector.from_elements(ir.VectorType.get((2,), i32), [bit] * 2)
        return _array([both] * (columns // 4), columns, is_signed=True)

    return marks


@functools.cache
def _half_of(columns: int, dtype: Any, n: int):
    """The operation for arrays with this number of columns."""
    struct = plgpu.ShapeDtypeStruct((CHUNK // 2, columns), jnp.dtype(dtype), HALF)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=struct)
    def half(ctx, x):
        return _array(list(x.registers.flat)[n::2], columns, rows=CHUNK // 2)

    return half


@functools.cache
def _joined(columns: int):
    """The operation whose results have this number of columns."""
    struct = plgpu.ShapeDtypeStruct((CHUNK, columns), jnp.dtype(jnp.float32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(HALF, HALF), return_type=struct)
    def join(ctx, first, last):
        pairs = zip(first.registers.flat, last.registers.flat, strict=True)
        return _array([register for pair in pairs for register in pair], columns)

    return join


@functools.cache
def _in_rows():
    """The operation."""
    struct = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.dtype(jnp.float32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=struct)
    def spread(ctx, x):
        zero = vector.from_elements(_pair(), [utils.c(0.0, ir.F32Type.get())] * 2)
        registers = list(x.registers.flat)
        eights = [[zero, zero, *registers[n : n + 2]] for n in range(0, len(registers), 2)]
        return _array([register for eight in eights for register in eight], CHUNK)

    return spread


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
    """The operation for arrays with this number of columns."""
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
    values: list[ir.Value], columns: int, is_signed: bool | None = None, rows: int = CHUNK
) -> fragmented_array.FragmentedArray:
    layout = fragmented_array.WGMMA_LAYOUT if rows == CHUNK else HALF.to_mgpu()
    registers = np.empty(len(values), dtype=object)
    registers[:] = values
    return fragmented_array.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((rows, columns))),
        _layout=layout,
        _is_signed=is_signed,
    )
