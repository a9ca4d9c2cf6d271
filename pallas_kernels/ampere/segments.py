"""Rows cut into segments that are walked side by side, where heads are few. That is exact. No device code.

A segment changes a (transposed) state h [V, K] to h M + e. A walk from zeros gives e, one of the identity without
values M. From those follow the states that segments start from, and in the backward pass, where the cotangent behind
a segment changes by M^T, the cotangents that segments end with. Then all segments are walked as sequences.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.shapes import Dims
from pallas_kernels.ampere.rows import Rows
from pallas_kernels.ampere.walk import ROWS
from pallas_kernels.device.launch import num_sms
from pallas_kernels.device.layouts import CHUNK, GRANULE, round_up

STEP = 2.3
"""Microseconds of a chunk of a walk whose CTAs are no more than SMs: 1.18 ms for 512 (H100, 2026-11-25, K = V = 128,
with two slots)."""

JOIN = 10.0
"""Microseconds for the state behind one more segment: some 80 us for seven, with what else a cut costs beside walks
(H100, 2026-11-25, 8 heads)."""


def choose(dims: Dims, packed: bool, sms: int | None = None) -> int:
    """Chunks of a segment of least predicted time, 0 for rows that are not cut.

    Args:
      packed: whether sequences lie in one row, which is never cut.
      sms: streaming multiprocessors, None for those of the device.
    """
    chunks, walks, sms = -(-dims.T // CHUNK), dims.B * dims.HO, sms or num_sms()
    rows, columns = round_up(dims.V, GRANULE) // ROWS, round_up(dims.K, GRANULE) // ROWS

    def time(n: int) -> float:
        passes = 1 if n == 1 else 2 - (-n * walks * columns // sms)
        return -(-chunks // n) * passes * STEP + (n - 1) * JOIN

    most = 1 if packed else min(chunks, sms // (walks * rows))
    n = min(range(1, max(most, 1) + 1), key=time)
    return 0 if n == 1 else even(chunks, -(-chunks // n))


def even(chunks: int, segment_chunks: int) -> int:
    """The least number of chunks of a segment that cuts a row of so many into as many segments."""
    return -(-chunks // -(-chunks // segment_chunks))


def first_chunks(rows: Rows, segment_chunks: int) -> np.ndarray:
    """[B S + 1] int32: first chunk of each segment of each row, and the number of chunks."""
    chunks = rows.padded // CHUNK
    starts = np.arange(0, chunks, segment_chunks)
    return np.append((np.arange(rows.B)[:, None] * chunks + starts).ravel(), rows.B * chunks).astype(np.int32)


def joined(
    first: Float[Array, "B HO V K"] | None, e: Float[Array, "B S HO V K"], m: Float[Array, "B S HO K K"]
) -> Float[Array, "B S HO V K"]:
    """The state before each segment, from that before the first one; None for zeros."""
    states = [jnp.zeros_like(e[:, 0]) if first is None else first]
    for s in range(e.shape[1] - 1):
        changed = jnp.einsum("bhvk,bhkl->bhvl", states[s], m[:, s], precision=lax.Precision.HIGHEST)
        states.append(changed + e[:, s])
    return jnp.stack(states, axis=1)


def joined_backwards(
    last: Float[Array, "B HO V K"] | None, e: Float[Array, "B S HO V K"], m: Float[Array, "B S HO K K"]
) -> Float[Array, "B S HO V K"]:
    """The cotangent behind each segment, from that behind the last one; None for zeros."""
    return jnp.flip(joined(last, jnp.flip(e, 1), jnp.flip(m, 1).swapaxes(-1, -2)), 1)


def of_layout(states: jax.Array | None, kv_layout: bool) -> jax.Array | None:
    """States [.., V, K] from those of a layout, or back."""
    return states if states is None or not kv_layout else states.swapaxes(-1, -2)
