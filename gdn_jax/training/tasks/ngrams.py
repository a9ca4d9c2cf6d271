"""Bigram and trigram tables of bytes: they show how far counting alone comes on the same text."""

import numpy as np

_AT_ONCE = 2**20
"""Bytes that are counted at a time, so few that they are sorted in a core's cache."""
PRIOR = (
    5.0  # pseudo-counts given to the shorter context; 1 to 10 differ by 0.02 bits per byte on Python source
)


def bits_per_byte(train: np.ndarray, val: np.ndarray, positions: np.ndarray) -> dict[str, float]:
    """Returns the cross entropy of count tables fitted on `train`, in bits per byte of `val` at `positions`.

    Each order backs off to the one below it, with n(context) the count of a context and m the prior:

        p1(y)         = (n(y) + 1) / (n + 256)
        p2(y | b)     = (n(b y) + m p1(y)) / (n(b) + m)
        p3(y | a b)   = (n(a b y) + m p2(y | b)) / (n(a b) + m)

    Args:
      train: [n] uint8.
      val: [m] uint8; a context reaches back over the start of a model's window, so the tables are never at a
        disadvantage.
      positions: [p] indices >= 1 into val of the bytes that are scored.

    Returns:
      {"bigram": p2, "trigram": p3} in bits per byte.
    """
    v = np.concatenate([[0], val]).astype(np.int64)  # a zero before the first byte completes its context
    at = positions + 1
    y, b, a = v[at], v[at - 1], v[at - 2]
    n3 = _trigrams(np.concatenate([np.zeros(1, np.uint8), train]))
    n2 = n3.reshape(256, 256**2).sum(0)
    n1 = n2.reshape(256, 256).sum(0)
    c2 = n2.reshape(256, 256).sum(1)  # contexts b
    c3 = n3.reshape(256 * 256, 256).sum(1)  # contexts a b
    p1 = (n1[y] + 1) / (n1.sum() + 256)
    p2 = (n2[b * 256 + y] + PRIOR * p1) / (c2[b] + PRIOR)
    p3 = (n3[(a * 256 + b) * 256 + y] + PRIOR * p2) / (c3[a * 256 + b] + PRIOR)
    return {"bigram": float(-np.log2(p2).mean()), "trigram": float(-np.log2(p3).mean())}


def _trigrams(stream: np.ndarray) -> np.ndarray:
    """Counts how often each three bytes a b y follow each other, at (a * 256 + b) * 256 + y."""
    counts = np.zeros(256**3, np.int64)
    for begin in range(0, stream.size - 2, _AT_ONCE):
        part = stream[begin : begin + _AT_ONCE + 2]
        codes = part[:-2].astype(np.uint32)
        for following in (part[1:-1], part[2:]):
            codes <<= 8
            codes |= following
        codes.sort()  # so that each code's count is the length of a run: to add at random places takes longer
        lasts = np.append(np.flatnonzero(codes[1:] != codes[:-1]), codes.size - 1)
        counts[codes[lasts]] += np.diff(lasts, prepend=-1)
    return counts
