"""A chunk's decays as the walks read them, of a head that decays as one and of one whose channels do.

A walk multiplies the state by keys and queries in which a chunk's decays are, or which it scales by them. What it
does else is the same: the two classes here are all that differs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.ampere.walk import ROWS, Cta
from pallas_kernels.device.layouts import CHUNK, COL, along_columns

BETA, GL = 0, CHUNK
"""Places of the write strengths and of gl in the vectors of `ChannelDecay`."""


class HeadDecay:
    """One decay a head: k and q as they are, and vectors (D, Dr) of `states.factors`."""

    erased, read, written = "k", "q", "k"
    """Names of the tiles that errors, outputs and what is written are made of."""
    early_states, early_outputs, late = ("v", "t", "factors"), ("q", "v", "t", "p", "factors"), ("k",)

    def before(self, cta: Cta, i) -> Any:
        """The factor of both products with the state: D."""
        return cta.factor(0, i)

    def errors(self, v_t: jax.Array, d: Any, hk: jax.Array) -> jax.Array:
        """The values without those of their keys in the state."""
        return v_t - d * hk

    def outputs(self, cta: Cta, d: Any, hq: jax.Array) -> jax.Array:
        """The part of the outputs that queries read from the state."""
        return hq * (d * cta.sizes.scale)

    def strengths(self, cta: Cta, i) -> jax.Array:
        """The factor of W where it is written: Dr."""
        return cta.factor(1, i)

    def decay(self, cta: Cta, i) -> jax.Array:
        """The factor of the state over the chunk."""
        return cta.number(CHUNK - 1, i)


class ChannelDecay:
    """A decay of each channel: kg, qg and kr of `channel_prepare`, and vectors (beta, gl) of `channel_factors`."""

    erased, read, written = "kg", "qg", "kr"
    early_states, early_outputs = ("kg", "v", "t", "factors"), ("kg", "qg", "v", "t", "p", "factors")
    late = ("kr",)

    def before(self, cta: Cta, i) -> None:
        """See `HeadDecay`. kg and qg hold it."""
        del cta, i

    def errors(self, v_t: jax.Array, d: Any, hk: jax.Array) -> jax.Array:
        """See `HeadDecay`."""
        del d
        return v_t - hk

    def outputs(self, cta: Cta, d: Any, hq: jax.Array) -> jax.Array:
        """See `HeadDecay`."""
        del cta, d
        return hq

    def strengths(self, cta: Cta, i) -> jax.Array:
        """See `HeadDecay`. It is beta."""
        return cta.factor(0, i)

    def decay(self, cta: Cta, i) -> jax.Array:
        """See `HeadDecay`. It is gl, along the columns of the state."""
        vector = cta.slot("factors", i).at[cta.wg, GL : GL + cta.sizes.K]
        return along_columns(plgpu.load(vector, layout=COL), ROWS)


HEADS, CHANNELS = HeadDecay(), ChannelDecay()


def channel_factors(
    beta: Float[Array, "chunks HO C"], gl: Float[Array, "chunks HO K"]
) -> Float[Array, "chunks HO _"]:
    """beta and gl of every chunk, side by side, with zeros up to a multiple of 128."""
    vectors = jnp.concatenate([beta, gl], axis=-1)
    return jnp.pad(vectors, ((0, 0), (0, 0), (0, -vectors.shape[-1] % (2 * CHUNK))))
