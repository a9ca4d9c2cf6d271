"""Random episodes of serving: prompts, tokens and drafts of requests over a pool, against the float64 oracle.

After every call the outputs and all slots are looked at: those that were written against the truth, all others bit
for bit. What the next call starts from is read from the pool, so errors do not add up.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import serving_cases

from gdn_jax import serving
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import BOUNDS

CALLS = 12
"""Calls of an episode."""

SLOTS, N, DRAFTS, PROMPT = 12, 3, 3, 20


class Episode:
    """A pool, its options, and a random call at a time."""

    def __init__(self, rng: np.random.Generator, by_kernels: bool):
        self.rng = rng
        self.ring = bool(rng.random() < 0.4)
        self.layout = str(rng.choice(["kv", "vk"]))
        self.null_slot = None if rng.random() < 0.6 else int(rng.integers(0, SLOTS))
        self.dtype = "bfloat16" if by_kernels else str(rng.choice(["float32", "float32", "bfloat16"]))
        self.heads, self.widths = ((2, 4), (64, 64)) if by_kernels else ((1, 2), (4, 3))
        self.slot_dtype = rng.choice([np.int8, np.uint8, np.int16, np.int32, np.int64])
        self.options: dict[str, Any] = dict(use_qk_l2norm=True, allow_neg_eigval=bool(rng.random() < 0.3))
        self.shared = dict(state_layout=self.layout, null_slot=self.null_slot)
        self.invariant = bool(rng.random() < 0.3) and not by_kernels
        self.how = dict(implementation="mosaic_gpu") if by_kernels else {}
        states = serving_cases.draw_pool(
            SLOTS, int(rng.integers(1 << 30)), HV=self.heads[1], widths=self.widths, state_layout=self.layout
        )
        self.pool = jnp.asarray(states)
        if self.ring:
            ring = dict(num_key_heads=self.heads[0], length=8, dtype=jnp.float32, state_layout=self.layout)
            self.pool = serving.make_ring_pool(self.pool, **ring)
        self.pending: dict[int, np.ndarray] = {}
        """A ring's states after each draft of the last verify of a slot that has not been told what stays."""

    def __str__(self) -> str:
        names = ("ring", "layout", "null_slot", "dtype", "slot_dtype", "options", "invariant")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)

    def states(self) -> np.ndarray:
        """Present states of all slots in float64."""
        if not self.ring:
            return np.asarray(self.pool).astype(np.float64)
        every = np.arange(SLOTS)
        return np.asarray(serving.snapshot(self.pool, every, state_layout=self.layout)).astype(np.float64)

    def slots(self, count: int) -> np.ndarray:
        """Different slots, some of them padding."""
        found = self.rng.permutation(SLOTS)[:count]
        found = np.where(self.rng.random(count) < 0.2, -1, found)
        # An unsigned -1 is the largest number of its dtype, which no slot has.
        return found.astype(self.slot_dtype)

    def is_slot(self, slots: np.ndarray) -> np.ndarray:
        numbers = slots.astype(np.int64)
        return (
            (numbers >= 0)
            & (numbers < SLOTS)
            & (numbers != (-1 if self.null_slot is None else self.null_slot))
        )

    def requests(self, T: int) -> serving_cases.Requests:
        seed = int(self.rng.integers(1 << 30))
        return serving_cases.draw(
            N, T, seed, heads=self.heads, widths=self.widths, dtype=jnp.dtype(self.dtype)
        )

    def check(
        self, what: str, o, expected_o, before: np.ndarray, written: dict[int, np.ndarray]
    ) -> list[str]:
        """Outputs, and every slot."""
        wrong, bounds = [], BOUNDS["float32" if self.dtype == "float32" else "bfloat16"][1]
        o, after = np.asarray(o).astype(np.float64), self.states()
        error = np.sqrt(np.mean((o - expected_o) ** 2))
        size = max(np.sqrt(np.mean(expected_o**2)), 0.25)
        if not error <= 2 * bounds["o"] * size:
            wrong.append(f"{what}: o off by {error / size:.1e}")
        for slot in range(SLOTS):
            if slot in written:
                error = np.sqrt(np.mean((after[slot] - written[slot]) ** 2))
                size = max(np.sqrt(np.mean(written[slot] ** 2)), 0.25)
                if not error <= 2 * bounds["final_state"] * size:
                    wrong.append(f"{what}: slot {slot} off by {error / size:.1e}")
            elif not np.array_equal(after[slot], before[slot]):
                wrong.append(f"{what}: slot {slot} changed")
        return wrong

    def step(self) -> tuple[str, list[str]]:
        """One random call."""
        kinds = ["decode", "decode", "verify", "prefill", "prefill", "copy", "exchange"]
        kind = str(self.rng.choice([*kinds, "flush"] if self.ring else kinds))
        if self.pending and kind != "verify":
            self._settle()
        return kind, getattr(self, f"_{kind}")()

    def _settle(self) -> None:
        """Tells the ring how many of the last drafts stay."""
        slots = np.array(list(self.pending), np.int32)
        stay = self.rng.integers(1, DRAFTS + 1, len(slots)).astype(np.int32)
        self.pool = serving.accept(self.pool, slots, stay, null_slot=self.null_slot)
        self.pending = {}

    def _apart(self, read: np.ndarray) -> np.ndarray | None:
        return None if self.rng.random() < 0.5 else self.slots(len(read))

    def _decode(self) -> list[str]:
        x, read, before = self.requests(1), self.slots(N), self.states()
        write, is_read = self._apart(read), self.is_slot(read)
        start = np.where(is_read[:, None, None, None], before[np.where(is_read, read, 0).astype(int)], 0)
        o, after = serving_cases.expected(x, start, state_layout=self.layout, **self.options)
        slots = dict(read_slots=read, write_slots=write)
        got, self.pool = serving.decode(
            *serving_cases.one(x), self.pool, **x.gates, **slots, **self.options, **self.shared, **self.how
        )
        to = read if write is None else write
        written = {
            int(s): h for s, h, r, w in zip(to, after, is_read, self.is_slot(to), strict=True) if r and w
        }
        return self.check("decode", got, np.where(is_read[:, None, None], o[:, 0], 0), before, written)

    def _verify(self) -> list[str]:
        x, before = self.requests(DRAFTS), self.states()
        tokens = tuple(jnp.asarray(y) for y in x.tokens)
        if self.ring:
            slots = np.array(list(self.pending), self.slot_dtype) if self.pending else self.slots(N)
            accepted = np.ones(N, np.int32)
            start = before[np.where(self.is_slot(slots), slots, 0).astype(int)]
            if self.pending:
                accepted = self.rng.integers(1, DRAFTS + 1, len(slots)).astype(np.int32)
                start = np.stack([self.pending[int(s)][a - 1] for s, a in zip(slots, accepted, strict=True)])
                if len(slots) < N:
                    more = N - len(slots)
                    slots = np.append(slots, np.full(more, -1).astype(self.slot_dtype))
                    accepted = np.append(accepted, np.ones(more, np.int32))
                    start = np.append(start, np.zeros((more, *start.shape[1:])), 0)
            is_read = self.is_slot(slots)
        else:
            slots = self.slots(N * DRAFTS).reshape(N, DRAFTS)
            accepted = self.rng.integers(1, DRAFTS + 1, N).astype(np.int32)
            first = slots[np.arange(N), accepted - 1]
            is_read = self.is_slot(first)
            start = before[np.where(is_read, first, 0).astype(int)]
        start = np.where(is_read[:, None, None, None], start, 0)
        o, after = serving_cases.every_state(x, start, state_layout=self.layout, **self.options)
        named = dict(state_slots=slots, num_accepted_tokens=accepted)
        got, self.pool = serving.verify(
            *tokens, self.pool, **x.gates, **named, **self.options, **self.shared, **self.how
        )
        expected = np.where(is_read[:, None, None, None], o, 0)
        if self.ring:
            self.pending = {int(s): h for s, h, r in zip(slots, after, is_read, strict=True) if r}
            written = {s: h[-1] for s, h in self.pending.items()}
            return self.check("verify", got, expected, before, written)
        written = {
            int(slots[n, t]): after[n, t]
            for n in range(N)
            for t in range(DRAFTS)
            if is_read[n] and self.is_slot(slots[n, t])
        }
        return self.check("verify", got, expected, before, written)

    def _prefill(self) -> list[str]:
        rng, before, read = self.rng, self.states(), self.slots(N)
        cu = np.concatenate([[0], np.sort(rng.integers(0, PROMPT + 1, N))]).astype(np.int32)
        x = self.requests(PROMPT).at(slice(0, 1))
        g, beta = (
            serving_cases.log_decay(x).astype(np.float32),
            serving_cases.write_strength(x).astype(np.float32),
        )
        q, k, v = x.tokens[:3]
        write, is_read = self._apart(read), self.is_slot(read)
        has = rng.random(N) < 0.7 if rng.random() < 0.5 else None
        used = is_read if has is None else is_read & has
        start = np.where(used[:, None, None, None], before[np.where(is_read, read, 0).astype(int)], 0)
        layout = dict(use_qk_l2norm=True, state_layout=self.layout)
        o, after = oracle.forward(q, k, v, g, beta, initial_state=start, cu_seqlens=cu, **layout)
        tokens = (jnp.asarray(y) for y in (q, k, v, g, beta))
        slots = dict(read_slots=read, write_slots=write, has_initial_state=has)
        how = self.how | dict(use_qk_l2norm=True, batch_invariant=self.invariant)
        got, self.pool = serving.prefill(*tokens, cu, self.pool, **slots, **how, **self.shared)
        real = np.zeros(PROMPT, bool)
        for n in range(N):
            real[cu[n] : cu[n + 1]] = is_read[n]
        to = read if write is None else write
        written = {
            int(s): h for s, h, r, w in zip(to, after, is_read, self.is_slot(to), strict=True) if r and w
        }
        return self.check("prefill", got, np.where(real[None, :, None, None], o, 0), before, written)

    def _copy(self) -> list[str]:
        before, source, to = self.states(), self.slots(N), self.slots(N)
        self.pool = serving.copy_slots(self.pool, source, to, null_slot=self.null_slot)
        pairs = zip(source, to, self.is_slot(source) & self.is_slot(to), strict=True)
        return self.check(
            "copy", 0.0, np.zeros(()), before, {int(t): before[int(s)] for s, t, real in pairs if real}
        )

    def _exchange(self) -> list[str]:
        """Two slots change places by way of the caller."""
        before, (a, b) = self.states(), self.rng.permutation(SLOTS)[:2]
        one, other = np.array([a, b], np.int32), np.array([b, a], np.int32)
        self.pool = serving.put_slots(self.pool, other, serving.take_slots(self.pool, one))
        return self.check("exchange", 0.0, np.zeros(()), before, {int(a): before[b], int(b): before[a]})

    def _flush(self) -> list[str]:
        before, slots = self.states(), self.slots(N)
        self.pool = serving.flush(self.pool, slots, state_layout=self.layout, null_slot=self.null_slot)
        written = {int(s): before[int(s)] for s in slots[self.is_slot(slots)]}
        return self.check("flush", 0.0, np.zeros(()), before, written)


def served(seed: int, count: int, by_kernels: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Runs so many calls; yields each with what was wrong. An episode ends where something is."""
    done = n = 0
    while done < count:
        rng = np.random.default_rng([seed, n, 1])
        episode = Episode(rng, by_kernels)
        for i in range(min(CALLS, count - done)):
            kind, wrong = "a call", []
            try:
                kind, wrong = episode.step()
            except Exception as error:  # whatever it is, a legal call must not raise
                wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
            done += 1
            yield f"seed {seed} episode {n} call {i} {kind}: {episode}", wrong
            if wrong:
                break
        n += 1
        if n % 4 == 0:
            jax.clear_caches()
