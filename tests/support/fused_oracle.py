"""The parts around the rule in a layer, in float64 NumPy: values, and gradients of <cotangent, value>.

Nothing is shared with the project. Arguments of any dtype are taken as the numbers that they hold.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np


def wide(x: Any) -> np.ndarray:
    """Any array in float64."""
    return np.asarray(x).astype(np.float64)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def silu_slope(x: np.ndarray) -> np.ndarray:
    """Derivative of x sigmoid(x)."""
    return sigmoid(x) + x * sigmoid(x) * (1 - sigmoid(x))


class Piece(NamedTuple):
    """Tokens of a row that see each other."""

    row: int
    start: int
    stop: int
    sequence: int
    """Entry of the initial and final state."""
    begins: bool = True
    """Whether it takes up from the initial state."""
    ends: bool = True
    """Whether it leaves the final state."""


def whole_rows(B: int, T: int) -> list[Piece]:
    """Every row a sequence."""
    return [Piece(row, 0, T, row) for row in range(B)]


def pieces_of_ids(segment_ids: np.ndarray) -> list[Piece]:
    """The first segment of a row takes up from its initial state, the last one leaves its final state."""
    pieces = []
    for row, ids in enumerate(np.asarray(segment_ids)):
        borders = [0, *(t for t in range(1, len(ids)) if ids[t] != ids[t - 1]), len(ids)]
        for start, stop in itertools.pairwise(borders):
            pieces.append(Piece(row, start, stop, row, start == 0, stop == len(ids)))
    return pieces


def pieces_of_lengths(lengths: tuple[int, ...]) -> list[Piece]:
    """Packed sequences of one row."""
    ends = np.cumsum(lengths)
    return [Piece(0, int(end) - n, int(end), i) for i, (end, n) in enumerate(zip(ends, lengths, strict=True))]


class Convolution(NamedTuple):
    """Results of `short_conv`, and gradients, None without cotangents."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    final_state: np.ndarray
    dx: np.ndarray | None = None
    dweight: np.ndarray | None = None
    dbias: np.ndarray | None = None
    dstate: np.ndarray | None = None


def short_conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    state: Any = None,
    cotangents: tuple | None = None,
    *,
    pieces: list[Piece],
    heads: int,
    width: int,
    normalize: bool = True,
) -> Convolution:
    """y = silu(bias + sum_j weight[j] x[t - W + 1 + j]), and y (sum(y^2) + 1e-6)^(-1/2) for the heads of q and k.

    Args:
      x: [B, T, D]; tokens of no piece have output 0.
      weight: [D, W].
      bias: [D].
      state: inputs before each sequence [N, D, W - 1]; None for zeros.
      cotangents: of q, k, v and the final state.
      pieces: which tokens see each other.
      heads, width: of q and of k.
    """
    x, weight = wide(x), wide(weight)
    (B, T, D), W = x.shape, weight.shape[1]
    N = 1 + max(piece.sequence for piece in pieces)
    state = np.zeros((N, D, W - 1)) if state is None else wide(state)
    bias = np.zeros(D) if bias is None else wide(bias)
    z, final, pasts = np.zeros_like(x), np.zeros((N, D, W - 1)), []
    for p in pieces:
        before = state[p.sequence].T if p.begins else np.zeros((W - 1, D))
        past, n = np.concatenate([before, x[p.row, p.start : p.stop]]), p.stop - p.start
        z[p.row, p.start : p.stop] = bias + sum(past[j : j + n] * weight[:, j] for j in range(W))
        if p.ends:
            final[p.sequence] = past[n:].T
        pasts.append(past)
    keys = heads * width
    s = z * sigmoid(z)
    inside = np.zeros((B, T, 1))
    for p in pieces:
        inside[p.row, p.start : p.stop] = 1
    s = s * inside

    def normalized(part):
        part = part.reshape(B, T, heads, width)
        return part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) if normalize else part

    q, k, v = normalized(s[..., :keys]), normalized(s[..., keys : 2 * keys]), s[..., 2 * keys :]
    if cotangents is None:
        return Convolution(q, k, v, final)
    dq, dk, dv, dfinal = (wide(c) for c in cotangents)

    def through(part, dy):
        part = part.reshape(B, T, heads, width)
        if normalize:
            square = (part**2).sum(-1, keepdims=True) + 1e-6
            dy = dy / np.sqrt(square) - part * (part * dy).sum(-1, keepdims=True) / square**1.5
        return dy.reshape(B, T, keys)

    ds = [through(s[..., :keys], dq), through(s[..., keys : 2 * keys], dk), dv]
    dz = np.concatenate(ds, axis=-1) * silu_slope(z) * inside
    dx, dweight, dstate = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(state)
    for p, past in zip(pieces, pasts, strict=True):
        dpast, n, here = np.zeros_like(past), p.stop - p.start, dz[p.row, p.start : p.stop]
        if p.ends:
            dpast[n:] += dfinal[p.sequence].T
        for j in range(W):
            dpast[j : j + n] += here * weight[:, j]
            dweight[:, j] += (here * past[j : j + n]).sum(0)
        dx[p.row, p.start : p.stop] = dpast[W - 1 :]
        if p.begins:
            dstate[p.sequence] = dpast[: W - 1].T
    return Convolution(q, k, v, final, dx, dweight, dz.sum((0, 1)), dstate)


def add_norm(x: Any, y: Any, weight: Any, eps: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """s = x + y and s (mean(s^2) + eps)^(-1/2) weight."""
    s = wide(x) if y is None else wide(x) + wide(y)
    return s, s / np.sqrt((s**2).mean(-1, keepdims=True) + eps) * wide(weight)


def add_norm_gradients(
    s: Any, weight: Any, ds: Any, dn: Any, eps: float = 1e-5
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients with respect to x (and to y, which has the same) and to weight, from the sum s; ds None for zeros."""
    s, weight, dn = wide(s), wide(weight), wide(dn)
    square = (s**2).mean(-1, keepdims=True) + eps
    t = dn * weight
    dx = t / np.sqrt(square) - s * (t * s).mean(-1, keepdims=True) / square**1.5
    dweight = (dn * s / np.sqrt(square)).reshape(-1, s.shape[-1]).sum(0)
    return dx if ds is None else dx + wide(ds), dweight


def gated_norm(o: Any, gate: Any, weight: Any, eps: float = 1e-5, activation: str = "silu") -> np.ndarray:
    """o (mean(o^2) + eps)^(-1/2) weight f(gate), f SiLU or the sigmoid."""
    return add_norm(o, None, weight, eps)[1] * _activated(gate, activation)


def gated_norm_gradients(
    o: Any, gate: Any, weight: Any, dy: Any, eps: float = 1e-5, activation: str = "silu"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """do, dgate and dweight."""
    gate, dy = wide(gate), wide(dy)
    do, dweight = add_norm_gradients(o, weight, None, dy * _activated(gate, activation), eps)
    slope = silu_slope(gate) if activation == "silu" else sigmoid(gate) * (1 - sigmoid(gate))
    return do, dy * add_norm(o, None, weight, eps)[1] * slope, dweight


def _activated(gate: Any, activation: str) -> np.ndarray:
    gate = wide(gate)
    return {"silu": gate, "sigmoid": 1.0}[activation] * sigmoid(gate)


def gated_projection(o: Any, gate: Any, weight: Any, kernel: Any, eps: float = 1e-5) -> np.ndarray:
    """The heads of `gated_norm` side by side @ kernel."""
    y = gated_norm(o, gate, weight, eps)
    return y.reshape(*y.shape[:-2], -1) @ wide(kernel)


def gated_projection_gradients(
    o: Any, gate: Any, weight: Any, kernel: Any, dresult: Any, eps: float = 1e-5
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """do, dgate, dweight and dkernel."""
    dresult, kernel = wide(dresult), wide(kernel)
    y, dy = gated_norm(o, gate, weight, eps), (dresult @ kernel.T).reshape(o.shape)
    dkernel = y.reshape(-1, len(kernel)).T @ dresult.reshape(-1, dresult.shape[-1])
    return *gated_norm_gradients(o, gate, weight, dy, eps), dkernel


def channel_gates(
    f: Any, A_log: Any, dt_bias: Any, lower_bound: float | None, dg: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """g, df, dA_log and d dt_bias, for parameters of a moderate size."""
    x, rate, dg = wide(f) + wide(dt_bias), np.exp(wide(A_log))[:, None], wide(dg)
    if lower_bound is None:
        g, of_x, of_A_log = -rate * np.logaddexp(0, x), -rate * sigmoid(x), -rate * np.logaddexp(0, x)
    else:
        s = sigmoid(rate * x)
        g, of_x, of_A_log = (lower_bound * y for y in (s, s * (1 - s) * rate, s * (1 - s) * rate * x))
    df, by_channel = dg * of_x, dg * of_A_log
    tokens = tuple(range(df.ndim - 2))
    return g, df, by_channel.sum((*tokens, -1)), df.sum(tokens)


def branches(a: Any, b: Any) -> np.ndarray:
    """silu(a) b."""
    a = wide(a)
    return a * sigmoid(a) * wide(b)


def branches_gradients(a: Any, b: Any, dh: Any) -> tuple[np.ndarray, np.ndarray]:
    """da and db."""
    a, dh = wide(a), wide(dh)
    return dh * wide(b) * silu_slope(a), dh * a * sigmoid(a)


def swiglu(x: Any, gate_kernel: Any, up_kernel: Any, down_kernel: Any, dy: Any) -> tuple[Any, ...]:
    """y, dx and the gradients of the three kernels."""
    x, dy, *kernels = (wide(array) for array in (x, dy, gate_kernel, up_kernel, down_kernel))
    gate, up = (x @ w for w in kernels[:2])
    h, (dgate, dup) = branches(gate, up), branches_gradients(gate, up, dy @ kernels[2].T)

    def weight(a, b):
        return a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])

    dx = dgate @ kernels[0].T + dup @ kernels[1].T
    return h @ kernels[2], dx, weight(x, dgate), weight(x, dup), weight(h, dy)


def embedding_gradient(tokens: Any, dx: Any, size: int) -> np.ndarray:
    """Sums of the rows of dx by token, [size, D]; -1 is the last row, tokens outside [-size, size) name none."""
    tokens = np.asarray(tokens).astype(np.int64).reshape(-1)
    dx = wide(dx).reshape(len(tokens), -1)
    named = (tokens >= -size) & (tokens < size)
    total = np.zeros((size, dx.shape[1]))
    np.add.at(total, tokens[named] % size, dx[named])
    return total
