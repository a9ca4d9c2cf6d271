"""Softmax attention as a token mixer: grouped queries, rotary positions, and a cache of keys and values."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.layers.blocks import Initializer, RMSNorm, products
from gdn_jax.layers.padding import check_rows, run_of_tokens
from gdn_jax.models.config import AttentionConfig
from gdn_jax.parallel.token_shards import attention_on_mesh
from gdn_jax.parts.attention import attend, frequencies, same_segment
from gdn_jax.parts.attention_rows import attention_rows
from gdn_jax.shapes import check_array


class AttentionCache(NamedTuple):
    """Keys and values of the tokens that an attention layer has seen. A pytree.

    Row b has its tokens in the first `length[b]` of S slots, without padding. What the other slots hold does not
    matter as long as it is finite: a weight of 0 times NaN is NaN. After a NaN a row needs a new cache. A call with
    this cache returns one with as many more slots as the call has tokens.

    Fields:
      k, v: normalised and rotated keys, and values [B, S, Hkv, D], in the compute dtype.
      length: tokens of each row [B].
    """

    k: Float[Array, "B S Hkv D"]
    v: Float[Array, "B S Hkv D"]
    length: Int[Array, " B"]


class FixedAttentionCache(AttentionCache):
    """An AttentionCache whose number of slots stays, as a loop under jit wants it.

    A call with more tokens than there are free slots raises a ValueError; under jit, where `length` is not known, the
    outputs of tokens without a slot are NaN.
    """

    @property
    def capacity(self) -> int:
        """Tokens that each row has room for."""
        return self.k.shape[1]


class WindowCache(NamedTuple):
    """Keys and values of the last W tokens that a window of W tokens has seen. A pytree of fixed size.

    Token n of a row, counted from 0, lies in slot n mod W, where it replaces token n - W.

    Fields:
      k, v: normalised and rotated keys, and values [B, W, Hkv, D], in the compute dtype.
      length: tokens that each row has had [B].
    """

    k: Float[Array, "B W Hkv D"]
    v: Float[Array, "B W Hkv D"]
    length: Int[Array, " B"]


class Attention(nnx.Module):
    """Causal softmax attention, a `TokenMixer`.

        q, k, v = x Wq, x Wk, x Wv             q and k normalised, then rotated by their position
        o_i     = sum_{j <= i} softmax_j(q_i . k_j / sqrt(D)) v_j
        y       = (o * sigmoid(x Wg)) Wo

    Query head i reads key and value head i // (num_heads // num_kv_heads); nothing is repeated. The rotation turns
    the pairs (j, j + rotary_dim / 2) of the first rotary_dim dimensions by position * rope_theta^(-2 j / rotary_dim).

    Args:
      hidden_size: width of x and y.
      config: heads and variants.
      norm_eps, zero_centred_norms: of the norms of q and k, see `RMSNorm`.
      dtype, param_dtype: compute and parameter dtype.
      implementation: of the norms and of a token over the cache, as for `parts.kernels.usable`.
      kernel_init, out_kernel_init: initialisers of the projections, and of Wo.
      rngs: source of the initial weights.

    Parameters: q_proj, k_proj, v_proj, g_proj (Wg), o_proj; q_norm and k_norm, of width head_dim for qk_norm "head"
      and of all heads together for "width".

    Attributes:
      layer: a number that no other attention layer of a program has, see `attend`; a model sets it.

    Numerics: rotation and softmax are float32. Products run in the compute dtype with float32 sums.
    """

    attends = True
    """It keeps no state but every token."""

    def __init__(
        self,
        hidden_size: int,
        config: AttentionConfig,
        *,
        norm_eps: float = 1e-5,
        zero_centred_norms: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.hidden_size = hidden_size
        self.config: Any = config  # each kind of attention has its own
        self.layer = 0
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.head_dim
        self.cache_widths = (config.head_dim, config.head_dim)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.implementation = implementation

        kernel_init = kernel_init or nnx.initializers.lecun_normal()
        options = dict(use_bias=config.bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nnx.Linear(hidden_size, width, kernel_init=kernel_init, **options)
        self.k_proj = nnx.Linear(hidden_size, kv_width, kernel_init=kernel_init, **options)
        self.v_proj = nnx.Linear(hidden_size, kv_width, kernel_init=kernel_init, **options)
        gate = (
            nnx.Linear(hidden_size, width, kernel_init=kernel_init, **options) if config.output_gate else None
        )
        self.g_proj = gate
        self.o_proj = nnx.Linear(width, hidden_size, kernel_init=out_kernel_init or kernel_init, **options)

        def norm(width: int) -> RMSNorm | None:
            if config.qk_norm == "none":
                return None
            options: Any = dict(dtype=dtype, param_dtype=param_dtype, implementation=implementation)
            features = self.head_dim if config.qk_norm == "head" else width
            return RMSNorm(features, eps=norm_eps, zero_centred=zero_centred_norms, **options)

        self.q_norm, self.k_norm = norm(width), norm(kv_width)

    def init_cache(
        self, batch: int, capacity: int | None = None, dtype: DTypeLike | None = None
    ) -> AttentionCache | WindowCache:
        """The cache before the first token.

        Args:
          batch: sequences.
          capacity: tokens that each of them will have at most, for a `FixedAttentionCache`; None: the cache grows.
          dtype: of keys and values; default the compute dtype (param_dtype where that is None).
        """
        kind = AttentionCache if capacity is None else FixedAttentionCache
        shape, dtype = (batch, capacity or 0, self.num_kv_heads), dtype or self.dtype or self.param_dtype
        k, v = (jnp.zeros((*shape, width), dtype) for width in self.cache_widths)
        return kind(k, v, jnp.zeros(batch, jnp.int32))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        cache: AttentionCache | WindowCache | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        return_cache: bool = False,
    ) -> tuple[Float[Array, "B T D"], AttentionCache | WindowCache | None]:
        """Mixes the tokens of every row.

        Any cutting of a row into calls, each given the cache of the one before, gives what one call gives.

        Args:
          x: inputs [B, T, hidden_size], floating. What padding holds does not matter.
          cache: of the tokens before.
          mask: True at tokens, False at padding, which no token sees and whose output is 0. The tokens of a row must
            be one run. A position counts the tokens before, not the padding.
          segment_ids: packed rows; nothing is seen across a change of id.
          return_cache: returns a cache also when none came in.

        Returns:
          y [B, T, hidden_size] in the compute dtype, and the cache after the last token (None without cache and
          return_cache).

        Raises:
          ValueError: an argument is wrong, names it; also a full `FixedAttentionCache`, where its length is known.
          NotImplementedError: segment_ids with a cache: it would have to forget all segments but the last.
        """
        self._check_call(x, cache, mask, segment_ids, return_cache)
        B, T, _ = x.shape
        begin, count = None, jnp.full(B, T, jnp.int32)
        if mask is not None:
            # Tokens go first: then their order alone says who sees whom, and a length what is padding.
            begin, end = run_of_tokens(mask)
            count = (end - begin).astype(jnp.int32)
            x = jnp.where((jnp.arange(T) < count[:, None])[..., None], _rolled(x, -begin), 0)
            segment_ids = None if segment_ids is None else _rolled(segment_ids, -begin)
        q, k, v = self.heads(x, None if cache is None else cache.length[:, None] + jnp.arange(T))
        lengths = None if mask is None else count
        o, cache = self.mix(q, k, v, cache, count, lengths, segment_ids, return_cache)
        y = self.o_proj(self.gated(o, x))
        if mask is not None:
            y = jnp.where(mask[..., None], _rolled(y, begin), 0)
        return y, cache

    def mix(self, q, k, v, cache, count, lengths, segment_ids, return_cache):
        """Returns what each query sees of tokens and cache [B, T, H, D], and the cache after them.

        Args:
          q, k, v: of `heads`, tokens first in each row.
          cache: of the tokens before; None: none.
          count: tokens of each row [B].
          lengths: count, or None where all rows are full.
          segment_ids, return_cache: as for a call.
        """
        if cache is None:
            o = attention_on_mesh(
                partial(_attend_causally, layer=self.layer, window=self.config.window),
                *(q, k, v),
                lengths=lengths,
                segment_ids=segment_ids,
            )
            return o, self.first_cache(k, v, count) if return_cache else None
        T, cache = q.shape[1], _append(cache, k, v, count, is_full=lengths is None)
        positions = (cache.length - count)[:, None] + jnp.arange(T)
        last = jnp.maximum(cache.length, 1)[:, None] - 1  # padding has a slot where its row has
        return self.seen(q, cache, jnp.minimum(positions, last)), cache

    def seen(self, q, cache, positions, rows=None, by_row=True):
        """Returns what queries of tokens at some positions see of a cache or a pool; NaN where that has no slot.

        Args: as for `some_queries`, rows as for `one_query`; by_row: whether one query of each row is that.
        """
        is_one = by_row and q.shape[1] == 1
        o = self.one_query(q, cache, rows) if is_one else self.some_queries(q, cache, positions)
        # The slots may not suffice, which is seen outside jit only: say it loudly.
        return self.outputs(jnp.where((positions < cache.k.shape[1])[..., None, None], o, jnp.nan))

    def some_queries(
        self, q: Float[Array, "B T H K"], cache, positions: Int[Array, "B T"]
    ) -> Float[Array, "B T H Vc"]:
        """Returns what queries of tokens at some positions see of a cache, before `outputs`.

        Args:
          q: the queries.
          cache: with the queries' tokens, each in the slot of its position.
          positions: of the tokens.
        """
        ages = positions[..., None] - jnp.arange(cache.k.shape[1])
        visible = (ages >= 0) & (ages < (self.config.window or cache.k.shape[1]))
        return attend(self.queries(q), *self.read(cache), causal=False, visible=visible[:, None])

    def one_query(
        self, q: Float[Array, "B 1 H K"], cache, rows: Int[Array, " B"] | None = None
    ) -> Float[Array, "B 1 H Vc"]:
        """Returns what one query of each row sees of a cache, before `outputs`.

        Args:
          q: the queries.
          cache: after the queries' tokens.
          rows: rows of k and v, where the cache is a pool; its length belongs to the queries' rows in any case.
        """
        options: Any = dict(rows=rows, implementation=self.implementation)
        return attention_rows(q, cache.k, cache.v, cache.length, **options)

    def queries(self, q: Float[Array, "B T H K"]) -> Float[Array, "B T H Kc"]:
        """Queries of `heads` as they meet the keys of `read`."""
        return q

    def read(self, cache):
        """Keys and values of a cache, as the queries of a call meet them."""
        return cache.k, cache.v

    def outputs(self, o: Float[Array, "B T H Vc"]) -> Float[Array, "B T H V"]:
        """Outputs of the heads from mixed values of `read`."""
        return o

    def gated(self, o, x):
        """Outputs of the heads side by side, times the gate where there is one."""
        return self.gated_by(o, None if self.g_proj is None else self.g_proj(x))

    def gated_by(self, o: Float[Array, "B T H V"], gate: Array | None) -> Float[Array, "B T F"]:
        """`gated` from the projection to the gate."""
        o = o.reshape(*o.shape[:2], -1)
        return o if gate is None else o * jax.nn.sigmoid(gate)

    def first_cache(self, k: Array, v: Array, count: Array) -> AttentionCache | WindowCache:
        """The cache of the first tokens of rows: `count` [B] of k and v each."""
        return AttentionCache(k, v, count)

    def heads(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T Hkv K"], Float[Array, "B T Hkv K"]]:
        """Queries, keys and values of tokens: projected, normalised and rotated.

        Args:
          x: inputs [B, T, hidden_size].
          positions: of the tokens, counted from 0; None: 0 to T - 1 in each row.
        """
        q, k, v = products(x, (self.q_proj, self.k_proj, self.v_proj))
        return self.heads_of(q, k, v, positions)

    def heads_of(
        self,
        q: Float[Array, "B T F"],
        k: Float[Array, "B T G"],
        v: Float[Array, "B T G"],
        positions: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T Hkv K"], Float[Array, "B T Hkv K"]]:
        """`heads` from the projections."""
        B, T, _ = q.shape
        if self.config.qk_norm == "width":
            q, k = self._normalise(q, k)
        q = q.reshape(B, T, self.num_heads, self.head_dim)
        k = k.reshape(B, T, self.num_kv_heads, self.head_dim)
        v = v.reshape(B, T, self.num_kv_heads, self.head_dim)
        if self.config.qk_norm == "head":
            q, k = self._normalise(q, k)
        if self.config.rotary_dim:
            positions = jnp.arange(T)[None] if positions is None else positions
            q, k = (rotate(a, positions, self.config.rotary_dim, self.config.rope_theta) for a in (q, k))
        return q, k, v

    def weights(self, x: Float[Array, "B T D"]) -> Float[Array, "B H T T"]:
        """The attention map of every head: softmax of the scores of whole rows without padding, rows are queries.

        For looking inside; a call never makes it where cuDNN runs. Rows sum to 1, float32.
        """
        q, k, _ = self.heads(x)
        k = jnp.repeat(k, self.num_heads // self.num_kv_heads, axis=2)
        return self.map_of(q, k)

    def map_of(self, q: Array, k: Array) -> Array:
        """The attention map of queries and as many heads of keys."""
        scores = jnp.einsum("bihd,bjhd->bhij", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
        T = q.shape[1]
        ages = jnp.arange(T)[:, None] - jnp.arange(T)
        seen = (ages >= 0) & (ages < (self.config.window or T))
        return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)

    def _normalise(self, q, k):
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)

    def _check_call(self, x, cache, mask, segment_ids, return_cache):
        check_rows(x, mask, segment_ids, self.hidden_size)
        B, T, _ = x.shape
        if segment_ids is not None and (return_cache or cache is not None):
            raise NotImplementedError(
                "segment_ids: an attention layer keeps no cache of packed rows, it would have to forget all "
                "segments but the last"
            )
        if cache is None:
            return
        for name, width in zip(("k", "v"), self.cache_widths, strict=True):
            shape = (B, None, self.num_kv_heads, width)
            check_array(f"cache.{name}", getattr(cache, name), shape, "B S Hkv D")
        check_array("cache.length", cache.length, (B,), "B")
        if isinstance(cache, FixedAttentionCache) and not isinstance(cache.length, jax.core.Tracer):
            if mask is None or not isinstance(mask, jax.core.Tracer):
                count = T if mask is None else np.asarray(mask).sum(axis=1)
                most, S = int(np.max(np.asarray(cache.length) + count)), cache.k.shape[1]
                if most > S:
                    raise ValueError(f"cache: expected room for {most} tokens, got {S} slots")


def reserve(cache: AttentionCache, tokens: int) -> FixedAttentionCache:
    """A cache of fixed size with the tokens of another one and slots for more, a multiple of 8 in all, as
    kernels copy them."""
    more = tokens + -(cache.k.shape[1] + tokens) % 8
    k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (cache.k, cache.v))
    return FixedAttentionCache(k, v, cache.length)


def rotate(
    x: Float[Array, "B T H D"], positions: Int[Array, "B1 T"], rotary_dim: int, theta: float
) -> Float[Array, "B T H D"]:
    """Turns the pairs (j, j + rotary_dim / 2) of the first dimensions by position * theta^(-2 j / rotary_dim).

    Args:
      x: queries or keys.
      positions: of the tokens, of every row or of all rows alike (B1 = 1).
      rotary_dim: even number of dimensions that are turned; the others stay as they are.
      theta: base of the wavelengths, above 1.

    Returns:
      The turned x in its dtype; angles and products are float32.
    """
    half = rotary_dim // 2
    angles = (positions[..., None] * frequencies(theta, rotary_dim))[:, :, None]  # [B1, T, 1, half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def _attend_causally(q, k, v, *, lengths, segment_ids, layer, window):
    """`attend` of whole rows."""
    visible = same_segment(segment_ids)
    return attend(q, k, v, causal=True, lengths=lengths, visible=visible, layer=layer, window=window)


def _append(cache, k, v, count, is_full: bool):
    """The cache with new tokens [B, T] after its own, of which the first `count` of each row are tokens.

    Args:
      is_full: whether all are.
    """
    T, after = k.shape[1], cache.length + count
    if not isinstance(cache, FixedAttentionCache):
        old_k, old_v = (jnp.pad(x, ((0, 0), (0, T), (0, 0), (0, 0))) for x in (cache.k, cache.v))
        cache = cache._replace(k=old_k, v=old_v)
    if k.shape[0] == T == 1 and is_full:
        # One kernel where a scatter would be three. A token for which there is no slot replaces the last one: its
        # outputs are NaN, and all outputs after it.
        at = (0, cache.length[0], 0, 0)
        k, v = (
            jax.lax.dynamic_update_slice(old, new.astype(old.dtype), at)
            for old, new in ((cache.k, k), (cache.v, v))
        )
        return cache._replace(k=k, v=v, length=after)
    token, S = jnp.arange(T), cache.k.shape[1]
    slots = jnp.where(token < count[:, None], cache.length[:, None] + token, S)  # slot S is dropped
    return with_tokens(cache, jnp.arange(k.shape[0])[:, None], slots, k, v)._replace(length=after)


def with_tokens(cache, rows: Array, slots: Array, k: Array, v: Array) -> Any:
    """A cache with keys and values of tokens in some slots of some rows, its length as it was.

    A token whose slot or row the cache does not have is dropped.
    """
    k, v = (
        old.at[rows, slots].set(new.astype(old.dtype), mode="drop")
        for old, new in ((cache.k, k), (cache.v, v))
    )
    return cache._replace(k=k, v=v)


def _rolled(x, by):
    """x [B, T, ...] with row b moved by[b] places along T, in a circle."""
    T = x.shape[1]
    places = (jnp.arange(T) - by[:, None]) % T
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)
