"""The choice of experts by one warp, in registers: what `rows.row_choice` writes down."""

import functools
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from pallas_kernels.device.grid_barrier import LINE, UNKNOWN
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout


@functools.cache
def pick(experts: int, choice: Any, is_gated: bool):
    """The operation (chosen, weights, words, bias): numbers and weights to shared memory, from published scores.

    The first warp of the warpgroup that calls it waits for the scores. bias is in a layout in which every warp has
    all of it, and a thread neighbours; with softmax there is none.

    Args:
      experts: how many there are, 64, 128, 256 or, with softmax, 512.
      choice: how they are chosen, a `gdn_jax.shapes.Choice`.
      is_gated: whether the shared expert has a score, after theirs.
    """
    is_softmax = choice.scoring == "softmax"
    biases = () if is_softmax else (lane_layout(WARP, experts // WARP).reduce(0),)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), *biases))
    def operation(ctx, chosen, weights, words, *bias):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = utils.thread_idx()
        lane = arith.andi(thread, _int(WARP - 1))
        branch = scf.IfOp(_same(arith.andi(thread, _int(WARPS * WARP - WARP)), _int(0)))
        with ir.InsertionPoint(branch.then_block):
            found = [arith.bitcast(f32, word) for word in _published(words, lane, experts, is_gated)]
            x, own = found[: experts // WARP], found[experts // WARP :]
            if is_softmax:
                s, c = _exponentials(x, not choice.normalise), [_nan_first(y) for y in x]
            else:
                s = [_sigmoid(y) for y in x]
                c = [_nan_first(arith.addf(y, z)) for y, z in zip(s, _numbers(bias[0]), strict=True)]
            if choice.kept_groups < choice.groups:
                c = _kept(c, lane, choice)
            number, weight = _largest(s, c, lane, choice)
            has_one = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, lane, _int(choice.per_token)))
            with ir.InsertionPoint(has_one.then_block):
                place = arith.index_cast(ir.IndexType.get(), lane)
                memref.store(arith.bitcast(i32, number), chosen, [place])
                memref.store(weight, weights, [place])
                scf.yield_([])
            last: Any = utils.c(choice.per_token, ir.IndexType.get())
            is_first = scf.IfOp(_same(lane, _int(0)))
            with ir.InsertionPoint(is_first.then_block):
                of_shared = _sigmoid(own[0]) if is_gated else _float(1.0)
                memref.store(of_shared, weights, [last])
                scf.yield_([])
            scf.yield_([])

    return operation


def _published(words: Any, lane: Any, experts: int, is_gated: bool) -> list[Any]:
    """This thread's words of those that CTAs publish, and that of the shared expert, once all of the warp's are
    there."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    own, at_once = experts // WARP, min(4, experts // WARP)
    first = arith.addi(arith.muli(lane, _int(own)), _int(LINE))
    address = arith.addi(
        llvm.ptrtoint(i64, utils.memref_ptr(words)), arith.muli(arith.extui(i64, first), utils.c(4, i64))
    )
    places = ", ".join(f"${i}" for i in range(at_once))
    last = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(words)), utils.c(4 * (LINE + experts), i64))
    count = own + is_gated
    loop = scf.WhileOp([i32] * count, [_int(0)] * count)
    before = loop.before.blocks.append(*[i32] * count)
    with ir.InsertionPoint.at_block_begin(before):
        found: list[Any] = []
        for n in range(0, own, at_once):
            found += utils.inline_ptx(
                f"ld.relaxed.gpu.global.v{at_once}.u32 {{{places}}}, [${at_once}];",
                llvm.inttoptr(ir.Type.parse("!llvm.ptr"), arith.addi(address, utils.c(4 * n, i64))),
                result_types=[i32] * at_once,
                has_side_effects=True,
            )
        if is_gated:
            pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr"), last)
            found.append(
                utils.inline_ptx(
                    "ld.relaxed.gpu.global.u32 $0, [$1];", pointer, result_types=i32, has_side_effects=True
                )
            )
        unknown = functools.reduce(arith.ori, [_same(x, _int(UNKNOWN)) for x in found])
        some = utils.inline_ptx(
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.u32 $0, 1, 0, p; }",
            arith.extui(i32, unknown),
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        scf.condition(arith.cmpi(arith.CmpIPredicate.ne, some, _int(0)), found)
    after = loop.after.blocks.append(*[i32] * count)
    with ir.InsertionPoint.at_block_begin(after):
        scf.yield_(list(after.arguments))
    return list(loop.results)


def _exp(x: Any, sign: int = 1) -> Any:
    """exp(sign x)."""
    f32, log2_e = ir.F32Type.get(), 1.4426950408889634
    return utils.inline_ptx(
        "ex2.approx.ftz.f32 $0, $1;", arith.mulf(x, _float(sign * log2_e)), result_types=f32
    )


def _sigmoid(x: Any) -> Any:
    return arith.divf(_float(1.0), arith.addf(_float(1.0), _exp(x, -1)))


def _exponentials(x: list[Any], normalises: bool) -> list[Any]:
    """exp(x - max x) over the numbers of a warp, or these over their sum."""

    def over_the_warp(operation: Any, x: list[Any]) -> Any:
        total = functools.reduce(operation, x)
        for distance in (1, 2, 4, 8, 16):
            total = operation(total, utils.shfl_bfly(total, distance))
        return total

    most = over_the_warp(arith.maximumf, x)
    s = [_exp(arith.subf(y, most)) for y in x]
    if not normalises:
        return s
    total = over_the_warp(arith.addf, s)
    return [arith.divf(y, total) for y in s]


def _nan_first(x: Any) -> Any:
    """x, but inf for NaN, which is neither larger than a number nor smaller."""
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), _float(float("inf")), x)


def _kept(c: list[Any], lane: Any, choice: Any) -> list[Any]:
    """c, but -inf in groups that are not kept."""
    threads = WARP // choice.groups
    first, second = c[0], _float(-float("inf"))
    for x in c[1:]:
        first, second = _top(first, second, x, _float(-float("inf")))
    distance = 1
    while distance < threads:
        others = utils.shfl_bfly(first, distance), utils.shfl_bfly(second, distance)
        first, second = _top(first, second, *others)
        distance *= 2
    total, own = _nan_first(arith.addf(first, second)), arith.divui(lane, _int(threads))
    before = _int(0)
    for group in range(choice.groups):
        other = _of_lane(total, _int(group * threads))
        larger = arith.cmpf(arith.CmpFPredicate.OGT, other, total)
        equal = arith.cmpf(arith.CmpFPredicate.OEQ, other, total)
        earlier = arith.cmpi(arith.CmpIPredicate.ult, _int(group), own)
        comes = arith.ori(larger, arith.andi(equal, earlier))
        before = arith.addi(before, arith.extui(ir.IntegerType.get_signless(32), comes))
    is_kept = arith.cmpi(arith.CmpIPredicate.ult, before, _int(choice.kept_groups))
    return [arith.select(is_kept, x, _float(-float("inf"))) for x in c]


def _top(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any]:
    """The two largest of a >= b and c >= d."""
    return arith.maximumf(a, c), arith.maximumf(arith.minimumf(a, c), arith.maximumf(b, d))


def _largest(s: list[Any], c: list[Any], lane: Any, choice: Any) -> tuple[Any, Any]:
    """For thread j, below k: the number of the expert with the j-th largest c, and its weight."""
    i32, own = ir.IntegerType.get_signless(32), len(c)
    keys = [_ordered(x) for x in c]
    number, weight, total = _int(0), _float(0.0), _float(0.0)
    for j in range(choice.per_token):
        most = functools.reduce(arith.maxui, keys)
        largest = utils.inline_ptx(
            "redux.sync.max.u32 $0, $1, -1;", most, result_types=i32, has_side_effects=True, convergent=True
        )
        winner = utils.inline_ptx(  # the first thread that has it
            "{ .reg .pred p; .reg .b32 t; setp.eq.u32 p, $1, $2; vote.sync.ballot.b32 t, p, -1; "
            "brev.b32 t, t; clz.b32 $0, t; }",
            most,
            largest,
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        place, score = _int(own - 1), s[-1]
        for i in range(own - 2, -1, -1):
            has = _same(keys[i], largest)
            place, score = arith.select(has, _int(i), place), arith.select(has, s[i], score)
        wins = _same(lane, winner)
        taken = arith.select(wins, place, _int(own))
        keys = [arith.select(_same(taken, _int(i)), _int(0), key) for i, key in enumerate(keys)]
        found = _of_lane(arith.addi(arith.muli(lane, _int(own)), place), winner)
        score, is_own = _of_lane(score, winner), _same(lane, _int(j))
        number, weight = arith.select(is_own, found, number), arith.select(is_own, score, weight)
        total = arith.addf(total, score)
    if choice.normalise:
        weight = arith.divf(weight, arith.addf(total, _float(1e-20)))
    return number, arith.mulf(weight, _float(choice.factor))


def _ordered(x: Any) -> Any:
    """An unsigned integer, larger for a larger number and never 0."""
    i32 = ir.IntegerType.get_signless(32)
    bits = arith.bitcast(i32, x)
    flipped = arith.ori(arith.shrsi(bits, _int(31)), _int(-(2**31)))
    return arith.maxui(arith.xori(bits, flipped), _int(1))


def _numbers(x: Any) -> list[Any]:
    """The numbers that a thread has of an array."""
    return [
        vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for register in x.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def _of_lane(x: Any, lane: Any) -> Any:
    """The value of another thread of the warp."""
    i32 = ir.IntegerType.get_signless(32)
    found = utils.inline_ptx(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
        x if x.type == i32 else arith.bitcast(i32, x),
        lane,
        result_types=i32,
        has_side_effects=True,
        convergent=True,
    )
    return found if x.type == i32 else arith.bitcast(x.type, found)


def _same(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _int(n: int) -> Any:
    return utils.c(n, ir.IntegerType.get_signless(32))


def _float(x: float) -> Any:
    return utils.c(x, ir.F32Type.get())
