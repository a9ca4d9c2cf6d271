"""The second half of a layer for one row, as one kernel: norm, router, choice of the experts, and the experts.

    s = x + y,   v = s (mean(s^2) + eps)^(-1/2) w,   e, weights = choice(v R^T, bias), see `row_choice`
    h_j = silu(v A_e) * (v B_e)   with [A_e | B_e] = gate_up[e], e = e_j;   the shared expert next to them
    z = sum_j weights_j h_j W_e + weight h_shared W,   weight = 1 or, of the last row of R, sigmoid(v r)

Three stages (`device.grid_barrier`): scores are published, and behind the branches is a barrier over all CTAs. While
one stage ends, tiles of the next one are on their way to shared memory, so that memory does not stand still. Only the
experts have to be known.

    stage    a CTA makes                           what is copied meanwhile
    router   v, its share of the scores, and the   the first tiles of the shared expert
             choice, again in every CTA
    branches parts of the sums of both branches    then those of the chosen ones; behind the last one the first
                                                   tiles of the projections down
    down     its part of the row of h, and of z

All tiles of the chosen experts are shared out evenly, and those of the shared one too: every multiprocessor reads as
much. A sum is made in parts by several CTAs; who reads it adds the parts up, always in one order.

Inputs (GMEM): x [1, D] and y [P, D], which are added up, or none; w [D] and with sigmoids bias [E], float32;
router [E, D], or [E + 1, D] where the shared expert has a gate, float32, bfloat16 or float16; gate_up [E, D, 2 F],
down [E, F, D]; of the shared expert gate, up [D, S], shared_down [S, D]; these matrices of one dtype, bfloat16 or
float16. Between the stages (GMEM): the scores; parts of both branches h [parts, k 2 F] and
g [parts, 2 S], all float32. Outputs (GMEM): s [1, D] of x's dtype, where there is y; z in parts [parts, D] float32.
Grid: as many CTAs of four warpgroups as there are multiprocessors. Shared memory: `_memory`.

    barrier     arrivals                           who waits
    full        a bulk copy of a tile              the warpgroup whose slot it is
    down_full   the same
    summed      the warpgroups that make v         the same, where they are several
    v_made      the same                           all
    made        all, when experts are known, and   all
                around what is added up

Numerics: float32; v and h are not rounded. The same bits in every call. Hardware: `NEEDS`. Limits:
`check_supported`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.shapes import Choice
from pallas_kernels.device import generations
from pallas_kernels.device.ahead import bring, rows_of
from pallas_kernels.device.grid_barrier import launch_stages
from pallas_kernels.device.lanes import WARPS
from pallas_kernels.device.launch import Shaped, kernel, warpgroup_index
from pallas_kernels.device.memory import SMEM_LIMIT, Barriers, Buffer, Memory, smem_bytes
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r
from pallas_kernels.rows import row_choice, stream
from pallas_kernels.rows.routed_stages import (
    COLUMNS,
    DEPTH,
    DOWN_COLUMNS,
    Branches,
    Config,
    Down,
    Router,
    Sizes,
    makers,
)

NEEDS = Needs.TMA | Needs.LARGE

WIDEST = WARPS * r.WARP_WIDTH
"""Widest row: each warp makes a fourth of it."""

REDUCTION_BYTES = 16
"""Bytes for reductions over more than a warp, of which the kernel has none."""


def check_supported(x: Shaped, gate_up: Shaped, shared: int, choice: Choice, ctas: int) -> str | None:
    """Why so many CTAs cannot take a row x [1, D] and experts gate_up [E, D, 2 F] with a shared one of inner width
    `shared`; None if they can."""
    D, (E, _, F2) = x.shape[1], gate_up.shape
    if reason := stream.check_supported(x):
        return reason
    if gate_up.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the experts are {gate_up.dtype}; the kernel takes bfloat16 and float16"
    if D % COLUMNS or F2 % (2 * COLUMNS) or shared % COLUMNS or not 0 < D <= WIDEST or not shared:
        of = f"multiples of {COLUMNS}, and rows up to {WIDEST}"
        return f"widths {D}, {F2 // 2} and {shared}; the kernel takes {of}"
    if D // DOWN_COLUMNS > ctas:
        return f"rows of {D} and {ctas} multiprocessors; the kernel takes {DOWN_COLUMNS} columns for each"
    if (reason := row_choice.check_supported(E, choice)) is not None:
        return reason
    sizes = Sizes(D, F2 // 2, choice.per_token, shared, E, E + 1)
    if _fitting(sizes, Config(ctas), choice, gate_up.dtype) is None:
        return f"rows of {D} and experts of {F2 // 2}; their parts have more than {SMEM_LIMIT} bytes"
    return None


def _fitting(sizes: Sizes, config: Config, choice: Choice, dtype: Any) -> Config | None:
    """The configuration with as many slots of the projection down as there is room for; None if there is none."""
    for n in range(config.down_slots, 0, -1):
        smaller = dataclasses.replace(config, down_slots=n)
        if smem_bytes(_memory(sizes, smaller, choice, dtype), REDUCTION_BYTES) <= SMEM_LIMIT:
            return smaller
    return None


def _memory(sizes: Sizes, config: Config, choice: Choice, dtype: Any) -> Memory:
    warpgroups, (shared, chosen) = config.warpgroups, sizes.branches(config)
    each, _ = sizes.down(config)
    slots = config.slots * warpgroups
    warps = makers(sizes.D, warpgroups) * WARPS
    down = min(config.down_slots, pl.cdiv(each, warpgroups)) * warpgroups
    return {
        "tiles": Buffer((slots, DEPTH, COLUMNS), dtype),
        "down_tiles": Buffer((down, COLUMNS, DOWN_COLUMNS), dtype),
        "v": Buffer((warps, sizes.D // warps)),
        "of_warps": Buffer((1 + pl.cdiv(sizes.scores, config.ctas), warps)),
        "h": Buffer((each * COLUMNS,)),
        "sums": Buffer((shared.spans + chosen.spans, warpgroups, WARPS, COLUMNS)),
        "full": Barriers(arrivals=1, count=slots),
        "down_full": Barriers(arrivals=1, count=down),
        "summed": Barriers(arrivals=warps // WARPS) if warps > WARPS else None,
        "v_made": Barriers(arrivals=warps // WARPS),
        "made": Barriers(arrivals=warpgroups),
        **row_choice.memory(choice),
    }


def _body(
    gmem: Any,
    smem: Any,
    barrier: Any,
    *,
    sizes: Sizes,
    config: Config,
    choice: Choice,
    eps: float,
    interpreted: bool,
) -> None:
    wg = warpgroup_index()
    router = Router(gmem, smem, barrier, eps, config.ctas, wg)
    experts, down = Branches(gmem, smem, sizes, config, wg), Down(gmem, smem, sizes, config, wg)

    meet = functools.partial(generations.meet, smem.made)
    pl.when(wg < router.makers)(lambda: router.make(router.load()))  # what it reads would come behind copies
    experts.begin()
    down.begin_known()
    pl.when(wg == config.warpgroups - 1)(lambda: row_choice.choose(gmem, smem, choice, sizes.E, interpreted))
    plgpu.barrier_wait(smem.v_made)
    experts.add_shared()
    meet()
    experts.add_chosen(down.begin)
    meet()
    experts.store(config.warpgroups)
    barrier.arrive()
    barrier.wait()
    barrier.leave()
    pl.when(wg == 0)(router.forget)
    pl.when(wg == config.warpgroups - 1)(lambda: bring(gmem.ahead, config.ctas))
    down.make_row()
    down.add()
    meet()
    down.store()


@kernel(
    "choice",
    "eps",
    "config",
    chosen=lambda x: dict(config=x.config or Config.default(), ahead=rows_of(x.ahead)),
)
def routed_stream(
    x: Float[Array, "1 D"],
    y: Float[Array, "P D"] | None,
    norm: Float[Array, " D"],
    router: Float[Array, "R D"],
    bias: Float[Array, " E"] | None,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    shared: tuple[Float[Array, "D S"], Float[Array, "D S"], Float[Array, "S D"]],
    *,
    choice: Choice,
    eps: float,
    ahead: Sequence[jax.Array] = (),
    words: Any = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "1 D"], Float[Array, "parts D"]]:
    """The stream x + y, and the weighted sum of the experts of its norm, in parts that are to be added up.

    Args:
      x: stream, for which, with the experts, `check_supported` is None.
      y: what is added to it, in parts.
      norm: weight of the norm.
      router: rows that the norm is multiplied by for the scores, E or, with a gate of the shared expert, E + 1.
      bias: what is added to the scores' sigmoids to choose by; None with softmax.
      gate_up, down: weights of all experts.
      shared: both branches and the projection down of an expert that every row has.
      choice: how experts are chosen.
      eps: of the norm.
      ahead: arrays that the kernels after this one read first, see `device.ahead`.
      words: of the barrier, as for `grid_barrier.launch_stages`.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    assert config is not None
    (E, D, F2), like, f32 = gate_up.shape, jax.ShapeDtypeStruct, jnp.float32
    gate, up, shared_down = shared
    sizes = Sizes(D, F2 // 2, choice.per_token, gate.shape[1], E, router.shape[0])
    of_shared, of_chosen = sizes.branches(config)
    warps = makers(D, config.warpgroups) * WARPS
    width = D // warps
    fitting = _fitting(sizes, config, choice, gate_up.dtype)
    assert fitting is not None, f"{config} and {sizes} have more than {SMEM_LIMIT} bytes"
    memory = _memory(sizes, fitting, choice, gate_up.dtype)
    made = launch_stages(
        "routed_stream",
        functools.partial(
            _body, sizes=sizes, config=config, choice=choice, eps=eps, interpreted=interpret is not None
        ),
        3,
        inputs={
            "x": x.reshape(warps, width),
            "y": None if y is None else y.reshape(-1, warps, width),
            "w": norm.astype(f32).reshape(warps, width),
            "router": router.reshape(-1, warps, width),
            "bias": None if bias is None else bias.astype(f32),
            "gate_up": gate_up,
            "down": down,
            "gate": gate,
            "up": up,
            "shared_down": shared_down,
        },
        between={
            "h": like((of_chosen.parts, of_chosen.items * COLUMNS), f32),
            "g": like((of_shared.parts, of_shared.items * COLUMNS), f32),
        },
        outputs={
            "s": None if y is None else like((warps, width), x.dtype),
            "z": like((sizes.down(config)[1], D), f32),
        },
        published=sizes.scores,
        words=words,
        memory=memory,
        ahead=ahead,
        reduction_bytes=REDUCTION_BYTES,
        ctas=config.ctas,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
    return made["s"].reshape(x.shape) if y is not None else x, made["z"]
