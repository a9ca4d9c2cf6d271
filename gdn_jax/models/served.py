"""A language model over pools of what its layers remember, as `serving.Server` takes it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from gdn_jax.models.config import ModelConfig
from gdn_jax.models.decoder import Around, LanguageModel
from gdn_jax.models.inference.program import for_inference
from gdn_jax.models.served_layers import LayerPools, kind_of
from gdn_jax.models.structure import split
from gdn_jax.serving.slots import Indices
from gdn_jax.shapes import check_whole

__all__ = ["LayerPools", "ServedModel", "slot_bytes"]


class ServedModel:
    """A LanguageModel whose layers keep what they remember in slots; tokens are the likeliest ones.

    A token is -1 where its logits are NaN: after NaN in a slot, and where a request has more tokens than the pools'
    capacity. `Server.submit` refuses such a request, and with `gdn_jax.debug_checks` every call does.

    `prefill`, `decode` and `verify` are pure functions of the parameters, `params`, and the pools. `params` are those
    of `for_inference(model)`: 16-bit models read 16-bit weights.

    Args:
      model: the model; its mixers are attention, or recurrent layers with the short convolution and one step a token.
      batch_invariant: of `serving.decode` and `serving.prefill`.

    Raises:
      NotImplementedError: a mixer is another one.
    """

    def __init__(self, model: LanguageModel, *, batch_invariant: bool = False):
        self._mixers = [block.mixer for block in model.blocks]
        self._kinds: list[Any] = [kind_of(mixer, i, batch_invariant) for i, mixer in enumerate(self._mixers)]
        self._structure, self.params = split(for_inference(model))

    def make_pools(
        self,
        slots: int,
        *,
        dtype: DTypeLike = jnp.float32,
        ring: int | None = None,
        capacity: int | None = None,
    ) -> tuple:
        """Empty pools of every layer.

        Args:
          slots: requests that they have room for.
          dtype: of the recurrent states; with rings also int8 or float8_e4m3fn, see `serving.make_byte_states`.
          ring: length of the rings for deferred writes; None for none.
          capacity: tokens of a request at most, with its drafts; a model with attention keeps them all.

        Raises:
          ValueError: a number does not fit; the model has attention, and there is no capacity; or states cannot have
            the dtype.
        """
        check_whole("slots", slots, 1)
        for name, number, least in (("ring", ring, 1), ("capacity", capacity, 0)):
            if number is not None:
                check_whole(name, number, least)
        try:
            jnp.dtype(dtype)
        except TypeError:
            raise ValueError(f"dtype: expected a dtype of states, got {dtype!r}") from None
        layers = zip(self._kinds, self._mixers, strict=True)
        return tuple(kind.make_pool(mixer, slots, dtype, ring, capacity) for kind, mixer in layers)

    def prefill(
        self,
        params: Any,
        tokens: Int[Array, "1 T"],
        cu_seqlens: Indices,
        slots: Indices,
        has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"],
        pools: tuple,
    ) -> tuple[Int[Array, " N"], tuple]:
        """Pieces of prompts, packed in one row: the likeliest token after each, and the pools.

        Args:
          params: `self.params`.
          tokens: of all pieces, one behind the other.
          cu_seqlens: where the pieces begin, and the end of the last one.
          slots: of their requests; -1 for none, whose piece is padding.
          has_initial_state: False where the slot holds nothing of the request yet.
          pools: of `make_pools`, or of the call before.
        """

        def mix(i: int, mixer: Any, x: Array, **_: Any) -> tuple[Array, Any]:
            return self._kinds[i].prefill(mixer, x, pools[i], cu_seqlens, slots, has_initial_state)

        ends = jnp.asarray(cu_seqlens, jnp.int32)[1:]  # wide: what is less than 0 wraps in unsigned numbers
        return self._run(params, tokens, mix, lambda x: x[0, jnp.maximum(ends - 1, 0)])

    def decode(
        self, params: Any, tokens: Int[Array, " B"], slots: Indices, pools: tuple
    ) -> tuple[Int[Array, " B"], tuple]:
        """One token of every request: the likeliest next ones, and the pools.

        Args:
          params: `self.params`.
          tokens: last token of each request.
          slots: of the requests; -1 for none.
          pools: of the call before.
        """

        def mix(i: int, mixer: Any, x: Array, **_: Any) -> tuple[Array, Any]:
            return self._kinds[i].decode(mixer, x, pools[i], slots)

        return self._run(params, tokens[:, None], mix, lambda x: x[:, 0])

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

        def mix(i: int, mixer: Any, x: Array, **_: Any) -> tuple[Array, Any]:
            return self._kinds[i].verify(mixer, x, pools[i], state_slots, num_accepted_tokens)

        return self._run(params, tokens, mix, lambda x: x)

    def _run(
        self, params: Any, tokens: Int[Array, "B T"], mix: Around, pick: Callable[[Array], Array]
    ) -> tuple[Int[Array, "..."], tuple]:
        """The likeliest tokens after those that `pick` picks from all hidden states, and the pools."""
        model = self._structure.merge(params)
        x, new = model.hidden_states(tokens, around=mix, return_cache=True)
        logits = model.logits(pick(x))
        likeliest = jnp.argmax(logits, -1).astype(jnp.int32)  # of NaN, where there is one
        is_number = ~jnp.isnan(jnp.max(logits, -1))
        return jnp.where(is_number, likeliest, -1), new or ()


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
