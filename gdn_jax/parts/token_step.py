"""One token of every row by the rule's kernel, on states that it changes in place."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.parts.kernels import run, token_op, usable


def takes(q, k, v, a, b, A_log, dt_bias, state, implementation: str | None) -> bool:
    """Whether the kernel takes a call of `token_step`, from its arrays or their shapes.

    Args:
      implementation: None takes the kernel where it can run (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not.
    """
    from pallas_kernels.decode import step

    if any(x.dtype == jnp.float64 for x in (q, k, v, a, b, A_log, dt_bias)):
        return False
    reason = step.check_supported(q, k, v, state)
    return usable(implementation, step, part="the step of a token", reason=reason)


def token_step(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    a: Float[Array, "B HV"],
    b: Float[Array, "B HV"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    state: Float[Array, "B HV K V"],
    *,
    allow_neg_eigval: bool = False,
) -> tuple[Float[Array, "B HV V"], Float[Array, "B HV K V"]]:
    """One token of every row by the kernel: norms, gates, the rule and the new state in one pass over the state.

        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b);   q and k to unit length
        S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = K^(-1/2) q^T S

    A loop that carries the state has it changed where it lies; elsewhere XLA copies it.

    Args:
      q, k, v: queries, keys and values of any length, for which `takes` is true.
      a, b: raw inputs of the gates.
      A_log, dt_bias: parameters of the decay.
      state: the states before the token.
      allow_neg_eigval: beta = 2 sigmoid(b).

    Returns:
      o in v's dtype, and the states after the token in the state's dtype. Numerics: all in float32, rounded once.
    """
    args = (q, k, v, a, b, A_log, dt_bias, state)
    return on_explicit_shards(partial(_token_step, allow_neg_eigval), args, _OPERANDS, _RESULTS, _sizes(args))


_OPERANDS = ("b h .", "b h .", "b h .", "b h", "b h", "h", "h", "b h . .")
_RESULTS = ("b h .", "b h . .")


def _sizes(args) -> dict[str, int]:
    """Rows, and heads of q and k where they have as many."""
    (B, Hq, _), (_, Hk, _) = args[0].shape, args[1].shape
    return {"b": B, "h": Hq} if Hq == Hk else {"b": B}


@token_op
def _token_step(allow_neg_eigval: bool, *args):
    return run(_by_kernel, allow_neg_eigval, args, _OPERANDS, _RESULTS, _sizes(args))


def _by_kernel(allow_neg_eigval: bool, q, k, v, a, b, A_log, dt_bias, state):
    from pallas_kernels.decode.step import step

    options: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "allow_neg_eigval": allow_neg_eigval}
    options |= {"read_slots": None, "write_slots": None, "scale": q.shape[-1] ** -0.5}
    o, state = step(*(x[:, None] for x in (q, k, v, a, b)), pool=state, **options)
    return o[:, 0], state
