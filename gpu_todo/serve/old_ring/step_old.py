"""A few tokens of every running request, each state read once from its slot of a pool and written back in place.

    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
    S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

With T = 1 this is decoding. With more tokens it is verification of drafts: the state after token t goes to a slot of
its own, and stays in float32 between the tokens.

Inputs (GMEM): q [N, T, Hq, K], k [N, T, Hk, K], v [N, T, HV, V] bfloat16, float16 or float32; a, b [N, T, HV] of any
floating dtype; A_log, dt_bias [HV]; read_slots [N], write_slots [N, T] int32; optionally num_tokens [N] int32.
In place (GMEM): pool [slots, HV, K, V], or [slots, HV, V, K], float32 or bfloat16; with an axis of layers after the
first in a pool that serves a whole model.
Outputs (GMEM): o [N, T, HV, V] in v's dtype.
Grid: a warpgroup for each (row, value head, tile of `block` entries of V), by itself. It holds its tile in registers:
the bytes in flight are those of all the warpgroups that fit on an SM.
Numerics: gates, norms, sums and states in float32, rounded once where they are stored. The order of every sum depends
on K, V, and the pool's dtype and layout, not on N: a request's bits do not depend on its neighbours.
Hardware: compute capability 9.0. Limits: K <= 256; K and V multiples of 32; HV a multiple of Hq and Hk.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from old_ring.tiles_old import (
    GRANULE,
    Rule,
    Tile,
    load,
    log_decay,
    write_strength,
)
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.memory import store_any
from pallas_kernels.work.slots import one_for_all_layers

MAX_K = 256
"""The registers of a warpgroup hold tiles of at most this many entries of K."""

MAX_TILE = 128 * 128
"""Entries of a tile by default: registers do not hold a larger one in float32."""

POOL_DTYPES = ("float32", "bfloat16")
"""Of the states in a pool."""

REDUCTION_BYTES = 4096
"""Shared memory for sums over warps."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs, not what it computes."""

    block: int
    """Entries of V in a tile."""
    across: bool = False
    """Whether warps lie beside each other along V, with states [K, V]: sums over K then need no other warp."""

    @classmethod
    def default(cls, K: int, V: int, pool_dtype: Any, kv_layout: bool) -> "Config":
        """What was fastest on an H200 with K = V = 128 (docs/log/decode.md), where V and registers allow it."""
        is_half, most = jnp.dtype(pool_dtype).itemsize == 2, 32
        if kv_layout:
            most = 128 if is_half else 64
        block = next(n for n in (128, 64, GRANULE) if n <= most and V % n == 0 and K * n <= MAX_TILE)
        return cls(block, across=kv_layout and is_half)


def check_supported(q, k, v, pool) -> str | None:
    """Why the kernel cannot take a call, from its arrays or their shapes; None if it can."""
    (Hq, K), (Hk, _), (HV, V) = q.shape[-2:], k.shape[-2:], v.shape[-2:]
    if jnp.dtype(pool.dtype).name not in POOL_DTYPES:
        return f"the pool is {jnp.dtype(pool.dtype).name}; the kernel takes {' and '.join(POOL_DTYPES)}"
    if not q.dtype == k.dtype == v.dtype or jnp.dtype(q.dtype).itemsize > 4:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; the kernel takes one dtype of at most 32 bits"
    if K % GRANULE or V % GRANULE or not 0 < K <= MAX_K:
        return f"K = {K}, V = {V}; the kernel takes multiples of {GRANULE}, K up to {MAX_K}"
    if HV % Hq or HV % Hk:
        return f"{HV} value heads, {Hq} and {Hk} of q and k; the kernel takes whole groups of value heads"
    if pool.shape[-3] != HV:
        return f"the pool is {pool.shape}; the kernel takes as many states as value heads, {HV}"
    if not v.shape[0] or not pool.shape[0]:
        return "there are no requests, or no slots"
    return None


def _body(gmem: Any, _: Any, *, rule: Rule, config: Config, T: int) -> None:
    itemsize = gmem.pool.dtype.itemsize
    tile = Tile(rule, config.block, itemsize, config.across)
    row, head, entries = tile.where(grid_index())
    q_head, k_head = lax.div(head, rule.HV // rule.Hq), lax.div(head, rule.HV // rule.Hk)
    slot = row if gmem.read_slots is None else gmem.read_slots[row]
    count = T if gmem.num_tokens is None else jnp.clip(gmem.num_tokens[row], 0, T)

    def vectors(t):
        return tile.vectors(
            gmem.q.at[row, t, q_head], gmem.k.at[row, t, k_head], gmem.v.at[row, t, head, entries]
        )

    def store_o(t, o):
        store_any(gmem.o.at[row, t, head, entries], o.astype(gmem.o.dtype))

    def token(t, carry):
        S, x = carry
        # The next token's vectors are on their way while this one is worked on.
        following = vectors(jnp.minimum(t + 1, T - 1)) if T > 1 else x
        write = row if gmem.write_slots is None else gmem.write_slots[row, t]
        alpha = jnp.exp(log_decay(gmem.a[row, t, head], gmem.A_log[head], gmem.dt_bias[head]))
        beta = write_strength(gmem.b[row, t, head], rule.allow_neg_eigval)
        S, o = tile.token(S, x, alpha, beta)
        store_o(t, o)

        @pl.when(rule.is_slot(write))
        def _():
            store_any(
                tile.state(gmem.pool, rule.place(write, gmem.layer), head, entries), S.astype(gmem.pool.dtype)
            )

        return S, following

    first = vectors(0)

    @pl.when(rule.is_slot(slot))
    def _():
        S = load(tile.state(gmem.pool, rule.place(slot, gmem.layer), head, entries), tile.layout)
        if T == 1 and gmem.num_tokens is None:
            token(0, (S, first))
        else:
            lax.fori_loop(0, count, token, (S.astype(jnp.float32), first))

    # Padding tokens, or a padding row.
    padding_from = jnp.where(rule.is_slot(slot), count, 0)
    lax.fori_loop(padding_from, T, lambda t, _: store_o(t, tile.zeros()), None)


def step(
    q: Float[Array, "N T Hq K"],
    k: Float[Array, "N T Hk K"],
    v: Float[Array, "N T HV V"],
    a: Float[Array, "N T HV"],
    b: Float[Array, "N T HV"],
    pool: Float[Array, "slots *layers HV rows columns"],
    *,
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    read_slots: Int[Array, " N"] | None,
    write_slots: Int[Array, "N T"] | None,
    num_tokens: Int[Array, " N"] | None = None,
    scale: float,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    kv_layout: bool = True,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    config: Config | None = None,
    interpret=None,
) -> tuple[Float[Array, "N T HV V"], Float[Array, "slots *layers HV rows columns"]]:
    """T tokens of N requests, and the pool with the states after them; all other slots keep their bits.

    The pool is updated in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      q, k, v, a, b, pool: inputs that `check_supported` accepts.
      A_log, dt_bias: parameters of the decay.
      read_slots: where each request's state is. One that is negative, past the pool or null_slot is padding: its
        output is 0, and nothing is read or written. None: that of request i is in slot i.
      write_slots: where the state after each token goes; padding: it is dropped. No slot twice, and none that another
        request reads. None, for one token: where the states were in the absence of read_slots.
      num_tokens: tokens that each request has; the others are padding. None for all.
      scale: factor of the output.
      use_qk_l2norm: whether q and k are normalised.
      allow_neg_eigval: beta = 2 sigmoid(b).
      kv_layout: whether states are [K, V]; else [V, K].
      null_slot: a slot that is padding too.
      layer: index of the second axis of a pool that serves a whole model.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    N, T, Hq, K = q.shape
    HV, V = v.shape[2:]
    slots, layers = pool.shape[0], 1 if layer is None else pool.shape[1]
    norm, span = (use_qk_l2norm, allow_neg_eigval), (slots, null_slot, layers)
    rule = Rule(Hq, k.shape[2], HV, K, V, scale, *norm, kv_layout, *span)
    config = config or Config.default(K, V, pool.dtype, kv_layout)
    in_place = jax.new_ref(one_for_all_layers(pool, layer))
    results = launch(
        "decode_step",
        functools.partial(_body, rule=rule, config=config, T=T),
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "a": a,
            "b": b,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "read_slots": read_slots,
            "write_slots": write_slots,
            "num_tokens": num_tokens,
            "layer": layer if layer is None else jnp.asarray(layer, jnp.int32)[None],
            "pool": in_place,
        },
        outputs={"o": jax.ShapeDtypeStruct(v.shape, v.dtype)},
        memory={},
        ctas=N * HV * (V // config.block),
        auto_barriers=False,
        reduction_bytes=REDUCTION_BYTES,
        interpret=interpret,
    )
    return results["o"], jax.freeze(in_place).reshape(pool.shape)
