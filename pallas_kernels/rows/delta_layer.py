"""A layer of the delta rule for one token of one row in one kernel, from the stream to the output projection.

    s = x + y;   c = s (mean(s^2) + eps)^(-1/2) w W_in^T;   q, k and v of c pass through the convolution
    S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = K^(-1/2) q^T S
    y = sum_h y_h,   y_h = W_h (o_h (mean(o_h^2) + eps)^(-1/2) w_o f(z_h))

The log decay g is a number of each value head, or one of each of its key channels: `delta_decays`. A key head may
have several value heads, R of them.

Two stages, `delta_projections` and `delta_heads`. Some CTAs share a key head in both of them: they wait for each
other by a barrier in global memory, and for no CTA of another head. What the second stage reads of weights and states
is on its way before the barrier, so that memory does not stand still there. How many CTAs there are and who makes
what is a `delta_plan`; where arrays lie in shared memory is the plan's room, `delta_rooms`.

Inputs (GMEM): x [1, D], y [P, D] or none, w [D]; W_in [F, D], whose rows lie as `delta_heads.Places` says; filters
[C, taps] and bias [C] or none of q, k and v; A_log [HV], dt_bias [HV] or [HV, K]; w_o [V]; output [E, HV V]. In place
(GMEM): states of the convolution [1, C, taps - 1], and of the rule [1, HV, K, V] float32. Outputs (GMEM): s [1, D] of
x's dtype, where there is y; y_h [HV, E] of the output's dtype. Between the stages (GMEM): the channels [F] float32.
Grid: CTAs of four warpgroups, as many for each head, at most one on a multiprocessor: all are on the device at once.
Shared memory: `Room.memory`.
Numerics: float32; what passes through the convolution is rounded before it. The same bits in every call.
Hardware: `NEEDS`. Limits: `check_supported`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from gdn_jax.shapes import Convolution, LayerScales
from pallas_kernels.device.ahead import bring, rows_of
from pallas_kernels.device.grid_barrier import HEADS, GridBarrier, new_words
from pallas_kernels.device.launch import NUM_SMS, Shaped, grid_index, kernel, launch
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.rows import stream
from pallas_kernels.rows.delta_decays import Decay
from pallas_kernels.rows.delta_heads import Head, Places, Rule, Share
from pallas_kernels.rows.delta_plan import Plan, plan_of
from pallas_kernels.rows.delta_projections import Alone, Projections
from pallas_kernels.rows.delta_rooms import WARPGROUPS, WIDEST

NEEDS = Needs.TMA | Needs.LARGE

FEWEST_CTAS = NUM_SMS // 2
"""With fewer of them the kernels of today, which have CTAs on all multiprocessors, read faster."""


def _plan(
    weight: Any, scales: LayerScales | None, state: Any, output: Any, places: Places, decay: Decay
) -> Plan | str:
    """The plan of a call, or why there is none."""
    (_, HV, K, _), H = state.shape, places.k // state.shape[2]
    dtypes = weight.dtype, (weight if scales is None else scales.narrow).dtype
    return plan_of(H, HV // H, K, weight.shape[1], output.shape[0], dtypes, decay)


def check_supported(
    x: Shaped,
    weight: Shaped,
    convolution: Convolution,
    state: Shaped,
    output: Shaped,
    places: Places,
    decay: Decay,
    scales: LayerScales | None = None,
) -> str | None:
    """Why the kernel cannot take a stream [1, D], both matrices and the states; None if it can."""
    (N, HV, K, V), D, keys = state.shape, weight.shape[1], places.k
    dtype = (weight if scales is None else scales.narrow).dtype
    if N != 1 or state.dtype != jnp.float32 or K != V or K not in (64, 128):
        return f"states {state.shape} of {state.dtype}; the kernel takes one row's of 64 or 128, float32"
    if x.shape != (1, D):
        return f"rows {x.shape}; the kernel takes one of {D}"
    matrix = dtype if scales is None else jnp.float8_e4m3fn
    other = any(y not in stream.DTYPES for y in (x.dtype, dtype, convolution.state.dtype))
    if other or weight.dtype != matrix or output.dtype != matrix:
        found = f"{x.dtype}, {dtype}, {weight.dtype}, {output.dtype}"
        return (
            f"{found}; the kernel takes float32, bfloat16 and float16, one for matrices, or E4M3 with scales"
        )
    if not keys or keys % K or HV % (keys // K):
        return (
            f"{HV} heads of v and {keys} channels of k; the kernel takes whole heads, v's a multiple of k's"
        )
    if convolution.filters.shape[0] != 2 * keys + HV * V or places[:3] != (0, keys, 2 * keys):
        return f"{convolution.filters.shape[0]} channels; the kernel filters those of q, k and v, of {HV} heads of v"
    if any(place % 8 for place in (places.decay, places.gate)) or output.shape[1] != HV * V:
        return f"channels from {places.decay} and {places.gate}; the kernel takes multiples of 8"
    if scales is not None and (places.gate % K or weight.shape[0] % K):
        return f"{weight.shape[0]} channels of codes, gates from {places.gate}; the kernel takes whole heads"
    plan = _plan(weight, scales, state, output, places, decay)
    if isinstance(plan, str):
        return plan
    return f"{plan.ctas} CTAs; the kernel takes {FEWEST_CTAS} or more" if plan.ctas < FEWEST_CTAS else None


def _share(plan: Plan) -> Share:
    number, n = grid_index(), jnp.int32(plan.n)
    key, rank = lax.div(number, n), lax.rem(number, n)
    if plan.R == 1:
        return Share(key, rank, key, rank)
    m = jnp.int32(plan.m)
    return Share(key, rank, key * plan.R + lax.div(rank, m), lax.rem(rank, m))


def _body(gmem: Any, smem: Any, *, places: Places, rule: Rule, plan: Plan, eps: float) -> None:
    share, gmem.seen_state = _share(plan), gmem.state
    gmem.words = gmem.words.at[pl.ds(HEADS, plan.H)]
    barrier = GridBarrier(gmem.words.at[share.key], plan.n, share.rank)
    then = Head(gmem, smem, share, places, rule, plan)
    first = Projections(gmem, smem, share, places, plan, eps, Device(False))
    first.run(then)
    then.arrive(barrier)
    S = then.read()
    if gmem.ahead:
        pl.when(then.wg == 0)(lambda: bring(gmem.ahead, plan.ctas))
    then.meet(barrier)
    if plan.claimable:
        pl.when((share.rank == 0) & (then.wg == 0))(first.claims.forget)
    S = then.token(S)
    then.write(S)
    then.multiply()


def _first(gmem: Any, smem: Any, *, places: Places, plan: Plan, eps: float) -> None:
    """The first stage alone, interpreted."""
    Projections(gmem, smem, _share(plan), places, plan, eps, Device(True)).run(Alone())


def _second(gmem: Any, smem: Any, *, places: Places, rule: Rule, plan: Plan) -> None:
    """The second stage alone, interpreted."""
    then = Head(gmem, smem, _share(plan), places, rule, plan)
    then.ask_state()
    for i in range(plan.room.pieces):
        then.ask_rows(i)
    then.arrive(None)
    S = then.read()
    then.meet(None)
    S = then.token(S)
    then.write(S)
    then.multiply()


def _chosen(x: Any) -> dict[str, Any]:
    """The plan of a call that has none, and what the kernel brings nearer."""
    plan = x.plan or _plan(x.weight, x.scales, x.state, x.output, x.places, x.rule.decay)
    return dict(plan=plan, ahead=rows_of(x.ahead))


@kernel("eps", "places", "rule", "plan", chosen=_chosen)
def delta_layer(
    x: Float[Array, "1 D"],
    y: Float[Array, "P D"] | None,
    norm: Float[Array, " D"],
    weight: Float[Array, "F D"],
    convolution: Convolution,
    state: Float[Array, "1 HV K V"],
    output_norm: Float[Array, " V"],
    output: Float[Array, "E G"],
    *,
    eps: float,
    A_log: Float[Array, " HV"] | None,
    dt_bias: Float[Array, "HV *K"],
    places: Places,
    rule: Rule,
    scales: LayerScales | None = None,
    plan: Plan | None = None,
    ahead: Sequence[jax.Array] = (),
    words: Any = None,
    interpret: Any = None,
) -> tuple[Float[Array, "1 D"], Float[Array, "HV E"], Float[Array, "1 C W1"], Float[Array, "1 HV K V"]]:
    """The stream x + y, the layer's output in parts, one for each value head, and both states after the token.

    The states are updated in place where they are donated to the compiled function around this call; else XLA copies
    them.

    Args:
      x: stream.
      y: what is added to it, in parts; None: nothing.
      norm: weight of its norm.
      weight, convolution, state, output: projections of the norm, short convolution, states of the rule, and output
        projection, that `check_supported` accepts.
      output_norm: weight of the gated norm.
      eps: of the norm of the stream.
      A_log: rate of each value head; None for 0.
      dt_bias: bias of each value head, or of each of its key channels, as the rule's decay has it.
      places: where the channels lie.
      rule: what is computed of them.
      scales: what belongs to matrices of codes of E4M3; None: matrices are numbers. Channels of the narrow
        projections come after those of the codes.
      plan: how the work is divided; None: by `plan_of`.
      ahead: arrays that the kernels after this one read first, see `device.ahead`.
      words: of the barriers, as for `grid_barrier.launch_stages`; those of a key head are its barrier's and that of
        what its CTAs claim.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    assert isinstance(plan, Plan), plan
    A_log = jnp.zeros(dt_bias.shape[:1], jnp.float32) if A_log is None else A_log
    (F, D), like, room = weight.shape, jax.ShapeDtypeStruct, plan.room
    pieces, of_stream = (D // WIDEST, WIDEST), stream.inputs(x, y, norm)
    of_inputs, of_output, narrow = (None, None, None) if scales is None else scales
    channels = F if narrow is None else F + len(narrow)
    inputs = {
        **of_stream,
        "weight": weight.reshape(F, *pieces),
        "scales": of_inputs,
        "narrow": None if narrow is None else narrow.reshape(-1, *pieces),
        "filters": convolution.filters,
        "bias": convolution.bias,
    }
    of_heads = {
        "A_log": A_log,
        "dt_bias": dt_bias,
        "w_o": output_norm,
        "output": output,
        "output_scales": of_output,
    }
    outputs = {
        "s": None if y is None else like(of_stream["x"].shape, x.dtype),
        "channels": like((channels,), jnp.float32),
    }
    parts = {"y_h": like((plan.H * plan.R, plan.E), plan.results)}
    static: dict[str, Any] = {"places": places, "plan": plan}
    run = functools.partial(
        launch,
        ctas=plan.ctas,
        warpgroups=WARPGROUPS,
        reduction_bytes=room.reduction_bytes,
        interpret=interpret,
    )
    if interpret is None:
        results = run(
            "delta_layer",
            functools.partial(_body, rule=rule, eps=eps, **static),
            inputs={**inputs, **of_heads},
            outputs=outputs | parts,
            updated={"conv": convolution.state, "state": state},
            kept={"words": new_words() if words is None else words},
            memory={**room.memory(plan), **plan.weights.memory(plan)},
            ahead=ahead,
        )
    else:  # CTAs run one after the other: a kernel for each stage
        body = functools.partial(_first, eps=eps, **static)
        updated, memory = {"conv": convolution.state}, {**room.first(plan), **plan.weights.memory(plan)}
        results = run("projections", body, inputs=inputs, outputs=outputs, updated=updated, memory=memory)
        seen = {"channels": results["channels"], "seen_state": state}
        body = functools.partial(_second, rule=rule, **static)
        updated, memory = {"state": state}, room.second(plan)
        results |= run("heads", body, inputs=of_heads | seen, outputs=parts, updated=updated, memory=memory)
    s = x if y is None else results["s"].reshape(x.shape)
    return s, results["y_h"], results["conv"], results["state"]
