"""Tokens a second of serving over batch sizes, after a check of the outputs.

A step is one token of every request, or several drafts, of which all are accepted, or of a tree the path to its last
one: from the projections' outputs, with gates and norms inside, from states in a pool to states in the same
pool, in place. With deferred writes it is the mean over a period between two writes of a state. Bytes are those of
the states alone, which a step has to move: once in and once for each token out, or with deferred writes once in and
once in a period out.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import serving
from gdn_jax.bench import measure
from gdn_jax.bench.benchmark import Case, Result, checked
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.serving import BOUNDS, BYTE_BOUNDS, DTYPES, ServingBenchmark
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import worst_ratio
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.serving.byte_states import decoded, of_dtype


class Line(NamedTuple):
    """The case of one line: the implementation, the tokens of a step, the pool's dtype, tokens between two writes."""

    by: str | None
    tokens: int
    pool: str
    write: int
    batch: int
    drafts: str = "chain"
    gates: str = "head"

    @property
    def parents(self) -> np.ndarray:
        """Parent of each token of a step [T]."""
        t = np.arange(self.tokens, dtype=np.int32)
        return t - 1 if self.drafts == "chain" else (t + 1) // 2 - 1

    @property
    def accepted(self) -> list[int]:
        """The tokens of a step that are accepted."""
        path, parents = [self.tokens - 1], self.parents
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        return path

    @property
    def steps(self) -> int:
        """Steps of a period: the steps until a ring is full, with room for all drafts of a step."""
        return max(1, (self.write - self.tokens) // len(self.accepted) + 1)


class Problem(NamedTuple):
    """Inputs of a period on the host: tokens [B, steps * T, ...], parameters of the gates and states."""

    tokens: tuple[np.ndarray, ...]
    A_log: np.ndarray
    dt_bias: np.ndarray
    states: np.ndarray
    slots: np.ndarray


@dataclasses.dataclass(frozen=True)
class DecodeBenchmark(ServingBenchmark):
    """A step of every running request."""

    on_cpu: ClassVar[dict[str, Any]] = {"batches": (1, 8), "heads": (2, 4), "width": 64, "repeats": 5}

    batches: Annotated[tuple[int, ...], Distinct, Positive] = (1, 8, 32, 128, 512)
    """Requests of a step, one line of the table for each."""
    deferred: Annotated[tuple[int, ...], Distinct, Positive] = (1, 16)
    """Tokens between two writes of a state; 1 is a plain pool."""
    tokens: Annotated[tuple[int, ...], Distinct, Positive] = (1, 4)
    """Tokens of a step: 1 is `serving.decode`, more are `serving.verify`."""
    drafts: Annotated[tuple[Literal["chain", "tree"], ...], Distinct] = ("chain",)
    """Whether each of a step's tokens follows the one before, or token t token (t - 1) // 2."""
    pools: Annotated[  # pyrefly: ignore[bad-override]
        tuple[Literal["float32", "bfloat16", "int8", "float8_e4m3fn"], ...], Distinct
    ] = ("float32", "bfloat16")
    """dtypes of the pool of states; those of 8 bits with deferred writes alone."""
    gates: Annotated[tuple[Literal["head", "channel", "erase"], ...], Distinct] = ("head",)
    """A decay of each head, or of each channel; or of each channel and an erasure before each write, by
    `serving.erase_then_delta_decode`, whose ring has two entries for each token."""
    implementations: tuple[Literal["mosaic_gpu", "xla"], ...] = ()
    """Implementations to time, "mosaic_gpu" for the kernels. If none is named: the one that runs unasked."""

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        if any(1 < ring < most for ring in self.deferred for most in self.tokens):
            fail("tokens", "no more than a ring holds", " ".join(map(str, self.tokens)))
        if 1 in self.deferred and not {*BYTE_BOUNDS}.isdisjoint(self.pools):
            fail("deferred", "more than 1 for a pool of 8 bits", " ".join(map(str, self.deferred)))

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each implementation, tokens of a step, dtype of the pool, length of the ring, batch, drafts and
        kind of gates."""
        implementations = self.implementations or (None,)
        sizes = (
            implementations,
            self.tokens,
            self.pools,
            self.deferred,
            self.batches,
            self.drafts,
            self.gates,
        )
        for line in itertools.starmap(Line, itertools.product(*sizes)):
            if line.tokens > 1 or line.drafts == self.drafts[0]:  # one token alone follows no other
                yield Case(line._asdict(), partial(self.time_line, line))

    def time_line(self, line: Line) -> Iterator[Result]:
        """Checks and times one line."""
        x = draw(self, line)
        pool, slots = _pool(self, line, x)
        states_bytes = sum(y.nbytes for y in jax.tree.leaves(pool.state if line.write > 1 else x.states))
        steps, T = line.steps, line.tokens
        tokens = jax.device_put(
            [tuple(y[:, i * T : i * T + T] if T > 1 else y[:, i] for y in x.tokens) for i in range(steps)]
        )
        common: dict[str, Any] = {"A_log": jnp.asarray(x.A_log), "dt_bias": jnp.asarray(x.dt_bias)}
        common |= {"state_layout": self.state_layout, "implementation": line.by}
        slots, last_accepted = jnp.asarray(slots), jnp.full(line.batch, T, jnp.int32)
        parents = jnp.tile(line.parents, (line.batch, 1)) if line.drafts == "tree" else None

        erases = line.gates == "erase"
        decode: Any = serving.erase_then_delta_decode if erases else serving.decode
        verify: Any = serving.erase_then_delta_verify if erases else serving.verify

        def step(pool, token):
            if T > 1:
                spans = {"state_slots": slots, "num_accepted_tokens": last_accepted, "parents": parents}
                o, pool = verify(*token, pool, **spans, **common)
                return pool, o
            o, pool = decode(*token, pool, read_slots=slots, **common)
            return pool, o[:, None]

        def all_tokens(pool, tokens):
            # Inputs and outputs of a step are arrays of their own, as in a server: to take them out of larger ones,
            # or put them there, would be timed too. The loop of a scan would wait for the host in every step.
            outputs = []
            for token in tokens:
                pool, o = step(pool, token)
                outputs.append(o)
            return pool, outputs

        program = measure.compiled(all_tokens, pool, tokens, donate=(0,))
        period = measure.going_on(program, pool, tokens)
        # The second period begins with what the first one left.
        outputs = [np.concatenate([np.asarray(y) for y in period()[1]], 1) for _ in range(2)]
        errors = {"o": _error(x, line, outputs, self.state_layout)}

        def timed() -> tuple[Timing, dict[str, Any]]:
            timing = measure.measure(period, self.repeats).over(steps)
            writes = T if line.write == 1 else 1 / steps
            return timing, {
                "tokens/s": line.batch * len(line.accepted) / timing.ms * 1e3,
                "TB/s": states_bytes * (1 + writes) / timing.ms * 1e-9,
            }

        bound = max(BOUNDS[self.dtype], BYTE_BOUNDS.get(line.pool, 0))
        yield checked(line._asdict(), errors, {"o": bound}, timed)


def draw(options: ServingBenchmark, line: Line) -> Problem:
    """Random inputs of a line."""
    rng = np.random.default_rng(options.seed)
    (Hk, HV), D, batch = options.heads, options.width, line.batch

    def normal(*shape: int) -> np.ndarray:
        x = rng.standard_normal((batch, line.steps * line.tokens, *shape), np.float32)
        return x.astype(DTYPES[options.dtype])

    channels = (HV,) if line.gates == "head" else (HV, D)
    tokens = (normal(Hk, D), normal(Hk, D), normal(HV, D), normal(*channels), normal(HV))
    if line.gates == "erase":
        tokens = *tokens, normal(Hk, D), normal(HV)
    A_log = np.log(rng.uniform(0.1, 16, HV)).astype(np.float32)
    dt_bias = rng.uniform(-6, -2, channels).astype(np.float32)
    states = rng.standard_normal((batch, HV, D, D), np.float32)
    if line.pool in BYTE_BOUNDS:  # such as the pool holds
        states = np.asarray(decoded(serving.make_byte_states(jnp.asarray(states), dtype=line.pool)))
    else:
        states = states.astype(DTYPES[line.pool])
    return Problem(tokens, A_log, dt_bias, states, rng.permutation(batch).astype(np.int32))


def _error(x: Problem, line: Line, periods: list[np.ndarray], state_layout: str) -> float:
    """Error of the accepted outputs of the first and last request against float64; every period has the same
    tokens."""
    rows = np.unique([0, len(x.slots) - 1])[:, None]
    accepted = (np.arange(line.steps)[:, None] * line.tokens + line.accepted).ravel()
    o = np.concatenate([y[rows, accepted] for y in periods], 1)
    tokens = (y[rows, accepted].astype(np.float64) for y in x.tokens)
    q, k, v, a, b, *erasure = (np.tile(y, (1, 2, *(1,) * (y.ndim - 2))) for y in tokens)
    rate = np.exp(x.A_log.astype(np.float64)).reshape(-1, *(1,) * (x.dt_bias.ndim - 1))
    g, beta = -rate * np.logaddexp(a + x.dt_bias, 0), 1 / (1 + np.exp(-b))
    states = x.states[x.slots[rows[:, 0]]]
    options = {"use_qk_l2norm": True, "state_layout": state_layout, "initial_state": states}
    if erasure:  # a token is two: one that decays, erases and writes no value, and one that is read
        e, w = erasure
        halves = (q, q), (e, k), (0 * v, v), (g, 0 * g), (1 / (1 + np.exp(-w)), beta)
        q, k, v, g, beta = (np.stack(pair, 2).reshape(len(rows), -1, *pair[1].shape[2:]) for pair in halves)
    want, _ = oracle.forward(q, k, v, g, beta, **options)
    return worst_ratio(want[:, 1::2] if erasure else want, o, 2)


def _pool(options: ServingBenchmark, line: Line, x: Problem) -> tuple[Any, np.ndarray]:
    """The pool, and where the requests are in it: slots [B], or [B, T] with a state for each of several tokens."""
    states: Any = of_dtype(jnp.asarray(x.states), line.pool)
    if line.write > 1:
        ring: dict[str, Any] = {
            "num_key_heads": options.heads[0],
            "length": line.write * (2 if line.gates == "erase" else 1),
            "dtype": DTYPES[options.dtype],
            "trees": line.drafts == "tree",
            "channels": line.gates != "head",
        }
        return serving.make_ring_pool(states, state_layout=options.state_layout, **ring), x.slots
    if line.tokens == 1:
        return states, x.slots
    T = line.tokens  # a step goes on from the state after its last token
    return jnp.repeat(states, T, 0), x.slots[:, None] * T + np.arange(T, dtype=np.int32)
