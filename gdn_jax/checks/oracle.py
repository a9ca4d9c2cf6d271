"""The rule and its adjoint, token by token, in NumPy float64: the truth of tests and `gdn check`, with no other code.

State S [K, V] of one head, decay a = exp(g) [K], strength b, and in its place erase c [K] and write w [V]:

    D = a S          e = w v - D^T (c k)          u = b e          S' = D + k u^T          o = scale S'^T q

With beta, which stands for both strengths, b is beta and c = w = 1; with erase and write b is 1. A gate or a strength
that is one number a head is the same in every channel; its cotangent is the sum.

Adjoint of one token, from the cotangent L of S' (all later uses) and do:

    L  += scale q do^T                 dq = scale S' do
    du  = L^T k                        db = du . e            de = b du
    dv  = w de                         dw = v de              dy = -D de         (cotangent of y = c k)
    dc  = k dy                         dk = L u + c dy
    M   = L - (c k) de^T               (cotangent of D)
    dg  = sum over V of M D            L <- a M

With a = 0 (g = -inf) the token before has no part in what follows: dg = 0 and L = 0, no limit is taken.
Only tokens are looped over. Every run of tokens that shares a state (a row, a packed sequence, a segment) advances
in the same step of that loop, so thousands of short sequences cost a few steps.

`operand` is applied to both factors of every matrix product above. With the identity, results are the truth; with a
rounding they show what the recurrence itself loses where operands are narrow and sums are exact.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

L2NORM_EPS = 1e-6


class Gradients(NamedTuple):
    """Cotangents of the inputs, in their shapes. None where the input is None."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dg: np.ndarray | None
    dbeta: np.ndarray | None
    dh_0: np.ndarray | None
    derase: np.ndarray | None
    dwrite: np.ndarray | None


class _Runs(NamedTuple):
    """Runs of tokens that share a state, longest first. source/sink: index of initial/final state, -1 for none."""

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    source: np.ndarray
    sink: np.ndarray


def _runs(B, T, cu_seqlens, segment_ids):
    found = []
    if cu_seqlens is not None:
        cu = np.asarray(cu_seqlens)
        found = [(0, cu[n], cu[n + 1] - cu[n], n, n) for n in range(len(cu) - 1)]
    elif segment_ids is not None:
        for b, ids in enumerate(np.asarray(segment_ids)):
            borders = [0, *(np.flatnonzero(np.diff(ids)) + 1), T]
            last = len(borders) - 2
            for i in range(len(borders) - 1):
                source, sink = (b if i == 0 else -1), (b if i == last else -1)
                found.append((b, borders[i], borders[i + 1] - borders[i], source, sink))
    else:
        found = [(b, 0, T, b, b) for b in range(B)]
    table = np.array(found, np.int64).reshape(-1, 5)
    return _Runs(*table[np.argsort(-table[:, 2], kind="stable")].T)


def _f64(x) -> Any:
    return None if x is None else np.asarray(x).astype(np.float64)


def _unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + L2NORM_EPS)


def _unit_adjoint(x, dy):
    r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + L2NORM_EPS)
    y = x * r
    return r * (dy - y * (y * dy).sum(-1, keepdims=True))


def _spread(x, HO):
    """Head i of the result is head i // (HO // Hx) of x."""
    return x[:, :, np.arange(HO) // (HO // x.shape[2])]


def _gather(dx, Hx):
    """Adjoint of _spread."""
    B, T, HO, D = dx.shape
    return dx.reshape(B, T, Hx, HO // Hx, D).sum(3)


def _channels(x, shape: tuple[int, ...], width: int) -> np.ndarray:
    """Strengths or decays of every channel, from one number a head or one a channel; ones for None."""
    if x is None:
        return np.ones((*shape, width))
    return np.broadcast_to(x if x.ndim == 4 else x[..., None], (*shape, width))


def _as_given(dx, x):
    """A cotangent of every channel, summed where x has one number a head."""
    return None if x is None else dx if x.ndim == 4 else dx.sum(-1)


def _turned(state, state_layout: str) -> Any:
    """States between [K, V] and the caller's layout."""
    return state.swapaxes(-1, -2) if state is not None and state_layout == "vk" else state


def _solve(
    q,
    k,
    v,
    g=None,
    beta=None,
    *,
    erase=None,
    write=None,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    segment_ids=None,
    use_qk_l2norm=False,
    state_layout="kv",
    cotangents=None,
    operand=lambda x: x,
) -> tuple[np.ndarray, np.ndarray, Any]:
    r = operand
    q, k, v, g, beta, erase, write, h_0 = map(_f64, (q, k, v, g, beta, erase, write, initial_state))
    B, T, Hq, K = q.shape
    Hk, HV, V = k.shape[2], v.shape[2], v.shape[3]
    HO = max(Hq, HV)
    scale = K**-0.5 if scale is None else scale
    h_0 = _turned(h_0, state_layout)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    runs = _runs(B, T, cu_seqlens, segment_ids)

    qq = _spread(_unit(q) if use_qk_l2norm else q, HO)
    kk = _spread(_unit(k) if use_qk_l2norm else k, HO)
    vv = _spread(v, HO)
    shape = (B, T, HO)
    a = _channels(None if g is None else np.exp(g), shape, K)
    b = _channels(beta, shape, 1)
    c, w = _channels(erase, shape, K), _channels(write, shape, V)

    S = np.zeros((len(runs.row), HO, K, V))
    if h_0 is not None:
        S[runs.source >= 0] = h_0[runs.source[runs.source >= 0]]
    o = np.zeros((*shape, V))
    steps = int(runs.length.max(initial=0))
    history = []
    for t in range(steps):
        n = int((runs.length > t).sum())
        at = (runs.row[:n], runs.start[:n] + t)
        D = a[at][..., None] * S[:n]
        e = w[at] * vv[at] - np.einsum("nhk,nhkv->nhv", r(c[at] * kk[at]), r(D))
        S[:n] = D + r(kk[at])[..., None] * r(b[at] * e)[..., None, :]
        o[at] = scale * np.einsum("nhk,nhkv->nhv", r(qq[at]), r(S[:n]))
        if cotangents is not None:
            history.append((n, at, D, e))
    h_T = np.zeros((N, HO, K, V))
    h_T[runs.sink[runs.sink >= 0]] = S[runs.sink >= 0]
    h_T = _turned(h_T, state_layout)
    if cotangents is None:
        return o, h_T, None

    do, dh_T = map(_f64, cotangents)
    dh_T = _turned(dh_T, state_layout)
    dq, dk, dg, dc = (np.zeros((*shape, K)) for _ in range(4))
    dv, dw, db = np.zeros((*shape, V)), np.zeros((*shape, V)), np.zeros(shape)
    L = np.zeros_like(S)
    if dh_T is not None:
        L[runs.sink >= 0] = dh_T[runs.sink[runs.sink >= 0]]
    for n, at, D, e in reversed(history):
        qt, kt, erased = qq[at], kk[at], c[at] * kk[at]
        u = b[at] * e
        if do is not None:
            after = D + r(kt)[..., None] * r(u)[..., None, :]
            dq[at] = scale * np.einsum("nhkv,nhv->nhk", r(after), r(do[at]))
            L[:n] += scale * r(qt)[..., None] * r(do[at])[..., None, :]
        du = np.einsum("nhk,nhkv->nhv", r(kt), r(L[:n]))
        de = b[at] * du
        db[at] = (du * e).sum(-1)
        dv[at], dw[at] = w[at] * de, vv[at] * de
        derased = -np.einsum("nhkv,nhv->nhk", r(D), r(de))
        dc[at] = kt * derased
        dk[at] = np.einsum("nhkv,nhv->nhk", r(L[:n]), r(u)) + c[at] * derased
        M = L[:n] - r(erased)[..., None] * r(de)[..., None, :]
        dg[at] = (M * D).sum(-1)
        L[:n] = a[at][..., None] * M
    dh_0 = None
    if h_0 is not None:
        dh_0 = np.zeros((N, HO, K, V))
        dh_0[runs.source[runs.source >= 0]] = L[runs.source >= 0]
        dh_0 = _turned(dh_0, state_layout)
    dq, dk, dv = _gather(dq, Hq), _gather(dk, Hk), _gather(dv, HV)
    if use_qk_l2norm:
        dq, dk = _unit_adjoint(q, dq), _unit_adjoint(k, dk)
    dbeta = None if beta is None else db
    apart = _as_given(dc, erase), _as_given(dw, write)
    return o, h_T, Gradients(dq, dk, dv, _as_given(dg, g), dbeta, dh_0, *apart)


def forward(q, k, v, g=None, beta=None, **options) -> tuple[np.ndarray, np.ndarray]:
    """(o, final_state) in float64, with the shapes and options of gdn_jax.delta_rule (but no chunk_size)."""
    o, final_state, _ = _solve(q, k, v, g, beta, **options)
    return o, final_state


def gradients(q, k, v, g=None, beta=None, *, do, dh_T, **options) -> Gradients:
    """Gradients of <do, o> + <dh_T, final_state> in float64. A cotangent that is None counts as zero."""
    return _solve(q, k, v, g, beta, cotangents=(do, dh_T), **options)[2]


def evaluate(
    q,
    k,
    v,
    g=None,
    beta=None,
    *,
    do,
    dh_T,
    operand: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    **options,
) -> dict[str, np.ndarray | None]:
    """Outputs and gradients by name: o, final_state, dq, dk, dv, dg, dbeta, dh_0, derase, dwrite."""
    o, final_state, gradients = _solve(q, k, v, g, beta, cotangents=(do, dh_T), operand=operand, **options)
    return {"o": o, "final_state": final_state, **gradients._asdict()}
