"""A barrier over all CTAs of a kernel, so that what were several kernels can be stages of one.

A launch and the first latencies of a kernel are 2.5 us and more, in which memory stands still. Behind a barrier a
stage begins at once, with its first weights already in shared memory: copies of weights need not wait.

All CTAs add to one word in global memory, 2^31 together, so that its last bit changes when the last one has arrived;
who waits reads that bit. A few numbers may be published, which is faster than a barrier: each takes the place of
`UNKNOWN` in a word of its own, and who needs them reads until none is left.

A kernel leaves the words as they were, so the next one takes the same and nobody sets them again. They are a
reference (`new_words`), which kernels change in place, and XLA sees that they do: it runs kernels with the same words
one after another, and gives calls that share none, those of a compiled function that is called twice among them, an
array each. (Words that were a constant of a program, which kernels read as far as XLA knew, were one array to XLA
wherever they were equal, and their readers could run at once.)

What it needs: all CTAs must be on the device at once, so there are at most as many as multiprocessors (`most_ctas`).
More of them would wait for each other for ever. So would two kernels with words of their own, each of which has a
part of its CTAs on the device and no room for the others. Nothing but measurement says that kernels of one program do
not meet so: two independent chains of twelve ran 32,550 times on an H100 (2026-11-26), in graphs of either scheduling
mode and without graphs, with the same bits. Behind the barrier plain loads see what other CTAs have stored before it.
A bulk copy would need a fence of its own: such copies are of what no stage writes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

from pallas_kernels.device import generations
from pallas_kernels.device.launch import NUM_SMS, default_device, grid_index, launch
from pallas_kernels.device.memory import Barriers, Memory

LINE = 32
"""Words of a cache line."""

PUBLISHED = 544
"""Numbers that the CTAs of a kernel publish, at most. They lie behind the first line."""

HEADS = 1 + PUBLISHED // LINE
"""The first of as many lines as there are multiprocessors, for kernels with a barrier for some of their CTAs each."""

UNKNOWN = 0x7FC0D0D0
"""A number that has not been published: a NaN that no operation gives."""


def most_ctas() -> int:
    """CTAs that are at once on any GPU of this process, whatever shared memory they have; at most `NUM_SMS`.

    Under jit nobody knows yet which of them a program runs on, so the smallest one counts. 0 where one does not say
    how many multiprocessors it has: too many CTAs would wait for ever. Where there is no GPU, programs are only
    compiled for one, for `NUM_SMS`.
    """
    gpus = [device for device in (default_device(), *jax.local_devices()) if device.platform == "gpu"]
    return min([NUM_SMS, *(getattr(gpu, "core_count", None) or 0 for gpu in gpus)])


def new_words() -> Any:
    """A reference to words [lines, LINE] for kernels that run one after another."""
    return jax.new_ref(_words())


@jax.jit
def _words() -> jax.Array:
    lines = jnp.arange(HEADS + NUM_SMS)
    words = jnp.where((lines > 0) & (lines < HEADS), jnp.int32(UNKNOWN), jnp.int32(0))
    return jnp.broadcast_to(words[:, None], (len(lines), LINE))


class GridBarrier:
    """The barriers of a kernel, all of whose warpgroups call the same methods in the same order."""

    def __init__(self, words: Any, ctas: int, number: Any = None) -> None:
        """Takes the words in global memory.

        Args:
          words: those of `new_words`, or one of their lines.
          ctas: how many CTAs meet.
          number: of this CTA among them; None for its place in the grid.
        """
        self.words, self.ctas, self.arrivals = words, ctas, 0
        self.number = grid_index() if number is None else number

    def publish(self, i: Any, x: jax.Array) -> None:
        """Gives float32 number i to all CTAs, by one warpgroup of one of them."""
        _set(self.words, i, lax.bitcast_convert_type(x, jnp.int32))

    def withdraw(self, i: Any) -> None:
        """Takes number i back, by one warpgroup, behind a barrier before which all have read it."""
        _set(self.words, i, jnp.int32(UNKNOWN))

    def arrive(self) -> None:
        """All that this CTA has stored is seen by who waits. It is also a barrier of the CTA."""
        self.arrivals += 1
        _arrive(self.words, self._share())

    def wait(self) -> None:
        """Waits for the last arrival of all CTAs. It is also a barrier of the CTA."""
        _wait(self.arrivals % 2)(self.words)

    def leave(self) -> None:
        """The word becomes what it was, behind the last wait of a kernel."""
        if self.arrivals % 2:
            _leave(self.words, self._share())

    def _share(self) -> jax.Array:
        """This CTA adds so much to the word: the first one what the others leave of 2^31."""
        return jnp.where(self.number == 0, jnp.int32(2**31 - self.ctas), 0) + 1


class InTurn:
    """The barriers of a kernel whose CTAs run one after the other."""

    def __init__(self, words: Any, meeting: Any) -> None:
        """Takes the published numbers in global memory, and a barrier of the warpgroups of a CTA."""
        self.words, self.meeting = words, meeting

    def publish(self, i: Any, x: jax.Array) -> None:
        """See `GridBarrier.publish`."""
        self.words[i] = x

    def withdraw(self, i: Any) -> None:
        """See `GridBarrier.withdraw`."""

    def arrive(self) -> None:
        """A barrier of the CTA."""
        generations.meet(self.meeting)

    def wait(self) -> None:
        """See `arrive`."""
        self.arrive()

    def leave(self) -> None:
        """See `GridBarrier.leave`."""


def launch_stages(
    name: str,
    body: Callable[[Any, Any, Any], None],
    stages: int,
    *,
    inputs: Mapping[str, Any],
    between: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    memory: Memory,
    ctas: int,
    warpgroups: int,
    published: int = 0,
    words: Any = None,
    interpret: Any = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Runs body(gmem, smem, barrier) as `launch` would, with barriers over all CTAs between its stages.

    What one stage writes for later ones, such as gmem.h, these read as gmem.seen_h, behind a barrier.

    The interpreter runs CTAs one after the other. There the kernel runs once for each stage, and sees what the run
    before has written: the last run sees all of it.

    Args:
      name, body, inputs, outputs, memory, interpret: as for `launch`. A body may run again: it updates nothing.
      stages: how many.
      between: what stages write for later ones, in global memory.
      ctas: CTAs, at most `most_ctas`.
      warpgroups: warpgroups of a CTA.
      published: how many numbers CTAs publish, which others read as gmem.seen_words: from the word `LINE` on, or, by
        the interpreter, from its first one.
      words: of `new_words`, for the kernels before this one, too; None: new ones. Not read by the interpreter.
      options: others of `launch`.

    Returns:
      The outputs and what stages have written for each other, by name.
    """
    options |= dict(ctas=ctas, warpgroups=warpgroups, interpret=interpret)
    if interpret is None:

        def run(gmem, smem):
            for key in between:
                setattr(gmem, f"seen_{key}", getattr(gmem, key))
            gmem.seen_words = gmem.words
            body(gmem, smem, GridBarrier(gmem.words, ctas))

        assert published <= PUBLISHED
        kept, outputs = {"words": new_words() if words is None else words}, {**outputs, **between}
        return launch(name, run, inputs=inputs, outputs=outputs, kept=kept, memory=memory, **options)

    def run_in_turn(gmem, smem):
        body(gmem, smem, InTurn(gmem.words, smem.meeting))

    between = {**between, "words": jax.ShapeDtypeStruct((max(1, published),), jnp.float32)}
    memory = {**memory, "meeting": Barriers(arrivals=warpgroups)}
    made = {key: jnp.zeros(x.shape, x.dtype) for key, x in between.items()}
    for _ in range(stages):
        inputs = {**inputs, **{f"seen_{key}": made[key] for key in between}}
        made = launch(
            name, run_in_turn, inputs=inputs, outputs={**outputs, **between}, memory=memory, **options
        )
    return made


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_SPLAT(())))
def _set(ctx, words, i, value):
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    place = arith.addi(i.registers.item(), utils.c(LINE, i32))
    offset = arith.muli(arith.extui(i64, place), utils.c(4, i64))
    address = llvm.ptrtoint(i64, utils.memref_ptr(words))
    utils.inline_ptx(
        "st.relaxed.gpu.global.u32 [$0], $1;",
        llvm.inttoptr(ir.Type.parse("!llvm.ptr"), arith.addi(address, offset)),
        value.registers.item(),
        predicate=utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
        has_side_effects=True,
    )


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
def _arrive(ctx, words, share):
    gpu.barrier()
    _add(words, share, "release")


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
def _leave(ctx, words, share):
    _add(words, share, "relaxed")


def _add(words: Any, share: Any, order: str) -> None:
    """The CTA's first thread, which is the one that waits, adds to the word."""
    utils.inline_ptx(
        f"red.{order}.gpu.global.add.u32 [$0], $1;",
        utils.memref_ptr(words),
        share.registers.item(),
        predicate=_is_first(),
        has_side_effects=True,
    )


@functools.cache
def _wait(bit: int):
    """The operation that waits until the last bit is so."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(ctx, words):
        i32 = ir.IntegerType.get_signless(32)
        first = scf.IfOp(_is_first())
        with ir.InsertionPoint(first.then_block):
            loop = scf.WhileOp([], [])
            before = loop.before.blocks.append()
            with ir.InsertionPoint.at_block_begin(before):
                found: Any = utils.inline_ptx(
                    "ld.acquire.gpu.global.u32 $0, [$1];",
                    utils.memref_ptr(words),
                    result_types=i32,
                    has_side_effects=True,
                )
                predicate = arith.CmpIPredicate.sge if bit else arith.CmpIPredicate.slt
                scf.condition(arith.cmpi(predicate, found, utils.c(0, i32)), [])
            with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
                scf.yield_([])
            scf.yield_([])
        gpu.barrier()

    return wait


def _is_first() -> ir.Value:
    """Whether this is the CTA's first thread."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.cmpi(arith.CmpIPredicate.eq, utils.thread_idx(), utils.c(0, i32))
