"""The recurrence over chunks: the state at the start of each, the values it really writes, and their derivative.

    v_new = A (x - read (k h))                                A = (I + kkt)^-1
    end   = total h + k^T (to_end v_new)                      state at the chunk's end
    h'    = keep end + forcing                                state at the start of the next chunk

With x = beta v, read = beta exp(G), to_end = exp(G_C - G), total = exp(G_C) these are v_new = u - w h and
h' = exp(G_C) h + k^T (exp(G_C - G) v_new), in a form that needs fewer products than w and u. This is the only
part of the chunked form that walks over chunks.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", section 3.3; fla's `chunk_gated_delta_rule_fwd_h`.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from gdn_jax.rule.chunks.stages import Numerics, solve_tril

INVERSE_NAME = "gdn_inverse"
STATES_NAME = "gdn_states"
"""`checkpoint_name`s of A and of h where the derivative is taken."""


@runtime_checkable
class Transition(Protocol):
    """The effect of a chunk on the state, apart from what it writes: all that `solve_states` asks of a rule.

    Arrays have the axes L (chunks, walked in order), P (lanes, side by side) and those of the heads. An
    implementation is a NamedTuple of arrays, so that JAX maps over its chunks; a tangent of one is one, too.
    """

    @property
    def ends(self) -> Int[Array, "L P"] | None:
        """The sequence that ends with each chunk, counted from 1, and 0 where none does; None: nowhere.

        Such a chunk passes nothing on to the next one, which starts from its forcing alone.
        """
        ...

    def shape(self) -> tuple[int, ...]:
        """(L, P, heads...), of every head's state."""
        ...

    def width(self) -> int:
        """K, the rows of a state."""
        ...

    def replace_ends(self, ends: jax.Array) -> "Transition":
        """The same transition with these `ends`."""
        ...

    def end_state(self, h: jax.Array, v_new: jax.Array, numerics: Numerics) -> jax.Array:
        """The state at the chunk's end, from the one at its start and the values written."""
        ...

    def v_new(self, A: jax.Array, x: jax.Array | None, h: jax.Array, numerics: Numerics) -> jax.Array:
        """A (x - what the chunk's tokens find in h): the values that are really written. x of None is 0."""
        ...

    def found_tangent(self, d: Any, dx: jax.Array, h: jax.Array, numerics: Numerics) -> jax.Array:
        """dx less the tangent of what the tokens find in h, along the tangent d of the transition."""
        ...

    def drive_tangent(self, d: Any, h: jax.Array, v_new: jax.Array, numerics: Numerics) -> jax.Array:
        """Tangent of the state at the chunk's end for given h and v_new, along the tangent d."""
        ...


class HeadTransition(NamedTuple):
    """A `Transition` with one decay a head:

    found = read (k h);   end = total h + k^T (to_end v_new)
    """

    total: Float[Array, "L P *H"]
    """exp(G_C): decay over the chunk."""
    to_end: Float[Array, "L P *H C"]
    """exp(G_C - G): decay of each token's write until the chunk's end."""
    read: Float[Array, "L P *H C"]
    """beta exp(G): factor of what each token's key finds in the state."""
    k: Float[Array, "L P *Hk C K"]
    ends: Int[Array, "L P"] | None = None

    def shape(self) -> tuple[int, ...]:
        return self.total.shape

    def width(self) -> int:
        return self.k.shape[-1]

    def replace_ends(self, ends: jax.Array) -> "HeadTransition":
        return self._replace(ends=ends)

    def end_state(self, h: jax.Array, v_new: jax.Array, numerics: Numerics) -> jax.Array:
        written = numerics.einsum("...ck,...cv->...kv", self.k, self.to_end[..., None] * v_new)
        return self.total[..., None, None] * h + written

    def v_new(self, A: jax.Array, x: jax.Array | None, h: jax.Array, numerics: Numerics) -> jax.Array:
        found = self.read[..., None] * numerics.einsum("...ck,...kv->...cv", self.k, h)
        return numerics.einsum("...ij,...jv->...iv", A, -found if x is None else x - found)

    def found_tangent(
        self, d: "HeadTransition", dx: jax.Array, h: jax.Array, numerics: Numerics
    ) -> jax.Array:
        dx = dx - d.read[..., None] * numerics.einsum("...ck,...kv->...cv", self.k, h)
        return dx - self.read[..., None] * numerics.einsum("...ck,...kv->...cv", d.k, h)

    def drive_tangent(
        self, d: "HeadTransition", h: jax.Array, v_new: jax.Array, numerics: Numerics
    ) -> jax.Array:
        # One product for both tangents: in reverse mode, so are both cotangents.
        dk_to_end = d.to_end[..., None] * self.k + self.to_end[..., None] * d.k
        return d.total[..., None, None] * h + numerics.einsum("...ck,...cv->...kv", dk_to_end, v_new)


class ChannelTransition(NamedTuple):
    """A `Transition` with one decay for each key channel, which is inside the keys:

    found = read_k h;   end = total h + write_k^T v_new
    """

    total: Float[Array, "L P *H K"]
    """exp(G_C): decay of each channel over the chunk."""
    read_k: Float[Array, "L P *H C K"]
    """beta e exp(G): erase keys, decayed from the chunk's start, times the write strength."""
    write_k: Float[Array, "L P *H C K"]
    """k exp(G_C - G): write keys, decayed until the chunk's end."""
    ends: Int[Array, "L P"] | None = None

    def shape(self) -> tuple[int, ...]:
        return self.total.shape[:-1]

    def width(self) -> int:
        return self.total.shape[-1]

    def replace_ends(self, ends: jax.Array) -> "ChannelTransition":
        return self._replace(ends=ends)

    def end_state(self, h: jax.Array, v_new: jax.Array, numerics: Numerics) -> jax.Array:
        return self.total[..., None] * h + numerics.einsum("...ck,...cv->...kv", self.write_k, v_new)

    def v_new(self, A: jax.Array, x: jax.Array | None, h: jax.Array, numerics: Numerics) -> jax.Array:
        found = numerics.einsum("...ck,...kv->...cv", self.read_k, h)
        return numerics.einsum("...ij,...jv->...iv", A, -found if x is None else x - found)

    def found_tangent(
        self, d: "ChannelTransition", dx: jax.Array, h: jax.Array, numerics: Numerics
    ) -> jax.Array:
        return dx - numerics.einsum("...ck,...kv->...cv", d.read_k, h)

    def drive_tangent(
        self, d: "ChannelTransition", h: jax.Array, v_new: jax.Array, numerics: Numerics
    ) -> jax.Array:
        return d.total[..., None] * h + numerics.einsum("...ck,...cv->...kv", d.write_k, v_new)


class States(NamedTuple):
    """Solution of the recurrence over chunks."""

    h: Float[Array, "L P *H K V"]
    """State at the start of each chunk."""
    v_new: Float[Array, "L P *H C V"]
    """Values that each chunk really writes."""
    last: Float[Array, "*H K V"]
    """State after the last chunk."""
    ends: Float[Array, "N *H K V"] | None
    """State at the end of each sequence, added to what was given there; None without."""


def _walk(numerics, A, transition, x, drive, forcing, h, ends):
    """The recurrence of `solve_states` in one pass over axis 0, every lane on its own, with the sum of all to `ends`.

    drive: is added to the state at the end of each chunk; None: nothing.
    """
    stored, kept, numerics = numerics.operand, numerics.kept, numerics.wide()

    def chunk(carry, inputs):
        h, ends = carry
        A, transition, x, drive, forcing = inputs
        v_new = transition.v_new(A, x, h, numerics)
        end = transition.end_state(h, v_new, numerics)
        end = end if drive is None else end + drive
        new = end
        if transition.ends is not None:
            # A selection, so that a NaN stops at the border of its sequence.
            new = jnp.where(jnp.expand_dims(transition.ends == 0, tuple(range(1, end.ndim))), end, 0)
            if ends is not None:  # here alone the state at a sequence's end is not rounded
                nowhere = len(ends) + jnp.arange(len(end))
                at = jnp.where(transition.ends == 0, nowhere, transition.ends - 1)
                ends = ends.at[at].add(end, mode="drop", unique_indices=True)
        new = new if forcing is None else new + forcing
        return (new, ends), (h.astype(stored), v_new.astype(kept))

    (last, ends), (states, v_new) = lax.scan(chunk, (h, ends), (A, transition, x, drive, forcing))
    return States(states, v_new, last, ends)


def _walk_lanes(numerics, A, transition, x, drive, forcing, h0, ends):
    """`solve_states` for a given inverse A, linear in (x, drive, forcing, h0, ends)."""
    lanes = transition.shape()[1]
    if lanes == 1:
        states = _walk(numerics, A, transition, x, drive, forcing, h0[None], ends)
        return states._replace(last=states.last[0])
    # Every lane from a zero state and, for what it does to a state, from the identity; then the lanes are
    # joined in order and walked once more from their true start states.
    K = transition.width()
    shape = (lanes, *h0.shape)
    zeros = jnp.zeros_like(h0, shape=shape)
    written = _walk(numerics, A, transition, x, drive, forcing, zeros, None).last
    identity = jnp.zeros_like(h0, shape=(*shape[:-2], K, K)) + jnp.eye(K, dtype=h0.dtype)
    carried = _walk(numerics, A, transition, None, None, None, identity, None).last

    passes = None if transition.ends is None else (transition.ends == 0).all(0)

    def join(h, lane):
        written, carried, passes = lane
        product = jnp.einsum("...kj,...jv->...kv", carried, h, precision=lax.Precision.HIGHEST)
        if passes is not None:  # zeros times the NaN of a sequence that has ended would go on
            product = jnp.where(passes, product, 0)
        return written + product, h

    _, starts = lax.scan(join, h0, (written, carried, passes))
    states = _walk(numerics, A, transition, x, drive, forcing, starts, ends)
    return states._replace(last=states.last[-1])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def solve_states(
    numerics: Numerics,
    kkt: Float[Array, "L P *H C C"],
    transition: Any,
    x: Float[Array, "L P *H C V"],
    forcing: Float[Array, "L P *H K V"] | None,
    h0: Float[Array, "*H K V"],
    ends: Float[Array, "N *H K V"] | None = None,
) -> States:
    """Solves the recurrence over chunks, with A = (I + kkt)^-1:

        v_new = A (x - found(h));   end = decayed(h) + written(v_new);   h' = keep end + forcing

    where found, decayed and written are those of the transition, and keep is 0 where a sequence ends, whose end
    is added to `ends`. Axis 0 is walked in order; axis 1 holds the lanes of a row one after another (lane 1 goes on
    where lane 0 ends), walked side by side. One lane or many give the same states; many cost two more walks, all
    shorter.

    The equations are linear in (x, forcing, h0, ends), so the derivative in any argument solves the same equations
    with another x and forcing, and with a drive that is added to end; these are parallel over chunks. In reverse
    mode the adjoint state walks backwards and everything else is parallel; dkkt = -lam v_new^T needs no derivative
    of the inverse.
    """
    A = solve_tril(kkt)
    return _walk_lanes(numerics, A, transition, x, None, forcing, h0, ends)


@solve_states.defjvp
def _solve_states_jvp(numerics, primals, tangents):
    kkt, transition, x, forcing, h0, ends = primals
    dkkt, d, dx, dforcing, dh0, dends = tangents
    wide = numerics.wide()
    A = checkpoint_name(solve_tril(kkt), INVERSE_NAME)
    solution = _walk_lanes(numerics, A, transition, x, None, forcing, h0, ends)
    h = checkpoint_name(solution.h, STATES_NAME)
    # From h and not from the walk, so that the backward pass recomputes it without walking again.
    v_new = transition.v_new(A, x, h, wide).astype(numerics.kept)

    dx = transition.found_tangent(d, dx, h, wide)
    dx = dx - wide.einsum("...ij,...jv->...iv", dkkt, v_new)
    drive = transition.drive_tangent(d, h, v_new, wide)
    solution = solution._replace(h=h, v_new=v_new)
    return solution, _walk_lanes(numerics, A, transition, dx, drive, dforcing, dh0, dends)
