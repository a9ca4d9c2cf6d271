"""Notation, array types and boundary checks. This module is a leaf: it imports no other module of the project.

Dimensions (upper case everywhere, in names, docstrings and jaxtyping strings):

    B     batch                                  T     tokens of a row
    N     sequences (B, or len(cu_seqlens) - 1)  C     tokens of a chunk
    Hq    query heads                            Hk    key heads
    HV    value heads                            HO    state, gate and output heads, max(Hq, HV)
    K     width of a key (and query)             V     width of a value (and output)

Arrays:

    q k v   queries [B, T, Hq, K], keys [B, T, Hk, K], values [B, T, HV, V]
    g       log decay, natural logarithm, <= 0 [B, T, HO]; decay is exp(g), "linear alpha" elsewhere
    beta    write strength [B, T, HO], in [0, 1], or [0, 2] with negative eigenvalues
    h       recurrent state [N, HO, K, V] ("kv") or [N, HO, V, K] ("vk")
    o       outputs [B, T, HO, V]
    g_cum   inclusive cumulative log decay inside a chunk
    kkt     strictly lower triangular matrix before the solve; A = (I + kkt)^-1
    w, u    WY keys and values; v_new = u - w h
    do dh_T dq dk dv dg dbeta dh_0   cotangents

Head i of the output reads head i // (HO // Hx) of an input with Hx heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

STATE_LAYOUTS = ("kv", "vk")
MAX_HEAD_DIM = 256


class Dims(NamedTuple):
    """Sizes of one call of the rule, see the module docstring."""

    B: int
    T: int
    N: int
    Hq: int
    Hk: int
    HV: int
    HO: int
    K: int
    V: int


def _fail(name: str, expected: str, got: object) -> None:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def check_array(name: str, x: object, shape: tuple[int | None, ...], letters: str) -> None:
    """Raises ValueError unless x is an array of that shape (None matches any size)."""
    got = getattr(x, "shape", None)
    if got is None:
        _fail(name, f"an array [{letters}]", type(x).__name__)
    if len(got) != len(shape) or any(s is not None and s != n for s, n in zip(shape, got, strict=True)):
        want = ", ".join("?" if s is None else str(s) for s in shape)
        _fail(name, f"shape [{letters}] = [{want}]", list(got))


def check_floating(name: str, x: jax.Array) -> None:
    """Raises ValueError unless x is f16, bf16, f32 or f64."""
    if x.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        _fail(name, "dtype float16, bfloat16, float32 or float64", x.dtype)


def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raises ValueError unless value is one of choices."""
    if value not in choices:
        _fail(name, "one of " + ", ".join(map(repr, choices)), repr(value))
