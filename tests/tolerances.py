"""The only place for numbers a result may be off by, each with its derivation, and the metric.

Metric: rms(reference - x) / rms(reference), over the whole tensor and over each head (a wrong quiet head must not
hide behind a loud one). NaN and inf fail before anything is measured. Where the reference is zero in float32 (a head
with beta = 0 has dk = 0; exp(-1000) underflows) the ratio has no meaning: there rms(x) itself must be below the
bound, all inputs being of order one.
"""

import numpy as np
from cases import Case, Inputs

SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16

# Unit roundoff of each dtype.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

STATES = ("o", "final_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh_0")

# float32. An output is a sum of K products of the query with a state, itself a sum over up to 128 tokens of a chunk
# of results of a solve with up to 128 terms. With errors of one roundoff u = 6e-8 that add up like a random walk,
# that is sqrt(K + 128 + 128) u = 1.3e-6 for K = 256; 1e-5 leaves a factor of eight for sums that grow, then cancel.
# A gradient goes through the same chain twice (forward values enter the backward), and dg is a sum over the chunk of
# terms of either sign: a factor of ten more.
FLOAT32 = {**dict.fromkeys(STATES, 1e-5), **dict.fromkeys(GRADIENTS, 1e-4)}

# float64 differs from float32 in u alone, 2^-29 of it: 1.9e-14 and 1.9e-13. The oracle rounds as much: twice that.
FLOAT64 = {name: 2 * value * 2.0**-29 for name, value in FLOAT32.items()}

# bfloat16. The inputs are rounded before both sides see them. o, dq, dk, dv leave as bfloat16: rounding to nearest is
# off by up to 2^-8 = 3.9e-3 of the value, 1.7e-3 rms. An implementation may also round the operands of its matrix
# products (float32 sums): each factor adds 1.7e-3, and independent roundings add in squares, sqrt(1 + 2 * 3) * 1.7e-3
# = 4.5e-3 after three products. dq, dk, dh_0 go through two chains, 1.7 times that. dg and dbeta are differences of
# such sums, which cancel to about a third of their size.
BFLOAT16 = {
    "o": 5e-3,
    "final_state": 5e-3,
    "dv": 5e-3,
    "dq": 8e-3,
    "dk": 8e-3,
    "dh_0": 8e-3,
    "dg": 2e-2,
    "dbeta": 2e-2,
}

# float16 has 3 bits more than bfloat16. (Its range is not tested here: inputs are of order one.)
FLOAT16 = {name: value / 8 for name, value in BFLOAT16.items()}

BY_DTYPE = {"float64": FLOAT64, "float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}

# Central differences of the oracle with step 1e-5 in float64: 1e-10 from the third derivative, 1e-16 / 1e-5 = 1e-11
# from rounding, both against entries of order one; 1e-7 leaves room for small entries.
FINITE_DIFFERENCES = 1e-7


def condition(case: Case, x: Inputs) -> float:
    """Largest Skeel condition number || |A| |I + kkt| || over the chunks of a case, A = (I + kkt)^-1."""
    B, T, C, HO, Hk = case.B, case.T, case.chunk_size, case.HO, case.heads[1]
    k = np.asarray(x.k).astype(np.float64)
    worst = 1.0
    for b in range(B):
        for i in range(HO):
            for start in range(0, T, C):
                s = slice(start, start + C)
                kc = k[b, s, i // (HO // Hk)]
                c = len(kc)
                g = np.zeros(c) if x.g is None else x.g[b, s, i].astype(np.float64)
                beta = np.ones(c) if x.beta is None else x.beta[b, s, i].astype(np.float64)
                L = np.eye(c)
                for t in range(c):  # decays by addition: no difference of large numbers
                    L[t, :t] = beta[t] * kc[:t] @ kc[t] * np.exp(np.cumsum(g[1 : t + 1][::-1])[::-1])
                worst = max(worst, np.abs(np.abs(np.linalg.inv(L)) @ np.abs(L)).sum(1).max())
    return float(worst)


def cancellation(case: Case, x: Inputs) -> tuple[float, float]:
    """How much larger than the result the terms of the rule's sums are, for the worst head: (forward, dh_0).

    Forward, over whole sequences: o_i = sum_j P_ij u_j (P: decayed scores), and the prediction of token i,
    sum_j (k_i.k_j decay) u_j, against u itself. dh_0 = sum_i D_i (q_i do_i - beta_i k_i lam_i) + D_T dh_T with
    lam the adjoint of u. Terms are added in squares, as roundings of their factors are. Packed cases: not asked for.
    """
    q, k, v, do = (np.asarray(a).astype(np.float64) for a in (x.q, x.k, x.v, x.do))
    dh_T = np.asarray(x.dh_T).astype(np.float64)
    dh_T = dh_T if case.options.get("state_layout", "kv") == "kv" else dh_T.swapaxes(-1, -2)
    scale = case.options.get("scale", None)
    scale = case.K**-0.5 if scale is None else scale
    worst, worst_dh, T = 1.0, 1.0, case.T
    for b in range(case.B):
        for i in range(case.HO):
            qi, ki, vi = (a[b, :, i // (case.HO // a.shape[2])] for a in (q, k, v))
            g = np.zeros(T) if x.g is None else np.maximum(x.g[b, :, i].astype(np.float64), -1e3)
            beta = np.ones(T) if x.beta is None else x.beta[b, :, i].astype(np.float64)
            G = np.cumsum(g)
            decay = np.tril(np.exp(np.minimum(G[:, None] - G[None], 0)))
            P, L = scale * decay * (qi @ ki.T), np.tril(beta[:, None] * (ki @ ki.T) * decay, -1)
            I_L = np.eye(T) + L
            u = np.linalg.solve(I_L, beta[:, None] * vi)
            o, lo = P @ u, 2.0**-126
            for terms, total in ((P**2 @ u**2, o), (L**2 @ u**2, u)):
                if _rms(total) > lo:
                    worst = max(worst, float(np.sqrt(np.mean(terms))) / _rms(total))
            lam = np.linalg.solve(I_L.T, P.T @ do[b, :, i] + (np.exp(G[-1] - G)[:, None] * ki) @ dh_T[b, i])
            D = np.exp(G)[:, None]
            parts = scale * D * qi, -beta[:, None] * D * ki
            dh = parts[0].T @ do[b, :, i] + parts[1].T @ lam + np.exp(G[-1]) * dh_T[b, i]
            terms = (parts[0] ** 2).T @ do[b, :, i] ** 2 + (parts[1] ** 2).T @ lam**2
            if _rms(dh) > lo:
                worst_dh = max(worst_dh, float(np.sqrt(np.mean(terms))) / _rms(dh))
    return worst, worst_dh


def tolerance(name: str, dtype: str, case: Case | None = None, x: Inputs | None = None) -> float:
    """Largest rms ratio of the output or gradient `name` in a dtype.

    With a case and its inputs, the bound of forms that round operands of products and solve a system in each chunk.

    float32, float64, ill-conditioned cases: substitution with I + kkt returns x with an error of up to
    |A| |I + kkt| |x| u (Higham, Accuracy and Stability of Numerical Algorithms, theorem 8.5), that is the condition
    number times u for o and states, and ten times that for gradients, for the same reasons as in FLOAT32. The
    well-conditioned rest of the table has condition numbers of up to 75, far inside the plain bound.

    bfloat16, float16: the rounding of an operand is 1.1e-3 of a term, not of the sum; with terms c times the sum
    (`cancellation`) three roundings and that of the result give sqrt(1 + 3 c^2) 1.1e-3. It stays below the plain
    bound up to c = 2 (keys in many dimensions, with decay) and predicts what is measured beyond: c = 2.9, 3.5, 13
    give 5.6e-3, 6.8e-3, 2.5e-2 for o; measured 5.0e-3, 6.7e-3, 1.9e-2. A factor of 1.3 on top for the spread of
    heads, and the same ratio to o's bound as the plain bounds have for the other outputs.
    """
    plain = BY_DTYPE[dtype][name]
    if case is None or x is None:
        return plain
    if dtype in ("bfloat16", "float16"):
        if x.cu_seqlens is not None or x.segment_ids is not None:
            return plain
        forward, dh_0 = cancellation(case, x)
        c = max(forward, dh_0) if name == "dh_0" else forward
        return plain * max(1.0, 1.3 * np.sqrt(1 + 3 * c * c) * 1.1e-3 / BFLOAT16["o"])
    if not case.ill_conditioned:
        return plain
    amplified = ROUNDOFF[dtype] * condition(case, x)
    return max(plain, amplified if name in STATES else 10 * amplified)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def rms_ratio(reference, x) -> float:
    """rms(reference - x) / rms(reference); rms(x) where the reference is zero in float32; inf for NaN or inf in x."""
    reference, x = np.asarray(reference).astype(np.float64), np.asarray(x).astype(np.float64)
    assert reference.shape == x.shape, f"shape {x.shape}, expected {reference.shape}"
    assert np.isfinite(reference).all(), "the reference is not finite"
    if not np.isfinite(x).all():
        return float("inf")
    size = _rms(reference)
    return _rms(reference - x) / size if size >= SMALLEST_NORMAL else _rms(x)


def worst_ratio(reference, x, head_axis: int | None = None) -> float:
    """Largest rms_ratio of the tensor and of each head.

    A head of fewer than 8 numbers has no rms of its own: the relative error of a single sum that happens to cancel
    has no bound.
    """
    reference, x = np.asarray(reference), np.asarray(x)
    ratios = [rms_ratio(reference, x)]
    if head_axis is not None and reference.size >= 8 * reference.shape[head_axis]:
        heads = range(reference.shape[head_axis])
        ratios += [rms_ratio(reference.take(i, head_axis), x.take(i, head_axis)) for i in heads]
    return max(ratios)


def head_axis(name: str) -> int:
    """Axis of the heads: 1 in states [N, HO, K, V], 2 in everything that has tokens [B, T, H, ...]."""
    return 1 if name in ("final_state", "dh_0") else 2


def assert_close(reference, x, bound: float, what: str = "", axis: int | None = None) -> None:
    """Fails unless worst_ratio is at most bound."""
    ratio = worst_ratio(reference, x, axis)
    assert ratio <= bound, f"{what}: rms ratio {ratio:.2e}, allowed {bound:.1e}"
