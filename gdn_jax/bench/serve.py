"""How fast a `serving.Server` answers requests with a language model of random weights.

The number of requests in flight is fixed: when one ends, the next is submitted, so that prompts are read while other
requests write. Lengths of prompts and answers are drawn for each of 1024 requests, with the logarithm uniform between
a shortest and a longest length: half of the lengths are below the geometric mean of the two. Tokens of prompts are
uniform. No answer ends before its drawn length. The timed steps begin when as many requests have ended as are in
flight.

A line is the time of a step of the server, by the clock. A step reads prompts, and gives every other request a token,
or up to --most-tokens. Its columns:

- tokens/s: new tokens that all requests together got in a second;
- prompt tokens/s: tokens of the prompts whose first new token came in the timed steps, in a second;
- first ms, first ms 95 %: from `submit` to the first new token on the host, the median and the 95th percentile;
- shared tokens/s: with --prefix-gb the tokens of prompts that were found and not read, in a second;
- loop %: the share of the time in which the host did not wait for the device, which has work meanwhile;
- idle %: the share of the time in which the GPU had nothing to do, in pauses of 5 us or more between kernels: what
  the loop costs. A profile of 64 more steps tells the milliseconds of work for a new token; since it slows the host
  down, these are compared with the time of a new token in the timed steps. Other prompts make it 3 % more or less;
- first s: seconds from the first `submit` to its second token, nearly all of which is tracing and compiling;
- pool GB: memory of all slots (10^9 bytes).
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

from gdn_jax.bench import profiles
from gdn_jax.bench.benchmark import Benchmark, Case, Result, checked
from gdn_jax.bench.measure import Timing, on_gpu
from gdn_jax.bench.sizes import model_config
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, NotNegative, Positive
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.models.served import ServedModel
from gdn_jax.serving import Server
from gdn_jax.serving.pools import GRID

DRAWN = 1024
"""Requests that are drawn; then the first comes again."""

PROFILED, PAUSE_NS = 64, 5e3
"""Steps of the profile, and the shortest pause between kernels in it that is not within a program."""


class Request(NamedTuple):
    """A request as `Server.submit` takes it."""

    prompt: np.ndarray
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class ServeBenchmark(Benchmark):
    """A Server whose requests come and go."""

    on_cpu: ClassVar[dict[str, Any]] = {
        "model": "tiny",
        "requests": (1, 4),
        "prompt_tokens": (4, 64),
        "answer_tokens": (4, 32),
        "prefill_tokens": (64,),
        "repeats": 100,
    }

    repeats: Annotated[int, Positive] = 2000
    """Timed steps."""
    model: str = "0.4b"
    """The model: tiny, 0.4b or 1.3b as of gdn bench step, or a preset of gdn info, such as qwen3.5-0.8b."""
    requests: Annotated[tuple[int, ...], Distinct, Positive] = (1, 8, 32, 128, 256)
    """Requests in flight, one line of the table for each."""
    prompt_tokens: Annotated[tuple[int, int], Positive] = (16, 2048)
    """Shortest and longest prompt."""
    answer_tokens: Annotated[tuple[int, int], Positive] = (16, 512)
    """Shortest and longest answer."""
    prefill_tokens: Annotated[tuple[int, ...], Distinct, Positive] = (1024,)
    """Tokens of prompts in a step, 64 at least; of several a step takes the first that has room for its prompts."""
    most_tokens: Annotated[int, Positive] = 8
    """Most tokens of a request in a step, by one program while no prompt is read; 1: one."""
    system_tokens: Annotated[int, NotNegative] = 0
    """Tokens that all prompts begin with, as with a system prompt; the tokens of --prompt-tokens follow them."""
    prefix_gb: Annotated[float, NotNegative] = 0.0
    """GB (10^9 bytes) for what is remembered of the beginnings of prompts; 0: every prompt is read whole."""
    ring: Annotated[int | None, Positive] = None
    """Length of the rings for deferred writes; None: states are written for every token."""
    pool: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the recurrent states."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and computation."""
    options: tuple[str, ...] = ()
    """More fields of the ModelConfig, as in residual_dtype=bfloat16."""

    def config(self) -> ModelConfig:
        """The model's configuration; raises RunError where there is none."""
        return model_config(self.model, self.options, dtype=self.dtype, weight_dtype=self.dtype)

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        for name in ("prompt_tokens", "answer_tokens"):
            shortest, longest = lengths = getattr(self, name)
            if shortest > longest:
                fail(name, "a shortest and a longest length", " ".join(map(str, lengths)))
        if min(self.prefill_tokens) < GRID or list(self.prefill_tokens) != sorted(self.prefill_tokens):
            expected = f"numbers in ascending order, {GRID} or more"
            fail("prefill_tokens", expected, " ".join(map(str, self.prefill_tokens)))
        self.config()

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each number of requests in flight."""
        model = LanguageModel(self.config(), rngs=nnx.Rngs(self.seed))
        for requests in self.requests:
            served = ServedModel(model, max_batch=requests)
            jax.block_until_ready(served.params)
            about = {"model": self.model, "requests": requests}
            yield Case(about, partial(self.time_steps, served, about))

    def time_steps(self, served: ServedModel, about: dict[str, Any]) -> Iterator[Result]:
        """Times steps of a server with one number of requests in flight."""
        in_flight, vocab_size = about["requests"], self.config().vocab_size
        capacity = self.system_tokens + self.prompt_tokens[1] + self.answer_tokens[1]
        pools = served.make_pools(in_flight, dtype=self.pool, ring=self.ring, capacity=capacity)
        numbers = {"pool GB": sum(x.nbytes for x in jax.tree.leaves(pools)) / 1e9}
        server = Server(
            *(served.prefill, served.decode, served.params, pools),
            max_batch=in_flight,
            max_waiting=in_flight,
            prefill_tokens=self.prefill_tokens,
            vocab_size=vocab_size,
            prefix_bytes=int(1e9 * self.prefix_gb),
            most_tokens=self.most_tokens,
        )
        began = time.perf_counter()
        server.submit([0], 2)
        server.run()
        numbers["first s"] = time.perf_counter() - began
        traffic = Traffic(server, in_flight, self.draw(vocab_size))
        while len(traffic.ended) < in_flight:
            traffic.step()
        errors = {"wrong answers": 1 - float(np.mean(traffic.ended))}

        def timed() -> tuple[Timing, dict[str, Any]]:
            timing, rates = traffic.timed(self.repeats)
            if on_gpu():
                before = traffic.new_tokens
                found = profiles.kernels(profiles.profile(traffic.step, PROFILED))
                work = profiles.busy_ms(found, PAUSE_NS) / (traffic.new_tokens - before)
                rates["idle %"] = 100 * (1 - work * rates["tokens/s"] / 1e3)
            return timing, rates | numbers

        yield checked(about, errors, {"wrong answers": 0.0}, timed)

    def draw(self, vocab_size: int) -> list[Request]:
        """Requests in the order in which they come, and then come again."""
        rng = np.random.default_rng(self.seed)

        def lengths(shortest: int, longest: int) -> np.ndarray:
            logarithms = rng.uniform(np.log(shortest), np.log(longest + 1), DRAWN)
            return np.exp(logarithms).astype(int).clip(shortest, longest)

        every = [*zip(lengths(*self.prompt_tokens), lengths(*self.answer_tokens), strict=True)]
        prompts = [rng.integers(0, vocab_size, n) for n, _ in every]
        system = rng.integers(0, vocab_size, self.system_tokens)
        return [
            Request(np.concatenate([system, prompt]), int(answer))
            for prompt, (_, answer) in zip(prompts, every, strict=True)
        ]


class Traffic:
    """Requests of which a server has the same number at any time.

    Args:
      server: one without requests.
      in_flight: their number.
      requests: in the order in which they come, and then come again.
    """

    def __init__(self, server: Server, in_flight: int, requests: list[Request]):
        self.server, self.in_flight, self.requests = server, in_flight, itertools.cycle(requests)
        self.sent: dict[int, tuple[Request, float]] = {}
        """The requests in flight by their numbers, with the times at which they were submitted."""
        self.firsts: dict[int, tuple[float, int]] = {}
        """Seconds to the first new token of each request that has one, and tokens of its prompt."""
        self.new_tokens = 0
        """New tokens of all requests so far."""
        self.ended: list[bool] = []
        """Whether the answer of each request that has ended has the right length and nothing but tokens."""

    def step(self) -> None:
        """Submits a request for each that has ended, and lets the server make a step."""
        while len(self.sent) < self.in_flight:
            request, now = next(self.requests), time.perf_counter()
            self.sent[self.server.submit(*request)] = request, now
        finished, now = self.server.step(), time.perf_counter()
        for number, tokens in self.server.read.items():
            self.new_tokens += len(tokens)
            request, sent = self.sent[number]
            self.firsts.setdefault(number, (now - sent, len(request.prompt)))
        for number, tokens in finished.items():
            request, _ = self.sent.pop(number)
            self.ended.append(len(tokens) == request.num_tokens and min(tokens) >= 0)

    def timed(self, steps: int) -> tuple[Timing, dict[str, Any]]:
        """The time of a step, and the rates and delays of these steps."""
        before, new_tokens, waited = len(self.firsts), self.new_tokens, self.server.waited
        shared = self.server.tokens_shared
        ends = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            ends.append(time.perf_counter())
        seconds, firsts = ends[-1] - ends[0], [*self.firsts.values()][before:]
        numbers = {
            "tokens/s": (self.new_tokens - new_tokens) / seconds,
            "prompt tokens/s": sum(n for _, n in firsts) / seconds,
            "shared tokens/s": (self.server.tokens_shared - shared) / seconds or None,
            "loop %": 100 * (1 - (self.server.waited - waited) / seconds),
        }
        if firsts:
            delays = np.percentile([s * 1e3 for s, _ in firsts], (50, 95))
            numbers |= dict(zip(("first ms", "first ms 95 %"), delays.tolist(), strict=True))
        return Timing.of((np.diff(ends) * 1e3).tolist()), numbers
