"""Softmax attention for single tokens: of one row the norm and the products of all projections are one kernel."""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.layers.blocks import Projection, RMSNorm, normalise_first
from gdn_jax.models.attention import Attention, FixedAttentionCache, WindowCache
from gdn_jax.models.inference.part import Call, Reader, cache_alone
from gdn_jax.models.inference.projections import (
    ProjectionOfGroup,
    group_of,
    group_projections,
    parts_of,
    weights_of,
)
from gdn_jax.models.window import WindowAttention
from gdn_jax.parts.cached_attention import Heads, Place, attended_token, cached_attention, takes
from gdn_jax.parts.products import Addend, with_words, words_of


class AttentionRows(Attention, Reader):
    """Attention with one product of all projections of its input.

    Args:
      attention: the layer, of a copy for inference, whose parts this one takes over.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "g_proj")
    """Projections of the layer's input, in the order of their product."""
    last: Any = None
    """The output projection in parts of a sum; None: it is whole."""

    def __init__(self, attention: Attention):
        vars(self).update(vars(attention))
        for names in (self.INPUTS, ("o_proj",)):
            group_projections(self, names)
        for norm in self._cached_norms():
            norm.implementation = "chunked"

    @classmethod
    def of(cls, attention: Attention, call: Call) -> "AttentionRows":
        """A layer for calls of single tokens, of however many rows."""
        layer = cls(attention)
        layer.last = parts_of(layer.o_proj) if call.in_parts else None
        return layer

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
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "Q T D"] | Addend, Any]]:
        """See `layers.blocks.from_stream`."""
        inputs: list[Any] = self.inputs()
        group, cache = group_of(inputs), cache_alone(options)
        if group is None or cache is None:
            return normalise_first(self, norm, x, y, **options)
        self._check_call(x, cache, None, None, False)
        x, channels = group.from_stream(norm, x, y, self.implementation, self.after(1))
        places = [slice(linear.start, linear.stop) for linear in inputs]
        out, cache = self.of_channels(channels, places, cache)
        return x, (with_words(out, words_of(y)), cache)

    def of_channels(
        self, channels: Float[Array, "B T F"], places: list[slice], cache: Any
    ) -> tuple[Float[Array, "P T D"], Any]:
        """The output and the cache after tokens, from the products of `inputs` and their places."""
        q, k, v, *gate = (channels[..., place] for place in places)
        if (found := self._row(channels, gate, cache)) is not None:
            return found
        if (found := self._by_kernels(channels, gate, cache, self.place(cache))) is None:
            return self.of_heads(self.heads_of(q, k, v, self.positions(channels, cache)), gate, cache)
        return found[0], found[1]._replace(length=cache.length + 1)

    def by_kernels(
        self, x: Float[Array, "B 1 D"], pool: FixedAttentionCache, place: Place
    ) -> tuple[Float[Array, "P 1 D"], FixedAttentionCache] | None:
        """A token of each row at some places of a pool, and the pool with its keys and values, but with the lengths
        before it; None where no kernels take it."""
        inputs: list[Any] = self.inputs()
        if (group := group_of(inputs)) is None or self.config.window is not None:
            return None
        channels = group(x)
        gate = [channels[..., linear.start : linear.stop] for linear in inputs[3:]]
        return self._by_kernels(channels, gate, pool, place)

    def _by_kernels(
        self, channels: Float[Array, "B T F"], gate: list[Array], cache: Any, place: Place
    ) -> tuple[Float[Array, "P T D"], Any] | None:
        """The output for a token of each row with a cache of fixed size, and the cache with its keys and values, by
        kernels; None where these do not take it."""
        if channels.shape[1] > 1 or self.config.qk_norm == "width":
            return None
        if not isinstance(cache, FixedAttentionCache | WindowCache):
            return None
        arrays, (norms, heads) = (channels[:, 0], cache.k, cache.v), self._known()
        if not takes(*arrays, heads, self.implementation):
            return None
        o, k, v = cached_attention(*arrays, place, norms, heads)
        last = self.o_proj if self.last is None else self.last
        return last(self.gated_by(o[:, None], gate[0] if gate else None)), cache._replace(k=k, v=v)

    def _known(self) -> tuple[tuple[Array, Array] | None, Heads]:
        """The factors of the norms of queries and keys, and the sizes of the heads, as kernels take them."""
        config, norms, eps = self.config, None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            norms, eps = (self.q_norm.scale(jnp.float32), self.k_norm.scale(jnp.float32)), self.q_norm.eps
        return norms, Heads(self.num_heads, eps, config.rotary_dim, config.rope_theta)

    def _row(
        self, channels: Float[Array, "B T F"], gate: list[Array], cache: Any
    ) -> tuple[Float[Array, "B T D"], FixedAttentionCache] | None:
        """`of_channels` of a token of one row by kernels, the output projection among them; None where these do not
        take it."""
        last: Any = self.o_proj
        if (
            channels.shape[:2] != (1, 1)
            or self.config.qk_norm == "width"
            or type(cache) is not FixedAttentionCache
        ):
            return None
        if not isinstance(last, ProjectionOfGroup) or not last.is_alone:
            return None
        group: Any = last.group
        arrays, output = (channels[:, 0], cache.k, cache.v), (group.weight[...], group.scales_of_blocks())
        norms, heads = self._known()
        if not takes(*arrays, heads, self.implementation, *output):
            return None
        static: Any = dict(is_gated=bool(gate), ahead=self.after(2))
        y, *after = attended_token(*arrays, cache.length, norms, *output, heads, **static)
        return y[None], FixedAttentionCache(*after)

    def place(self, cache: Any) -> Place:
        """The place of a token of each row after those of a cache."""
        return Place(cache.length, cache.length)

    def positions(self, channels: Float[Array, "B T F"], cache: Any) -> Int[Array, "B T"]:
        """Positions of the tokens after those of a cache."""
        return cache.length[:, None] + jnp.arange(channels.shape[1])

    def of_heads(
        self, heads: tuple[Array, Array, Array], gate: list[Array], cache: Any
    ) -> tuple[Float[Array, "P T D"], Any]:
        """The output and the cache after tokens, from their queries, keys and values and the product of the gate."""
        (B, T), none = heads[0].shape[:2], (None, None)
        o, after = self.mix(*heads, cache, jnp.full(B, T, jnp.int32), *none, False)
        return self.o_proj(self.gated_by(o, gate[0] if gate else None)), after

    def token_weights(self) -> list[nnx.Param]:
        """See `Reader.token_weights`."""
        return weights_of(group_of(self.inputs()), group_of([self.o_proj]))


class WindowRows(AttentionRows, WindowAttention):
    """`AttentionRows` of a window."""

    def place(self, cache: Any) -> Place:
        """See `AttentionRows.place`: a token sees all that a ring holds, in whatever order."""
        W = cache.k.shape[1]
        return Place(cache.length, cache.length % W, jnp.clip(cache.length + 1, 1, W))
