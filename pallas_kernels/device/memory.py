"""Shared memory: what a kernel declares, how much that is, and views and copies of it.

A kernel declares its shared memory once, as a dict from names to `Buffer` or `Barriers`: what is launched, what its
estimate of memory is summed from, and the names by which its body knows the references.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.layouts import GRANULE, WGMMA, WGMMA_TRANSPOSED, round_up

CLUSTER = "peer"
"""Axis of the CTAs of a cluster."""

SMEM_LIMIT = 232_448
"""Bytes of shared memory that one CTA may have on compute capability 9.0."""

ALIGNMENT = 1024
"""Bytes to which Pallas rounds every buffer up."""

REDUCTION_BYTES = 2048
"""Bytes that Pallas sets aside in a kernel that reduces an array, unless it is told otherwise."""


class Buffer(NamedTuple):
    """Arrays in shared memory."""

    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    swizzle: int | None = None
    """Bytes over which rows are swizzled, for operands of wgmma; None for a plain array."""
    also_flat: bool = False
    """Whether the same bytes can be used as a plain array too: the reference is then a pair (swizzled, plain)."""

    @property
    def bytes(self) -> int:
        """Bytes that the buffer takes."""
        return round_up(math.prod(self.shape) * jnp.dtype(self.dtype).itemsize, ALIGNMENT)

    def scratch_type(self) -> Any:
        """The buffer in Pallas' terms."""
        transforms = () if self.swizzle is None else tiling(self.swizzle, jnp.dtype(self.dtype).itemsize)
        tile = plgpu.SMEM(self.shape, self.dtype, transforms=transforms)
        return plgpu.RefUnion(tile, plgpu.SMEM(self.shape, self.dtype)) if self.also_flat else tile


class Barriers(NamedTuple):
    """Barriers on each of which `arrivals` arrivals complete a phase."""

    arrivals: int
    count: int = 1
    of_cluster: bool = False
    """Whether an arrival counts in all CTAs of the cluster; `arrivals` are then those of each CTA."""

    @property
    def bytes(self) -> int:
        """Bytes that the barriers take."""
        return 8 * self.count

    def scratch_type(self) -> Any:
        """The barriers in Pallas' terms."""
        if self.of_cluster:
            return plgpu.ClusterBarrier(
                collective_axes=(CLUSTER,), num_arrivals=self.arrivals, num_barriers=self.count
            )
        return plgpu.Barrier(num_arrivals=self.arrivals, num_barriers=self.count)


Memory = Mapping[str, Buffer | Barriers | None]
"""Shared memory of a kernel by name; None where a configuration has no use for it."""


def smem_bytes(memory: Memory, reduction_bytes: int = 0) -> int:
    """Shared memory of one CTA, with what is set aside for reductions."""
    of_parts = sum(part.bytes for part in memory.values() if part is not None)
    return round_up(reduction_bytes, ALIGNMENT) + of_parts


def fitting[C](configs: Iterable[C], memory: Callable[[C], Memory], reduction_bytes: int = 0) -> C:
    """The first configuration whose shared memory a CTA may have; an AssertionError where none is so small."""
    found = (c for c in configs if smem_bytes(memory(c), reduction_bytes) <= SMEM_LIMIT)
    config = next(found, None)
    assert config is not None, "no configuration fits the shared memory"
    return config


def tiling(swizzle: int, itemsize: int = 2) -> tuple:
    """Transforms of a shared-memory operand of wgmma whose rows are swizzled over `swizzle` bytes."""
    return (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


def transposed(ref):
    """A transposed view of a two-dimensional reference: a wgmma operand, or ldmatrix/stmatrix with .trans."""
    return ref.transpose((1, 0))


def store_any(ref, x: jax.Array) -> None:
    """ref[...] = x by plain stores, where no conflict-free pattern exists (jax from 0.12 on wants that said)."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def load_state(ref, rows, kv_layout: bool) -> jax.Array:
    """Rows of a state [V, K] in memory, or of one that lies there as [K, V], in float32.

    Times 1, which compiles to nothing: what is loaded from an argument keeps in its type, inside jax.shard_map, the
    mesh axes that it varies over, and what is computed in a kernel does not. A loop's carry must stay of one type.
    """
    if kv_layout:
        source = transposed(ref.at[:, rows])
        s = plgpu.load(source, layout=WGMMA_TRANSPOSED, optimized=False).astype(jnp.float32)
        s = plgpu.layout_cast(s, WGMMA)
    else:
        s = plgpu.load(ref.at[rows], layout=WGMMA, optimized=False).astype(jnp.float32)
    return s * 1.0


def store_state(ref, rows, h: jax.Array, kv_layout: bool) -> None:
    """Writes rows of a float32 state to memory in its dtype, where it lies as [V, K], or as [K, V]."""
    if kv_layout:
        h = plgpu.layout_cast(h, WGMMA_TRANSPOSED)
        store_any(transposed(ref.at[:, rows]), h.astype(ref.dtype))
    else:
        store_any(ref.at[rows], h.astype(ref.dtype))


def pad_states(states: jax.Array | None, K: int, V: int, kv_layout: bool) -> jax.Array | None:
    """States in float32, of widths padded to multiples of GRANULE; None for zeros. Outside kernels.

    Args:
      kv_layout: whether they are [.., K, V]; else [.., V, K].
    """
    if states is None:
        return None
    widths = round_up(K, GRANULE), round_up(V, GRANULE)
    return pad(states.astype(jnp.float32), (*states.shape[:2], *(widths if kv_layout else widths[::-1])))


def cut_states(states: jax.Array, K: int, V: int, kv_layout: bool) -> jax.Array:
    """States [N, H, ..] without the padding of `pad_states`. Outside kernels."""
    rows, columns = (K, V) if kv_layout else (V, K)
    return states[:, :, :rows, :columns]


def pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x with zeros at the end of its dimensions, up to a shape. Outside kernels."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])
