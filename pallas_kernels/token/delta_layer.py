"""A layer of the delta rule for one token of one row in one kernel, from the stream to the output projection.

    s = x + y;   c = s (mean(s^2) + eps)^(-1/2) w W_in^T;   q, k and v of c pass through the convolution
    S <- Diag(exp(g)) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = K^(-1/2) q^T S
    y = sum_h y_h,   y_h = W_h (o_h (mean(o_h^2) + eps)^(-1/2) w_o f(z_h))

Two stages, `projections` and `heads`. Some CTAs share a head in both of them: they wait for each other by a barrier
in global memory, and for no CTA of another head. What the second stage reads of weights and states is on its way
before the barrier, so that memory does not stand still there.

Inputs (GMEM): x [1, D], y [P, D] or none, w [D]; W_in [F, D], whose rows lie as `heads.Places` says; filters
[C, taps] and bias [C] or none of q, k and v; A_log [H], dt_bias [H, K]; w_o [V]; output [E, H V]. In place (GMEM):
states of the convolution [1, C, taps - 1], and of the rule [1, H, K, V] float32. Outputs (GMEM): s [1, D] of x's
dtype, where there is y; y_h [H, E] of the output's dtype. Between the stages (GMEM): the channels [F] float32.
Grid: CTAs of four warpgroups, as many for each head, at most one on a multiprocessor: all are on the device at once.
Shared memory: that of both stages.
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

from gdn_jax.shapes import Convolution
from pallas_kernels.device.ahead import bring, rows_of
from pallas_kernels.device.grid_barrier import GridBarrier, barriers, most_ctas
from pallas_kernels.device.lanes import WARPS
from pallas_kernels.device.launch import NUM_SMS, compiled, grid_index, launch
from pallas_kernels.device.memory import REDUCTION_BYTES, SMEM_LIMIT, Memory, smem_bytes
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.token import heads, projections
from pallas_kernels.token.heads import WARPGROUPS, Head, Places, Rule, Share
from pallas_kernels.token.projections import CHUNK, CHUNKS, WIDEST, Projections

NEEDS = Needs.TMA

FEWEST_CTAS = NUM_SMS // 2
"""With fewer of them the kernels of today, which have CTAs on all multiprocessors, read faster."""

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def ctas_of_head(H: int, K: int, E: int, dtype: Any) -> int:
    """CTAs that share a head: the most that are on a device at once and have whole shares; 0 where there are none."""
    unit = heads.rows_at_once(K, dtype) * WARPGROUPS
    for n in (8, 4, 2, 1):
        is_whole = (
            E % (n * unit) == 0 and K % (n * heads.state_rows(K)) == 0 and K % (n * WARPGROUPS * WARPS) == 0
        )
        if is_whole and n * H <= most_ctas() and E // n // WARPGROUPS <= WIDEST:
            return n
    return 0


def _memory(D: int, K: int, E: int, ctas: int, dtype: Any) -> tuple[Memory, Memory]:
    """Shared memory of both stages."""
    return projections.memory(D, dtype), heads.memory(E // ctas // WARPGROUPS, K, dtype)


def check_supported(
    x: jax.ShapeDtypeStruct | jax.Array,
    weight: jax.ShapeDtypeStruct | jax.Array,
    convolution: Convolution,
    state: jax.ShapeDtypeStruct | jax.Array,
    output: jax.ShapeDtypeStruct | jax.Array,
    places: Places,
) -> str | None:
    """Why the kernel cannot take a stream [1, D], both matrices and the states; None if it can."""
    (N, H, K, V), D, E, dtype = state.shape, weight.shape[1], output.shape[0], weight.dtype
    if N != 1 or state.dtype != jnp.float32 or K != V or K not in (64, 128):
        return f"states {state.shape} of {state.dtype}; the kernel takes one row's of 64 or 128, float32"
    if x.shape != (1, D) or D % CHUNKS or D > CHUNKS * WARPGROUPS:
        return f"rows {x.shape} of {D}; the kernel takes one of a multiple of {CHUNKS}, up to {CHUNKS * WARPGROUPS}"
    if any(y not in DTYPES for y in (x.dtype, dtype, convolution.state.dtype)) or output.dtype != dtype:
        return f"{x.dtype}, {dtype}, {output.dtype}; the kernel takes float32, bfloat16 and float16, one for matrices"
    if convolution.filters.shape[0] != 3 * H * K or places[:3] != (0, H * K, 2 * H * K):
        return f"{convolution.filters.shape[0]} channels; the kernel filters those of {H} heads of q, k and v"
    if any(place % 8 for place in (places.decay, places.gate)) or output.shape[1] != H * V:
        return f"channels from {places.decay} and {places.gate}; the kernel takes multiples of 8"
    ctas = ctas_of_head(H, K, E, dtype)
    if ctas * H < FEWEST_CTAS:
        return (
            f"{H} heads of {K} and {E} outputs; the kernel takes whole shares of {FEWEST_CTAS} CTAs or more"
        )
    first, second = _memory(D, K, E, ctas, dtype)
    taken = smem_bytes({**first, **second}, REDUCTION_BYTES)
    return f"{taken} bytes of shared memory; a CTA has {SMEM_LIMIT}" if taken > SMEM_LIMIT else None


def _share(ctas: int) -> Share:
    number, n = grid_index(), jnp.int32(ctas)
    return Share(lax.div(number, n), lax.rem(number, n), ctas)


def _body(gmem: Any, smem: Any, *, places: Places, rule: Rule, ctas: int, eps: float) -> None:
    share, gmem.seen_state = _share(ctas), gmem.state
    barrier = GridBarrier(gmem.words.at[share.head], ctas, share.rank)
    then = Head(gmem, smem, share, places, rule)
    first = Projections(gmem, smem, share, places, then.K, eps, Device(False))
    first.run(then.ask_state, then.ask_weight)
    then.arrive(barrier)
    S = then.read()
    if gmem.ahead:
        all_ctas = ctas * gmem.state.shape[1]
        pl.when(then.wg == 0)(lambda: bring(gmem.ahead, all_ctas))
    then.meet(barrier)
    pl.when((share.rank == 0) & (then.wg == 0))(first.claims.forget)
    S = then.token(S)
    then.write(S)
    then.multiply()


def _first(gmem: Any, smem: Any, *, places: Places, ctas: int, width: int, eps: float) -> None:
    """The first stage alone, interpreted."""
    stage = Projections(gmem, smem, _share(ctas), places, width, eps, Device(True))
    stage.run(lambda: None, lambda: None)


def _second(gmem: Any, smem: Any, *, places: Places, rule: Rule, ctas: int) -> None:
    """The second stage alone, interpreted."""
    then = Head(gmem, smem, _share(ctas), places, rule)
    then.ask_state()
    then.ask_weight()
    then.arrive(None)
    S = then.read()
    then.meet(None)
    S = then.token(S)
    then.write(S)
    then.multiply()


def delta_layer(
    x: Float[Array, "1 D"],
    y: Float[Array, "P D"] | None,
    norm: Float[Array, " D"],
    weight: Float[Array, "F D"],
    convolution: Convolution,
    state: Float[Array, "1 H K V"],
    output_norm: Float[Array, " V"],
    output: Float[Array, "E G"],
    *,
    eps: float,
    A_log: Float[Array, " H"] | None,
    dt_bias: Float[Array, "H K"],
    places: Places,
    rule: Rule,
    ahead: Sequence[jax.Array] = (),
    interpret: Any = None,
) -> tuple[Float[Array, "1 D"], Float[Array, "H E"], Float[Array, "1 C W1"], Float[Array, "1 H K V"]]:
    """The stream x + y, the layer's output in parts, one for each head, and both states after the token.

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
      A_log: rate of each head; None for 0.
      dt_bias: bias of each channel.
      places: where the channels lie.
      rule: what is computed of them.
      ahead: arrays that the kernels after this one read first, see `device.ahead`.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    A_log = jnp.zeros(dt_bias.shape[:1], jnp.float32) if A_log is None else A_log
    # Of each head: the word of its barrier, and that of what its CTAs claim.
    words = jnp.asarray(barriers(state.shape[1], 2)) if interpret is None else None
    arrays = (
        x,
        y,
        norm,
        weight,
        convolution,
        state,
        output_norm,
        output,
        A_log,
        dt_bias,
        rows_of(ahead),
        words,
    )
    return compiled(_run, interpret, static=4)(eps, places, rule, interpret, *arrays)


def _run(
    eps, places, rule, interpret, x, y, norm, weight, convolution, state, w_o, output, A_log, dt_bias, *last
):
    ahead, words = last
    (_, H, K, _), (F, D), E, like = state.shape, weight.shape, output.shape[0], jax.ShapeDtypeStruct
    ctas, by_warps = ctas_of_head(H, K, E, weight.dtype), (D // CHUNK, CHUNK)
    inputs = {
        "x": x.reshape(by_warps),
        "y": None if y is None else y.reshape(-1, *by_warps),
        "w": norm.astype(jnp.float32).reshape(by_warps),
        "weight": weight.reshape(F, D // WIDEST, WIDEST),
        "filters": convolution.filters,
        "bias": convolution.bias,
    }
    of_heads = {"A_log": A_log, "dt_bias": dt_bias, "w_o": w_o, "output": output}
    outputs = {"s": None if y is None else like(by_warps, x.dtype), "channels": like((F,), jnp.float32)}
    parts = {"y_h": like((H, E), output.dtype)}
    first, second = _memory(D, K, E, ctas, weight.dtype)
    static: dict[str, Any] = {"places": places, "ctas": ctas}
    run = functools.partial(
        launch, auto_barriers=False, ctas=H * ctas, warpgroups=WARPGROUPS, interpret=interpret
    )
    if interpret is None:
        results = run(
            "delta_layer",
            functools.partial(_body, rule=rule, eps=eps, **static),
            inputs={**inputs, **of_heads, "words": words},
            outputs=outputs | parts,
            updated={"conv": convolution.state, "state": state},
            memory={**first, **second},
            ahead=ahead,
        )
    else:  # CTAs run one after the other: a kernel for each stage
        body = functools.partial(_first, eps=eps, width=K, **static)
        updated = {"conv": convolution.state}
        results = run("projections", body, inputs=inputs, outputs=outputs, updated=updated, memory=first)
        seen = {"channels": results["channels"], "seen_state": state}
        body = functools.partial(_second, rule=rule, **static)
        updated = {"state": state}
        results |= run("heads", body, inputs=of_heads | seen, outputs=parts, updated=updated, memory=second)
    s = x if y is None else results["s"].reshape(x.shape)
    return s, results["y_h"], results["conv"], results["state"]
