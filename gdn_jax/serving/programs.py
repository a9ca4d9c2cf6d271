"""A server makes two programs of a model's functions: one reads prompts, one writes tokens.

A program takes the contents of all slots and gives them back; they are donated. Its table of requests is one array,
and so are its tokens: a step has few copies between host and device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gdn_jax.serving.arguments import check_integers
from gdn_jax.serving.draws import Draws
from gdn_jax.serving.slots import Address, put, take, take_slots
from gdn_jax.shapes import ArgumentError

Prefill = Callable[..., tuple[jax.Array, Any]]
"""(params, tokens [1, T], cu_seqlens [N + 1], slots [N], has_initial_state [N], pools) -> next tokens [N], pools. A
server with sampling has one more argument, the `Draws` of the N requests."""
Decode = Callable[..., tuple["jax.Array | Chain", Any]]
"""(params, tokens [B], slots [B], pools) -> next tokens [B], or a `Chain` of them, pools; with sampling also the
`Draws` of the B requests."""


class Chain(NamedTuple):
    """New tokens of requests, of which a step gives several. A pytree.

    Fields:
      tokens: [B, T] integers.
      count: [B], 1 to T: a request's first `count` tokens are the new ones.
    """

    tokens: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, name: str, new: Any, size: int, letter: str) -> "Chain":
        """Tokens of `size` requests that a function of that name gave: one each, or a chain of them.

        Raises:
          ValueError: they are no integers, or of another shape.
        """
        if not isinstance(new, cls):
            check_integers(f"{name}'s tokens", new, (size,), letter)
            return cls(new[:, None], jnp.ones(size, jnp.int32))
        check_integers(f"{name}'s tokens", new.tokens, (size, None), f"{letter}, T")
        check_integers(f"{name}'s count", new.count, (size,), letter)
        return new

    @property
    def newest(self) -> jax.Array:
        """The last new token of each request [B]."""
        if self.tokens.shape[1] == 1:
            return self.tokens[:, 0]
        return jnp.take_along_axis(self.tokens, self.count[:, None] - 1, axis=1)[:, 0]

    def packed(self) -> jax.Array:
        """Tokens and counts in one array [B, T + 1] of int32, which one copy brings to the host."""
        return jnp.concatenate([self.tokens, self.count[:, None]], axis=1).astype(jnp.int32)


class State(NamedTuple):
    """Contents of the slots: the model's memory of a request, the request's newest token, and how it draws."""

    pools: Any
    newest: jax.Array
    draws: Draws | None


@jax.jit
def take_state(state: State, slots: Any) -> Any:
    """Contents of slots, as arrays of their own."""
    return take_slots(state, slots)


OPTIONS = {"xla_enable_command_buffers_during_profiling": True}
"""Compiler options: a profile shows programs as they run, each as a CUDA graph."""


@partial(jax.jit, static_argnums=0, donate_argnums=1, compiler_options=OPTIONS)
def run_prefill(prefill: Prefill, state: State, params, tokens, table, draws):
    """Pieces of prompts, of which each column of the table [4, N + 1] has where it begins, its slot, whether the slot
    has an initial state, and the slot again if the prompt ends: only then there is a newest token."""
    cu_seqlens, (slots, goes_on, ended) = table[0], table[1:, :-1]
    # An array of its own: kernels want arrays that begin at multiples of 256 bytes, and XLA would hand them the row
    # of the table where it lies.
    slots = jnp.maximum(slots, -1)
    more = () if draws is None else (draws,)
    new, pools = prefill(params, tokens, cu_seqlens, slots, goes_on > 0, state.pools, *more)
    new = Chain.of("prefill", new, len(slots), "N")
    if draws is not None:
        draws = draws._replace(number=new.count)  # of a prompt that goes on it is written again
        draws = put(state.draws, Address.of(slots, state.newest), draws)
    newest = put(state.newest, Address.of(ended, state.newest), new.newest)
    return new.packed()[None], State(pools, newest, draws)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2, compiler_options=OPTIONS)
def run_decode(decode: Decode, steps: int, state: State, params, table):
    """Steps of tokens of requests, of which each column of the table [2, B] has the slot, and how many tokens it gets
    at most: after them it is padding."""
    slots, left = table

    def step(carry: tuple[State, jax.Array], _: None) -> tuple[tuple[State, jax.Array], jax.Array]:
        state, left = carry
        now = jnp.where(left > 0, slots, -1)
        at = Address.of(now, state.newest)
        draws = take(state.draws, at)
        more = () if draws is None else (draws,)
        new, pools = decode(params, take(state.newest, at), now, state.pools, *more)
        new = Chain.of("decode", new, len(slots), "B")
        if steps > 1 and new.tokens.shape[1] > 1:
            raise ArgumentError("most_tokens", "1, since decode gives chains", steps)
        if draws is not None:
            draws = put(state.draws, at, draws._replace(number=draws.number + new.count))
        state = State(pools, put(state.newest, at, new.newest), draws)
        new = new._replace(count=jnp.where(left > 0, new.count, 0))
        return (state, left - new.count), new.packed()

    (state, _), new = jax.lax.scan(step, (state, left), None, length=steps)
    return new, state
