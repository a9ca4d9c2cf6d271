"""A language model over pools of states, as `serving.Server` takes it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gdn_jax import serving
from gdn_jax.fused.short_conv import split_normalized
from gdn_jax.layers import RecurrentMixer
from gdn_jax.models.decoder import Around, LanguageModel
from gdn_jax.models.inference import for_inference
from gdn_jax.serving.pools import draft_slots


class LayerPools(NamedTuple):
    """Contents of the slots for one layer."""

    conv: Float[Array, "slots D W1"]
    state: Float[Array, "slots HO K V"] | serving.RingPool


class ServedModel:
    """A LanguageModel whose layers keep what they remember in slots; tokens are the likeliest ones.

    `prefill`, `decode` and `verify` are pure functions of the parameters, `params`, and the pools. `params` are those
    of `for_inference(model)`: 16-bit models read 16-bit weights.

    Args:
      model: the model; its mixers are recurrent layers with the short convolution and one step a token.
      batch_invariant: of `serving.decode` and `serving.prefill`.

    Raises:
      NotImplementedError: a mixer is another one.
    """

    def __init__(self, model: LanguageModel, *, batch_invariant: bool = False):
        self._mixers: list[RecurrentMixer] = []
        for layer, block in enumerate(model.blocks):
            mixer = block.mixer
            if not (isinstance(mixer, RecurrentMixer) and mixer.can_be_served):
                keeps = ", whose cache holds tokens: the slots of a pool hold states"
                raise NotImplementedError(
                    "model: expected delta rules of one step a token, with the short convolution, got "
                    f"{type(mixer).__name__} in layer {layer}{keeps if getattr(mixer, 'attends', False) else ''}"
                )
            self._mixers.append(mixer)
        self._graphdef, self.params = nnx.split(for_inference(model))
        self._batch_invariant = batch_invariant

    def make_pools(self, slots: int, *, dtype: DTypeLike = jnp.float32, ring: int | None = None) -> tuple:
        """Empty pools of every layer.

        Args:
          slots: requests that they have room for.
          dtype: of the recurrent states.
          ring: length of the rings for deferred writes; None for none.
        """
        pools = []
        for mixer in self._mixers:
            conv, state = mixer.init_cache(slots)
            state = state.astype(dtype)
            if ring is not None:
                heads = dict(num_key_heads=mixer.num_heads, channels=mixer.by_channels)
                state = serving.make_ring_pool(state, length=ring, **heads)
            pools.append(LayerPools(conv, state))
        return tuple(pools)

    def prefill(
        self,
        params: Any,
        tokens: Int[Array, "1 T"],
        cu_seqlens: Int[Array, " N1"],
        slots: Int[Array, " N"],
        has_initial_state: Bool[Array, " N"],
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
        addresses = dict(read_slots=slots, has_initial_state=has_initial_state)

        def mix(i: int, mixer: RecurrentMixer, x: Array, **_: Any) -> tuple[Array, LayerPools]:
            qkv, conv = serving.causal_conv1d(
                mixer.project_qkv(x), cu_seqlens, pools[i].conv, *mixer.filters(), **addresses
            )
            g, beta, erase, write = mixer.gates(*mixer.raw_gates(x))
            o, state = serving.prefill(
                *_heads(mixer, qkv),
                g,
                beta,
                cu_seqlens,
                pools[i].state,
                erase=erase,
                write=write,
                use_qk_l2norm=True,
                batch_invariant=self._batch_invariant,
                **addresses,
            )
            return mixer.rule_output(o, x), LayerPools(conv, state)

        return self._run(params, tokens, mix, lambda x: x[0, jnp.maximum(cu_seqlens[1:] - 1, 0)])

    def decode(
        self, params: Any, tokens: Int[Array, " B"], slots: Int[Array, " B"], pools: tuple
    ) -> tuple[Int[Array, " B"], tuple]:
        """One token of every request: the likeliest next ones, and the pools.

        Args:
          params: `self.params`.
          tokens: last token of each request.
          slots: of the requests; -1 for none.
          pools: of the call before.
        """

        def mix(i: int, mixer: RecurrentMixer, x: Array, **_: Any) -> tuple[Array, LayerPools]:
            qkv = mixer.project_qkv(x)[:, 0]
            qkv, conv = serving.causal_conv1d_update(qkv, pools[i].conv, *mixer.filters(), read_slots=slots)
            a, b, w = mixer.raw_gates(x)
            o, state = serving.decode_packed(
                qkv,
                a[:, 0],
                b[:, 0],
                pools[i].state,
                w=None if w is None else w[:, 0],
                read_slots=slots,
                **self._options(mixer),
            )
            return mixer.rule_output(o[:, None], x), LayerPools(conv, state)

        return self._run(params, tokens[:, None], mix, lambda x: x[:, 0])

    def verify(
        self,
        params: Any,
        tokens: Int[Array, "N T"],
        state_slots: Int[Array, "N T"],
        num_accepted_tokens: Int[Array, " N"],
        pools: tuple,
    ) -> tuple[Int[Array, "N T"], tuple]:
        """The last sampled token and drafts of every request: the likeliest token after each, and the pools.

        Args:
          params: `self.params`.
          tokens: [N, T].
          state_slots: [N, T], see `serving.verify`. With rings the recurrent states use the first slot of a request.
          num_accepted_tokens: [N], of the call before.
          pools: of the call before.
        """
        spans = dict(num_accepted_tokens=num_accepted_tokens)

        def mix(i: int, mixer: RecurrentMixer, x: Array, **_: Any) -> tuple[Array, LayerPools]:
            qkv, conv = serving.causal_conv1d_verify(
                mixer.project_qkv(x), pools[i].conv, *mixer.filters(), state_slots=state_slots, **spans
            )
            a, b, w = mixer.raw_gates(x)
            o, state = serving.verify(
                *_heads(mixer, qkv),
                a,
                b,
                pools[i].state,
                w=w,
                state_slots=draft_slots(pools[i].state, state_slots),
                **self._options(mixer),
                **spans,
            )
            return mixer.rule_output(o, x), LayerPools(conv, state)

        return self._run(params, tokens, mix, lambda x: x)

    def _run(
        self, params: Any, tokens: Int[Array, "B T"], mix: Around, pick: Callable[[Array], Array]
    ) -> tuple[Int[Array, "..."], tuple]:
        """The likeliest tokens behind those that `pick` picks from all hidden states, and the pools."""
        model = nnx.merge(self._graphdef, params)
        x, new = model.hidden_states(tokens, around=mix, return_cache=True)
        return jnp.argmax(model.logits(pick(x)), -1).astype(jnp.int32), new or ()

    def _options(self, mixer: RecurrentMixer) -> dict[str, Any]:
        """Options of a layer that `serving.decode` and `serving.verify` have in common."""
        return {
            "A_log": None if mixer.A_log is None else mixer.A_log[...],
            "dt_bias": mixer.dt_bias[...],
            "lower_bound": mixer.lower_bound,
            "allow_neg_eigval": mixer.allow_neg_eigval,
            "batch_invariant": self._batch_invariant,
        }


def _heads(mixer: RecurrentMixer, qkv: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values [.., heads, width] of the convolution's output."""
    q, k, v = split_normalized(qkv, mixer.num_heads, mixer.head_dim, normalize=False)
    return q, k, v.reshape(*v.shape[:-1], mixer.num_v_heads, mixer.head_v_dim)
