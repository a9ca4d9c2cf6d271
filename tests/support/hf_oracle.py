"""Hybrid models of released families in float64 NumPy, token by token, for one row; no JAX in it.

Parameters are a dict from our names, as in "blocks.0.mixer.q_proj.kernel", to arrays.
"""

import numpy as np
from fused_oracle import sigmoid


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weight


def turned(x, theta, neighbours):
    """Heads [T, H, D] rotated by their place, in the pairs (0, 1) .. or (0, D / 2) .."""
    n = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(n) / n)
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :n], x[..., n:])
    a, b = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.stack([a, b], -1).reshape(x.shape) if neighbours else np.concatenate([a, b], -1)


def attend(q, k, v, window=None):
    """[T, H, D] of queries [T, H, K] on as many heads of keys and values."""
    i, j = np.ogrid[: len(q), : len(q)]
    seen = (j <= i) & (j > i - (window or len(q)))
    scores = np.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    return np.einsum("hij,jhd->ihd", softmax(np.where(seen, scores, -np.inf)), v)


class Part:
    """The parameters of a part of the model: `part("q_proj.kernel")`."""

    def __init__(self, params, prefix):
        self.params, self.prefix = params, prefix

    def __call__(self, name):
        return self.params[f"{self.prefix}.{name}"]

    def project(self, x, *names):
        """x times the kernels of projections, one behind the other; one that is not there is left out."""
        for name in names:
            kernel = self.params.get(f"{self.prefix}.{name}.kernel")
            x = x if kernel is None else x @ kernel
        return x


def attention(p, a, eps, x):
    T, kv = len(x), a.num_kv_heads or a.num_heads
    q, k, v = (p.project(x, f"{n}_proj").reshape(T, -1, a.head_dim) for n in "qkv")
    q, k = rms(q, p("q_norm.weight"), eps), rms(k, p("k_norm.weight"), eps)
    if a.rotary_dim:
        q, k = (turned(y, a.rope_theta, neighbours=False) for y in (q, k))
    k, v = (np.repeat(y, a.num_heads // kv, 1) for y in (k, v))
    return p.project(attend(q, k, v, a.window).reshape(T, -1), "o_proj")


def latent(p, a, eps, x):
    del eps  # the norms of the latents have their own
    T, n = len(x), a.nope_dim
    down = x if a.q_rank is None else rms(p.project(x, "q_a_proj"), p("q_a_norm.weight"), 1e-6)
    q = p.project(down, "q_proj", "q_b_proj").reshape(T, a.num_heads, -1)
    kv = p.project(x, "kv_a_proj")
    up = p.project(rms(kv[:, : a.kv_rank], p("kv_a_norm.weight"), 1e-6), "kv_b_proj")
    up, k_r = up.reshape(T, a.num_heads, -1), kv[:, None, a.kv_rank :]
    q_r = q[..., n:]
    if a.rope_theta is not None:
        q_r, k_r = (turned(y, a.rope_theta, neighbours=True) for y in (q_r, k_r))
    k = np.concatenate([up[..., :n], np.repeat(k_r, a.num_heads, 1)], -1)
    o = attend(np.concatenate([q[..., :n], q_r], -1), k, up[..., n:])
    if a.head_gate:
        o = o * sigmoid(p.project(x, "g_proj"))[..., None]
    return p.project(o.reshape(T, -1), "o_proj")


def recurrent(p, config, x):
    """A GatedDeltaNet, or Kimi Delta Attention where the config's mixer has gates of channels."""
    T, H, K = len(x), config.num_heads, config.head_dim
    HV, bounds = config.num_v_heads or H, config.mixer
    filters = p("conv_weight")
    qkv = np.concatenate([p.project(x, f"{n}_proj") for n in "qkv"], 1)
    padded = np.concatenate([np.zeros((filters.shape[1] - 1, qkv.shape[1])), qkv])
    qkv = silu(sum(padded[i : i + T] * filters[:, i] for i in range(filters.shape[1])))
    q, k, v = np.split(qkv, [H * K, 2 * H * K], 1)
    q, k = (np.repeat(y.reshape(T, H, K), HV // H, 1) for y in (q, k))
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    v, beta = v.reshape(T, HV, -1), sigmoid(p.project(x, "b_proj"))
    by_channels = bounds.name == "kda"
    if by_channels:
        f = p.project(x, "f_proj", "f_a_proj", "f_b_proj").reshape(T, HV, K) + p("dt_bias")
        rate = np.exp(p("A_log"))[:, None]
        g = bounds.lower_bound * sigmoid(rate * f)
        g = g if bounds.gate == "lower_bound" else -rate * np.logaddexp(f, 0)
    else:
        g = (-np.exp(p("A_log")) * np.logaddexp(p.project(x, "a_proj") + p("dt_bias"), 0))[..., None]
    S, o = np.zeros((HV, K, v.shape[-1])), []
    for t in range(T):
        S = np.exp(g[t])[..., None] * S
        error = v[t] - np.einsum("hk,hkv->hv", k[t], S)
        S = S + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        o.append(np.einsum("hk,hkv->hv", q[t] * K**-0.5, S))
    gate = p.project(x, "g_proj", "g_a_proj", "g_b_proj").reshape(T, HV, -1)
    y = rms(np.stack(o), p("o_norm.weight"), config.norm_eps) * (sigmoid if by_channels else silu)(gate)
    return p.project(y.reshape(T, -1), "o_proj")


def swiglu(p, x, part=""):
    return p.project(
        silu(p.project(x, f"{part}gate_proj")) * p.project(x, f"{part}up_proj"), f"{part}down_proj"
    )


def experts(p, e, x):
    r, scores = e.routing, x @ p("router")
    scores = c = softmax(scores) if r is None else sigmoid(scores)
    if r is not None:
        c = scores + p("router_bias")
        groups = c.reshape(len(x), r.groups, -1)
        best = np.argsort(-np.sort(groups)[..., -2:].sum(-1))[:, : r.kept_groups]
        stays = (np.arange(r.groups) == best[..., None]).any(1)
        c = np.where(stays[..., None], groups, -np.inf).reshape(scores.shape)
    chosen = np.argsort(-c)[:, : e.per_token]
    picked, weights = np.take_along_axis(scores, chosen, 1), np.zeros(scores.shape)
    factor = 1 if r is None else r.factor
    np.put_along_axis(
        weights, chosen, factor * picked / (picked.sum(1, keepdims=True) if e.normalise else 1), 1
    )
    gate, up = np.split(np.einsum("td,edf->tef", x, p("gate_up")), 2, -1)
    mixed = np.einsum("tef,efd,te->td", silu(gate) * up, p("down"), weights, optimize=True)
    return swiglu(p, x, "shared.") + mixed


def loss(config, params, tokens):
    """Mean negative log-likelihood of the tokens of a row after its first one."""
    x, eps = params["embedding"][tokens[:-1]], config.norm_eps
    for i, kind in enumerate(config.types):
        block, p = Part(params, f"blocks.{i}"), Part(params, f"blocks.{i}.mixer")
        y, a = rms(x, block("mixer_norm.weight"), eps), config.attention_of(kind)
        if a is None:
            x = x + recurrent(p, config, y)
        else:
            x = x + (latent if hasattr(a, "kv_rank") else attention)(p, a, eps, y)
        y, p = rms(x, block("mlp_norm.weight"), eps), Part(params, f"blocks.{i}.mlp")
        x = x + (experts(p, config.experts, y) if config.has_experts(i) else swiglu(p, y))
    head = params.get("head", params["embedding"])
    probabilities = softmax(rms(x, params["norm.weight"], eps) @ head.T)
    return -np.mean(np.log(probabilities[np.arange(len(tokens) - 1), tokens[1:]]))
