"""Sliding-window attention as a token mixer, whose cache is a ring."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from gdn_jax.models.attention import Attention, WindowCache, with_tokens
from gdn_jax.parts.attention import attend


class WindowAttention(Attention):
    """`Attention` in which a token sees itself and the `config.window` - 1 tokens before it."""

    def init_cache(
        self, batch: int, capacity: int | None = None, dtype: DTypeLike | None = None
    ) -> WindowCache:
        """See `Attention.init_cache`: a ring has room for any number of tokens, so capacity is not read."""
        del capacity
        return WindowCache(*super().init_cache(batch, self._window, dtype))

    def mix(self, q, k, v, cache, count, lengths, segment_ids, return_cache):
        """See `Attention.mix`."""
        if cache is None:
            return super().mix(q, k, v, cache, count, lengths, segment_ids, return_cache)
        T, W = q.shape[1], self._window
        after = _put(cache, k, v, count)
        if T == 1:  # what the ring holds is what the token sees, in whatever order
            seen = jnp.clip(after.length, 1, W)
            return self.one_query(q, after._replace(length=seen)), after
        new = cache.length[:, None] + jnp.arange(T)
        last = cache.length[:, None] - 1
        old = (
            last - (last - jnp.arange(W)) % W
        )  # the latest token that lies in each slot, negative where none does
        places = jnp.concatenate([old, new], axis=1)
        ages = new[..., None] - places[:, None]
        visible = (places >= 0)[:, None] & (ages >= 0) & (ages < W)
        keys, values = (
            jnp.concatenate([a, b.astype(a.dtype)], axis=1) for a, b in ((cache.k, k), (cache.v, v))
        )
        return attend(q, keys, values, causal=False, visible=visible[:, None]), after

    def first_cache(self, k: Array, v: Array, count: Array) -> WindowCache:
        """See `Attention.first_cache`."""
        return _put(self.init_cache(k.shape[0], dtype=k.dtype), k, v, count)

    def _check_call(self, x, cache, mask, segment_ids, return_cache):
        super()._check_call(x, cache, mask, segment_ids, return_cache)
        if cache is not None and not (isinstance(cache, WindowCache) and cache.k.shape[1] == self._window):
            got = f"{type(cache).__name__} of {cache.k.shape[1]} slots"
            raise ValueError(f"cache: expected a WindowCache of {self._window} slots, got {got}")

    @property
    def _window(self) -> int:
        assert self.config.window is not None
        return self.config.window


def _put(cache: WindowCache, k: Array, v: Array, count: Array) -> WindowCache:
    """The ring after new tokens [B, T], of which the first `count` of each row are tokens."""
    B, T, W = *k.shape[:2], cache.k.shape[1]
    token = jnp.arange(T)
    kept = (token < count[:, None]) & (token >= count[:, None] - W)
    slots = jnp.where(kept, (cache.length[:, None] + token) % W, W)  # slot W is dropped
    return with_tokens(cache, jnp.arange(B)[:, None], slots, k, v)._replace(length=cache.length + count)
