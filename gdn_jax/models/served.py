"""A language model over pools of what its layers remember, as `serving.Server` takes it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from gdn_jax.models.config import ModelConfig
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.models.draft_head import NoDrafts, Pieces, SlotDrafts, check_drafts, run_round
from gdn_jax.models.inference.program import for_decoding, for_inference
from gdn_jax.models.sampling import next_tokens
from gdn_jax.models.served_layers import Attending, LayerPools, chain, kind_of
from gdn_jax.models.structure import Structure, split
from gdn_jax.serving.draws import Draws
from gdn_jax.serving.pools import Accept
from gdn_jax.serving.programs import Chain
from gdn_jax.serving.slots import Indices
from gdn_jax.shapes import check_whole

__all__ = ["LayerPools", "ServedModel", "slot_bytes"]


class ServedModel:
    """A LanguageModel whose layers keep what they remember in slots.

    Tokens are the likeliest ones, or drawn as the requests of a `Server(sampling=True)` ask for it.

    A token is -1 where its logits are NaN: after NaN in a slot, and where a request has more tokens than the pools'
    capacity. `Server.submit` refuses such a request, and with `gdn_jax.debug_checks` every call does.

    `prefill`, `decode` and `verify` are pure functions of the parameters, `params`, and the pools. `params` are the
    weights of `for_decoding(for_inference(model))`, 16 bits in 16-bit models, as in the loop of `generate`. On a GPU
    these are copies of the projections' weights, which prompts and tokens share: without the model itself they are
    in memory once.

    Args:
      model: the model; its mixers are attention, or recurrent layers with the short convolution and one step a token,
        or an erasure and one. Their states and convolutions are operations of `serving`, which hold to the
        model's `implementation`: prompts take it, and tokens run in plain JAX unless it is None or "mosaic_gpu".
      batch_invariant: of `serving.decode` and `serving.prefill`.
      drafts: "mtp": the model's head for multi-token prediction guesses tokens, and `decode` reads them with the
        newest token of each request: it gives a `serving.Chain`. The tokens are the same, but for ties within
        rounding. None: there are none.
      num_drafts: guesses in a step, 1 or more.
      draft_vocab: guesses are among this number of first tokens of the vocabulary, see `generate`; None: among all.
      max_batch: most requests of a `decode`, if known. 1: the weights lie as the kernels of a single row read them,
        and in pools of one slot `decode` is a token of `generate`; such a slot has no padding.

    Raises:
      NotImplementedError: a mixer is another one.
      ValueError: the model has no head, or there are no such drafts.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        batch_invariant: bool = False,
        drafts: str | None = None,
        num_drafts: int = 3,
        draft_vocab: int | None = None,
        max_batch: int | None = None,
    ):
        if max_batch is not None:
            check_whole("max_batch", max_batch, 1)
        self._mixers = [block.mixer for block in model.blocks]
        self._drafts: Any = NoDrafts()
        self._chain = 1
        if drafts is not None:
            check_drafts(model, drafts, num_drafts, draft_vocab)
            self._drafts = SlotDrafts(num_drafts, draft_vocab, model, Attending(batch_invariant))
            self._chain = 1 + num_drafts
        self._kinds: list[Any] = [kind_of(mixer, i, batch_invariant) for i, mixer in enumerate(self._mixers)]
        rows = None if max_batch is None or batch_invariant else max_batch * self._chain
        head_rows = None if drafts is None else max_batch or MANY
        self._structure, self.params = _for_tokens(*split(for_inference(model)), rows, head_rows)
        # A window's pool has all tokens and is no ring, as its cache is.
        self._is_one_row = rows == 1 and "window_attention" not in model.config.types

    def make_pools(
        self,
        slots: int,
        *,
        dtype: DTypeLike = jnp.float32,
        ring: int | None = None,
        capacity: int | None = None,
    ) -> Any:
        """Empty pools of every layer, and of the drafts.

        Args:
          slots: requests that they have room for.
          dtype: of the recurrent states; with rings also int8 or float8_e4m3fn, see `serving.make_byte_states`.
          ring: length of the rings for deferred writes; None for none.
          capacity: tokens of a request at most, with its drafts; a model with attention keeps them all. A `Server`
            needs room for the drafts of two steps.

        Raises:
          ValueError: a number does not fit; the model has attention, and there is no capacity; a ring is too short
            for the drafts; or states cannot have the dtype.
        """
        check_whole("slots", slots, 1)
        for name, number, least in (("ring", ring, self._chain), ("capacity", capacity, 0)):
            if number is not None:
                check_whole(name, number, least)
        try:
            jnp.dtype(dtype)
        except TypeError:
            raise ValueError(f"dtype: expected a dtype of states, got {dtype!r}") from None
        if ring is not None and self._chain > 1 and any(kind.entries > 1 for kind in self._kinds):
            raise ValueError(
                "ring: expected None with drafts of Erase-then-Delta Attention, whose tokens have two entries, "
                f"got {ring}"
            )
        layers = zip(self._kinds, self._mixers, strict=True)
        pools = tuple(kind.make_pool(mixer, slots, dtype, ring, capacity) for kind, mixer in layers)
        return self._drafts.make_pools(pools, slots, capacity)

    def prefill(
        self,
        params: Any,
        tokens: Int[Array, "1 T"],
        cu_seqlens: Indices,
        slots: Indices,
        has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"],
        pools: Any,
        draws: Draws | None = None,
    ) -> tuple[Int[Array, " N"], Any]:
        """Pieces of prompts, packed in one row: the token after each, and the pools.

        Args:
          params: `self.params`.
          tokens: of all chunks, one after the other.
          cu_seqlens: where the pieces begin, and the end of the last one.
          slots: of their requests; -1 for none, whose piece is padding.
          has_initial_state: False where the slot holds nothing of the request yet.
          pools: of `make_pools`, or of the call before.
          draws: how the requests draw; None: tokens are the likeliest ones.
        """
        model, layers = self._structure.merge(params), self._drafts.layers(pools)

        def mix(i: int, mixer: Any, x: Array, **_: Any) -> tuple[Array, Any]:
            return self._kinds[i].prefill(mixer, x, layers[i], cu_seqlens, slots, has_initial_state)

        ends = jnp.asarray(cu_seqlens, jnp.int32)[1:]  # wide: what is less than 0 wraps in unsigned numbers
        x, after = model.hidden_states(tokens, around=mix, return_cache=True)
        logits = model.logits(x[0, jnp.maximum(ends - 1, 0)])
        new = next_tokens(logits[:, None], draws)[:, 0]
        pieces = Pieces(tokens, x, cu_seqlens, slots, has_initial_state, new)
        return new, self._drafts.after_prompts(model, pieces, after or (), pools)

    def decode(
        self,
        params: Any,
        tokens: Int[Array, " B"],
        slots: Indices,
        pools: Any,
        draws: Draws | None = None,
    ) -> tuple[Int[Array, " B"] | Chain, Any]:
        """One token of every request, or with drafts several: the next ones, and the pools.

        A request accepts a draft if it equals the token that the model draws there, or the likeliest one without
        draws. So drafts change neither the tokens nor their probabilities.

        Args:
          params: `self.params`.
          tokens: last token of each request.
          slots: of the requests; -1 for none.
          pools: of the call before.
          draws: how the requests draw; None: tokens are the likeliest ones.
        """
        model = self._structure.merge(params)
        if self._is_one_row and all(map(_is_cache, pools)):
            x, pools = model.hidden_states(tokens[:, None], cache=pools)
            return next_tokens(model.logits(x), draws)[:, 0], pools

        def read(tokens: Array, layers: tuple) -> tuple[Array, Accept]:
            def mix(i: int, mixer: Any, x: Array, **_: Any) -> tuple[Array, Any]:
                return chain(self._kinds[i], mixer, x, layers[i], slots)

            x, accepts = model.hidden_states(tokens, around=mix, return_cache=True)
            return x, lambda count: tuple(accept(count) for accept in accepts or ())

        options: Any = dict(read=read, choose=partial(next_tokens, draws=draws))
        this = run_round(model, self._drafts, tokens, slots, pools, **options)
        count = 1 + this.right
        return this.new[:, 0] if self._chain == 1 else Chain(this.new, count), this.after(count)

    def verify(
        self,
        params: Any,
        tokens: Int[Array, "N T"],
        state_slots: Indices,
        num_accepted_tokens: Indices,
        pools: tuple,
    ) -> tuple[Int[Array, "N T"], tuple]:
        """The last sampled token and drafts of every request: the likeliest token after each, and the pools.

        Args:
          params: `self.params`.
          tokens: [N, T].
          state_slots: [N, T], see `serving.verify`. With rings the recurrent states use the first slot of a request,
            and so do keys and values of attention layers in any case.
          num_accepted_tokens: [N], of the call before.
          pools: of the call before.
        """
        model = self._structure.merge(params)

        def mix(i: int, mixer: Any, x: Array, **_: Any) -> tuple[Array, Any]:
            return self._kinds[i].verify(mixer, x, pools[i], state_slots, num_accepted_tokens)

        x, after = model.hidden_states(tokens, around=mix, return_cache=True)
        return next_tokens(model.logits(x)), after or ()


def _is_cache(pool: Any) -> bool:
    """Whether the pool of a layer is the cache of one row."""
    arrays = jax.tree.leaves(pool)
    return len(arrays) == len(pool) and all(len(x) == 1 for x in arrays)


MANY = 2
"""Rows for which a model is prepared that serves any number of requests, see `for_decoding`."""


def _for_tokens(
    structure: Structure, arrays: list[Any], rows: int | None, head_rows: int | None
) -> tuple[Structure, list[Any]]:
    """Structure and arrays of a model of `for_inference` as `decode` reads them for a number of rows, or for any,
    made by one program. An array that stays is shared."""
    found: list[Any] = []

    def make(arrays: list[Any]) -> list[Any]:
        options: Any = dict(in_parts=rows is not None, head_rows=head_rows)
        single, laid_out = split(for_decoding(structure.merge(arrays), rows or MANY, **options))
        places = {id(x): i for i, x in enumerate(arrays)}
        found.extend([single, [places.get(id(x)) for x in laid_out]])
        return [x for x in laid_out if id(x) not in places]

    run = jax.jit(make)
    new = iter(run(arrays) if jax.eval_shape(run, arrays) else ())  # without a GPU nothing is to be made
    single, places = found
    return single, [next(new) if place is None else arrays[place] for place in places]


def slot_bytes(
    config: ModelConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    ring: int | None = None,
    capacity: int | None = None,
) -> int:
    """Bytes of a slot of a served model, in all layers together; makes no array.

    Args:
      config: of the model.
      dtype, ring, capacity: as for `ServedModel.make_pools`.

    Raises:
      NotImplementedError, ValueError: as `ServedModel` and its `make_pools`.
    """

    small, numbers = config.of_each_kind()

    def pools() -> tuple:
        model = ServedModel(LanguageModel(small, rngs=nnx.Rngs(0)))
        return model.make_pools(1, dtype=dtype, ring=ring, capacity=capacity)

    of_kinds = zip(numbers, jax.eval_shape(pools), strict=True)
    return sum(n * x.size * x.dtype.itemsize for n, pool in of_kinds for x in jax.tree.leaves(pool))
