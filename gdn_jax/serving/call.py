"""Options of a call of a serving operation, and where its states lie.

A program is made for its options, and is given the places as arrays. Both are checked here, once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from gdn_jax.serving.arguments import check_integers, check_range, check_scale, check_slots, check_values
from gdn_jax.shapes import Dims, check_flags

interpreter: ContextVar[Any] = ContextVar("interpreter", default=None)
"""Parameters of Pallas' interpreter for the kernels of a call; None to compile them."""


@contextmanager
def interpreted(parameters: Any) -> Iterator[None]:
    """Interprets the kernels of every call inside the context, for tests.

    Pallas' interpreter hangs inside a compiled function. Such a call is therefore neither compiled nor split over
    devices.
    """
    token = interpreter.set(parameters)
    try:
        yield
    finally:
        interpreter.reset(token)


@dataclass(frozen=True)
class Call:
    """Options of `decode` and `verify`, with their defaults."""

    scale: Any = None
    use_qk_l2norm: bool = True
    allow_neg_eigval: bool = False
    batch_invariant: bool = False
    implementation: str | None = None
    lower_bound: float | None = None
    bound: str = "sigmoid"
    """How the gate comes to its lower bound, as for `channel_log_decay`."""

    def checked(self, dims: Dims) -> Any:
        """The same options with the factor of the output as a number; raises ValueError where one is wrong."""
        names = ("use_qk_l2norm", "allow_neg_eigval", "batch_invariant")
        check_flags(**{name: getattr(self, name) for name in names})
        return replace(self, scale=check_scale(self.scale, dims))


@dataclass(frozen=True)
class PromptCall(Call):
    """Options of `prefill`."""

    chunk_size: int = 64
    checkpoint_every: int | None = None


class At(NamedTuple):
    """Where the states of a call's requests lie; the arguments of `prefill` have these names."""

    read_slots: Any
    """None for the kernels of a token, on a cache: the state of each row lies in the slot of its number."""
    write_slots: Any = None
    layer: Any = None
    has_initial_state: Any = None
    checkpoint_slots: Any = None

    is_tree = False
    """Whether tokens of a call may follow others than the one before."""

    @property
    def are_rows(self) -> bool:
        """Whether the pool is a cache, whose slots are the rows of a call."""
        return self.read_slots is None

    def check(self, pool: Any, letters: str, number: int | None, *, unique: bool = True) -> None:
        """Raises ValueError unless `number` slots are read and written, and where known values are wrong.

        Args:
          unique: whether the pool is changed: no slot may come twice then.
        """
        check = partial(
            check_slots, shape=(number,), letters=letters, size=pool.size, null_slot=pool.null_slot
        )
        check("read_slots", self.read_slots, unique=unique and self.write_slots is None)
        if self.write_slots is not None:
            check("write_slots", self.write_slots, unique=True)


class Spans(NamedTuple):
    """Where the drafts of a call begin, end and follow one another; the arguments of `verify` have these names."""

    state_slots: Any
    num_accepted_tokens: Any
    num_tokens: Any = None
    parents: Any = None
    layer: Any = None

    are_rows = False
    """See `At.are_rows`."""

    @property
    def is_tree(self) -> bool:
        """Whether tokens of a call may follow others than the one before."""
        return self.parents is not None

    def check(self, pool: Any, letters: str, N: int, T: int) -> None:
        """Raises ValueError for arrays that are not those of N requests of T tokens, and for wrong known values."""
        shape, letters = ((N, T), letters) if pool.slot_per_token else ((N,), "N")
        check = partial(check_slots, size=pool.size, null_slot=pool.null_slot, unique=True)
        check("state_slots", self.state_slots, shape, letters)
        pool.check_drafts(T, self.is_tree)
        check_integers("num_accepted_tokens", self.num_accepted_tokens, (N,), "N")
        check_range("num_accepted_tokens", self.num_accepted_tokens, 1, pool.most_accepted(T))
        if self.num_tokens is not None:
            check_integers("num_tokens", self.num_tokens, (N,), "N")
            check_range("num_tokens", self.num_tokens, 0, T)
        if self.parents is not None:
            check_integers("parents", self.parents, (N, T), "N, T")
            check_values(_check_parents, self.parents)

    def is_token(self, T: int) -> Bool[Array, "_ T"]:
        """Which tokens of each request there are, [N or 1, T]."""
        if self.num_tokens is None:
            return jnp.ones((1, T), bool)
        return jnp.arange(T) < self.num_tokens[:, None]


def _check_parents(parents) -> None:
    parents = np.asarray(parents)
    if ((parents < -1) | (parents >= np.arange(parents.shape[1]))).any():
        raise ValueError(
            f"parents: expected an earlier token of the row for each, or -1, got {parents.tolist()}"
        )
