"""State passing by the kernels of `hopper` and `channels`.

The kernels cut long rows into segments anyway and find the map of states over each segment. The product of these maps
is the map over the whole device, so that splitting tokens costs little more than sending the states: a walk back over
the segments whose cotangents reach the first token (`pallas_kernels.backward.reach`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax import gates
from gdn_jax.rule.call import Arrays, Call
from gdn_jax.rule.state_passing import Affine


class Saved(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass."""

    x: Arrays
    """The tokens. initial_state holds the states that this device's tokens started from."""
    residuals: Any


class Opened(NamedTuple):
    """Kernels of a call that cut sequences into segments, where a sequence goes on at another device.

    Keys are as they are after the L2 norm, states are [K, V], and cu_seqlens is not known while tracing. Outputs may
    have more tokens than the call.
    """

    forward: Callable[[Int[Array, ""] | None], Any]
    """The forward up to where states are needed, as `pallas_kernels.forward.rule.Open`, from the packed sequence that
    goes on; None where every row does."""
    adjoints: Callable[[Any, Any, Any], Any]
    """The cotangents at both ends of segments, as of `pallas_kernels.backward.rule.open_adjoints`, from residuals,
    cotangents and the sequences that come from elsewhere."""
    backward: Callable[[Any, Any, jax.Array | None], Arrays]
    """Cotangents of the arguments, from residuals, cotangents and those at the starts of segments, to walk over
    these; None to walk over whole sequences."""


@runtime_checkable
class OpenKernels(Protocol):
    """A set of kernels that passes states."""

    def opened(self, call: Call, x: Arrays, interpret: Any) -> Opened:
        """The kernels with the arguments of a call.

        Args:
          interpret: parameters of Pallas' interpreter, None to compile.
        """
        ...


@dataclasses.dataclass(frozen=True)
class KernelPassing:
    """A `StatePassing`. The kernels hold the scale of the call."""

    call: Call
    kernels: OpenKernels
    interpret: Any = None

    def forward(
        self, x: Arrays, begins: Float[Array, "N HO K V"], borders: Any
    ) -> tuple[Affine, Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], Saved]]]:
        """See `StatePassing`."""
        keys = self._normalized(*self._keys(x))
        kernels = self.kernels.opened(self._plain, self._with_keys(x, keys), self.interpret)
        opened = kernels.forward(borders.last)
        items, m_t = opened.prepared.items, opened.prepared.m_t
        assert m_t is not None
        _, end = _items_of(items, borders.last, x.k.shape[0])
        K, V = x.k.shape[3], x.v.shape[3]
        leaves = jnp.swapaxes(opened.starts(begins)[end - 1], -1, -2)  # that of the empty segment after it

        def rest(start: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Saved]:
            o, final, residuals = opened.finish(start)
            return (o[:, : x.q.shape[1]], final), Saved(x._replace(initial_state=start), residuals)

        m = _transition(m_t, items, borders.last, x.k.shape)
        return Affine(leaves[..., :K, :V], m[..., :K, :K]), rest

    def backward(
        self, saved: Saved, borders: Any, do: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[Any, ...]]]:
        """See `StatePassing`."""
        from pallas_kernels.backward.reach import Entry
        from pallas_kernels.backward.rule import OutputCotangents

        x, residuals = saved
        keys, through_norm = jax.vjp(self._normalized, *self._keys(x))
        kernels = self.kernels.opened(self._plain, self._with_keys(x, keys), self.interpret)
        entry = Entry(borders.first, borders.enters)
        e, at_ends, is_cut = kernels.adjoints(residuals, OutputCotangents(do, ends), entry)
        segments, rows = residuals.segments, x.k.shape[0]
        first, end = _items_of(segments.items, borders.first, rows)
        m_t = jax.tree.map(lambda x: x[first], segments.m_t).whole()
        over_first = jnp.einsum("rhvk,rhjk->rhvj", at_ends[first], m_t, precision=lax.Precision.HIGHEST)
        ends_in_first = (end - first == 1)[:, None, None, None]  # whose e holds the part of the end already
        de = jnp.swapaxes(e[first] + jnp.where(ends_in_first, 0, over_first), -1, -2)

        def rest(ends: jax.Array) -> tuple[Any, ...]:
            adjoints = None
            if is_cut:
                after = jnp.swapaxes(borders.pick(ends, borders.last), -1, -2).astype(e.dtype)
                widths = e.shape[-2] - after.shape[2], e.shape[-1] - after.shape[3]
                _, end = _items_of(segments.items, borders.last, rows)
                adjoints = e.at[end - 1].set(jnp.pad(after, ((0, 0), (0, 0), *((0, n) for n in widths))))
            out = kernels.backward(residuals, OutputCotangents(do, ends), adjoints)
            return self._with_keys(out, through_norm(self._keys(out))).floats

        return de[:, :, : x.k.shape[3], : x.v.shape[3]], rest

    @property
    def _plain(self) -> Call:
        """The call on keys that are normalised."""
        return self.call._replace(use_qk_l2norm=False)

    def _keys(self, x: Arrays) -> tuple[jax.Array, ...]:
        """The arrays that the norm is of."""
        return tuple(getattr(x, name) for name in self.call.keys)

    def _with_keys(self, x: Arrays, keys: tuple[jax.Array, ...]) -> Arrays:
        """x with others in their places."""
        return x._replace(**dict(zip(self.call.keys, keys, strict=True)))

    def _normalized(self, *keys: jax.Array) -> tuple[jax.Array, ...]:
        """Keys as the kernels take them."""
        return tuple(map(gates.l2norm, keys)) if self.call.use_qk_l2norm else keys


def _items_of(items: Any, sequence: Int[Array, ""] | None, rows: int) -> tuple[jax.Array, jax.Array]:
    """First item, and the one after the last, of each sequence that crosses a border: every row, or one that is
    packed."""
    if sequence is None:
        per_row = items.split.num_items // rows
        first = jnp.arange(rows) * per_row
        return first, first + per_row
    first = items.tables.first_item
    return first[sequence][None], first[sequence + 1][None]


def _transition(
    m_t: Any, items: Any, sequence: Int[Array, ""] | None, shape: tuple[int, ...]
) -> Float[Array, "R HO K64 K64"]:
    """The product of the maps of all segments of sequences that leave, without the empty segment after them.

    Neighbours are merged, level by level, in float32.

    Args:
      m_t: pallas_kernels.work.residuals.Transition.
      shape: of k.
    """
    first, end = _items_of(items, sequence, shape[0])
    number = items.split.num_items // shape[0]
    if sequence is None:
        number -= 1
    else:  # one sequence has at most so many
        number = min(number, -(-shape[1] // (64 * items.split.segment_chunks)) + 2)
    index = jnp.minimum(first, items.split.num_items - number)[:, None] + jnp.arange(number)
    inside = ((index >= first[:, None]) & (index < end[:, None] - 1))[..., None, None, None]
    m_t = jax.tree.map(lambda x: x[index], m_t).whole()
    identity = jnp.eye(m_t.shape[-1], dtype=jnp.float32)
    m = jnp.where(inside, jnp.swapaxes(m_t, -1, -2), identity)
    while m.shape[1] > 1:
        if m.shape[1] % 2:
            m = jnp.concatenate([m, jnp.broadcast_to(identity, m[:, :1].shape)], 1)
        m = jnp.einsum("rshkj,rshji->rshki", m[:, 1::2], m[:, 0::2], precision=lax.Precision.HIGHEST)
    return m[:, 0]
