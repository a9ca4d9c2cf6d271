"""Arguments of the kernels of one row and what they have to give, for tests with and without a GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import put
from fused_harness import draws
from fused_oracle import wide

from gdn_jax.parts import block_weights
from gdn_jax.parts import delta_layer as fused
from gdn_jax.parts.delta_layer import Gates
from gdn_jax.shapes import Choice, Convolution, LayerScales

IN_TURN = 4 * 256**0.5 * 2.0**-24
"""Two sums of 256 numbers one behind the other, the norm's and the product's. Errors of 2^-24 of a term add in
squares, and the largest of some thousand results is about four times as far off."""


def near_one(draw, width: int):
    """Weights of a norm."""
    return put(1 + 0.1 * np.asarray(draw(width)))


def scores(N: int, E: int, seed: int = 0):
    """Scores, some of them equal, and a bias that leaves every second as it is."""
    draw = draws(seed)
    x = np.array(draw(N, E))
    x[0] = np.round(x[0])
    return put(x), put(np.where(np.arange(E) % 2, 0.1 * np.asarray(draw(E)), 0), "float32")


def routed(
    E: int,
    D: int,
    F: int,
    S: int,
    P: int,
    choice: Choice,
    seed: int = 0,
    *,
    gate: bool = False,
    router: Any = None,
):
    """Arguments of `routed_stream.routed_stream`, y in parts, and what it gives: s and the sum of the experts.

    Args:
      gate: whether the shared expert has one.
      router: dtype of the router; None: float32.
    """
    draw, is_softmax, dtype = draws(seed), choice.scoring == "softmax", router or "float32"
    x, y = (draw(n, D, dtype="bfloat16") for n in (1, P))
    norm, router = near_one(draw, D), draw(E + gate, D, dtype=dtype, scale=D**-0.5)
    bias = None if is_softmax else draw(E, scale=0.1)
    gate_up, down, branch, up, shared_down = (
        draw(*s, dtype="bfloat16", scale=s[-2] ** -0.5)
        for s in ((E, D, 2 * F), (E, F, D), (D, S), (D, S), (S, D))
    )
    s, n = fused_oracle.add_norm(x, np.sum(wide(y), axis=0, keepdims=True), norm, 1e-6)
    scores = (n @ wide(router).T)[0]
    weights = fused_oracle.softmax(scores[:E]) if is_softmax else fused_oracle.sigmoid(scores[:E])
    c = weights if is_softmax else weights + wide(bias)
    if choice.kept_groups < choice.groups:
        of_groups = c.reshape(choice.groups, -1)
        best = np.argsort(-np.sort(of_groups)[:, -2:].sum(axis=1), kind="stable")[: choice.kept_groups]
        kept = np.isin(np.arange(choice.groups), best)
        c = np.where(kept[:, None], of_groups, -np.inf).reshape(-1)
    chosen = np.argsort(-c, kind="stable")[: choice.per_token]
    factor = choice.factor / (weights[chosen].sum() if choice.normalise else 1.0)
    want = fused_oracle.branches(n @ wide(branch), n @ wide(up)) @ wide(shared_down)
    want = fused_oracle.sigmoid(scores[E]) * want if gate else want
    for e in chosen:
        a, b = np.split(n @ wide(gate_up)[e], 2, axis=-1)
        want = want + factor * weights[e] * fused_oracle.branches(a, b) @ wide(down)[e]
    return (x, y, norm, router, bias, gate_up, down, (branch, up, shared_down)), s, want


def dense(D: int, F: int, P: int, seed: int = 0):
    """Arguments of `dense_stream.dense_stream`, y in parts or none, and what it gives: s and the SwiGLU."""
    draw = draws(seed)
    x, y = draw(1, D, dtype="bfloat16"), draw(P, D, dtype="bfloat16") if P else None
    norm, (gate_up, down) = (
        near_one(draw, D),
        (draw(*s, dtype="bfloat16", scale=c) for *s, c in ((2 * F, D, D**-0.5), (F, D, F**-0.5))),
    )
    added = np.sum(wide(y), axis=0, keepdims=True) if P else 0.0
    s, n = fused_oracle.add_norm(x, added, norm, 1e-6)
    a, b = np.split(n @ wide(gate_up).T, 2, axis=-1)
    return (x, y, norm, gate_up, down), s, fused_oracle.branches(a, b) @ wide(down)


def dense_codes(D: int, F: int, P: int):
    """`dense` with weights in 8 bits, whose blocks have unlike scales."""
    rng = np.random.default_rng(0)

    def weight(outputs, inputs):
        sizes = rng.uniform(0.1, 3, (-(-outputs // 128), -(-inputs // 128)))
        sizes = np.repeat(np.repeat(sizes, 128, 0), 128, 1)[:outputs, :inputs]
        return (rng.normal(size=(outputs, inputs)) * sizes * inputs**-0.5).astype(np.float32)

    weights = weight(F, D), weight(F, D), weight(D, F)

    @jax.jit
    def made(weights):
        codes, scales = zip(*map(block_weights.quantised, weights), strict=True)
        a, b, w = (x[::128] for x in scales)
        return jnp.concatenate(codes[:2]), codes[2].T, jnp.stack([a, b, w.T])

    gate_up, down, scales = made(weights)
    x, y, norm = rng.normal(size=(1, D)), rng.normal(size=(P, D)), rng.uniform(0.5, 1.5, D)
    x, y = (put(z.astype(jnp.bfloat16)) for z in (x, y))
    s, n = fused_oracle.add_norm(x, np.sum(wide(y), 0, keepdims=True), norm, 1e-6)
    # In NumPy: in one program with `quantised` XLA drops the rounding to 8 bits on a GPU.
    codes = *np.split(np.asarray(gate_up, np.float64), 2), np.asarray(down, np.float64)
    each = (np.repeat(np.repeat(np.asarray(x, np.float64), 128, 0)[:F], 128, 1)[:, :D] for x in scales)
    a, b, w = (x * scale for x, scale in zip(codes, each, strict=True))
    want = fused_oracle.branches(n @ a.T, n @ b.T) @ w
    return (x, y, put(norm.astype(np.float32)), gate_up, down, scales), s, want


def stream(D: int, F: int, dtype: str, seed: int = 0):
    """Arguments of `parts.row_product.stream_product`, and s and the product."""
    draw = draws(seed)
    x, y, norm, weight = draw(1, D), draw(1, D, dtype="bfloat16"), near_one(draw, D), draw(F, D, dtype=dtype)
    s, n = fused_oracle.add_norm(x, y, norm, 1e-6)
    return (x, y, norm, weight), s, n @ wide(weight).T


def stream_codes(D: int, F: int, seed: int = 0):
    """`stream` with a matrix of codes whose blocks have unlike scales, given for every column."""
    (x, y, norm, _), s, _ = stream(D, 8, "bfloat16", seed)
    codes, scales, weight = matrix_of_codes(F, D, seed)
    _, n = fused_oracle.add_norm(x, y, norm, 1e-6)
    return (x, y, norm, codes, scales), s, n @ weight.T


def matrix_of_codes(F: int, D: int, seed: int = 0, scale: float = 1.0):
    """Codes, scales of every column of each block of 128 rows, which are unlike, and what they mean."""
    codes = draws(seed)(F, D, dtype="float8_e4m3fn")
    sizes = np.random.default_rng(seed).uniform(0.1, 3, (F // 128, D // 128))
    scales = np.repeat(scale * sizes, 128, 1).astype(np.float32)
    return codes, put(scales), np.asarray(codes, np.float64) * np.repeat(scales, 128, 0)


def heads_codes(H: int, V: int, others: int, F: int, activation: str):
    """`heads` with a matrix of codes."""
    (o, channels, norm, _), _ = heads(H, V, others, 8, activation)
    codes, scales, weight = matrix_of_codes(F, H * V)
    y = fused_oracle.gated_norm(o, wide(channels)[others:].reshape(H, V), norm, 1e-6, activation)
    return (o, channels, norm, codes, scales), y.reshape(1, -1) @ weight.T


def heads(H: int, V: int, others: int, F: int, activation: str, seed: int = 0):
    """Arguments of `parts.row_product.heads_product`, the gates behind other channels, and what it gives."""
    draw = draws(seed)
    o, channels, norm = (
        draw(H, V, dtype="bfloat16"),
        draw(others + H * V, dtype="bfloat16"),
        near_one(draw, V),
    )
    weight = draw(F, H * V, dtype="bfloat16", scale=(H * V) ** -0.5)
    y = fused_oracle.gated_norm(o, wide(channels)[others:].reshape(H, V), norm, 1e-6, activation)
    return (o, channels, norm, weight), y.reshape(1, -1) @ wide(weight).T


def attended(N: int, G: int, P: int, V: int, F: int, gated: bool, seed: int = 0, *, codes: bool = False):
    """What `attended_product` takes of N key heads and G heads of each, filled up to eight with NaN: parts, the gates
    after other heads, the matrix and the scales of one of codes; and what it gives. The last part of several saw no
    token."""
    draw, rng = draws(seed), np.random.default_rng(seed)
    o, total = rng.normal(size=(N, P, G, V)), rng.uniform(0.5, 2, (N, P, G))
    largest = rng.normal(size=(N, P, G))
    if P > 1:
        o[:, -1], total[:, -1], largest[:, -1] = 0, 0, -np.inf
    factor = np.exp2(largest - largest.max(1, keepdims=True))
    seen = (factor[..., None] * o).sum(1) / (factor * total).sum(1)[..., None]
    z, weight, scales = draw(N * G + 1, V, dtype="bfloat16"), draw(F, N * G * V, dtype="bfloat16"), None
    W = wide(weight)
    if codes:
        weight, scales, W = matrix_of_codes(F, N * G * V, seed)
    gates = wide(z)[1:].reshape(N, G, V)
    v = seen / (1 + np.exp(-gates)) if gated else seen
    fill = [(0, 0), (0, 0), (0, 8 - G)]
    parts = [
        np.pad(x, fill + [(0, 0)] * (x.ndim - 3), constant_values=np.nan)[None] for x in (o, largest, total)
    ]
    want = v.reshape(1, -1) @ W.T
    return [put(x, "float32") for x in parts], z if gated else None, weight, scales, want


def same_bits(x, y) -> None:
    """Asserts that arrays in 16 bits are the same, NaN among them."""
    np.testing.assert_array_equal(*(np.asarray(a).view(np.int16) for a in (x, y)))


def latent(H: int, C: int, V: int, S: int, length: int, seed: int = 0):
    """Arguments of `latent_row.latent_row` with a gate, its static ones, and what it gives: y, and the k_r and c that
    the token leaves in the cache. The slots after the tokens hold NaN."""
    draw, R, rank = draws(seed), 64, 32
    half, first = R // 2, (rank, rank + C + R)
    channels, q = draw(1, first[1] + H, dtype="bfloat16"), draw(1, H * (C + R), dtype="bfloat16")
    norm, values = near_one(draw, C), draw(H, V, C, dtype="bfloat16", scale=C**-0.5)
    frequencies = put(1e4 ** -(np.arange(half) / half), "float32")
    is_token = np.arange(S)[:, None, None] < length
    k, v = (put(np.where(is_token, draw(1, S, 1, n), np.nan), "bfloat16") for n in (R, C))
    args = channels, q, norm, frequencies, values, k, v, put([length], "int32")
    static = dict(kv=first[0], gate=first[1], scale=0.5 / (C + R) ** 0.5, eps=1e-6)
    row, q = wide(channels)[0], wide(q)[0]
    kv, pairs, gate = np.split(row[rank:], [C, C + R])
    c = kv * (np.mean(kv**2) + 1e-6) ** -0.5 * wide(norm)
    angles = np.float64(np.float32(length) * np.asarray(frequencies))

    def turned(x):
        a, b = x[..., 0::2], x[..., 1::2]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    k_r = turned(pairs)
    of_token = [wide(x.astype(jnp.bfloat16)) for x in (c, k_r)]
    keys = np.concatenate([wide(v)[0, :length, 0], of_token[0][None]])
    turned_keys = np.concatenate([wide(k)[0, :length, 0], of_token[1][None]])
    q_c, q_r = np.split(q, [H * C])
    scores = q_c.reshape(H, C) @ keys.T + turned(q_r.reshape(H, R)) @ turned_keys.T
    p = np.exp(static["scale"] * scores)
    o = p / p.sum(axis=1, keepdims=True) @ keys
    y = np.einsum("hvc,hc->hv", wide(values), o) * fused_oracle.sigmoid(gate)[:, None]
    return args, static, y.reshape(1, -1), k_r, c


class Decay(NamedTuple):
    """A decay of `delta_layer`, as the oracle knows it."""

    seam: Callable[[int, int, int, int, bool], Any]
    """Gates of `parts.delta_layer` from heads of k and v, the first channel after v, K, and beta's factor."""
    width: Callable[[int, int], int]
    """Channels of its raw input, from heads of v and K."""
    bias: Callable[[int, int], tuple[int, ...]]
    """Shape of dt_bias."""
    g: Callable[..., np.ndarray]
    """[HV, K] or [HV, 1] of the raw input and A_log."""
    activation: str
    """Of the output gate of layers that have it."""


def _softplus(x):
    return np.logaddexp(0.0, x)


HEADS = Decay(
    lambda H, HV, first, K, doubled: Gates(H, first, first + HV, doubled),
    lambda HV, K: HV,
    lambda HV, K: (HV,),
    lambda x, A_log: (-np.exp(A_log) * _softplus(x))[:, None],
    "silu",
)
BOUND = -5.0
CHANNELS = Decay(
    lambda H, HV, first, K, doubled: Gates(H, first, first + HV * K, doubled, BOUND),
    lambda HV, K: HV * K,
    lambda HV, K: (HV, K),
    lambda x, A_log: BOUND * fused_oracle.sigmoid(np.exp(A_log)[:, None] * x),
    "sigmoid",
)


def _coded(layer: fused.Layer, gates: Any, values: int, seed: int):
    """The layer with codes of all rows that are whole heads, its gates, and what both matrices mean."""
    (F, D), (E, G) = layer.inputs.shape, layer.output.shape
    first = gates.decay if gates.strength - gates.decay < 128 else gates.strength
    rows, last = first + values, gates.strength + layer.dt_bias.shape[0]
    codes, of_inputs, W_in = matrix_of_codes(rows, D, seed, D**-0.5)
    outputs, of_output, W_out = matrix_of_codes(E, G, seed + 1, G**-0.5)
    blocks = [put(np.asarray(x)[:, ::128]) for x in (of_inputs, of_output)]
    numbers = np.asarray(layer.inputs)
    scales = LayerScales(*blocks, put(numbers[first:last]))
    decay = gates.decay if first > gates.decay else rows
    gates = gates._replace(decay=decay, strength=rows + gates.strength - first)
    W_in = np.concatenate([W_in[:first], wide(numbers[first : F - values]), W_in[first:]])
    return layer._replace(inputs=codes, output=outputs, scales=scales), gates, W_in, W_out


def delta_layer(
    H: int,
    K: int,
    D: int,
    parts: int,
    seed: int = 0,
    *,
    decay: Decay = CHANNELS,
    HV: int | None = None,
    bias: bool = False,
    doubled: bool = False,
    dtype: str = "bfloat16",
    codes: bool = False,
):
    """Arguments of `parts.delta_layer.delta_layer`, of a layer of H heads of k, its gates and options, and what it
    gives: s, y, and the states of the convolution and of the rule.

    Args:
      parts: of what is added to the stream; 0: nothing is.
      HV: heads of v; None: H.
      bias: whether the convolution has one.
      doubled: whether beta is 2 sigmoid(b).
      dtype: of both matrices and of the convolution.
      codes: whether both matrices are codes of E4M3, whose blocks have unlike scales, but for rows of decays and
        strengths of a head.
    """
    draw, keys, HV = draws(seed), H * K, HV or H
    values, decays = HV * K, decay.width(HV, K)
    C = 2 * keys + values
    F = -(-(C + decays + HV) // K) * K + values  # zeros fill up whole heads before the gates
    x, y, norm = draw(1, D), draw(parts, 1, D) if parts else None, near_one(draw, D)
    inputs = draw(F, D, dtype=dtype, scale=D**-0.5)
    window, filters = draw(1, C, 3, dtype=dtype), draw(C, 4, dtype=dtype)
    A_log, dt_bias, state = draw(HV, scale=0.3), draw(*decay.bias(HV, K)), draw(1, HV, K, K)
    output_norm, output = near_one(draw, K), draw(D, values, dtype=dtype, scale=values**-0.5)
    added = draw(C, dtype=dtype) if bias else None
    convolution = Convolution(window, filters, added)
    layer = fused.Layer(norm, inputs, convolution, A_log, dt_bias, state, output_norm, output)
    gates, options = decay.seam(H, HV, C, K, doubled), fused.Options(1e-6, 1e-5, decay.activation)
    W_in, W_out = wide(inputs), wide(output)
    if codes:
        layer, gates, W_in, W_out = _coded(layer, gates, values, seed)

    s, n = fused_oracle.add_norm(x, wide(y).sum(0) if parts else 0.0, norm, 1e-6)
    channels = (n @ W_in.T)[0]
    past = np.concatenate([wide(window)[0], channels[:C, None]], axis=1)
    total = np.sum(past * wide(filters), axis=1) + (wide(added) if bias else 0.0)
    q, k, v = np.split(total * fused_oracle.sigmoid(total), [keys, 2 * keys])
    q, k = (np.repeat(a.reshape(H, K), HV // H, axis=0) for a in (q, k))
    q, k = (a / np.sqrt(np.sum(a * a, axis=1, keepdims=True) + 1e-6) for a in (q, k))
    raw = channels[C : C + decays].reshape(dt_bias.shape) + wide(dt_bias)
    S = wide(state)[0] * np.exp(decay.g(raw, wide(A_log)))[..., None]
    beta = fused_oracle.sigmoid(channels[C + decays : C + decays + HV])[:, None] * (1 + doubled)
    S = S + k[..., None] * (beta * (v.reshape(HV, K) - np.einsum("hk,hkv->hv", k, S)))[:, None]
    o = K**-0.5 * np.einsum("hk,hkv->hv", q, S)
    z = channels[F - values :].reshape(HV, K)
    out = fused_oracle.gated_norm(o, z, output_norm, 1e-5, decay.activation).reshape(1, -1) @ W_out.T
    return (x, y, layer, gates, options), (s, out, past[None, :, 1:], S[None])
