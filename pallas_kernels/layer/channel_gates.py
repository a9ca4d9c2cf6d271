"""Log decays of the key channels from what a layer projects to them, and their derivative, each in one pass.

    g = -exp(A_log) softplus(f + dt_bias),   or   g = lower_bound sigmoid(exp(A_log) (f + dt_bias))
    df = dg slope,   d dt_bias = sum of df,   d A_log = sum of dg slope for A_log          sums over tokens

Inputs (GMEM): f [N, H, K]; dg [N, H, K] float32; dt_bias [H, K] and A_log [H] float32.
Outputs (GMEM): g [N, H, K] float32; df of f's dtype; the sums that each CTA made, [CTAs, rows, K] float32, which are
added in a fixed order.
Grid: as many CTAs of one warpgroup as run at once, the same number for each head, each of which walks over blocks of
its head's rows. No shared memory.
Numerics: float32 inside, see `device.gates`. Hardware: `NEEDS`. Limits: `check_supported`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.device.gates import log_decay_slopes, log_decays
from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch, num_sms
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r

NEEDS = Needs.NOTHING

BLOCK = 1024
"""Numbers of a block: 8 a thread."""

CTAS_PER_SM = 12


def check_supported(f: Shaped) -> str | None:
    """Why the kernels cannot take [B, T, H, K]; None if they can."""
    K = f.shape[-1]
    if f.dtype not in (jnp.bfloat16, jnp.float16):
        return f"f is {jnp.dtype(f.dtype).name}; the kernel takes bfloat16 and float16"
    if K not in (32, 64, 128, 256):
        return f"K = {K}; the kernel takes 32, 64, 128 and 256"
    tokens, rows = f.size // (K * f.shape[-2]) if f.size else 0, rows_of(K)
    if not tokens or tokens % rows:
        return f"{tokens} tokens; the kernel takes a multiple of {rows}"
    return None


def rows_of(K: int) -> int:
    """Tokens of a block."""
    return BLOCK // K


def _parts(N: int, H: int, K: int) -> int:
    """CTAs of a head."""
    return min(N // rows_of(K), max(1, num_sms() * CTAS_PER_SM // H))


def _walk(gmem: Any, body: Any, carry: Any) -> Any:
    """carry = body(part, A_log, dt_bias, carry) for every block of this CTA; part(ref): the block's in an array."""
    N, H, K = gmem.f.shape
    rows, parts = rows_of(K), _parts(N, H, K)
    head, part = lax.rem(grid_index(), H), lax.div(grid_index(), H)
    bias, A_log = r.load_along(gmem.dt_bias.at[head], rows), gmem.A_log[head]

    def block(i, carry):
        first = (part + i * parts) * rows
        return body(lambda ref: ref.at[pl.ds(first, rows), head], A_log, bias, carry)

    return lax.fori_loop(0, (N // rows - part + parts - 1) // parts, block, carry)


def _forward(gmem: Any, smem: Any, *, lower_bound: float | None) -> None:
    def block(part, A_log, bias, carry):
        store_any(part(gmem.g), log_decays(_load(part(gmem.f)) + bias, A_log, lower_bound))
        return carry

    _walk(gmem, block, ())


def _backward(gmem: Any, smem: Any, *, lower_bound: float | None) -> None:
    K = gmem.f.shape[-1]

    def block(part, A_log, bias, carry):
        x, dg = _load(part(gmem.f)) + bias, _load(part(gmem.dg))
        of_x, of_A_log = log_decay_slopes(x, A_log, lower_bound)
        dx = dg * of_x
        store_any(part(gmem.df), dx.astype(gmem.df.dtype))
        return carry[0] + dx, carry[1] + dg * of_A_log

    sums = _walk(gmem, block, (r.zeros(K, rows_of(K)), r.zeros(K, rows_of(K))))
    for out, total in zip((gmem.dbias, gmem.dA_log), sums, strict=True):
        r.store(out.at[grid_index()], 0, total)


def _load(ref: Any) -> jax.Array:
    return r.load_whole(ref).astype(jnp.float32)


@kernel("lower_bound")
def channel_gates(
    f: Float[Array, "N H K"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    *,
    lower_bound: float | None,
    interpret: Any = None,
) -> Float[Array, "N H K"]:
    """The log decays, in float32.

    Args:
      f: of all tokens, which `check_supported` accepts.
      A_log, dt_bias: of any floating dtype.
      lower_bound: the strongest log decay, below 0; None: the first form.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    return launch(
        "log_decays",
        functools.partial(_forward, lower_bound=lower_bound),
        inputs=_inputs(f, A_log, dt_bias),
        outputs={"g": jax.ShapeDtypeStruct(f.shape, jnp.float32)},
        ctas=f.shape[1] * _parts(*f.shape),
        interpret=interpret,
    )["g"]


def _inputs(f, A_log, dt_bias):
    return {"f": f, "A_log": A_log.astype(jnp.float32), "dt_bias": dt_bias.astype(jnp.float32)}


@kernel("lower_bound")
def channel_gates_backward(
    f: Float[Array, "N H K"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    dg: Float[Array, "N H K"],
    *,
    lower_bound: float | None,
    interpret: Any = None,
) -> tuple[Float[Array, "N H K"], Float[Array, " H"], Float[Array, "H K"]]:
    """Gradients of <dg, channel_gates(f)>: df in f's dtype, dA_log and d dt_bias in float32."""
    (_, H, K), parts = f.shape, _parts(*f.shape)
    sums = jax.ShapeDtypeStruct((parts * H, rows_of(K), K), jnp.float32)
    results = launch(
        "log_decays_backward",
        functools.partial(_backward, lower_bound=lower_bound),
        inputs=_inputs(f, A_log, dt_bias) | {"dg": dg},
        outputs={"df": jax.ShapeDtypeStruct(f.shape, f.dtype), "dbias": sums, "dA_log": sums},
        ctas=parts * H,
        interpret=interpret,
    )
    dbias, dA_log = (results[name].reshape(parts, H, -1, K) for name in ("dbias", "dA_log"))
    return results["df"], dA_log.sum((0, 2, 3)), dbias.sum((0, 2))
