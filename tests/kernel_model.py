"""What the GPU kernels may be off by: their algorithm in NumPy, float64 but for the operands of matrix products.

The kernels round every operand of a product once, to the dtype of q, k and v, where `rounded` stands below; all sums,
gates and states are float32. Where keys are strongly correlated (64 keys in 16 dimensions), strengths large or decays
absent, terms cancel and these roundings show: the difference to the oracle is then a property of the algorithm. The
kernels must reproduce it: a larger error has another cause.
"""

import numpy as np
import oracle
from cases import DTYPES, Case, Inputs
from tolerances import tolerance, worst_ratio

CHUNK = 64

SPREAD = 1.3
"""Two runs of random roundings differ by this much; over a hundred heads and tokens of a case, by less."""

SPREAD_ILL_CONDITIONED = 4.0
"""The same where rounding errors are amplified a hundred times and more, so that a few of them decide."""


def forward(case: Case, x: Inputs, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(o, final_state) as the kernels would compute them."""

    def rounded(y, to=DTYPES[dtype]):
        with np.errstate(over="ignore", invalid="ignore"):
            return y.astype(np.float32).astype(to).astype(np.float64)

    q, k, v = (np.asarray(y).astype(np.float64) for y in (x.q, x.k, x.v))
    if case.use_qk_l2norm:
        q, k = (rounded(y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)) for y in (q, k))
    B, T, HO, K, V = case.B, case.T, case.HO, case.K, case.V
    g2 = np.zeros((B, T, HO)) if x.g is None else np.maximum(x.g.astype(np.float64) / np.log(2), -150)
    beta = np.ones((B, T, HO)) if x.beta is None else x.beta.astype(np.float64)
    if x.segment_ids is not None:
        g2[:, 1:][x.segment_ids[:, 1:] != x.segment_ids[:, :-1]] = -150
    scale = K**-0.5 if case.scale is None else case.scale
    places = [(b, 0, T) for b in range(B)]
    if x.cu_seqlens is not None:
        places = [(0, int(a), int(b)) for a, b in zip(x.cu_seqlens[:-1], x.cu_seqlens[1:], strict=True)]
    states = np.zeros((case.N, HO, V, K))
    if x.initial_state is not None:
        h0 = x.initial_state.astype(np.float64)
        states = h0.swapaxes(-1, -2).copy() if case.state_layout == "kv" else h0.copy()
    o = np.zeros((B, T, HO, V))
    heads = np.arange(HO)
    of_q, of_k, of_v = (heads // (HO // n) for n in case.heads)
    for n, (b, begin, end) in enumerate(places):
        for start in range(begin, end, CHUNK):
            s = slice(start, min(start + CHUNK, end))
            kc, qc, vc = (
                y[b, s][:, of].swapaxes(0, 1) for y, of in ((k, of_k), (q, of_q), (v, of_v))
            )  # [HO, C, .]
            strength = beta[b, s].T[:, None, :]
            G = np.cumsum(g2[b, s], 0).T
            C = G.shape[-1]
            gamma = np.tril(np.exp2(np.minimum(G[:, :, None] - G[:, None, :], 0)))
            L = np.tril(strength.swapaxes(1, 2) * (kc @ kc.swapaxes(1, 2)), -1)
            A = rounded(np.linalg.inv(np.eye(C) + L), np.float16)
            t = rounded(rounded(A * strength) * gamma)
            p = rounded(rounded(qc @ kc.swapaxes(1, 2) * scale) * gamma)
            D, Dr, last = (
                np.exp2(G)[:, None],
                np.exp2(G[:, -1:] - G)[:, None],
                np.exp2(G[:, -1])[:, None, None],
            )
            S = rounded(states[n])
            w = rounded(vc.swapaxes(1, 2) - (S @ kc.swapaxes(1, 2)) * D)
            correction = w @ t.swapaxes(1, 2)
            read = (S @ qc.swapaxes(1, 2)) * D * scale + rounded(correction) @ p.swapaxes(1, 2)
            o[b, s] = rounded(read).transpose(2, 0, 1)
            states[n] = last * states[n] + rounded(correction * Dr) @ kc
    return o, states.swapaxes(-1, -2) if case.state_layout == "kv" else states


def bounds(case: Case, x: Inputs, dtype: str, expected: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Largest ratios of o and of the final state: the plain tolerance, or that of the model where it is larger."""
    spread = SPREAD_ILL_CONDITIONED if case.ill_conditioned else SPREAD
    ratios = [
        worst_ratio(y, z, axis) for y, z, axis in zip(expected, forward(case, x, dtype), (2, 1), strict=True)
    ]
    return tuple(
        max(tolerance(name, dtype), spread * ratio)
        for name, ratio in zip(("o", "final_state"), ratios, strict=True)
    )


def oracle_forward(case: Case, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's outputs for a case."""
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    return oracle.forward(**x.arguments, **options)
