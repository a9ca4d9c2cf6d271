"""Multi-head latent attention for single tokens: of one row the products are kernels that read what lies there."""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from gdn_jax.layers.blocks import RMSNorm
from gdn_jax.models.attention import FixedAttentionCache
from gdn_jax.models.inference.attention import AttentionRows
from gdn_jax.models.latent import LATENT_NORM_EPS, LatentAttention
from gdn_jax.parts import latent_token, row_product
from gdn_jax.parts.cached_attention import Place
from gdn_jax.parts.latent_token import Latents
from gdn_jax.parts.products import transposed_product


class LatentRows(AttentionRows, LatentAttention):
    """Latent attention with copies of both parts of Wb as a GPU reads them fastest for few rows.

    The part that makes keys is multiplied by Wqb, where there is one: a token needs one product less, and queries are
    multiplied by it already. Queries of the latents lie side by side, q_n of all heads and then q_r of all heads, so
    that no token has to move them.

    Args:
      attention: as for `AttentionRows`.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("q_proj", "q_a_proj", "kv_a_proj", "g_proj")

    def __init__(self, attention: LatentAttention):
        super().__init__(attention)
        a, dtype = self.config, self.kv_b_proj.kernel.dtype
        keys, values = jnp.split(self.expansion(dtype), [a.nope_dim], axis=-1)
        values = with_layout_constraint(jnp.transpose(values, (1, 2, 0)), Layout((0, 1, 2)))
        self.value_rows = nnx.Param(values)
        self.query_rows = None if a.q_rank is None else nnx.Param(self._query_rows(keys))
        self.key_rows = nnx.Param(keys) if a.q_rank is None else None

    def _query_rows(self, keys: Float[Array, "C H N"]) -> Float[Array, "F Q"]:
        """Wqb multiplied by the part of Wb that makes keys, and its rotated rows."""
        a, dtype = self.config, keys.dtype
        second = self.q_b_proj.kernel[...].reshape(a.q_rank, self.num_heads, a.key_dim)
        nope, rope = jnp.split(second, [a.nope_dim], axis=-1)
        options: Any = dict(precision="highest", preferred_element_type=jnp.promote_types(dtype, jnp.float32))
        nope = jnp.einsum("chn,dhn->hcd", keys, nope, **options).astype(dtype)
        parts = nope, jnp.transpose(rope, (1, 2, 0))
        rows = jnp.concatenate([part.reshape(-1, a.q_rank) for part in parts])
        return with_layout_constraint(rows, Layout((0, 1)))

    def _cached_norms(self) -> list[RMSNorm]:
        return [self.kv_a_norm]

    def of_channels(
        self, channels: Float[Array, "B T F"], places: list[slice], cache: Any
    ) -> tuple[Float[Array, "P T D"], Any]:
        """See `AttentionRows.of_channels`."""
        q, kv, *gate = (channels[..., place] for place in places)
        q_b = self._second_of_channels(channels, places[0].start)
        if (found := self._by_kernel(channels, q_b, places, cache)) is not None:
            return found
        positions = self.positions(channels, cache)
        if q_b is not None:
            return self.of_heads(self.heads_of_queries(q_b, kv, positions), gate, cache)
        return self.of_heads(self.heads_of_first(q, kv, positions), gate, cache)

    def by_kernels(self, x: Float[Array, "B 1 D"], pool: FixedAttentionCache, place: Place) -> None:
        """See `AttentionRows.by_kernels`: there are none for rows of a pool."""
        del x, pool, place

    def _second_of_channels(self, channels: Float[Array, "B T C"], first: int):
        """`second` of the latents among the projections of x, where they lie; None where no kernel takes them."""
        matrix = None if self.query_rows is None else self.query_rows[...]
        if matrix is None or first % 4 or not row_product.takes(channels, matrix, self.implementation):
            return None
        static: Any = dict(eps=LATENT_NORM_EPS, dtype=self.dtype or channels.dtype, first=first)
        static["ahead"] = self.after(2)
        norm = self.q_a_norm.scale(jnp.float32)
        return row_product.stream_product(channels, None, norm, matrix, **static)[1]

    def _by_kernel(self, channels, q_b, places, cache):
        """A token of one row from its products, and the cache; None where no kernel takes them."""
        a, (_, kv, *gate) = self.config, places
        if q_b is None or a.rope_theta is None or not isinstance(cache, FixedAttentionCache):
            return None
        first = gate[0].start if gate else None
        latents = Latents(kv.start, first, a.key_dim**-0.5, LATENT_NORM_EPS, a.rope_theta)
        norm, values = self.kv_a_norm.scale(jnp.float32), self.value_rows[...].astype(q_b.dtype)
        row, q = channels.reshape(1, -1), q_b.reshape(1, -1)
        if not latent_token.takes(latents, row, q, values, cache.k, cache.v, self.implementation):
            return None
        o, *after = latent_token.latent_token(latents, row, q, norm, values, *cache)
        return self.o_proj(o[None]), FixedAttentionCache(*after)

    def halves_of(self, q: Float[Array, "B T F"]) -> tuple[Float[Array, "B T H N"], Float[Array, "B T H R"]]:
        """See `LatentAttention.halves_of`."""
        if self.query_rows is None:
            return super().halves_of(q)
        (B, T, F), H, rope = q.shape, self.num_heads, self.config.rope_dim
        q_n, q_r = jnp.split(q, [F - H * rope], axis=-1)
        return q_n.reshape(B, T, H, -1), q_r.reshape(B, T, H, -1)

    def second(self, q: Float[Array, "B T Q"]) -> Float[Array, "B T F"]:
        """See `LatentAttention.second`: multiplied by the part of Wb that makes keys."""
        assert self.query_rows is not None
        q = self.q_a_norm(q)
        return transposed_product(q, self.query_rows[...].astype(q.dtype), q.dtype)

    def parts(self, q: Float[Array, "B T H K"]) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H R"]]:
        """See `LatentAttention.parts`."""
        q_n, q_r = jnp.split(q, [q.shape[-1] - self.config.rope_dim], axis=-1)
        if self.key_rows is None:  # they are multiplied already
            return q_n, q_r
        return jnp.einsum("bthn,chn->bthc", q_n, self.key_rows[...].astype(q.dtype)), q_r

    def outputs(self, o: Float[Array, "B T H C"]) -> Float[Array, "B T H V"]:
        """See `Attention.outputs`: multiplied by the part of Wb that makes values."""
        return jnp.einsum("bthc,hvc->bthv", o, self.value_rows[...].astype(o.dtype))

    def token_weights(self) -> list[nnx.Param]:
        """See `Reader.token_weights`."""
        if self.query_rows is None or len(own := super().token_weights()) < 2:
            return []
        return [own[0], self.query_rows, self.value_rows, own[1]]
