"""One token of every running request, from states in a pool to states in a pool."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax import ops
from gdn_jax.serving import kernels, ring, shards, slots
from gdn_jax.serving.arguments import (
    check_pool,
    check_scale,
    check_slots,
    choose,
    slot_count,
    state_shape,
    token_dims,
)
from gdn_jax.serving.pools import RingPool, check_ring
from gdn_jax.serving.slots import Address, Indices
from gdn_jax.serving.tokens import Options, Raw, by_row, prepare, step

Pool = Float[Array, "slots *state"] | RingPool


def decode(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    a: Float[Array, "B HO"],
    b: Float[Array, "B HO"],
    pool: Pool,
    *,
    A_log: Float[Array, " HO"],
    dt_bias: Float[Array, " HO"],
    read_slots: Indices,
    write_slots: Indices | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B HO V"], Pool]:
    """One token of every request: gates from a and b, the rule, and the new state into the pool, which is donated.

        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
        S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

    Args:
      q, k, v: queries [B, Hq, K], keys [B, Hk, K] and values [B, HV, V] of one floating dtype. Usually Hq = Hk and HO
        is HV; what `gated_delta_rule` says of heads holds here.
      a, b: raw inputs [B, HO] of the gates, any floating dtype. What the projections gave is best passed as it is:
        the gates are computed in float32.
      pool: states [slots, HO, K, V], or [slots, HO, V, K] with state_layout "vk", of any floating dtype; or a
        `RingPool`, whose states are written once in as many tokens as the ring is long.
      A_log, dt_bias: parameters of the decay [HO], see `log_decay`.
      read_slots: [B] integers, where the states are. -1 is padding: output 0, and nothing is read or written.
      write_slots: [B] integers, where the new states go; by default where they were. No slot twice. At -1 the output
        is computed and the state dropped. A `RingPool` gets the rings there too, with the token in them.
      scale: factor of the output, K ** -0.5 by default.
      use_qk_l2norm: replaces q and k by x * rsqrt(sum(x^2) + 1e-6), in float32.
      allow_neg_eigval: beta = 2 sigmoid(b).
      state_layout: "kv" or "vk".
      null_slot: a slot that is padding like -1, for servers that keep one free (vLLM and tpu-inference keep slot 0).
      layer: index of the second axis of a pool [slots, layers, HO, K, V] that serves a whole model.
      batch_invariant: a request's bits do not depend on the other requests of the call, nor on their number.
      implementation: "xla" (plain JAX) or "mosaic_gpu" (the kernels), run exactly or refused. None takes the
        kernels where they can run, else plain JAX.

    Returns:
      o [B, HO, V] in v's dtype, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came. Slots that lie outside the pool or
        are written twice are reported where they are known (NumPy arrays), others with `debug_checks` on; without it,
        a slot outside the pool is padding.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: gates, norms, states and sums in float32 (float64 when an argument is), rounded once on the way out.
    Source: FlashInfer's `gated_delta_rule_decode_pretranspose`, vLLM's `fused_recurrent_gated_delta_rule`.
    """
    raw = Raw(q, k, v, a, b, A_log, dt_bias)
    return decode_raw(
        raw,
        pool,
        None,
        read_slots=read_slots,
        write_slots=write_slots,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        allow_neg_eigval=allow_neg_eigval,
        state_layout=state_layout,
        null_slot=null_slot,
        layer=layer,
        batch_invariant=batch_invariant,
        implementation=implementation,
    )


def decode_raw(
    raw: Raw,
    pool: Pool,
    qkv: Float[Array, "B D"] | None,
    *,
    read_slots: Indices,
    write_slots: Indices | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B HO V"], Pool]:
    """`decode`, of q, k and v that may be parts of one array.

    Args:
      raw: the tokens and the parameters of the gates.
      qkv: the array of which raw.q, raw.k and raw.v are the channels, one behind the other. A kernel then reads them
        there, and raw's are never made.
    """
    q, k, v, a, b, A_log, dt_bias = raw
    dims = token_dims(q, k, v, a, b, A_log, dt_bias, letters="B", state_layout=state_layout)
    states = pool.state if isinstance(pool, RingPool) else pool
    check_pool(states, *state_shape(dims, state_layout), layer)
    if isinstance(pool, RingPool):
        check_ring(pool, dims, layer)
    size = slot_count(pool)
    check_slots(
        "read_slots", read_slots, (dims.B,), "B", size, null_slot=null_slot, unique=write_slots is None
    )
    if write_slots is not None:
        check_slots("write_slots", write_slots, (dims.B,), "B", size, null_slot=null_slot, unique=True)
    no_kernel = partial(kernels.unsupported, raw, pool)
    options = Options(
        dims,
        check_scale(scale, dims),
        use_qk_l2norm,
        allow_neg_eigval,
        state_layout,
        null_slot,
        batch_invariant,
        choose(implementation, no_kernel),
    )
    if ops.debug_checks_are_on():
        shards.warn_of_gathered(pool, raw)
    read = jnp.asarray(read_slots)
    write = None if write_slots is None else jnp.asarray(write_slots)
    return _decode(pool, raw, qkv, read, write, layer, options)


@partial(jax.jit, static_argnums=6, donate_argnums=0, inline=True)
def _decode(pool, raw: Raw, qkv, read_slots, write_slots, layer, options: Options):
    whole = qkv is not None and not isinstance(pool, RingPool) and not shards.is_split(pool, raw)
    if whole and options.implementation == "mosaic_gpu":
        return kernels.decode(pool, raw, read_slots, write_slots, layer, options, qkv)
    return shards.serve(_decode_on_shard, options, pool, raw, read_slots, write_slots, layer)


def _decode_on_shard(options: Options, pool, raw: Raw, read_slots, write_slots, layer):
    by_kernels = options.implementation == "mosaic_gpu"
    if by_kernels and not isinstance(pool, RingPool):
        return kernels.decode(pool, raw, read_slots, write_slots, layer, options)
    read, write = slots.addresses(pool, read_slots, write_slots, options.null_slot, layer)
    if isinstance(pool, RingPool):
        if write_slots is not None:
            return _decode_copies(pool, raw, read, write, options)
        if by_kernels:
            return kernels.decode_on_ring(pool, raw, read_slots, layer, options)
        o, pool = ring.decode(pool, raw, read, options)
    else:
        o, pool = _plain(pool, raw, read, write, options)
    return jnp.where(read.is_slot[:, None, None], o, 0).astype(raw.v.dtype), pool


def _decode_copies(pool: RingPool, raw: Raw, read: Address, write: Address, options: Options):
    """The token on copies of the slots that are read, which then go where they are to be written.

    So all is read before any is written, a slot may be read twice, and a request that is written nowhere has a place.
    """
    rows = jnp.where(read.is_slot, jnp.arange(options.dims.B, dtype=jnp.int32), slots.BEYOND)
    copies = slots.take(pool, read)
    o, copies = _decode_on_shard(options._replace(null_slot=None), copies, raw, rows, None, None)
    return o, slots.put(pool, write, copies)


def _plain(pool, raw, read, write, options):
    tokens = prepare(raw, pool, options)
    h = options.swap(slots.take(pool, read).astype(tokens.g.dtype))
    h, o = by_row(partial(step, options=options), options, h, tokens)
    return o, slots.put(pool, write, options.swap(h))
