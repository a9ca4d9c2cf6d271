"""One token of every running request, from states in a pool to states in a pool."""

from typing import Any

from jaxtyping import Array, Float

from gdn_jax.serving.call import At, Call
from gdn_jax.serving.pools import Arrays, opened, serve
from gdn_jax.serving.slots import Indices
from gdn_jax.serving.tokens import Raw


def decode(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    a: Float[Array, "B HO"],
    b: Float[Array, "B HO"],
    pool: Arrays,
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
) -> tuple[Float[Array, "B HO V"], Arrays]:
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
    call = Call(scale, use_qk_l2norm, allow_neg_eigval, batch_invariant, implementation)
    memory, at = opened(pool, state_layout, null_slot), At(read_slots, write_slots, layer)
    return serve("decode", call, Raw(q, k, v, a, b, A_log, dt_bias), memory, at)
