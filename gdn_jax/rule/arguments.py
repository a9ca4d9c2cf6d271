"""Checks of a call's arguments: their shapes and options, and their values as `debug_checks` says."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.partitioning import on_explicit_shards, vary_alike, warn_of_gathers
from gdn_jax.rule.call import ERASURES, HEADS, Arrays, Call, RuleAxes
from gdn_jax.shapes import (
    ArgumentError,
    Dims,
    Number,
    accumulation_dtype,
    check_array,
    check_ascending,
    check_channels,
    check_choice,
    check_floating,
    real_number,
    rule_dims,
    widened,
)

CHUNK_SIZES = (16, 32, 64, 128)

MOST_ERASED = 2.1
"""Largest beta |k|^2 that `debug_checks` lets through: 2, and what rounding adds to normalised keys of 16 bits."""

_debug_checks = False


def debug_checks(enabled: bool) -> None:
    """Switches checks on or off, for functions traced from now on. Off by default.

    Values: g <= 0, beta |k|^2 of about 2 at most (beyond it the state of the delta rule grows without bound, as where
    keys were not normalised), and cu_seqlens ascending. An array whose values are known is checked at once and raises
    a ValueError. Under jit the host checks the values while the program runs. This costs a transfer per call, and jax
    reports the error as a `JaxRuntimeError` that carries the ValueError's text.

    Layout: fewer tokens than heads give a UserWarning, because the arrays may be [B, heads, T, width]. Such a call
    may be right, so that there is no warning without `debug_checks`.

    Shardings: an argument that lies on a mesh along a dimension that the operation cannot split, tokens or heads that
    do not divide, gives a UserWarning while the program is compiled.

    Args:
      enabled: whether they are on.
    """
    global _debug_checks
    _debug_checks = enabled


def debug_checks_are_on() -> bool:
    """Whether `debug_checks` are switched on."""
    return _debug_checks


def check_arrays(call: Call, x: Arrays) -> Dims:
    """Dimensions of a call whose arguments can be used, which are checked as far as they are static."""
    of_heads = call.gates == HEADS
    rest = x.initial_state, x.cu_seqlens, x.segment_ids
    gates = (x.g, x.erase) if of_heads else (None, None)
    dims = rule_dims(x.q, x.k, x.v, *gates, *rest, call.state_layout)
    check_chunk_size(call.chunk_size)
    if of_heads:
        return dims
    for name, y, width, letter in (
        ("g", x.g, dims.K, "K"),
        ("beta" if call.is_beta else "erase", x.erase, dims.K, "K"),
        ("write", x.write, dims.V, "V"),
    ):
        if y is not None and (name == "g" or call.gates != ERASURES):
            check_channels(name, y, (dims.B, dims.T, dims.HO), width, f"B, T, HO, {letter}")
    return dims


def strengths(beta: Any, erase: Any, write: Any) -> tuple[Any, Any]:
    """The two strengths of a call's record, where beta stands for both."""
    if beta is None:
        return erase, write
    check_array("beta", beta, (None,) * 3, "B, T, HO")
    check_floating("beta", beta)
    if erase is not None or write is not None:
        raise ArgumentError("beta", "None where erase or write is given, since it stands for both", "both")
    return beta, None


def check_chunk_size(chunk_size: Any) -> None:
    """Raises ValueError unless `chunk_size` is a number of tokens that chunks may have."""
    # 64.0 == 64, but is no number of tokens.
    check_choice("chunk_size", chunk_size if isinstance(chunk_size, int) else str(chunk_size), CHUNK_SIZES)


def check_scale(scale: Any, dims: Dims) -> Number | jax.Array:
    """The factor of the output, as a number or as an array without dimensions."""
    if scale is None:
        return Number(dims.K**-0.5)
    if isinstance(scale, (int, float, np.number)) and not isinstance(scale, bool):
        return Number(real_number("scale", scale))
    is_array = isinstance(scale, (jax.Array, np.ndarray))
    if not is_array or scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
        got = f"{scale.dtype}{list(scale.shape)}" if is_array else repr(scale)
        raise ValueError(f"scale: expected a number, or a floating array of shape [], got {got}")
    return jnp.asarray(scale)


def known_lengths(cu_seqlens: Any, T: int, always: bool = False) -> bytes | None:
    """cu_seqlens as int64 where its values are known while tracing, and checked there.

    always: looks at a JAX array too, for which the device must have computed it.
    """
    if not isinstance(cu_seqlens, np.ndarray) and (
        cu_seqlens is None or isinstance(cu_seqlens, jax.core.Tracer) or not always
    ):
        return None
    known = np.asarray(cu_seqlens).astype(np.int64)
    check_ascending(T, known)
    return known.tobytes()


def checked(call: Call, x: Arrays, dims: Dims) -> Arrays:
    """The arguments as arrays of JAX that vary alike; values are checked as `debug_checks` says."""
    if _debug_checks:
        check_layout(dims)
        check_values(dims.T, x.g, x.cu_seqlens)
        if call.gates == ERASURES:
            for n, key in enumerate((x.write, x.k)):
                check_keys(None if call.use_qk_l2norm else key, x.erase[..., n])
        else:
            check_keys(None if call.use_qk_l2norm else x.k, x.erase)
        axes = RuleAxes.of(x)
        arrays = [None if isinstance(y, jax.ShapeDtypeStruct | np.ndarray) else y for y in x]
        names = x._replace(**dict(zip(x._fields, x._fields, strict=True)))
        names = names._replace(erase="beta" if call.is_beta else "erase")
        warn_of_gathers(names, arrays, axes.inputs, axes.sizes)
    return vary_alike(
        x._replace(cu_seqlens=None if x.cu_seqlens is None else widened(jnp.asarray(x.cu_seqlens)))
    )


def check_layout(dims: Dims) -> None:
    """Warns of tokens and heads that seem to have changed places, as `debug_checks` says."""
    if 1 < dims.T < dims.HO:  # a single token is what generation has
        warnings.warn(
            f"q, k, v: {dims.T} tokens of {dims.HO} heads; arrays are [B, T, heads, width], and if these are "
            "[B, heads, T, width], tokens and heads have to change places first",
            stacklevel=5,
        )


def check_values(T: int, g: Any, cu_seqlens: Any) -> None:
    """Checks values where they are known, else while the program runs, as `debug_checks` says; either may be None."""
    if g is not None:
        check_known(_check_log_decay, jnp.max(g, initial=-jnp.inf), jnp.isnan(g).any())
    if cu_seqlens is not None:
        check_known(partial(check_ascending, T), cu_seqlens)


def check_keys(k: Any, erase: Any) -> None:
    """Checks that no token erases more than twice what its key finds, as `debug_checks` says.

    Args:
      k: keys [B, T, Hk, K]; None for keys that are normalised.
      erase: strengths [B, T, HO] or [B, T, HO, K]; None for 1.
    """
    if k is not None:
        whole = ". . . .", None if erase is None else " ".join("." * erase.ndim)
        check_known(_check_erased, on_explicit_shards(_largest_erased, (k, erase), whole, "", {}))


def check_known(check: Callable[..., None], *arrays: Any) -> None:
    """Runs a check on the host: at once where all arrays are known, else while the program runs."""
    if any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in arrays):
        jax.debug.callback(check, *arrays)
    else:
        check(*map(np.asarray, arrays))


def _largest_erased(k: jax.Array, erase: jax.Array | None) -> jax.Array:
    """The largest erase |k|^2 of a token and head."""
    squares = jnp.square(k.astype(accumulation_dtype(k)))
    if erase is not None:
        of_heads = erase.reshape(*k.shape[:3], -1, 1 if erase.ndim == 3 else k.shape[3])
        squares = of_heads.astype(squares.dtype) * squares[:, :, :, None]
    return jnp.max(jnp.sum(squares, -1), initial=0)


def _check_erased(largest: jax.Array | np.ndarray) -> None:
    if np.any(largest > MOST_ERASED):
        raise ValueError(
            "k: expected keys of unit length, or beta |k|^2 of at most 2, beyond which the state grows without bound "
            f"(use_qk_l2norm=True normalises q and k), got a largest beta |k|^2 of {float(np.max(largest)):.6g}"
        )


def _check_log_decay(largest: jax.Array | np.ndarray, has_nan: jax.Array | np.ndarray) -> None:
    if np.any(has_nan) or np.any(largest > 0):
        got = "nan" if np.any(has_nan) else f"a largest value of {float(np.max(largest)):.6g}"
        raise ValueError(
            f"g: expected log decay <= 0 everywhere (for a linear decay use log_decay_from_alpha), got {got}"
        )
