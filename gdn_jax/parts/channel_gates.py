"""Log decays of key channels by a kernel, whose result can be differentiated once, in reverse."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.gates import channel_log_decay
from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.parts.kernels import fused_op, run, token_axes, usable


def channel_gates(
    f: Float[Array, "B T H K"],
    A_log: Float[Array, " H"] | None,
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """`channel_log_decay`, by a kernel where there is one.

    Args:
      f, A_log, dt_bias, lower_bound: of `channel_log_decay`.
      implementation: None takes a kernel where there is one (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not. "mosaic_gpu" is None with a warning where there is none.

    Returns:
      g <= 0 [B, T, H, K], float32 (float64 when an argument is float64).
    """
    from pallas_kernels.layer import channel_gates as kernels

    if usable(implementation, kernels, part="the gate of each channel", reason=kernels.check_supported(f)):
        A_log = jnp.zeros(f.shape[2], dt_bias.dtype) if A_log is None else A_log
        names, sizes = _axes(f)
        operands = (names, *_of_heads(names))
        return on_explicit_shards(partial(_gates, lower_bound), (f, A_log, dt_bias), operands, names, sizes)
    return channel_log_decay(f, A_log, dt_bias, lower_bound)


def _axes(f) -> tuple[str, dict[str, int]]:
    from pallas_kernels.layer import channel_gates as kernels

    names, sizes = token_axes(f, kernels.rows_of(f.shape[-1]))
    return ("b t h .", sizes | {"h": f.shape[2]}) if sizes else (names, sizes)


def _of_heads(names: str) -> tuple[str, str]:
    """Names of the dimensions of A_log and of dt_bias."""
    return ("h", "h .") if "h" in names else (".", ". .")


def _forward(lower_bound, f, A_log, dt_bias):
    names, sizes = _axes(f)
    args, operands = (f, A_log, dt_bias), (names, *_of_heads(names))
    return run(_kernel, lower_bound, args, operands, names, sizes), args


def _backward(lower_bound, saved, dg):
    names, sizes = _axes(saved[0])
    A_log, dt_bias = _of_heads(names)
    results = (names, f"{A_log} +b +t", f"{dt_bias} +b +t")
    return run(_kernel_backward, lower_bound, (*saved, dg), (names, A_log, dt_bias, names), results, sizes)


def _kernel(lower_bound, f, A_log, dt_bias):
    from pallas_kernels.layer import channel_gates as kernels

    return kernels.channel_gates(_tokens(f), A_log, dt_bias, lower_bound=lower_bound).reshape(f.shape)


def _kernel_backward(lower_bound, f, A_log, dt_bias, dg):
    from pallas_kernels.layer import channel_gates as kernels

    args = (_tokens(f), A_log, dt_bias, _tokens(dg))
    df, dA_log, dbias = kernels.channel_gates_backward(*args, lower_bound=lower_bound)
    return df.reshape(f.shape), dA_log, dbias


def _tokens(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


_gates = fused_op(_forward, _backward)
