"""The family's rule and its adjoint, token by token, in NumPy float64: the truth of its tests.

State S [K, V] of one head, decay a = exp(g) [K], erase b [K], write w [V]:

    D = a S          u = w v - D^T (b k)          S' = D + k u^T          o = scale S'^T q

Adjoint of one token, from the cotangent L of S' (all later uses) and do:

    L  += scale q do^T              dq = scale S' do
    du  = L^T k                     dv = w du          dw = v du
    de  = -D du                     db = k de          dk = L u + b de
    M   = L - (b k) du^T            (cotangent of D)
    dg  = sum over V of M D         L <- a M

With a = 0 (g = -inf) the token before has no part in what follows: dg = 0 and L = 0, no limit is taken. Strengths
that are one number are the same in every channel; their cotangent is the sum. Of the other oracle only the tables of
runs and of shared heads are used.
"""

from typing import NamedTuple

import numpy as np

from gdn_jax.checks.oracle import _f64, _gather, _runs, _spread, _unit, _unit_adjoint


class Gradients(NamedTuple):
    """Cotangents of the inputs, in their shapes. None where the input is None."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dg: np.ndarray | None
    dbeta: np.ndarray | None
    derase: np.ndarray | None
    dwrite: np.ndarray | None
    dh_0: np.ndarray | None


def _channels(x, shape: tuple[int, ...], width: int):
    """Strengths or gates of every channel, from one number a head or one a channel; ones where there are none."""
    if x is None:
        return np.ones((*shape, width))
    return np.broadcast_to(x if x.ndim == 4 else x[..., None], (*shape, width))


def _as_given(d, x):
    """A cotangent of every channel, summed where x has one number a head."""
    return None if x is None else d if x.ndim == 4 else d.sum(-1)


def evaluate(
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
    do,
    dh_T,
) -> dict[str, np.ndarray | None]:
    """o, final_state and the gradients of <do, o> + <dh_T, final_state> by name, with `delta_rule`'s arguments."""
    q, k, v, g, beta, erase, write, h_0 = map(_f64, (q, k, v, g, beta, erase, write, initial_state))
    do, dh_T = map(_f64, (do, dh_T))
    B, T, Hq, K = q.shape
    Hk, HV, V = k.shape[2], v.shape[2], v.shape[3]
    HO = max(Hq, HV)
    scale = K**-0.5 if scale is None else scale
    if state_layout == "vk":
        h_0, dh_T = (None if x is None else x.swapaxes(-1, -2) for x in (h_0, dh_T))
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    runs = _runs(B, T, cu_seqlens, segment_ids)

    qq = _spread(_unit(q) if use_qk_l2norm else q, HO)
    kk = _spread(_unit(k) if use_qk_l2norm else k, HO)
    vv = _spread(v, HO)
    shape = (B, T, HO)
    a = np.ones((*shape, K)) if g is None else np.exp(_channels(g, shape, K))
    b = _channels(beta if erase is None else erase, shape, K)
    w = _channels(beta if write is None else write, shape, V)

    S = np.zeros((len(runs.row), HO, K, V))
    if h_0 is not None:
        S[runs.source >= 0] = h_0[runs.source[runs.source >= 0]]
    o, history = np.zeros((*shape, V)), []
    for t in range(int(runs.length.max(initial=0))):
        n = int((runs.length > t).sum())
        at = (runs.row[:n], runs.start[:n] + t)
        D = a[at][..., None] * S[:n]
        u = w[at] * vv[at] - np.einsum("nhk,nhkv->nhv", b[at] * kk[at], D)
        S[:n] = D + kk[at][..., None] * u[..., None, :]
        o[at] = scale * np.einsum("nhk,nhkv->nhv", qq[at], S[:n])
        history.append((n, at, D, u))
    h_T = np.zeros((N, HO, K, V))
    h_T[runs.sink[runs.sink >= 0]] = S[runs.sink >= 0]

    dq, dk, dg, db = (np.zeros((*shape, K)) for _ in range(4))
    dv, dw = np.zeros((*shape, V)), np.zeros((*shape, V))
    L = np.zeros_like(S)
    L[runs.sink >= 0] = dh_T[runs.sink[runs.sink >= 0]]
    for n, at, D, u in reversed(history):
        dq[at] = scale * np.einsum("nhkv,nhv->nhk", D + kk[at][..., None] * u[..., None, :], do[at])
        L[:n] += scale * qq[at][..., None] * do[at][..., None, :]
        du = np.einsum("nhk,nhkv->nhv", kk[at], L[:n])
        dv[at], dw[at] = w[at] * du, vv[at] * du
        de = -np.einsum("nhkv,nhv->nhk", D, du)
        db[at] = kk[at] * de
        dk[at] = np.einsum("nhkv,nhv->nhk", L[:n], u) + b[at] * de
        M = L[:n] - (b[at] * kk[at])[..., None] * du[..., None, :]
        dg[at] = (M * D).sum(-1)
        L[:n] = a[at][..., None] * M
    dh_0 = None
    if h_0 is not None:
        dh_0 = np.zeros((N, HO, K, V))
        dh_0[runs.source[runs.source >= 0]] = L[runs.source >= 0]
    dq, dk, dv = _gather(dq, Hq), _gather(dk, Hk), _gather(dv, HV)
    if use_qk_l2norm:
        dq, dk = _unit_adjoint(q, dq), _unit_adjoint(k, dk)
    dbeta = None if beta is None else db.sum(-1) + dw.sum(-1)
    if state_layout == "vk":
        h_T, dh_0 = h_T.swapaxes(-1, -2), None if dh_0 is None else dh_0.swapaxes(-1, -2)
    derase, dwrite = _as_given(db, erase), _as_given(dw, write)
    gradients = Gradients(dq, dk, dv, _as_given(dg, g), dbeta, derase, dwrite, dh_0)
    return {"o": o, "final_state": h_T, **gradients._asdict()}
