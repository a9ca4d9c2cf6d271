"""Recurrent layers in NumPy float64, from their parameters and options, and a call of a layer beside it."""

import jax
import numpy as np
from conv_oracle import conv_oracle
from flax import nnx
from fused_oracle import sigmoid
from small_layers import F32, empty_cache, inputs
from tolerances import assert_close

from gdn_jax.layers import EraseThenDelta, GatedLinearAttention, RecurrentCache

BOUND = -3.0
"""Of the gate that has one: another than the default, and not read off the layer."""


def random_cache(layer, N, seed=2):
    """A cache as if tokens had come before: nothing in it is zero."""
    shapes = empty_cache(layer, N)
    return RecurrentCache(*(inputs(*c.shape, seed=seed + i) / 2 for i, c in enumerate(shapes)))


@nnx.jit
def _call(layer, x, **options):
    return layer(x, return_cache=True, **options)


def call(layer, x, **options):
    """Output and cache of one compiled call, as NumPy arrays: slicing those compiles nothing."""
    return jax.device_get(_call(layer, x, **options))


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def low_rank(p, name, x):
    """x through the projections of that name, whether one or two factors."""
    if f"{name}_a_proj" in p:
        return linear(p[f"{name}_b_proj"], linear(p[f"{name}_a_proj"], x))
    return linear(p[f"{name}_proj"], x)


def layer_oracle(layer, x, cache):
    """One row x [T, D] in float64 from the layer's parameters and options: y, and the cache after it."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    x, T = np.asarray(x, np.float64), len(x)
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_dim, layer.head_v_dim
    of_heads, n = "a_proj" in p, getattr(layer, "num_householder", 1)
    qkv = np.concatenate([linear(p[f"{name}_proj"], x) for name in "qkv"], axis=1)
    if layer.use_short_conv:
        qkv, conv = conv_oracle(qkv, p["conv_weight"], p.get("conv_bias"), "silu", cache.conv)
    else:
        qkv, conv = qkv * sigmoid(qkv), np.zeros((layer.conv_dim, 0))
    q, k, v = np.split(qkv, [H * K, (1 + n) * H * K], axis=1)
    q, k, v = unit(q.reshape(T, H, K)), unit(k.reshape(T, n, H, K)), v.reshape(T, n, HV, V)
    q, k = (np.repeat(a, HV // H, axis=-2) for a in (q, k))
    rate = np.exp(p["A_log"])[:, None] if "A_log" in p else 1.0
    doubled = 1 + layer.allow_neg_eigval
    if of_heads:
        g = -rate * np.logaddexp(0, linear(p["a_proj"], x) + p["dt_bias"])[..., None]
        b = doubled * sigmoid(linear(p["b_proj"], x)).reshape(T, n, HV, 1)
        erase, write = b, b
    else:
        z = low_rank(p, "f", x).reshape(T, HV, K) + p["dt_bias"]
        bounded = layer.lower_bound is not None
        g = BOUND * sigmoid(rate * z) if bounded else -rate * np.logaddexp(0, z)
        g = BOUND * -np.expm1(rate * np.logaddexp(0, z) / BOUND) if layer.bound == "exponential" else g
        erase = doubled * sigmoid(linear(p["b_proj"], x)).reshape(T, 1, HV, -1)
        apart = "w_proj" in p and not isinstance(layer, EraseThenDelta)
        write = sigmoid(linear(p["w_proj"], x)).reshape(T, 1, HV, V) if apart else erase
        erase = 0 * erase if isinstance(layer, GatedLinearAttention) else erase
    if before := isinstance(layer, EraseThenDelta):
        e, gamma = (
            unit(low_rank(p, "e", x).reshape(T, H, K)),
            sigmoid(linear(p["w_proj"], x))[..., None, None],
        )
        e = np.repeat(e, HV // H, axis=1)
    S, o = np.asarray(cache.state, np.float64), np.zeros((T, HV, V))
    for t in range(T):
        S = np.exp(g[t])[..., None] * S
        if before:
            S = S - gamma[t] * e[t][..., None] * np.einsum("hk,hkv->hv", e[t], S)[:, None]
        for i in range(n):
            u = write[t, i] * v[t, i] - np.einsum("hk,hkv->hv", erase[t, i] * k[t, i], S)
            S = S + k[t, i][..., None] * u[:, None]
        o[t] = np.einsum("hk,hkv->hv", q[t], S) / np.sqrt(K)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * p["o_norm"]["weight"]
    o = o.reshape(T, HV * V)
    if getattr(layer, "use_gate", True):
        gate = low_rank(p, "g", x)
        o = o * (gate if of_heads else 1) * sigmoid(gate)
    return linear(p["o_proj"], o), conv, S


def assert_row(layer, x, past, y, new, what=""):
    """Output y [T, D] and cache of one sequence x [T, D] that follows `past` (no batch axis), against float64."""
    names = ("y", None), ("conv", None), ("state", 0)
    for (name, axis), want, got in zip(names, layer_oracle(layer, x, past), (y, *new), strict=True):
        assert_close(want, got, F32, f"{what} {name}", axis)


def row_of(cache, row):
    return jax.tree.map(lambda c: np.asarray(c)[row], cache)
