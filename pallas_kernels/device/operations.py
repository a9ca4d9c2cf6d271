"""Device operations that Pallas does not have, or that its interpreter lacks."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.device import eight_bits
from pallas_kernels.device.layouts import CHUNK, WGMMA, iota
from pallas_kernels.device.memory import store_any


class Device:
    """The operations that Pallas' interpreter lacks: wgmma with operands or initial values in registers, and PTX.

    Kernels call them here only. On the GPU each is one instruction or a few; interpreted, the same result is
    computed with jnp. Everything else runs in both as it stands.
    """

    def __init__(self, interpreted: bool):
        self.interpreted = interpreted

    def issue(self, acc, a, b_ref):
        """Starts acc + a @ b, asynchronously; a is an array in the WGMMA layout or a tile, b a tile."""
        if self.interpreted and isinstance(a, jax.Array):
            return jnp.dot(a, b_ref[...], preferred_element_type=jnp.float32)
        plgpu.wgmma(acc, a, b_ref)
        return acc

    def collect(self, product, newer: int = 0) -> jax.Array:
        """The value of an issued product, once at most `newer` younger products are still running."""
        if isinstance(product, jax.Array):
            return product
        return product[...] if self.interpreted else plgpu.wgmma_accumulator_load(product, wait_n=newer)

    def finish(self, newer: int) -> None:
        """Waits for all but the `newer` youngest products of this warpgroup."""
        if not self.interpreted:
            plgpu.wgmma_wait(newer)

    def release(self, barrier) -> None:
        """Tells the producer of a stage that this warpgroup has read it, so that a bulk copy may overwrite it.

        The arrival on the barrier does not wait for loads into registers whose values have not been used yet: these
        then find rows of the next tile (one sum in 100000, H200, 2026-11-21). Use the values first, or commit_smem,
        whose fence waits. The interpreter asks for a commit after every read.
        """
        if self.interpreted:
            plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)

    def commit(self) -> None:
        """Waits for all of this warpgroup, and makes what it stored to shared memory known to its products."""
        plgpu.commit_smem()

    def product(self, a, b_ref) -> jax.Array:
        """a @ b in float32, waited for."""
        shape = (a.shape[0], b_ref.shape[1])

        def body(acc):
            return self.collect(self.issue(acc, a, b_ref))

        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))

    def accumulate(self, starts: list[jax.Array], body: Callable) -> list[jax.Array]:
        """starts, with the products added that body(add) starts by add(n, a, b): a @ b to number n. They run beside
        what else the body does, and are waited for at the end."""
        if self.interpreted:
            sums = list(starts)

            def add(n, a, b):
                sums[n] = sums[n] + self.product(a, b)

            body(add)
            return sums
        accumulators: Any = [plgpu.ACC.init(x) for x in starts]
        return pl.run_state(lambda accs: body(lambda n, a, b: plgpu.wgmma(accs[n], a, b)))(accumulators)

    def row_minus_column(self) -> jax.Array:
        """Row minus column numbers of a [64, 64] array in the WGMMA layout, for masks: one register and constants,
        where the difference of two `iota` takes two registers an entry."""
        if self.interpreted:
            return iota((CHUNK, CHUNK), 0) - iota((CHUNK, CHUNK), 1)
        return _row_minus_column()

    def diagonal(self, x) -> jax.Array:
        """Diagonal of [64, 64] in layout ROW. A warp has its part of it in 16 columns, which it selects first."""
        if self.interpreted:
            return jnp.diagonal(x)
        return jnp.sum(jnp.where(_warp_row_minus_column() == 0, _own_columns(x), 0.0), axis=1)

    def widen(self, x, layout: Any = WGMMA) -> jax.Array:
        """bfloat16 in a layout with pairs of neighbours as float32, in two instructions a pair instead of three."""
        if self.interpreted or x.dtype != jnp.bfloat16:
            return x.astype(jnp.float32)
        return _widen(x.shape, layout)(x)

    def sum_of_threads_rows(self, x, layout: Any, summed: Any) -> jax.Array:
        """Sums of x [4 r, columns] over every r rows, which a thread has below each other: [4, columns].

        Args:
          layout, summed: of x and of the sums, float32. Each warp has r rows of x and one of the sums, and a thread
            the same columns in both.
        """
        columns = x.shape[1]
        if self.interpreted:
            return x.reshape(4, -1, columns).sum(1)
        return _sum_of_threads_rows(columns, layout, summed)(x)

    def unknown(self, x, layout: Any) -> jax.Array:
        """x of 16-bit numbers behind an instruction that compilers do not see through.

        They do not know that the result is x. So they compute what is made of x a second time from the result, and
        do not keep it in registers. (`lax.optimization_barrier` leaves such numbers in another order:
        docs/log/decode.md.)
        """
        return x if self.interpreted else _unknown(x.shape, jnp.dtype(x.dtype).name, layout)(x)

    def reciprocal(self, x, layout: Any) -> jax.Array:
        """1 / x of float32 in one instruction instead of five; 0 where it is below 2^-126. Relative error 2^-23."""
        return 1.0 / x if self.interpreted else _reciprocal(x.shape, layout)(x)

    def multiply_add(self, a, b, c, layout: Any) -> jax.Array:
        """a b + c of float32 vectors in one instruction, rounded once. Of a b + c d compilers choose which product is
        rounded, and not in every program the same."""
        return a * b + c if self.interpreted else _multiply_add(b.shape, layout)(a, b, c)

    def blocks_multiply_add(self, c, a, b_t) -> jax.Array:
        """c_w + a_w @ b_t_w^T of the four 16x16 blocks w of [64, 16] arrays; c float32, a and b_t both float16 or
        both bfloat16."""
        if not self.interpreted:
            return _blocks_multiply_add(jnp.dtype(a.dtype).name)(c, a, b_t)
        a, b_t = (x.astype(jnp.float32).reshape(4, 16, 16) for x in (a, b_t))
        return c + jnp.einsum("wij,wkj->wik", a, b_t).reshape(64, 16)

    def blocks_transpose(self, x) -> jax.Array:
        """Transposes each 16x16 block of a [64, 16] array of 16-bit numbers."""
        if not self.interpreted:
            return _blocks_transpose(jnp.dtype(x.dtype).name)(x)
        return x.reshape(4, 16, 16).swapaxes(1, 2).reshape(64, 16)

    def store_flat(self, ref, x) -> None:
        """Stores x [rows, columns] to a reference [rows columns]."""
        if self.interpreted:
            store_any(ref, x.reshape(-1))
        else:
            store_any(ref.reshape(*x.shape), x)

    def to_eight_bits(self, x, dtype: Any) -> jax.Array:
        """float32 rounded to the nearest of 8 bits. What is beyond the largest becomes that; NaN stays."""
        if self.interpreted:  # the instruction does so by itself
            x = jnp.clip(x, -float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).max))
        return x.astype(dtype)

    def count_beyond(self, count, left, x, layout: Any) -> jax.Array:
        """count [LANES], with how many of x are beyond a bound, infinite ones and NaN among them: each thread adds
        those that it has.

        Args:
          count: int32 in `eight_bits.THREADS`.
          left: likewise, what is left between the bits of the bound and 0x7fff, twice: in both halves of a word.
          layout: of x, 16-bit numbers.
        """
        if self.interpreted:
            bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) & 0x7FFF
            beyond = bits > 0x7FFF - (left[0] & 0x7FFF)
            return count + jnp.sum(beyond.astype(jnp.int32).reshape(-1, len(count)), axis=0)
        return eight_bits.count_beyond(x.shape, jnp.dtype(x.dtype).name, layout)(count, left, x)

    def together(self, x) -> jax.Array:
        """The numbers that a thread has of a row put side by side: [64, 64] of 8 bits in the WGMMA layout, to
        `eight_bits.TOGETHER`. Column 8 i + 2 j + k goes to 16 j + 2 i + k."""
        if self.interpreted:
            return x.reshape(64, 8, 4, 2).swapaxes(1, 2).reshape(64, 64)
        return eight_bits.together(jnp.dtype(x.dtype).name)(x)

    def columns_together(self, x) -> jax.Array:
        """The transpose of [64, 128] of 8 bits, from `eight_bits.BELOW` to `eight_bits.BESIDE`, with its columns in
        the order of `together`: each thread transposes what it has."""
        if self.interpreted:
            return x.reshape(8, 4, 2, 128).transpose(3, 1, 0, 2).reshape(128, 64)
        return eight_bits.columns_together(jnp.dtype(x.dtype).name)(x)


def _registers(values: list, like: fragmented_array.FragmentedArray) -> fragmented_array.FragmentedArray:
    registers = np.empty(len(values), dtype=object)
    registers[:] = values
    registers = registers.reshape(like.registers.shape)
    return fragmented_array.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Numbers of a thread's warp in the warpgroup and of the thread in the warp."""
    i32 = ir.IntegerType.get_signless(32)
    thread = utils.thread_idx()
    lane, warp = arith.andi(thread, utils.c(31, i32)), arith.shrui(thread, utils.c(5, i32))
    return arith.andi(warp, utils.c(3, i32)), lane


def _differences(columns: int, of_warp: bool) -> fragmented_array.FragmentedArray:
    """Row minus column of [64, columns] in the WGMMA layout, rows counted from the warp's first one or from 0."""
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), i32)
    warp, lane = _warp_and_lane()
    row = arith.shrui(lane, utils.c(2, i32))
    if not of_warp:
        row = arith.addi(row, arith.shli(warp, utils.c(4, i32)))
    first = arith.subi(row, arith.shli(arith.andi(lane, utils.c(3, i32)), utils.c(1, i32)))
    shape = fragmented_array.WGMMA_LAYOUT.registers_shape((CHUNK, columns))
    registers = np.empty(math.prod(shape), dtype=object)
    # Eight columns after another, and of each the first and the last eight rows of a warp.
    for n in range(len(registers)):
        offsets = [n % 2 * 8 - n // 2 * 8 - i for i in (0, 1)]
        registers[n] = vector.from_elements(pair, [arith.addi(first, utils.c(d, i32)) for d in offsets])
    return fragmented_array.FragmentedArray(
        _registers=registers.reshape(shape), _layout=fragmented_array.WGMMA_LAYOUT, _is_signed=True
    )


@plgpu.inline_mgpu(
    arg_types=(), return_type=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.dtype(jnp.int32), WGMMA)
)
def _row_minus_column(ctx):
    return _differences(CHUNK, of_warp=False)


@plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct((CHUNK, 16), jnp.dtype(jnp.int32), WGMMA))
def _warp_row_minus_column(ctx):
    return _differences(16, of_warp=True)


@plgpu.inline_mgpu(
    arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((CHUNK, 16), jnp.dtype(jnp.float32), WGMMA)
)
def _own_columns(ctx, x):
    """Columns 16 w to 16 w + 15 of the rows of warp w: four registers of its sixteen."""
    i32 = ir.IntegerType.get_signless(32)
    warp, _ = _warp_and_lane()
    is_warp = [arith.cmpi(arith.CmpIPredicate.eq, warp, utils.c(w, i32)) for w in (1, 2, 3)]
    registers = list(x.registers.flat)
    chosen = np.empty(4, dtype=object)
    chosen[:] = registers[:4]
    for w in (1, 2, 3):
        for n in range(4):
            chosen[n] = arith.select(is_warp[w - 1], registers[4 * w + n], chosen[n])
    shape = fragmented_array.WGMMA_LAYOUT.registers_shape((CHUNK, 16))
    return fragmented_array.FragmentedArray(
        _registers=chosen.reshape(shape), _layout=fragmented_array.WGMMA_LAYOUT, _is_signed=None
    )


def _elements(register: ir.Value) -> list[ir.Value]:
    """The numbers of a register of an array, which is a vector."""
    positions = range(ir.VectorType(register.type).shape[0])
    at = [ir.DenseI64ArrayAttr.get([i]) for i in positions]
    return [vector.extract(register, dynamic_position=[], static_position=i) for i in at]


@functools.cache
def _widen(shape: tuple[int, int], layout: Any):
    """The operation for arrays of a shape."""

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout)
    )
    def widen(ctx, x):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        values = []
        for register in x.registers.flat:
            numbers = ir.VectorType(register.type).shape[0]
            numerals = []
            for pair in _elements(vector.bitcast(ir.VectorType.get((numbers // 2,), i32), register)):
                numerals += [arith.shli(pair, utils.c(16, i32)), arith.andi(pair, utils.c(-65536, i32))]
            wide = [arith.bitcast(f32, y) for y in numerals]
            values.append(vector.from_elements(ir.VectorType.get((numbers,), f32), wide))
        return _registers(values, x)

    return widen


@functools.cache
def _sum_of_threads_rows(columns: int, layout: Any, summed: Any):
    """The operation for arrays with this number of columns."""

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((4, columns), jnp.dtype(jnp.float32), summed)
    )
    def sum_of_threads_rows(ctx, x):
        # A register is what a thread has of a row.
        total, *others = x.registers.flat
        for row in others:
            total = arith.addf(total, row)
        registers = np.empty(1, dtype=object)
        registers[0] = total
        result = summed.to_mgpu() if hasattr(summed, "to_mgpu") else summed
        return fragmented_array.FragmentedArray(
            _registers=registers.reshape(result.registers_shape((4, columns))),
            _layout=result,
            _is_signed=None,
        )

    return sum_of_threads_rows


@functools.cache
def _unknown(shape: tuple[int, int], dtype: str, layout: Any):
    """The operation for arrays of a shape."""

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout)
    )
    def unknown(ctx, x):
        i32 = ir.IntegerType.get_signless(32)
        values = []
        for register in x.registers.flat:
            words = ir.VectorType.get((ir.VectorType(register.type).shape[0] // 2,), i32)
            moved: Any = [
                llvm.inline_asm(i32, [word], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
                for word in _elements(vector.bitcast(words, register))
            ]
            values.append(vector.bitcast(register.type, vector.from_elements(words, moved)))
        return _registers(values, x)

    return unknown


@functools.cache
def _reciprocal(shape: tuple[int, int], layout: Any):
    """The operation for arrays of a shape."""

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout)
    )
    def reciprocal(ctx, x):
        f32, instruction = ir.F32Type.get(), "rcp.approx.ftz.f32 $0, $1;"
        values = []
        for register in x.registers.flat:
            inverse: Any = [
                llvm.inline_asm(f32, [y], instruction, "=f,f", has_side_effects=False)
                for y in _elements(register)
            ]
            values.append(vector.from_elements(register.type, inverse))
        return _registers(values, x)

    return reciprocal


@functools.cache
def _multiply_add(shape: tuple[int, ...], layout: Any):
    """The operation for arrays of a shape."""

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, layout),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout),
    )
    def multiply_add(ctx, a, b, c):
        f32, instruction = ir.F32Type.get(), "fma.rn.f32 $0, $1, $2, $3;"
        values = []
        for registers in zip(*(x.registers.flat for x in (a, b, c)), strict=True):
            sums: Any = [
                llvm.inline_asm(f32, list(numbers), instruction, "=f,f,f,f", has_side_effects=False)
                for numbers in zip(*map(_elements, registers), strict=True)
            ]
            values.append(vector.from_elements(registers[0].type, sums))
        return _registers(values, b)

    return multiply_add


@functools.cache
def _blocks_multiply_add(dtype: str):
    """The operation for operands of a dtype."""
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    instruction = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};"
    )

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA, WGMMA),
        return_type=plgpu.ShapeDtypeStruct((64, 16), jnp.dtype(jnp.float32), WGMMA),
    )
    def multiply_add(ctx, c, a, b_t):
        """Two mma.sync m16n8k16 a warp. A [64, 16] WGMMA array is exactly the A fragment of its warp's block, and the
        accumulator fragment of a matrix is the B fragment of its transpose: no data moves between threads."""
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        a_registers = [utils.bitcast(r, i32) for r in a.registers.flat]
        b_registers = [utils.bitcast(r, i32) for r in b_t.registers.flat]
        c_elements = [y for r in c.registers.flat for y in _elements(r)]
        results = []
        for n, b_pair in ((0, (b_registers[0], b_registers[2])), (1, (b_registers[1], b_registers[3]))):
            struct: Any = llvm.inline_asm(
                ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
                [*c_elements[4 * n : 4 * n + 4], *a_registers, *b_pair],
                instruction,
                "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r",
                has_side_effects=False,
            )
            out = [llvm.extractvalue(f32, struct, [i]) for i in range(4)]
            results += [vector.from_elements(ir.VectorType.get((2,), f32), out[i : i + 2]) for i in (0, 2)]
        return _registers(results, c)

    return multiply_add


@functools.cache
def _blocks_transpose(dtype: str):
    """The operation for arrays of a dtype."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((64, 16), jnp.dtype(dtype), WGMMA)
    )
    def transpose(ctx, x):
        """Four movmatrix a warp, one for each 8x8 quarter; the off-diagonal quarters change places."""
        i32 = ir.IntegerType.get_signless(32)
        quarters = [utils.bitcast(r, i32) for r in x.registers.flat]
        results: list[Any] = [
            llvm.inline_asm(
                i32,
                [quarters[i]],
                "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
                "=r,r",
                has_side_effects=False,
            )
            for i in (0, 2, 1, 3)
        ]
        return _registers([utils.bitcast(r, x.registers.flat[0].type) for r in results], x)

    return transpose
