"""The layers of a served model over pools: what a slot holds of a request, and the three calls of `ServedModel`.

A kind of layers is an object with the same five methods. The arguments of the calls are those of `ServedModel`.
"""

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gdn_jax import serving
from gdn_jax.layers import EraseThenDelta, RecurrentCache, RecurrentMixer
from gdn_jax.models.attention import Attention, AttentionCache, FixedAttentionCache, with_tokens
from gdn_jax.models.inference.attention import AttentionRows
from gdn_jax.models.inference.recurrent import RecurrentRows
from gdn_jax.parts.cached_attention import Place
from gdn_jax.parts.kernels import BY_KERNELS
from gdn_jax.parts.short_conv import split_normalized
from gdn_jax.serving import slots as pool_slots
from gdn_jax.serving.arguments import check_sequences, check_values
from gdn_jax.serving.byte_states import of_dtype
from gdn_jax.serving.call import At, Spans
from gdn_jax.serving.pools import Accept, Run
from gdn_jax.serving.slots import Address, Indices
from gdn_jax.serving.states import StatePool
from gdn_jax.serving.step import draft_slots, on_trial
from gdn_jax.shapes import check_whole

LayerPools = RecurrentCache
"""Contents of the slots for one recurrent layer: a cache whose rows are slots. The state may be any pool's arrays."""

FEWEST = 64
"""Tokens of a block of queries at least, see `Attending.prefill`."""


class Recurrent:
    """Recurrent layers of one step a token with the short convolution: a window and a state in each slot.

    Args:
      batch_invariant: of `serving.decode` and `serving.prefill`.
    """

    entries: ClassVar[int] = 1
    """Entries of a ring that a token has."""

    def __init__(self, batch_invariant: bool):
        self._batch_invariant = batch_invariant

    def make_pool(
        self, mixer: RecurrentMixer, slots: int, dtype: DTypeLike, ring: int | None, capacity: int | None
    ) -> LayerPools:
        """Empty pools of a layer.

        Raises:
          ValueError: there are no states of the dtype, or they are of 8 bits and there is no ring.
        """
        del capacity
        if ring is None and jnp.dtype(dtype).itemsize == 1:
            raise ValueError(
                f"dtype: expected 16 bits or more without a ring, whose states each token rounds, got {dtype!r}"
            )
        conv, states = mixer.init_cache(slots)
        state: Any = of_dtype(states, dtype)
        if ring is not None:
            heads = dict(num_key_heads=mixer.num_heads, channels=mixer.by_channels)
            state = serving.make_ring_pool(state, length=ring * self.entries, **heads)
        return LayerPools(conv, state)

    def prefill(
        self,
        mixer: RecurrentMixer | RecurrentRows,
        x: Float[Array, "1 T D"],
        pool: LayerPools,
        cu_seqlens: Indices,
        slots: Indices,
        has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"],
    ) -> tuple[Float[Array, "1 T D"], LayerPools]:
        """Pieces of prompts, packed in one row."""
        mixer, addresses = _layer(mixer), dict(read_slots=slots, has_initial_state=has_initial_state)
        window = partial(serving.causal_conv1d, **addresses, implementation=_implementation(mixer))
        qkv, conv = window(mixer.project_qkv(x), cu_seqlens, pool.conv, *mixer.filters())
        options = addresses | dict(use_qk_l2norm=True, batch_invariant=self._batch_invariant)
        options |= dict(implementation=mixer.implementation)
        o, state = self._prompts(mixer, x, qkv)(cu_seqlens, pool.state, **options)
        return mixer.rule_output(o, x), LayerPools(conv, state)

    def _prompts(self, mixer: Any, x: Float[Array, "1 T D"], qkv: Float[Array, "1 T C"]) -> Run:
        """The rule of prompts, after the convolution."""
        g, beta, erase, write = mixer.gates(*mixer.raw_gates(x))
        return partial(serving.prefill, *_heads(mixer, qkv), g, beta, erase=erase, write=write)

    def decode(
        self, mixer: Any, x: Float[Array, "B 1 D"], pool: LayerPools, slots: Indices
    ) -> tuple[Float[Array, "P 1 D"], LayerPools]:
        """One token of every request. The mixer is the layer's, or what `for_decoding` makes of it."""
        if isinstance(mixer, RecurrentRows):
            at = Address.of(slots, pool.conv)
            if isinstance(pool.state, jax.Array) and (found := mixer.by_kernels(x, pool, at.slot)):
                return found
        mixer = _layer(mixer)
        window = partial(serving.causal_conv1d_update, implementation=_implementation(mixer))
        qkv, conv = window(mixer.project_qkv(x)[:, 0], pool.conv, *mixer.filters(), read_slots=slots)
        o, state = self._token(mixer, x, qkv)(pool.state, read_slots=slots)
        return mixer.rule_output(o[:, None], x), LayerPools(conv, state)

    def _token(self, mixer: Any, x: Float[Array, "B 1 D"], qkv: Float[Array, "B C"]) -> Run:
        """The rule of one token of every request, after the convolution."""
        a, b, w = jax.tree.map(lambda y: y[:, 0], mixer.raw_gates(x))
        return partial(serving.decode_packed, qkv, a, b, w=w, **self._options(mixer))

    def verify(
        self,
        mixer: RecurrentMixer | RecurrentRows,
        x: Float[Array, "N T D"],
        pool: LayerPools,
        state_slots: Indices,
        num_accepted_tokens: Indices,
    ) -> tuple[Float[Array, "N T D"], LayerPools]:
        """The last token and drafts of every request."""
        mixer, accepted = _layer(mixer), dict(num_accepted_tokens=num_accepted_tokens)
        qkv, conv = self._window(mixer, x)(pool.conv, state_slots=state_slots, **accepted)
        slots = draft_slots(pool.state, state_slots)
        o, state = self._rule(mixer, x, qkv)(pool.state, state_slots=slots, **accepted)
        return mixer.rule_output(o, x), LayerPools(conv, state)

    def drafts(
        self,
        mixer: RecurrentMixer | RecurrentRows,
        x: Float[Array, "N T D"],
        pool: LayerPools,
        slots: Indices,
    ) -> tuple[Float[Array, "N T D"], Accept]:
        """See `chain`."""
        T, mixer = x.shape[1], _layer(mixer)
        qkv, accept_window = on_trial(self._window(mixer, x), pool.conv, slots, T)
        o, accept_state = on_trial(self._rule(mixer, x, qkv), pool.state, slots, T)
        return mixer.rule_output(o, x), lambda count: LayerPools(accept_window(count), accept_state(count))

    def _window(self, mixer: RecurrentMixer, x: Float[Array, "N T D"]) -> Run:
        """The convolution of tokens and their drafts."""
        weight, bias = mixer.filters()
        options = dict(weight=weight, bias=bias, implementation=_implementation(mixer))
        return partial(serving.causal_conv1d_verify, mixer.project_qkv(x), **options)

    def _rule(self, mixer: RecurrentMixer, x: Float[Array, "N T D"], qkv: Float[Array, "N T C"]) -> Run:
        """The rule of tokens and their drafts, after the convolution."""
        a, b, w = mixer.raw_gates(x)
        return partial(serving.verify, *_heads(mixer, qkv), a, b, w=w, **self._options(mixer))

    def _options(self, mixer: RecurrentMixer) -> dict[str, Any]:
        """Options of a layer that `serving.decode` and `serving.verify` have in common."""
        return {
            "A_log": None if mixer.A_log is None else mixer.A_log[...],
            "dt_bias": mixer.dt_bias[...],
            "lower_bound": mixer.lower_bound,
            "allow_neg_eigval": mixer.allow_neg_eigval,
            "batch_invariant": self._batch_invariant,
            "implementation": _implementation(mixer),
        }


class Erasing(Recurrent):
    """Layers of Erase-then-Delta Attention, `EraseThenDelta`, whose token is two of the delta rule.

    Kernels take rings of 16 entries, so of 8 tokens.
    """

    entries = 2

    def _prompts(self, mixer: Any, x: Float[Array, "1 T D"], qkv: Float[Array, "1 T C"]) -> Run:
        g, beta, strength, _ = mixer.gates(*mixer.raw_gates(x))
        tokens = *_heads(mixer, qkv), g, beta, mixer.erase_keys(x), strength
        return partial(serving.erase_then_delta_prefill, *tokens)

    def _token(self, mixer: Any, x: Float[Array, "B 1 D"], qkv: Float[Array, "B C"]) -> Run:
        gates = (y[:, 0] for y in self._erasure(mixer, x))
        return partial(serving.erase_then_delta_decode, *_heads(mixer, qkv), *gates, **self._options(mixer))

    def _rule(self, mixer: Any, x: Float[Array, "N T D"], qkv: Float[Array, "N T C"]) -> Run:
        tokens = *_heads(mixer, qkv), *self._erasure(mixer, x)
        return partial(serving.erase_then_delta_verify, *tokens, **self._options(mixer))

    def _options(self, mixer: Any) -> dict[str, Any]:
        return super()._options(mixer) | {"bound": mixer.bound}

    def _erasure(self, mixer: Any, x: Float[Array, "B T D"]) -> tuple[Any, Any, Any, Any]:
        """a, b, the erase keys and w of tokens, as `serving.erase_then_delta_verify` takes them."""
        a, b, w = mixer.raw_gates(x)
        return a, b, mixer.erase_keys(x), w


class Attending:
    """Attention layers: the keys and values of a request's tokens, and how many there are, in each slot.

    They lie as in a `FixedAttentionCache` with the slots as rows. Layers with a window keep all tokens here, since
    drafts that are not accepted would have replaced tokens of a ring. The drafts of a request lie in its first slot;
    in the slot of each draft there is the number of tokens up to it alone. So a request with drafts goes on with
    `verify` and the same slots. What has no room gives NaN; with `gdn_jax.debug_checks` on it is an error.

    Args:
      batch_invariant: whether a request's bits do not hang on the other requests; else single tokens take a kernel
        that cuts a few requests into more parts than many.
    """

    entries: ClassVar[int] = 1

    def __init__(self, batch_invariant: bool):
        self._batch_invariant = batch_invariant

    def make_pool(
        self, mixer: Attention, slots: int, dtype: DTypeLike, ring: int | None, capacity: int | None
    ) -> FixedAttentionCache:
        """An empty pool of a layer."""
        del dtype, ring
        if capacity is None:
            raise ValueError(
                "capacity: expected the tokens of a request, which attention layers keep, got None"
            )
        check_whole("capacity", capacity, 0)
        return FixedAttentionCache(*Attention.init_cache(mixer, slots, capacity))

    def prefill(
        self,
        mixer: Attention,
        x: Float[Array, "1 T D"],
        pool: FixedAttentionCache,
        cu_seqlens: Indices,
        slots: Indices,
        has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"],
    ) -> tuple[Float[Array, "1 T D"], FixedAttentionCache]:
        """Pieces of prompts, packed in one row.

        Queries meet keys in blocks, each with queries of one piece. There are at most twice as many blocks as pieces,
        and at most twice as many queries in them as tokens, or as N blocks of `FEWEST` have.
        """
        T, N = x.shape[1], len(slots)
        check_sequences(cu_seqlens, T, has_initial_state)
        At(slots).check(StatePool(pool), "N", cu_seqlens.shape[0] - 1)
        check_values(partial(_check_pieces, pool.capacity, len(pool.length)), cu_seqlens, slots)
        cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
        begins, counts, at = cu_seqlens[:-1], jnp.diff(cu_seqlens), Address.of(slots, pool)
        past = jnp.where(has_initial_state, pool_slots.take(pool.length, at), 0)
        token = jnp.arange(T)
        piece = jnp.clip(passed(cu_seqlens, token) - 1, 0, len(counts) - 1)
        place = token - begins[piece]
        q, k, v = mixer.heads(x, (past[piece] + place)[None])
        to = at.rows(piece).only(token < cu_seqlens[-1])
        pool = with_tokens(pool, to.slot, past[piece] + place, k[0], v[0])
        size = max(1, min(T, max(FEWEST, -(-T // N))))
        blocks = -(-counts // size)
        ends = jnp.cumsum(blocks)
        first, number = ends - blocks, jnp.arange(min(N * -(-T // size), T // size + N))
        of = jnp.clip(passed(ends, number), 0, N - 1)
        own = ((number - first[of]) * size)[:, None] + jnp.arange(size)
        rows = q[0][jnp.clip(begins[of, None] + own, 0, T - 1)]
        o = self._attend(mixer, rows, pool, at.rows(of), past[of, None] + own, (past + counts)[of])
        o = o[first[piece] + place // size, place % size]
        o = jnp.where(to.is_slot[:, None, None], o, 0)[None]
        length = pool_slots.put(pool.length, at, past + counts)
        return mixer.o_proj(mixer.gated(o, x)), pool._replace(length=length)

    def decode(
        self,
        mixer: Attention,
        x: Float[Array, "B 1 D"],
        pool: FixedAttentionCache,
        slots: Indices,
    ) -> tuple[Float[Array, "P 1 D"], FixedAttentionCache]:
        """One token of every request."""
        if isinstance(mixer, AttentionRows) and not self._batch_invariant:
            at = Address.of(slots, pool.length)
            past = pool_slots.take(pool.length, at)
            check_values(partial(_check_room, pool.capacity), past + 1, at.is_slot)
            place = Place(
                past, jnp.where(at.is_slot, past, pool.capacity), past + 1, jnp.where(at.is_slot, at.slot, 0)
            )
            if (found := mixer.by_kernels(x, pool, place)) is not None:
                parts = found[0].reshape(-1, *x.shape)  # of a sum, see `for_decoding`
                y = jnp.where(at.is_slot[:, None, None], parts, 0).reshape(found[0].shape)
                return y, found[1]._replace(length=pool_slots.put(pool.length, at, past + 1))
        return self.verify(mixer, x, pool, slots[:, None], jnp.ones(slots.shape, jnp.int32))

    def verify(
        self,
        mixer: Attention,
        x: Float[Array, "N T D"],
        pool: FixedAttentionCache,
        state_slots: Indices,
        num_accepted_tokens: Indices,
    ) -> tuple[Float[Array, "N T D"], FixedAttentionCache]:
        """The last token and drafts of every request."""
        lengths, spans = StatePool(pool.length), Spans(state_slots, num_accepted_tokens)
        spans.check(lengths, "N, T", *x.shape[:2])
        start, after = lengths.span(Spans(*map(jnp.asarray, spans[:2])))
        first = lengths.address(state_slots[:, 0], None).only(start.is_slot)
        past = pool_slots.take(pool.length, start)
        positions = past[:, None] + jnp.arange(x.shape[1])
        q, k, v = mixer.heads(x, positions)
        pool = with_tokens(pool, first.slot[:, None], positions, k, v)
        o = self._attend(mixer, q, pool, first, positions, positions[:, -1] + 1)
        length = pool_slots.put(pool.length, after, positions + 1)
        return mixer.o_proj(mixer.gated(o, x)), pool._replace(length=length)

    def drafts(
        self, mixer: Attention, x: Float[Array, "N T D"], pool: FixedAttentionCache, slots: Indices
    ) -> tuple[Float[Array, "N T D"], Accept]:
        """See `chain`."""
        N, T = x.shape[:2]
        first = jnp.concatenate([slots[:, None], jnp.full((N, T - 1), -1, slots.dtype)], axis=1)
        o, pool = self.verify(mixer, x, pool, first, jnp.ones(N, jnp.int32))

        def accept(count: Array) -> FixedAttentionCache:
            at = Address.of(slots, pool.length)
            after_one = pool_slots.take(pool.length, at)
            return pool._replace(length=pool_slots.put(pool.length, at, after_one - 1 + count))

        return o, accept

    def _attend(self, mixer, q, pool, at, positions, lengths):
        """Returns what queries [N, T] of tokens at these positions see of the first keys in their requests' slots."""
        S = pool.capacity
        check_values(partial(_check_room, S), lengths, at.is_slot)
        if q.shape[1] == 1 and mixer.config.window is None and not self._batch_invariant:
            o = mixer.seen(q, pool._replace(length=lengths), positions, jnp.where(at.is_slot, at.slot, 0))
        else:
            known = jnp.arange(S) < lengths[:, None]  # other places may hold NaN
            k, v = (jnp.where(known[..., None, None], pool_slots.take(y, at), 0) for y in (pool.k, pool.v))
            o = mixer.seen(q, AttentionCache(k, v, lengths), positions, by_row=False)
        return jnp.where(at.is_slot[:, None, None, None], o, 0)


def passed(ends: Int[Array, " N"], places: Int[Array, " T"]) -> Int[Array, " T"]:
    """How many ends are at or before each place. A search would be a loop of XLA, at which a CUDA graph ends."""
    return jnp.searchsorted(ends, places, side="right", method="compare_all")


def chain(
    kind: "Recurrent | Attending", mixer: Any, x: Float[Array, "N T D"], pool: Any, slots: Indices
) -> tuple[Float[Array, "P T D"], Accept]:
    """A token and its drafts of every request, each with one slot: the outputs, and the pool by how many stay.

    Without drafts it is `decode`.

    Returns:
      The outputs, and accept(count): the pool after the first `count` [N] tokens of each request, 1 or more.
    """
    if x.shape[1] > 1:
        return kind.drafts(mixer, x, pool, slots)
    o, pool = kind.decode(mixer, x, pool, slots)
    return o, lambda count: pool


def _check_pieces(capacity: int, size: int, cu_seqlens, slots) -> None:
    slots = np.asarray(slots)
    _check_room(capacity, np.diff(cu_seqlens), (slots >= 0) & (slots < size))


def _check_room(capacity: int, lengths, is_slot) -> None:
    most = int(np.max(lengths, initial=0, where=np.asarray(is_slot)))
    if most > capacity:
        raise ValueError(
            f"pools: expected a capacity of at least {most}, the tokens of a request, got {capacity}"
        )


def _layer(mixer: RecurrentMixer | RecurrentRows) -> Any:
    """The layer itself, whose projections `for_decoding` may have grouped."""
    return mixer.mixer if isinstance(mixer, RecurrentRows) else mixer


def _implementation(mixer: RecurrentMixer) -> str | None:
    """The implementation of a layer's convolutions and tokens, which are parts around the rule of its prompts."""
    return None if mixer.implementation in BY_KERNELS else "xla"


def _heads(mixer: RecurrentMixer, qkv: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values [.., heads, width] of the convolution's output."""
    q, k, v = split_normalized(qkv, mixer.num_heads, mixer.head_dim, normalize=False)
    return q, k, v.reshape(*v.shape[:-1], mixer.num_v_heads, mixer.head_v_dim)


KINDS: tuple[tuple[type, type[Recurrent] | type[Attending]], ...] = (
    (EraseThenDelta, Erasing),
    (RecurrentMixer, Recurrent),
    (Attention, Attending),
)
"""Layers and their kinds; the first that fits is taken."""


def kind_of(mixer: Any, layer: int, batch_invariant: bool) -> Recurrent | Attending:
    """The kind of a layer.

    Raises:
      NotImplementedError: there is none for it, with the layer and what it is.
    """
    for of, kind in KINDS:
        if isinstance(mixer, of) and getattr(mixer, "can_be_served", True):
            return kind(batch_invariant)
    raise NotImplementedError(
        "model: expected attention and delta rules of one step a token, with the short convolution, got "
        f"{type(mixer).__name__} in layer {layer}"
    )
