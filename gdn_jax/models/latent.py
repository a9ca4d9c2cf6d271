"""Multi-head latent attention: keys and values of all heads come from one narrow vector a token, which is cached."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.layers.blocks import (
    Initializer,
    Projection,
    RMSNorm,
    normalise_first,
    parts_of_group,
    products,
)
from gdn_jax.models.attention import Attention, AttentionCache, FixedAttentionCache, rotate
from gdn_jax.models.config import LatentAttentionConfig
from gdn_jax.parts.ahead import read_ahead
from gdn_jax.parts.latent_rows import latent_rows
from gdn_jax.parts.latent_token import Latents, LatentToken, latent_token, takes_token
from gdn_jax.parts.products import Addend, array_of, transposed_product
from gdn_jax.parts.row_product import stream_product, takes_stream
from gdn_jax.parts.unsummed import Parts

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of the latents, whatever that of the model is, as in released models."""


class LatentAttention(Attention):
    """Causal softmax attention from compressed keys and values, a `TokenMixer`.

        q         = x Wq, or RMSNorm(x Wqa) Wqb               in each head [q_n | q_r]
        [c | k_r] = x Wa;  c = RMSNorm(c)                     k_r is one for all heads
        [k_n | v] = c Wb                                      in each head
        o_i       = sum_{j <= i} softmax_j([q_n | q_r]_i . [k_n | k_r]_j / sqrt(nope + rope)) v_j
        y         = (o * sigmoid(x Wg)) Wo                    the gate one number a head, where there is one

    With rope_theta q_r and k_r are rotated by their position, in the pairs (0, 1), (2, 3) and so on. The cache holds
    c and k_r alone. A call with a cache multiplies queries and outputs by the parts of Wb instead of expanding it.

    Args:
      hidden_size: width of x and y.
      config: heads and variants.
      dtype, param_dtype: compute and parameter dtype.
      implementation: of the products of one row, as for `parts.kernels.kernels_run`.
      kernel_init, out_kernel_init: initialisers of the projections, and of Wo.
      rngs: source of the initial weights.

    Parameters: q_proj, or q_a_proj, q_a_norm, q_b_proj; kv_a_proj (Wa), kv_a_norm, kv_b_proj (Wb); g_proj (Wg);
      o_proj.

    Numerics: rotation and softmax are float32. The norms of the latents have epsilon 1e-6.

    Source: DeepSeek-AI, "DeepSeek-V2" (arXiv 2405.04434).
    """

    def __init__(
        self,
        hidden_size: int,
        config: LatentAttentionConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.hidden_size, self.layer = hidden_size, 0
        self.config: Any = config
        self.dtype, self.param_dtype, self.implementation = dtype, param_dtype, implementation
        self.num_heads, self.num_kv_heads = config.num_heads, 1
        self.cache_widths = (config.rope_dim, config.kv_rank)

        init = kernel_init or nnx.initializers.lecun_normal()
        options = dict(use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        def linear(inputs: int, outputs: int, init: Initializer = init) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, kernel_init=init, **options)

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, eps=LATENT_NORM_EPS, dtype=dtype, param_dtype=param_dtype)

        H, queries = config.num_heads, config.num_heads * config.key_dim
        if config.q_rank is None:
            self.q_proj = linear(hidden_size, queries)
        else:
            self.q_a_proj = linear(hidden_size, config.q_rank)
            self.q_a_norm = norm(config.q_rank)
            self.q_b_proj = linear(config.q_rank, queries)
        self.kv_a_proj = linear(hidden_size, config.kv_rank + config.rope_dim)
        self.kv_a_norm = norm(config.kv_rank)
        self.kv_b_proj = linear(config.kv_rank, H * (config.nope_dim + config.v_dim))
        self.query_rows: nnx.Param | None = None  # Wqb and both parts of Wb, in a copy for single tokens
        self.key_rows: nnx.Param | None = None
        self.value_rows: nnx.Param | None = None
        self.g_proj = linear(hidden_size, H) if config.head_gate else None
        self.o_proj = linear(H * config.v_dim, hidden_size, out_kernel_init or init)

    def init_cache(
        self, batch: int, capacity: int | None = None, dtype: DTypeLike | None = None
    ) -> AttentionCache:
        """See `Attention.init_cache`: k is k_r, and v is c, of one head."""
        kind = AttentionCache if capacity is None else FixedAttentionCache
        dtype = dtype or self.dtype or self.param_dtype
        k, v = (jnp.zeros((batch, capacity or 0, 1, width), dtype) for width in self.cache_widths)
        return kind(k, v, jnp.zeros(batch, jnp.int32))

    def heads(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T 1 R"], Float[Array, "B T 1 C"]]:
        """Queries of the heads, k_r and c of tokens: projected, normalised and rotated. See `Attention.heads`."""
        return self._heads_of(self._first()(x), self.kv_a_proj(x), positions)

    def _first(self) -> Projection:
        """The projection of x on the way to the queries."""
        return self.q_proj if self.config.q_rank is None else self.q_a_proj

    def _heads_of(self, q, kv, positions, q_b=None):
        """`heads` from the projections of x, or from the queries that are made of the first one."""
        a, T = self.config, q.shape[1]
        if a.q_rank is not None:
            q = self._second(q) if q_b is None else q_b
        q_n, q_r = self._halves_of(q)
        c = self.kv_a_norm(kv[..., : a.kv_rank])[:, :, None]
        k_r = kv[:, :, None, a.kv_rank :]
        if a.rope_theta is not None:
            positions = jnp.arange(T)[None] if positions is None else positions
            q_r, k_r = (rotate(_halves(r), positions, a.rope_dim, a.rope_theta) for r in (q_r, k_r))
        return jnp.concatenate([q_n, q_r], axis=-1), k_r, c

    def _halves_of(self, q: Float[Array, "B T F"]) -> tuple[Float[Array, "B T H N"], Float[Array, "B T H R"]]:
        """q_n and q_r of all heads. In `query_rows` each lie side by side, so that no token has to move them."""
        (B, T, F), H, rope = q.shape, self.num_heads, self.config.rope_dim
        if self.query_rows is None:
            q_n, q_r = jnp.split(q.reshape(B, T, H, -1), [F // H - rope], axis=-1)
            return q_n, q_r
        q_n, q_r = jnp.split(q, [F - H * rope], axis=-1)
        return q_n.reshape(B, T, H, -1), q_r.reshape(B, T, H, -1)

    def _second(self, q):
        """Queries from their latents; in a copy for single tokens multiplied by the part of Wb that makes keys."""
        if self.query_rows is None:
            (q,) = products(self.q_a_norm(q), (self.q_b_proj,))
            return q
        q = self.q_a_norm(q)
        return transposed_product(q, self.query_rows[...].astype(q.dtype), q.dtype)

    def _second_of_channels(self, channels: Float[Array, "B T C"], first: int):
        """`_second` of the latents among the projections of x, where they lie; None where no kernel takes them."""
        matrix = None if self.query_rows is None else self.query_rows[...]
        if matrix is None or first % 4 or not takes_stream(channels, matrix, self.implementation):
            return None
        static: Any = dict(eps=LATENT_NORM_EPS, dtype=self.dtype or channels.dtype, first=first)
        static["ahead"] = read_ahead(self, 2)
        return stream_product(channels, None, self.q_a_norm.scale(jnp.float32), matrix, **static)[2]

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | Parts | None,
        *,
        cache: AttentionCache | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        return_cache: bool = False,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], Any]]:
        """See `layers.blocks.from_stream`: of one row the norm and the product of all projections are one kernel."""
        linears = [self._first(), self.kv_a_proj] + ([] if self.g_proj is None else [self.g_proj])
        found = parts_of_group(linears)
        if found is None or cache is None or mask is not None or segment_ids is not None:
            options = dict(cache=cache, mask=mask, segment_ids=segment_ids, return_cache=return_cache)
            return normalise_first(self, norm, x, y, **options)
        self._check_call(x, cache, mask, segment_ids, return_cache)
        group, places = found
        weight = group.weight[...]
        if takes_stream(x, weight, self.implementation):
            static: Any = dict(eps=norm.eps, dtype=group.dtype or weight.dtype, ahead=read_ahead(self, 1))
            x, _, channels, _ = stream_product(x, array_of(y), norm.scale(jnp.float32), weight, **static)
        else:
            x, normalized = norm.add(x, y)
            channels = group(normalized)
        q, kv, *gate = (channels[..., place] for place in places)
        T = x.shape[1]
        q_b = self._second_of_channels(channels, places[0].start)
        if (found := self._of_channels(channels, q_b, places, cache)) is not None:
            return x, found
        q, k, v = self._heads_of(q, kv, cache.length[:, None] + jnp.arange(T), q_b)
        count = jnp.full(x.shape[0], T, jnp.int32)
        o, after = self.mix(q, k, v, cache, count, None, None, return_cache)
        return x, (self.o_proj(self._gated(o, *gate)), after)

    def _of_channels(self, channels, q_b, places, cache):
        """A token of one row from its products, and the cache; None where no kernel takes them."""
        a, (_, kv, *gate) = self.config, places
        if q_b is None or self.value_rows is None or a.rope_theta is None:
            return None
        if not isinstance(cache, FixedAttentionCache):
            return None
        first = gate[0].start if gate else None
        latents = Latents(kv.start, first, a.key_dim**-0.5, LATENT_NORM_EPS, a.rope_theta)
        norm, values = self.kv_a_norm.scale(jnp.float32), self.value_rows[...].astype(q_b.dtype)
        token = LatentToken(channels.reshape(1, -1), q_b.reshape(1, -1), norm, values, *cache)
        if not takes_token(token, latents, self.implementation):
            return None
        o, *after = latent_token(token, latents)
        return self.o_proj(o[None]), FixedAttentionCache(*after)

    def mix(self, q, k, v, cache, count, lengths, segment_ids, return_cache):
        """See `Attention.mix`."""
        if cache is not None:
            return super().mix(q, k, v, cache, count, lengths, segment_ids, return_cache)
        keys, values = self.expand(k, v)
        o, _ = super().mix(q, keys, values, None, count, lengths, segment_ids, False)
        return o, self.first_cache(k, v, count) if return_cache else None

    def one_query(self, q, cache):
        """See `Attention.one_query`: k_r and c lie apart, and so a score is the sum of two products."""
        q_c, q_r = self._parts(q)
        options: Any = dict(scale=self.config.key_dim**-0.5, implementation=self.implementation)
        arrays = q_c[:, 0], q_r[:, 0], cache.v[:, :, 0], cache.k[:, :, 0], cache.length
        return latent_rows(*arrays, **options)[:, None]

    def _parts(self, q):
        """Queries multiplied by the part of Wb that makes keys, and their rotated part."""
        a = self.config
        nope, q_r = jnp.split(q, [q.shape[-1] - a.rope_dim], axis=-1)
        if self.query_rows is not None:  # they are multiplied already
            return nope, q_r
        weight = self._expansion(q.dtype)[..., : a.nope_dim] if self.key_rows is None else self.key_rows[...]
        return jnp.einsum("bthn,chn->bthc", nope, weight.astype(q.dtype)), q_r

    def queries(self, q):
        """See `Attention.queries`: multiplied by the part of Wb that makes keys."""
        a = self.config
        q = jnp.concatenate(self._parts(q), axis=-1)
        # `attend` divides by the root of the width of what it gets, which is another one than that of a head.
        return q * ((a.kv_rank + a.rope_dim) / a.key_dim) ** 0.5

    def outputs(self, o):
        """See `Attention.outputs`: multiplied by the part of Wb that makes values."""
        if self.value_rows is not None:
            return jnp.einsum("bthc,hvc->bthv", o, self.value_rows[...].astype(o.dtype))
        return jnp.einsum("bthc,chv->bthv", o, self._expansion(o.dtype)[..., self.config.nope_dim :])

    ahead: tuple[nnx.Param, ...] = ()
    """See `parts.ahead.Reader`."""

    def token_weights(self) -> list[nnx.Param]:
        """See `parts.ahead.Reader.token_weights`."""
        groups = [getattr(linear, "group", None) for linear in (self.kv_a_proj, self.o_proj)]
        if self.query_rows is None or self.value_rows is None:
            return []
        first, last = ([] if group is None else [group.weight] for group in groups)
        return [*first, self.query_rows, self.value_rows, *last] if first and last else []

    def read_by_rows(self) -> None:
        """Adds copies of both parts of Wb as a GPU reads them fastest for few rows, in place.

        The matrix that makes keys is multiplied by Wqb, where there is one: a token needs one product less.
        """
        a, dtype = self.config, self.kv_b_proj.kernel.dtype
        keys, values = jnp.split(self._expansion(dtype), [a.nope_dim], axis=-1)
        values = with_layout_constraint(jnp.transpose(values, (1, 2, 0)), Layout((0, 1, 2)))
        self.value_rows = nnx.data(nnx.Param(values))
        # XLA reads its channels where they lie, and joins it with the writing of the cache.
        self.kv_a_norm.implementation = "chunked"
        if a.q_rank is None:
            self.key_rows = nnx.data(nnx.Param(keys))
            return
        second = self.q_b_proj.kernel[...].reshape(a.q_rank, self.num_heads, a.key_dim)
        nope, rope = jnp.split(second, [a.nope_dim], axis=-1)
        options: Any = dict(precision="highest", preferred_element_type=jnp.promote_types(dtype, jnp.float32))
        nope = jnp.einsum("chn,dhn->hcd", keys, nope, **options).astype(dtype)
        parts = nope, jnp.transpose(rope, (1, 2, 0))
        rows = jnp.concatenate([part.reshape(-1, a.q_rank) for part in parts])
        self.query_rows = nnx.data(nnx.Param(with_layout_constraint(rows, Layout((0, 1)))))

    def _expansion(self, dtype: DTypeLike) -> Float[Array, "C H KV"]:
        """Wb by heads."""
        plain = type(self.kv_b_proj) is nnx.Linear  # one with a low-rank change has more than its kernel
        rank = self.config.kv_rank
        kernel = self.kv_b_proj.kernel[...] if plain else self.kv_b_proj(jnp.eye(rank, dtype=dtype))
        return kernel.astype(dtype).reshape(rank, self.num_heads, -1)

    def read(self, cache):
        """See `Attention.read`: keys are [c | k_r], and values c."""
        return jnp.concatenate([cache.v, cache.k], axis=-1), cache.v

    def expand(
        self, k_r: Float[Array, "B T 1 R"], c: Float[Array, "B T 1 C"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H V"]]:
        """Keys and values of all heads."""
        a, (B, T) = self.config, c.shape[:2]
        (kv,) = products(c[:, :, 0], (self.kv_b_proj,))
        kv = kv.reshape(B, T, self.num_heads, a.nope_dim + a.v_dim)
        k_r = jnp.broadcast_to(k_r, (B, T, self.num_heads, a.rope_dim))
        return jnp.concatenate([kv[..., : a.nope_dim], k_r], axis=-1), kv[..., a.nope_dim :]

    def gated(self, o, x):
        """See `Attention.gated`."""
        return self._gated(o, None if self.g_proj is None else self.g_proj(x))

    def _gated(self, o, gate=None):
        """`gated` from the projection to the gate."""
        if gate is not None:
            o = o * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(o.dtype)[..., None]
        return o.reshape(*o.shape[:2], -1)

    def weights(self, x: Float[Array, "B T D"]) -> Float[Array, "B H T T"]:
        """See `Attention.weights`."""
        q, k_r, c = self.heads(x)
        return self.map_of(q, self.expand(k_r, c)[0])


def _halves(x: Array) -> Array:
    """Neighbours (0, 1), (2, 3) .. as the pairs (0, n), (1, n + 1) .. that `rotate` turns, for 2 n dimensions."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
