"""Tables of packed rows, found by a kernel from the borders of the sequences. Device code.

`work.tables` makes the others on the host. These are needed before anything else of a forward, and a kernel that XLA
puts in front for them takes longer than they do here: they hide behind the loads of the gates.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.layouts import CHUNK, ROW, round_up, zeros


def _rows(size: int) -> jax.Array:
    """0, 1, .. size - 1 in layout ROW, float32: in a loop Pallas carries no integer vectors that meet numbers."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (size,), 0), ROW).astype(jnp.float32)


def _float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _borders_up_to(token: jax.Array, cu: Any) -> jax.Array:
    """Number of borders at or before a token, by halving."""
    N1 = cu.shape[0]

    def halve(_, range_):
        low, high = range_  # all before low are at or before the token, none from high on
        middle = lax.div(low + high, 2)
        is_before = (middle < high) & (cu[jnp.minimum(middle, N1 - 1)] <= token)
        return jnp.where(is_before, middle + 1, low), jnp.where(is_before, high, middle)

    return lax.fori_loop(0, N1.bit_length(), halve, (jnp.int32(0), jnp.int32(N1)))[0]


def first_rows(chunk: jax.Array, gmem: Any) -> jax.Array:
    """[C] in layout ROW: row of the chunk at which the sequence of each of its tokens starts, 0 to C - 1.

    A token of the padding counts as a sequence of its own: it has no entries in the triangular inverse, where
    garbage it holds (NaN times 0) would reach the tokens that share its chunk.
    """
    cu, row, start = gmem.cu_seqlens, _rows(CHUNK), chunk * CHUNK
    N = cu.shape[0] - 1

    def next_border(token):
        n = _borders_up_to(token, cu)
        return jnp.where(n <= N, cu[jnp.minimum(n, N)] - start, CHUNK)

    def inside(state):
        return state[0] < CHUNK

    def cut(state):
        border, first = state
        return next_border(start + border), jnp.where(row >= _float(border), _float(border), first)

    first = lax.while_loop(inside, cut, (next_border(start), zeros((CHUNK,), jnp.float32, ROW)))[1]
    return jnp.where(row >= _float(cu[N] - start), row, first).astype(jnp.int32)


def ordered_size(N: int) -> int:
    """Entries of the table of `longest_first` for N sequences."""
    return round_up(N + 1, CHUNK)


def longest_first(gmem: Any, smem: Any) -> None:
    """Writes gmem.order: sequences, those of most chunks first, then N. smem.places is as long."""
    cu, number = gmem.cu_seqlens, _rows(gmem.order.shape[0])
    N = cu.shape[0] - 1

    def chunks_of(n):
        begin, end = cu[n], cu[n + 1]
        chunks = jnp.where(end > begin, lax.div(end + CHUNK - 1, CHUNK) - lax.div(begin, CHUNK), 0)
        return _float(chunks)

    def every_sequence(step, start):
        return lax.fori_loop(0, N, step, zeros(number.shape, jnp.float32, ROW) + start)

    chunks = every_sequence(lambda n, x: jnp.where(number == _float(n), chunks_of(n), x), 0.0)

    def count(n, places):
        before = (chunks_of(n) > chunks) | ((chunks_of(n) == chunks) & (number > _float(n)))
        return places + jnp.where(before, 1.0, 0.0)

    smem.places[...] = every_sequence(count, 0.0).astype(jnp.int32)
    plgpu.commit_smem()
    order = every_sequence(lambda n, x: jnp.where(number == _float(smem.places[n]), _float(n), x), float(N))
    plgpu.commit_smem()  # every warp reads the places
    smem.places[...] = order.astype(jnp.int32)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.places, gmem.order)
    plgpu.wait_smem_to_gmem(0)
