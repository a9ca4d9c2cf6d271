"""Multi-head latent attention: keys and values of all heads come from one narrow vector a token, which is cached."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from gdn_jax.layers.blocks import Initializer, Projection, RMSNorm, products
from gdn_jax.models.attention import Attention, rotate
from gdn_jax.models.config import LatentAttentionConfig
from gdn_jax.parts.attention_rows import latent_rows

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
    k_r and c alone, as k and v of one head. A call with a cache multiplies queries and outputs by the parts of Wb
    instead of expanding it.

    Args:
      hidden_size: width of x and y.
      config: heads and variants.
      dtype, param_dtype: compute and parameter dtype.
      implementation: of the norms and of the products of one row, as for `parts.kernels.usable`.
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
            more: Any = dict(dtype=dtype, param_dtype=param_dtype, implementation=implementation)
            return RMSNorm(width, eps=LATENT_NORM_EPS, **more)

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
        self.g_proj = linear(hidden_size, H) if config.head_gate else None
        self.o_proj = linear(H * config.v_dim, hidden_size, out_kernel_init or init)

    def heads(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T 1 R"], Float[Array, "B T 1 C"]]:
        """Queries of the heads, k_r and c of tokens: projected, normalised and rotated. See `Attention.heads`."""
        first = self.first_projection()
        return self.heads_of_first(first(x), self.kv_a_proj(x), positions)

    def first_projection(self) -> Projection:
        """The projection of x on the way to the queries."""
        return self.q_proj if self.config.q_rank is None else self.q_a_proj

    def heads_of_first(
        self, q: Float[Array, "B T F"], kv: Float[Array, "B T G"], positions: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T 1 R"], Float[Array, "B T 1 C"]]:
        """`heads` from the first projections of x."""
        return self.heads_of_queries(q if self.config.q_rank is None else self.second(q), kv, positions)

    def heads_of_queries(self, q, kv, positions):
        """`heads` from queries and from the projection to the latents."""
        a, T = self.config, q.shape[1]
        q_n, q_r = self.halves_of(q)
        c = self.kv_a_norm(kv[..., : a.kv_rank])[:, :, None]
        k_r = kv[:, :, None, a.kv_rank :]
        if a.rope_theta is not None:
            positions = jnp.arange(T)[None] if positions is None else positions
            q_r, k_r = (rotate(_halves(r), positions, a.rope_dim, a.rope_theta) for r in (q_r, k_r))
        return jnp.concatenate([q_n, q_r], axis=-1), k_r, c

    def halves_of(self, q: Float[Array, "B T F"]) -> tuple[Float[Array, "B T H N"], Float[Array, "B T H R"]]:
        """q_n and q_r of all heads."""
        (B, T, F), H, rope = q.shape, self.num_heads, self.config.rope_dim
        q_n, q_r = jnp.split(q.reshape(B, T, H, -1), [F // H - rope], axis=-1)
        return q_n, q_r

    def second(self, q: Float[Array, "B T Q"]) -> Float[Array, "B T F"]:
        """Queries from their latents."""
        (q,) = products(self.q_a_norm(q), (self.q_b_proj,))
        return q

    def mix(self, q, k, v, cache, count, lengths, segment_ids, return_cache):
        """See `Attention.mix`."""
        if cache is not None:
            return super().mix(q, k, v, cache, count, lengths, segment_ids, return_cache)
        keys, values = self.expand(k, v)
        o, _ = super().mix(q, keys, values, None, count, lengths, segment_ids, False)
        return o, self.first_cache(k, v, count) if return_cache else None

    def one_query(self, q, cache, rows=None):
        """See `Attention.one_query`: k_r and c lie apart, and so a score is the sum of two products."""
        q_c, q_r = self.parts(q)
        options: Any = dict(scale=self.config.key_dim**-0.5, rows=rows, implementation=self.implementation)
        arrays = q_c[:, 0], q_r[:, 0], cache.v[:, :, 0], cache.k[:, :, 0], cache.length
        return latent_rows(*arrays, **options)[:, None]

    def parts(self, q: Float[Array, "B T H K"]) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H R"]]:
        """Queries multiplied by the part of Wb that makes keys, and their rotated part."""
        a = self.config
        q_n, q_r = jnp.split(q, [q.shape[-1] - a.rope_dim], axis=-1)
        weight = self.expansion(q.dtype)[..., : a.nope_dim]
        return jnp.einsum("bthn,chn->bthc", q_n, weight.astype(q.dtype)), q_r

    def queries(self, q):
        """See `Attention.queries`: multiplied by the part of Wb that makes keys."""
        a = self.config
        q = jnp.concatenate(self.parts(q), axis=-1)
        # `attend` divides by the root of the width of what it gets, which is another one than that of a head.
        return q * ((a.kv_rank + a.rope_dim) / a.key_dim) ** 0.5

    def outputs(self, o):
        """See `Attention.outputs`: multiplied by the part of Wb that makes values."""
        return jnp.einsum("bthc,chv->bthv", o, self.expansion(o.dtype)[..., self.config.nope_dim :])

    def expansion(self, dtype: DTypeLike) -> Float[Array, "C H KV"]:
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

    def gated_by(self, o: Float[Array, "B T H V"], gate: Array | None) -> Float[Array, "B T F"]:
        """See `Attention.gated_by`: the gate is one number a head."""
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
