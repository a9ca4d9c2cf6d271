"""What a forward of the kernels leaves of segments, token by token in NumPy float64: for tests of the backwards."""

import itertools

import numpy as np

from pallas_kernels.work import tables
from pallas_kernels.work.residuals import Segments, Transition


def of_heads(y, heads: int, width: int) -> np.ndarray:
    """Tokens [B, T, H, .] of the heads of the output in float64, with zeros up to a width."""
    y = np.repeat(np.asarray(y).astype(np.float64), heads // y.shape[2], axis=2)
    return np.pad(y, ((0, 0),) * 3 + ((0, width - y.shape[3]),))


def segments_of(tokens: tuple, h_0: np.ndarray | None, cu_seqlens, length: int, dtype) -> Segments:
    """States at the starts of segments of `length` chunks, and what segments do to a state.

    Args:
      tokens: keys, erase keys, values, decays [B, T, HO, .] and strengths [B, T, HO], with padded widths.
      h_0: states [N, HO, K, V] before the first tokens; None for zeros.
      dtype: of the maps but for their diagonal.
    """
    k, e, v, alpha, beta = tokens
    (B, T, HO, K), V = k.shape, v.shape[3]
    if cu_seqlens is None:
        items, rows = tables.row_items(B, T, length), [(b, 0, T) for b in range(B)]
    else:
        cu = np.asarray(cu_seqlens, np.int32)
        items, rows = tables.packed_items(cu, T, length), [(0, *ends) for ends in itertools.pairwise(cu)]
    one = np.eye(K)
    starts, diagonal, rest = (
        np.full((items.split.num_items, HO, *shape), np.nan) for shape in ((V, K), (K,), (K, K))
    )
    item = 0
    for n, (row, begin, end) in enumerate(rows):
        h = np.zeros((HO, V, K))
        if h_0 is not None:
            h[:, : h_0.shape[3], : h_0.shape[2]] = h_0[n].swapaxes(1, 2)
        cuts = range(begin // 64 * 64 + length * 64, end, length * 64)
        for part in itertools.pairwise([begin, *cuts, end]):
            starts[item], m = h, np.tile(one, (HO, 1, 1))
            for t in range(*part):
                erased, written = (beta[row, t, :, None] * y[row, t] for y in (e, v))
                step = alpha[row, t][:, :, None] * (one - erased[:, :, None] * k[row, t][:, None])
                h = h @ step + written[:, :, None] * k[row, t][:, None]
                m = m @ step
            if part[1] < end:  # that of a sequence's last segment is not written
                diagonal[item], rest[item] = np.diagonal(m, axis1=1, axis2=2), m * (1 - one)
            item += 1
    f32 = np.float32
    return Segments(starts.astype(f32), Transition(diagonal.astype(f32), rest.astype(dtype)), items)
