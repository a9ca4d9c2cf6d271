"""Continuous batching: requests of uneven lengths join and leave a batch of fixed size, and slots are used again.

The device never waits for the host: the token that a request needs next stays on the device, in the slot of the
request, and tokens are read one step late, while the next ones are made. First tokens are read in their own step, if
the device then has tokens to make. Every array of indices that a program is given is a new one that nobody
writes to again, since the device may read it long after the call. A request counts what a program was given after
that program has started, so a step that is interrupted before loses nothing.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from gdn_jax.serving.arguments import capacity, slot_count
from gdn_jax.serving.draws import Draw, Draws
from gdn_jax.serving.pools import GRID
from gdn_jax.serving.prefixes import Prefixes
from gdn_jax.serving.programs import Decode, Prefill, State, run_decode, run_prefill, take_state
from gdn_jax.serving.slots import put_slots, take_slots
from gdn_jax.shapes import ArgumentError, check_whole

TOKENS = 2**31
"""Tokens that int32 tells apart."""


class QueueFull(RuntimeError):
    """The queue of waiting requests is full."""


@dataclass(eq=False)
class _Request:
    number: int
    prompt: np.ndarray
    num_tokens: int
    stop_token: int | None
    draw: Draw
    seen: int = 0
    """Tokens of the prompt that a program was given."""
    made: int = 0
    """New tokens that have been read, and one for each program whose tokens have not."""
    tokens: list[int] = field(default_factory=list)
    """New tokens that have been read."""
    slot: int | None = None
    kept: Any = None
    """Contents of the slot, while another request uses it."""
    is_done: bool = False


class Server:
    """A loop over requests: each call of `step` gives every running request a token, a `Chain`, or several tokens.

    Args:
      prefill, decode: pure functions of a model, which the server compiles once. -1 among the slots is padding.
      params: the model's parameters, the first argument of both functions.
      pools: the model's pools, a pytree of arrays [slots, ...]. They are donated: the server owns them from now on. A
        node of the tree may have a `capacity`, the number of tokens that fit into a slot, as KV caches have. With
        drafts leave room for two more chains without their first tokens, since the server reads results late.
      max_batch: most requests that run at once, not above the number of slots.
      max_waiting: most requests that wait.
      prefill_tokens: tokens of prompts in a step, at least 64. A longer prompt is read in chunks that end at
        multiples of 64 tokens. Of several numbers, in ascending order, each is a program, and a step runs the first
        that has room for its prompts, or the last: few tokens then cost less, and to compile costs more.
      vocab_size: `submit` refuses tokens from this number on. By default it takes all of int32.
      prefix_bytes: device memory for shared prefixes, in bytes: a request starts after the longest prefix of its
        prompt that an earlier prompt had too. Its tokens stay the same, except for ties within rounding. 0: every
        prompt is read whole. Each prefix takes the bytes of a whole slot, also for tokens that are not there yet.
      prefix_stride: a prefix is kept after every multiple of this number of tokens; itself a multiple of 64.
      sampling: whether requests may draw tokens, each in its own way; the functions then take `Draws`.
      most_tokens: most tokens of a request in a step, not for chains. Where no prompt is left to read, and a request
        needs more than half of them, a step is this number of tokens of every request by one program: the host has
        less to do, and tells tokens, and starts new requests, later.

    Raises:
      ValueError: a number does not fit.
    """

    def __init__(
        self,
        prefill: Prefill,
        decode: Decode,
        params: Any,
        pools: Any,
        *,
        max_batch: int,
        max_waiting: int = 64,
        prefill_tokens: int | Sequence[int] = 256,
        vocab_size: int | None = None,
        prefix_bytes: int = 0,
        prefix_stride: int = 256,
        sampling: bool = False,
        most_tokens: int = 1,
    ):
        slots = slot_count(pools)
        check_whole("max_batch", max_batch, 1, slots)
        check_whole("max_waiting", max_waiting, 1)
        self._sizes = [*prefill_tokens] if isinstance(prefill_tokens, Sequence) else [prefill_tokens]
        for size in self._sizes:
            check_whole("prefill_tokens", size, GRID)
        if not self._sizes or self._sizes != sorted(set(self._sizes)):
            raise ArgumentError("prefill_tokens", "a number, or several in ascending order", prefill_tokens)
        check_whole("most_tokens", most_tokens, 1)
        if vocab_size is not None:
            check_whole("vocab_size", vocab_size, 1, TOKENS)
        self._tokens = vocab_size or TOKENS
        self._prefill, self._decode, self._params = prefill, decode, params
        self._capacity = capacity(pools)
        self._samples = sampling
        draws = jax.tree.map(jnp.asarray, Draws.of([Draw.none()] * slots)) if sampling else None
        self._state = State(pools, jnp.zeros(slots, jnp.int32), draws)
        self._free = deque(range(slots))
        self._max_batch, self._max_waiting, self._most_tokens = max_batch, max_waiting, most_tokens
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._unread: deque[tuple[jax.Array, list[_Request | None]]] = deque()
        self._finished: dict[int, np.ndarray] = {}
        self._number = 0
        self.prefixes = Prefixes(prefix_stride, prefix_bytes)
        self.tokens_shared = 0
        """Number of prompt tokens that were not read again, because an earlier prompt had the same prefix."""
        self.occupied: dict[int | None, int] = {}
        """The number of the request that each slot served in the last step."""
        self.read: dict[int, list[int]] = {}
        """The new tokens that the last step read, by their request's number."""
        self.waited = 0.0
        """Seconds that all steps together waited for the device."""

    def submit(
        self,
        prompt: Sequence[int] | np.ndarray,
        num_tokens: int,
        *,
        stop_token: int | None = None,
        rng: PRNGKeyArray | np.ndarray | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> int:
        """Puts a request into the queue.

        Args:
          prompt: at least one token.
          num_tokens: most tokens to append. The prompt and all of them but the last must fit into a slot.
          stop_token: the request ends with this token.
          rng, temperature, top_k, top_p, min_p: how the request draws, as for `gdn_jax.models.generate`; above a
            temperature of 0 the server needs sampling. Its tokens follow from its key, whatever other requests there
            are, but for rounding: `generate` draws the same ones for the prompt alone, with or without drafts.

        Returns:
          The request's number.

        Raises:
          QueueFull: no more may wait; try again after a step.
          ValueError: an argument is wrong.
        """
        tokens = np.array(prompt)
        if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"prompt: expected a row of at least one token, got {tokens.dtype}{list(tokens.shape)}"
            )
        if (wrong := tokens[(tokens < 0) | (tokens >= self._tokens)]).size:
            raise ValueError(f"prompt: expected tokens from 0 to {self._tokens - 1}, got {wrong[0]}")
        check_whole("num_tokens", num_tokens, 1)
        if self._capacity is not None and len(tokens) + num_tokens - 1 > self._capacity:
            raise ValueError(
                f"num_tokens: expected a prompt and num_tokens - 1 tokens to fit the pools' capacity of "
                f"{self._capacity} tokens, got {len(tokens)} + {num_tokens} - 1 = {len(tokens) + num_tokens - 1}"
            )
        if stop_token is not None:
            check_whole("stop_token", stop_token, 0, self._tokens - 1)
        if temperature > 0 and not self._samples:
            raise ValueError(
                f"temperature: expected 0 of a request to a server without sampling, got {temperature}"
            )
        draw = Draw.made(self._tokens, temperature, top_k, top_p, min_p, rng)
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already")
        self._number += 1
        self._waiting.append(_Request(self._number, tokens.astype(np.int32), num_tokens, stop_token, draw))
        return self._number

    def step(self) -> dict[int, np.ndarray]:
        """Starts a token of every running request, or several, and reads those that the step before started, and the
        first tokens of requests whose prompts this step ends.

        Returns:
          The new tokens of the requests that have ended.
        """
        started, self.read = len(self._unread), {}
        self._admit()
        self.occupied = {request.slot: request.number for request in self._running}
        self._start_prompts()
        prompts = len(self._unread)
        self._start_tokens()
        for _ in range(prompts if len(self._unread) > prompts else started):
            self._read(*self._unread[0])
            self._unread.popleft()
        finished, self._finished = self._finished, {}
        return finished

    def run(self) -> dict[int, np.ndarray]:
        """Steps until every request has ended; the new tokens of each."""
        finished = {}
        while self._waiting or self._running or self._unread:
            finished |= self.step()
        return finished

    def preempt(self, number: int) -> None:
        """Takes a running request's slot away and lets it wait, first in the queue; it goes on where it was.

        Raises:
          ValueError: no such request is running.
        """
        request = next((request for request in self._running if request.number == number), None)
        if request is None:
            raise ValueError(f"number: expected a running request, got {number}")
        request.kept = jax.device_get(take_slots(self._state, _indices([request.slot])))
        self._release(request)
        self._waiting.appendleft(request)

    def cancel(self, number: int) -> np.ndarray:
        """Ends a request that waits or runs; no later step returns it. Its slot is free at once.

        Returns:
          The new tokens that have been read.

        Raises:
          ValueError: no such request waits or runs.
        """
        unread = (request for _, owners in self._unread for request in owners if request is not None)
        every = (*self._waiting, *self._running, *unread)
        request = next((r for r in every if r.number == number and not r.is_done), None)
        if request is None:
            raise ValueError(f"number: expected a request that waits or runs, got {number}")
        request.is_done = True  # tokens that a program was started for are not read
        if request.slot is not None:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        return np.array(request.tokens, np.int32)

    def _admit(self) -> None:
        while self._waiting and self._free and len(self._running) < self._max_batch:
            request, slot = self._waiting[0], self._free[0]
            if request.kept is not None:  # one that lost its place finds it again, before tokens are read
                self._state = put_slots(self._state, _indices([slot]), request.kept)
                request.kept = None
            elif not request.seen:
                length, contents = self.prefixes.find(request.prompt)
                if length:
                    self._state = put_slots(self._state, _indices([slot]), contents)
                    self.tokens_shared += length
                request.seen = length
            request.slot = slot
            self._running.append(request)
            self._waiting.popleft()
            self._free.popleft()

    def _release(self, request: _Request) -> None:
        """Programs that use the slot again come after those that were started for this request."""
        assert request.slot is not None
        self._running.remove(request)
        self._free.append(request.slot)
        request.slot = None

    def _start_prompts(self) -> None:
        rows: list[tuple[_Request, np.ndarray]] = []
        room = self._sizes[-1]
        for request in [request for request in self._running if not request.made]:
            left = len(request.prompt) - request.seen
            length = left if left <= room else room // GRID * GRID
            if not length:
                break
            length = self.prefixes.whole(request.prompt, request.seen, length)
            rows.append((request, request.prompt[request.seen : request.seen + length]))
            room -= length
        if not rows:
            return
        owners: list[_Request | None] = [
            request if request.seen + len(piece) == len(request.prompt) else None for request, piece in rows
        ]
        used = self._sizes[-1] - room
        size = next(size for size in self._sizes if size >= used)
        tokens = np.concatenate([piece for _, piece in rows] + [np.zeros(size - used, np.int32)])
        table = np.full((4, self._max_batch + 1), -1)
        table[0, : len(rows) + 1] = ends = np.cumsum([0] + [len(piece) for _, piece in rows])
        table[0, len(rows) + 1 :] = ends[-1]
        slots = table[1, : len(rows)] = [request.slot for request, _ in rows]
        table[2, : len(rows)] = [request.seen > 0 for request, _ in rows]
        table[3, : len(rows)] = [-1 if owner is None else owner.slot for owner in owners]
        draws = [request.draw for request, _ in rows] + [Draw.none()] * (self._max_batch - len(rows))
        draws = Draws.of(draws) if self._samples else None
        arguments = self._params, _indices(tokens[None]), _indices(table), draws
        new, self._state = run_prefill(self._prefill, self._state, *arguments)
        for request, piece in rows:
            request.seen += len(piece)
        self._count(new, owners)
        for (request, _), slot in zip(rows, slots, strict=False):
            if self.prefixes.wants(request.prompt, request.seen):
                self.prefixes.keep(request.prompt, request.seen, take_state(self._state, _indices([slot])))

    def _start_tokens(self) -> None:
        owners: list[Any] = [request for request in self._running if request.made]
        if not owners:
            return
        left = [request.num_tokens - request.made for request in owners]
        several = len(owners) == len(self._running) and 2 * max(left) > self._most_tokens
        steps = self._most_tokens if several else 1
        table = np.full((2, self._max_batch), -1)
        table[:, : len(owners)] = [request.slot for request in owners], left
        new, self._state = run_decode(self._decode, steps, self._state, self._params, _indices(table))
        self._count(new, owners, steps)

    def _count(self, new: jax.Array, owners: list[_Request | None], steps: int = 1) -> None:
        new.copy_to_host_async()
        self._unread.append((new, owners))
        for request in filter(None, owners):
            request.made = min(request.made + steps, request.num_tokens)
            if request.made == request.num_tokens:
                self._release(request)

    def _read(self, new: jax.Array, owners: list[_Request | None]) -> None:
        """Reads the tokens [steps, N, T + 1] of a program: the last number of each row is how many there are."""
        began = time.perf_counter()
        rows = np.asarray(new).swapaxes(0, 1)
        self.waited += time.perf_counter() - began
        tokens, count = rows[..., :-1], rows[..., -1]
        # Of all requests at once: what Python does for each of them costs every step.
        every = tokens[np.arange(tokens.shape[-1]) < count[..., None]].tolist()
        ends, drafts = count.sum(1).cumsum().tolist(), (count - 1).clip(0).sum(1).tolist()
        for request, begin, end, right in zip(owners, [0, *ends], ends, drafts, strict=False):
            if request is None or request.is_done:
                continue
            request.made += right
            found = every[begin:end][: request.num_tokens - len(request.tokens)]
            if request.stop_token in found:
                found = found[: found.index(request.stop_token) + 1]
            request.tokens += found
            self.read[request.number] = self.read.get(request.number, []) + found
            if found[-1] == request.stop_token or len(request.tokens) == request.num_tokens:
                request.is_done = True
                self._finished[request.number] = np.array(request.tokens)
            if request.slot is not None and (request.is_done or request.made >= request.num_tokens):
                self._release(request)


def _indices(values: Any) -> np.ndarray:
    """A new array that cannot be written to."""
    array = np.array(values)
    array = array if array.dtype == bool else array.astype(np.int32)
    array.flags.writeable = False
    return array
