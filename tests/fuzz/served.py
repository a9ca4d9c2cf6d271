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

    channels = False

    def __init__(self, rng: np.random.Generator, by_kernels: bool):
        self.rng = rng
        self.ring = bool(rng.random() < 0.4)
        self.layout = str(rng.choice(["kv", "vk"]))
        self.null_slot = None if rng.random() < 0.6 else int(rng.integers(0, SLOTS))
        self.dtype = "bfloat16" if by_kernels else str(rng.choice(["float32", "float32", "bfloat16"]))
        self.heads, self.widths = ((2, 4), (64, 64)) if by_kernels else ((1, 2), (4, 3))
        self.slot_dtype = rng.choice([np.int8, np.uint8, np.int16, np.uint32, np.int32, np.int64])
        self.number_dtype = rng.choice([np.int8, np.uint8, np.int16, np.uint32, np.int32])
        self.on_device = bool(rng.random() < 0.5)
        self.options: dict[str, Any] = dict(use_qk_l2norm=True, allow_neg_eigval=bool(rng.random() < 0.3))
        self.shared = dict(state_layout=self.layout, null_slot=self.null_slot)
        self.invariant = bool(rng.random() < 0.3) and not by_kernels
        self.how = dict(implementation="mosaic_gpu") if by_kernels else {}
        self.trees = bool(rng.random() < 0.4)
        self.pool = self._pool()
        self.pending: dict[int, np.ndarray] = {}
        """A ring's states after each draft of the last verify of a slot that has not been told what stays."""

    def _pool(self) -> Any:
        draw = dict(HV=self.heads[1], widths=self.widths, state_layout=self.layout)
        states = jnp.asarray(serving_cases.draw_pool(SLOTS, int(self.rng.integers(1 << 30)), **draw))
        if not self.ring:
            return states
        ring = dict(num_key_heads=self.heads[0], length=8, dtype=jnp.float32, state_layout=self.layout)
        return serving.make_ring_pool(states, **ring, trees=self.trees, channels=self.channels)

    def __str__(self) -> str:
        names = ("ring", "trees", "layout", "null_slot", "dtype", "slot_dtype", "number_dtype", "on_device")
        names += ("options", "invariant")
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

    def indices(self, **indices: np.ndarray | None) -> dict[str, Any]:
        """Slots, offsets and numbers as this episode gives them: in NumPy, where values are checked, or in JAX."""
        return {name: x if x is None or not self.on_device else jnp.asarray(x) for name, x in indices.items()}

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

    def given(self, x: Any) -> tuple[tuple, dict[str, Any]]:
        """Arrays and options of tokens, as the calls take them."""
        return tuple(jnp.asarray(y) for y in x.tokens), {**x.gates, **self.options, **self.shared, **self.how}

    def expected(self, x: Any, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and last states of requests that start from these states, in float64."""
        return serving_cases.expected(x, start, state_layout=self.layout, **self.options)

    def prompt(self) -> dict[str, np.ndarray]:
        """A row of prompts, in the arguments of `prefill`."""
        x = self.requests(PROMPT).at(slice(0, 1))
        g, beta = serving_cases.log_decay(x), serving_cases.write_strength(x)
        return dict(q=x.q, k=x.k, v=x.v, g=g.astype(np.float32), beta=beta.astype(np.float32))

    def expected_prompts(self, x: dict[str, np.ndarray], **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and last states of prompts, in float64."""
        return oracle.forward(**x, **options)

    def every_state(self, x: Any, start: np.ndarray, parents: np.ndarray | None):
        """Outputs and the states after every token of trees of drafts, or of chains."""
        outputs, after = [], []
        for t in range(DRAFTS):
            before = start if t == 0 else after[-1]
            if parents is not None:
                before = np.stack([start[n] if m < 0 else after[m][n] for n, m in enumerate(parents[:, t])])
            o, states = self.expected(x.at(slice(None), slice(t, t + 1)), before)
            outputs.append(o[:, 0])
            after.append(states)
        return np.stack(outputs, 1), np.stack(after, 1)

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

    def _settle(self) -> dict[int, np.ndarray]:
        """Tells the ring how many of the last drafts stay; the states by slot."""
        slots = np.array(list(self.pending), np.int32)
        stay = self.rng.integers(1, DRAFTS + 1, len(slots)).astype(np.int32)
        self.pool = serving.accept(self.pool, slots, stay, null_slot=self.null_slot)
        states = {int(s): self.pending[int(s)][n - 1] for s, n in zip(slots, stay, strict=True)}
        self.pending = {}
        return states

    def _apart(self, read: np.ndarray) -> np.ndarray | None:
        return None if self.rng.random() < 0.5 else self.slots(len(read))

    def _decode(self) -> list[str]:
        x, read, before = self.requests(1), self.slots(N), self.states()
        write, is_read = self._apart(read), self.is_slot(read)
        start = np.where(is_read[:, None, None, None], before[np.where(is_read, read, 0).astype(int)], 0)
        o, after = self.expected(x, start)
        tokens, options = self.given(x.at(slice(None), 0))
        slots = self.indices(read_slots=read, write_slots=write)
        got, self.pool = serving.decode(*tokens, self.pool, **slots, **options)
        to = read if write is None else write
        written = {
            int(s): h for s, h, r, w in zip(to, after, is_read, self.is_slot(to), strict=True) if r and w
        }
        return self.check("decode", got, np.where(is_read[:, None, None], o[:, 0], 0), before, written)

    def _verify(self) -> list[str]:
        x, before = self.requests(DRAFTS), self.states()
        tokens, options = self.given(x)
        parents = None
        if (self.trees or not self.ring) and self.rng.random() < 0.5:
            parents = np.stack([self.rng.integers(-1, t, N) for t in range(DRAFTS)], 1)
            parents = parents.astype(self.rng.choice([np.int8, np.int32]))
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
        o, after = self.every_state(x, start, parents)
        accepted = accepted.astype(self.number_dtype)
        named = self.indices(state_slots=slots, num_accepted_tokens=accepted, parents=parents)
        got, self.pool = serving.verify(*tokens, self.pool, **named, **options)
        expected = np.where(is_read[:, None, None, None], o, 0)
        if self.ring:
            self.pending = {int(s): h for s, h, r in zip(slots, after, is_read, strict=True) if r}
            written = {s: h[-1] for s, h in self.pending.items()}
            if parents is not None and self.pending:  # what is in the ring is no path until some tokens stay
                written = self._settle()
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
        x = self.prompt()
        write, is_read = self._apart(read), self.is_slot(read)
        has = rng.random(N) < 0.7 if rng.random() < 0.5 else None
        used = is_read if has is None else is_read & has
        start = np.where(used[:, None, None, None], before[np.where(is_read, read, 0).astype(int)], 0)
        layout = dict(use_qk_l2norm=True, state_layout=self.layout)
        o, after = self.expected_prompts(x, initial_state=start, cu_seqlens=cu, **layout)
        tokens = dict(g=None, beta=None) | {name: jnp.asarray(y) for name, y in x.items()}
        slots = self.indices(read_slots=read, write_slots=write, has_initial_state=has)
        offsets = self.indices(cu_seqlens=cu.astype(self.number_dtype))
        how = self.how | dict(use_qk_l2norm=True, batch_invariant=self.invariant)
        got, self.pool = serving.prefill(**tokens, **offsets, pool=self.pool, **slots, **how, **self.shared)
        real = np.zeros(PROMPT, bool)
        for n in range(N):
            real[cu[n] : cu[n + 1]] = is_read[n]
        to = read if write is None else write
        written = {
            int(s): h for s, h, r, w in zip(to, after, is_read, self.is_slot(to), strict=True) if r and w
        }
        return self.check("prefill", got, np.where(real[None, :, None, None], o, 0), before, written)

    def _copy(self) -> list[str]:
        """Beside the pool lies another array by slots, which has to follow."""
        before, source, to = self.states(), self.slots(N), self.slots(N)
        pools = {"rule": self.pool, "other": [jnp.arange(SLOTS, dtype=jnp.int8)]}
        pools = serving.copy_slots(pools, source, to, null_slot=self.null_slot)
        self.pool = pools["rule"]
        pairs = zip(source, to, self.is_slot(source) & self.is_slot(to), strict=True)
        copied = {int(t): int(s) for s, t, real in pairs if real}
        followed = [copied.get(slot, slot) for slot in range(SLOTS)]
        wrong = [] if np.asarray(pools["other"][0]).tolist() == followed else ["copy: the other array"]
        states = {t: before[s] for t, s in copied.items()}
        return wrong + self.check("copy", 0.0, np.zeros(()), before, states)

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


class ChannelEpisode(Episode):
    """The same with gates of each channel, or with erase and write apart."""

    channels = True

    def __init__(self, rng: np.random.Generator, by_kernels: bool):
        super().__init__(rng, by_kernels)
        self.rule, self.layout, self.dtype = str(rng.choice(list(serving_cases.GATES)[1:])), "kv", "float32"
        self.heads = serving_cases.HK, serving_cases.HV
        self.widths = serving_cases.K, serving_cases.V
        self.shared["state_layout"], self.pool = self.layout, self._pool()

    def __str__(self) -> str:
        return f"rule {self.rule}, {super().__str__()}"

    def requests(self, T: int) -> serving_cases.Requests:
        return serving_cases.draw(N, T, int(self.rng.integers(1 << 30)), gates=self.rule)

    def given(self, x: serving_cases.Requests) -> tuple[tuple, dict[str, Any]]:
        w = {} if x.w is None else {"w": jnp.asarray(x.w)}
        return tuple(map(jnp.asarray, x.tokens)), {**w, **x.gates, **x.options, **self.shared, **self.how}

    def expected(self, x: serving_cases.Requests, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return serving_cases.expected(x, start)

    def prompt(self) -> dict[str, np.ndarray]:
        x = self.requests(PROMPT).at(slice(0, 1))
        gates = dict(g=serving_cases.log_decay(x)) | serving_cases.strengths(x)
        gates = {name: y.astype(np.float32) for name, y in gates.items() if self.rng.random() < 0.9}
        return dict(q=x.q, k=x.k, v=x.v, **gates)

    def expected_prompts(self, x: dict[str, np.ndarray], **options: Any) -> tuple[np.ndarray, np.ndarray]:
        return oracle.forward(**x, **options)


def served(seed: int, count: int, by_kernels: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Runs so many calls; yields each with what was wrong. An episode ends where something is."""
    done = n = 0
    while done < count:
        rng = np.random.default_rng([seed, n, 1])
        kind = Episode if by_kernels or rng.random() < 0.6 else ChannelEpisode
        episode = kind(rng, by_kernels)
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
