"""How far a result is from the truth and how far it may be: the metric and the bounds of tests and `gdn check`.

Metric: rms(reference - x) / rms(reference), over the whole tensor and over each head (a wrong quiet head must not
hide behind a loud one). NaN and inf fail before anything is measured. Where the reference is zero in float32 (a head
with beta = 0 has dk = 0; exp(-1000) underflows) the ratio has no meaning: there rms(x) itself must be below the
bound, all inputs being of order one.
"""

from typing import Any

import numpy as np

SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16

STATES = ("o", "final_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh_0")
NAMES = STATES + GRADIENTS
STRENGTHS = ("derase", "dwrite")
"""Gradients of strengths that stand in place of beta. They have the bounds of dbeta."""
ERASURE = ("derase_key", "derase_strength")
"""Gradients of what `erase_then_delta_rule` takes more. They have the bounds of dk and dbeta."""
_BOUND_OF = dict.fromkeys((*STRENGTHS, "derase_strength"), "dbeta") | {"derase_key": "dk"}

# float32. An output is a sum of K products of the query with a state, itself a sum over up to 128 tokens of a chunk
# of results of a solve with up to 128 terms. With errors of one roundoff u = 6e-8 that add up like a random walk,
# that is sqrt(K + 128 + 128) u = 1.3e-6 for K = 256; 1e-5 leaves a factor of eight for sums that grow, then cancel.
# A gradient goes through the same chain twice (forward values enter the backward), and dg is a sum over the chunk of
# terms of either sign: a factor of ten more.
FLOAT32 = {**dict.fromkeys(STATES, 1e-5), **dict.fromkeys(GRADIENTS, 1e-4)}

# float64 differs from float32 in u alone, 2^-29 of it: 1.9e-14 and 1.9e-13. The oracle rounds as much: twice that.
FLOAT64 = {name: 2 * value * 2.0**-29 for name, value in FLOAT32.items()}

# bfloat16. The inputs are rounded before both sides see them. o, dq, dk, dv leave as bfloat16: rounding to nearest is
# off by up to 2^-8 = 3.9e-3 of the value, 1.7e-3 rms over all significands. An implementation may also round both
# operands of its matrix products (float32 sums). Independent roundings add in squares: with three products in a row
# that is sqrt(1 + 2 * 3) * 1.7e-3 = 4.5e-3. dq, dk, dh_0 go through two such chains, 1.7 times that. dg and dbeta are
# differences of such sums, which cancel to about a third of their size.
BFLOAT16 = {
    **dict.fromkeys(("o", "final_state", "dv"), 5e-3),
    **dict.fromkeys(("dq", "dk", "dh_0"), 8e-3),
    **dict.fromkeys(("dg", "dbeta"), 2e-2),
}

# The same where keys are alike or nothing decays. A rounded operand is off by 1.7e-3 of the terms, not of their sum;
# there the terms cancel, to 1 / c of their size, and the error is sqrt(1 + 6 c^2) * 1.7e-3: 8e-3 allows c = 1.9.
BFLOAT16_CANCELLING = {
    **dict.fromkeys(("o", "final_state", "dv"), 8e-3),
    **dict.fromkeys(("dq", "dk", "dh_0"), 1.2e-2),
    **dict.fromkeys(("dg", "dbeta"), 2e-2),
}

# float16 has 3 bits more than bfloat16. (Its range is not tested here: inputs are of order one.)
BOUNDS = {
    "float64": (FLOAT64, FLOAT64),
    "float32": (FLOAT32, FLOAT32),
    "bfloat16": (BFLOAT16, BFLOAT16_CANCELLING),
    "float16": tuple(
        {name: value / 8 for name, value in each.items()} for each in (BFLOAT16, BFLOAT16_CANCELLING)
    ),
}


def cancelling(g: Any, k: Any) -> bool:
    """Whether the sums of a call cancel, so that the wider bfloat16 bounds apply to it.

    They cancel in a head that never decays: its state is a sum over all earlier tokens, and a query reads a small
    difference of large terms from it. They also cancel in a head whose keys are alike: every token reads the values
    of all others, and subtracts most of them again. Keys are alike when the mean |cosine| of two of them is
    above a half. Random keys of width K have about sqrt(2 / (pi K)), so those of width 1 are alike too, being all
    1 or -1: a key's sign does not count, since (-k) (-k)^T is k k^T.

    Args:
      g: log decays [B, T, H]; None for no decay.
      k: keys [B, T, Hk, K]; the first 128 tokens of every row are looked at.
    """
    if g is None or (np.asarray(g) == 0).all((0, 1)).any():
        return True
    k = np.asarray(k[:, :128]).astype(np.float64)
    k = k / np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), SMALLEST_NORMAL)
    T = k.shape[1]
    if T == 1:
        return False
    cosine = np.abs(np.einsum("bihk,bjhk->hbij", k, k))
    others = cosine.sum((1, 2, 3)) - np.einsum("hbii->h", cosine)
    return bool((others / (k.shape[0] * T * (T - 1)) > 0.5).any())


def bound(name: str, dtype: str, *, cancelling: bool = False) -> float:
    """Largest error of the output or gradient `name` for inputs of a dtype.

    Args:
      name: one of NAMES, STRENGTHS or ERASURE.
      dtype: float64, float32, bfloat16 or float16.
      cancelling: of the call's g and k, see `cancelling`.
    """
    return BOUNDS[dtype][cancelling][_BOUND_OF.get(name, name)]


def _rms(x: np.ndarray | np.floating) -> float:
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

    Args:
      reference: what is right, finite.
      x: what came, of the same shape.
      head_axis: axis of the heads, see `head_axis`; None: the tensor alone counts.
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
