"""Softmax attention for single tokens: of one row the norm and the products of all projections are one kernel."""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.layers.blocks import Projection, RMSNorm, normalise_first
from gdn_jax.models.attention import Attention
from gdn_jax.models.inference.part import Call, Reader, cache_alone
from gdn_jax.models.inference.projections import group_of, group_projections, weights_of
from gdn_jax.models.window import WindowAttention
from gdn_jax.parts import row_product
from gdn_jax.parts.products import Addend, array_of


class AttentionRows(Attention, Reader):
    """Attention with one product of all projections of its input.

    Args:
      attention: the layer, of a copy for inference, whose parts this one takes over.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "g_proj")
    """Projections of the layer's input, in the order of their product."""

    def __init__(self, attention: Attention):
        vars(self).update(vars(attention))
        for names in (self.INPUTS, ("o_proj",)):
            group_projections(self, names)
        for norm in self._cached_norms():
            norm.implementation = "chunked"

    @classmethod
    def of(cls, attention: Attention, call: Call) -> "AttentionRows":
        """A layer for calls of single tokens, of however many rows."""
        del call
        return cls(attention)

    def _cached_norms(self) -> list[RMSNorm]:
        """Norms of what goes to the cache: XLA joins them with the turn by the position and with the writing."""
        return [norm for norm in (self.q_norm, self.k_norm) if norm is not None]

    def inputs(self) -> list[Projection]:
        """The projections of the layer's input that it has."""
        found = (getattr(self, name, None) for name in self.INPUTS)
        return [projection for projection in found if projection is not None]

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], Any]]:
        """See `layers.blocks.from_stream`."""
        inputs: list[Any] = self.inputs()
        group, cache = group_of(inputs), cache_alone(options)
        if group is None or cache is None:
            return normalise_first(self, norm, x, y, **options)
        self._check_call(x, cache, None, None, False)
        weight, places = group.weight[...], [slice(linear.start, linear.stop) for linear in inputs]
        if row_product.takes(x, weight, self.implementation):
            static: Any = dict(eps=norm.eps, dtype=group.dtype or weight.dtype, ahead=self.after(1))
            x, _, channels, _ = row_product.stream_product(
                x, array_of(y), norm.scale(jnp.float32), weight, **static
            )
        else:
            x, normalized = norm.add(x, y)
            channels = group(normalized)
        return x, self.of_channels(channels, places, cache)

    def of_channels(
        self, channels: Float[Array, "B T F"], places: list[slice], cache: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The output and the cache after tokens, from the products of `inputs` and their places."""
        q, k, v, *gate = (channels[..., place] for place in places)
        return self.of_heads(self.heads_of(q, k, v, self.positions(channels, cache)), gate, cache)

    def positions(self, channels: Float[Array, "B T F"], cache: Any) -> Int[Array, "B T"]:
        """Positions of the tokens after those of a cache."""
        return cache.length[:, None] + jnp.arange(channels.shape[1])

    def of_heads(
        self, heads: tuple[Array, Array, Array], gate: list[Array], cache: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The output and the cache after tokens, from their queries, keys and values and the product of the gate."""
        (B, T), none = heads[0].shape[:2], (None, None)
        o, after = self.mix(*heads, cache, jnp.full(B, T, jnp.int32), *none, False)
        return self.o_proj(self.gated_by(o, gate[0] if gate else None)), after

    def token_weights(self) -> list[nnx.Param]:
        """See `Reader.token_weights`."""
        return weights_of(group_of(self.inputs()), group_of([self.o_proj]))


class WindowRows(AttentionRows, WindowAttention):
    """`AttentionRows` of a window."""
