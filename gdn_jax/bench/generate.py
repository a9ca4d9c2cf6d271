"""How fast a language model with random weights reads a prompt and writes.

Reading is a call of `gdn_jax.models.generate` for one token, with all that the call does. Writing is the loop that
`generate` compiles, `models.generate.decode`, over a cache that is filled with random numbers in the place of a
prompt: the time of a call over its steps. Tokens are the likeliest ones. A call ends when its results are on the
device; times are by the clock. The cache is given to the call and comes back from it, so that there is one in memory.
Weights have the compute dtype, as those of a checkpoint have.

The column "ms of bytes" is the time of the bytes that a token has to move at least, at the memory's published speed:
the weights that its rows are multiplied by, with all experts that one of them chooses, all states once in and once
out, all keys and values once in. The part that grows with the context is the attention layers'.

With --drafts a further line is the loop of `models.drafts`, `decode_with_drafts`, after a prompt of random tokens. A
head of random weights guesses, its projection to the words is zeros, so that the first word is the likeliest always,
and the model's own words are drawn so that each guess is right with the probability --acceptance. So it costs what
generation costs whose guesses are as good; "tokens a pass" is how many there were. With --draft-vocab guesses are
among the first words; how many fewer of them are right is not known here, for the weights are random.

The column "first s" has the seconds that tracing and compiling take. A prompt's seconds are its first call, which
reads it once; for tokens they end before the first call.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gdn_jax.bench import measure
from gdn_jax.bench.benchmark import Benchmark, Case, Result, Writable
from gdn_jax.bench.sizes import model_config
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Fraction, NotNegative, Positive
from gdn_jax.commands.files import replacing
from gdn_jax.inspect.plots import COLORS
from gdn_jax.models import LanguageModel, ModelConfig, generate
from gdn_jax.models.attention import AttentionCache, WindowCache, reserve
from gdn_jax.models.costs import bytes_of_step, layer_costs, model_costs
from gdn_jax.models.decoder import Cache
from gdn_jax.models.drafts import Prompt, decode_with_drafts
from gdn_jax.models.generate import decode
from gdn_jax.models.inference.program import for_inference
from gdn_jax.models.mtp import MTPHead
from gdn_jax.training.peak import BANDWIDTH, of_device


@dataclasses.dataclass(frozen=True)
class GenerateBenchmark(Benchmark):
    """A language model that reads a prompt and writes."""

    on_cpu: ClassVar[dict[str, Any]] = {"model": "tiny", "batches": (1, 8), "tokens": 32, "prefill": 1024}

    repeats: Annotated[int, Positive] = 5
    """Measurements."""
    model: str = "0.4b"
    """The model: tiny, 0.4b or 1.3b as of gdn bench step, or a preset of gdn info, such as qwen3.5-0.8b."""
    batches: Annotated[tuple[int, ...], Distinct, Positive] = (1, 32, 256)
    """Rows that are written at once, one line of the table for each and every context."""
    contexts: Annotated[tuple[int, ...], Distinct, Positive] = (128,)
    """Tokens in the cache before the first timed one."""
    tokens: Annotated[int, Positive] = 64
    """Timed tokens of a row in one measurement."""
    prefill: Annotated[int, NotNegative] = 32768
    """Tokens of the prompt whose reading is timed, in one row; 0 leaves that out."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and computation."""
    options: tuple[str, ...] = ()
    """More fields of the ModelConfig, as in residual_dtype=bfloat16."""
    drafts: Annotated[int, NotNegative] = 0
    """Guesses in a pass of one more line for each batch and context; 0: no such lines."""
    draft_vocab: Annotated[int | None, Positive] = None
    """Guesses are among this number of first words of the vocabulary; None: among all."""
    acceptance: Annotated[float, Fraction] = 0.8
    """Probability that a guess is right, where all before it are."""
    largest_cache: Annotated[float, Positive] = 120.0
    """Lines whose cache would have more GB (10^9 bytes) are left out."""
    figure: Annotated[Path | None, Writable()] = None
    """PNG to draw: milliseconds of a token over the context, a line for each batch; drawn again after every line."""

    def config(self) -> ModelConfig:
        """The model's configuration; raises RunError where there is none."""
        return model_config(self.model, self.options, dtype=self.dtype, weight_dtype=self.dtype)

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        words = self.config().vocab_size
        if self.draft_vocab is not None and self.draft_vocab > words:
            fail("draft_vocab", f"at most {words}", self.draft_vocab)

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for the prompt, and one for each context and batch."""
        config, started = self.config(), time.perf_counter()
        model = LanguageModel(config, rngs=nnx.Rngs(self.seed))
        jax.block_until_ready(nnx.state(model))
        note(f"{self.model}: initialised in {time.perf_counter() - started:.1f} s")
        if self.prefill:
            about = {"what": "prompt", "context": self.prefill, "batch": 1}
            yield Case(about, partial(self.time_prompt, model, about))
        for context, batch in itertools.product(self.contexts, self.batches):
            size = batch * model_costs(config, context + self.tokens).cache_bytes / 1e9
            if size > self.largest_cache:
                why = f"its cache has {size:.3g} GB, more than {self.largest_cache:g}"
                note(f"context {context}, batch {batch}: left out, {why}")
                continue
            about = {"what": "token", "context": context, "batch": batch}
            yield Case(about, partial(self.time_tokens, model, about))
            if self.drafts:
                about = about | {"what": f"{self.drafts} drafts"}
                yield Case(about, partial(self.time_drafts, model, about))

    def time_prompt(self, model: LanguageModel, about: dict[str, Any]) -> Iterator[Result]:
        """Times a call of `generate` for one token."""
        prompt = jax.device_put(_tokens(model.config, (1, self.prefill), self.seed))
        began = time.perf_counter()
        jax.block_until_ready(generate(model, prompt, 1))
        first = time.perf_counter() - began
        timing = measure.by_clock(lambda: generate(model, prompt, 1), self.repeats)
        yield Result(about, timing, {"tokens/s": self.prefill / timing.ms * 1e3, "first s": first})

    def time_tokens(self, model: LanguageModel, about: dict[str, Any]) -> Iterator[Result]:
        """Times the loop of `generate` at one batch and context."""
        batch, context = about["batch"], about["context"]
        graphdef, params = nnx.split(model)
        token = jax.device_put(_tokens(model.config, (batch,), self.seed))
        cache = _fill(model, batch, context, context + self.tokens)
        began = time.perf_counter()
        program = _continue.lower(graphdef, params, token, cache, num_tokens=1 + self.tokens).compile()
        first = time.perf_counter() - began

        def once() -> Any:
            nonlocal cache
            tokens, cache = program(params, token, cache)
            return tokens, cache

        def rewind() -> None:
            nonlocal cache
            length = np.full(batch, context, np.int32)
            # A length for each layer: a call is given, and overwrites, every array of the cache.
            cache = tuple(
                c._replace(length=jax.device_put(length))
                if isinstance(c, AttentionCache | WindowCache)
                else c
                for c in cache
            )
            jax.block_until_ready(cache)

        timing = measure.by_clock(once, self.repeats, prepare=rewind).over(self.tokens)
        numbers = {
            "tokens/s": batch / timing.ms * 1e3,
            "ms of bytes": bytes_ms(model.config, batch, context + self.tokens // 2),
            "cache GB": sum(x.nbytes for x in jax.tree.leaves(cache)) / 1e9,
            "first s": first,
        }
        yield Result(about, timing, numbers)

    def time_drafts(self, model: LanguageModel, about: dict[str, Any]) -> Iterator[Result]:
        """Times the loop of `generate` with drafts at one batch and context."""
        batch, context = about["batch"], about["context"]
        graphdef, params = nnx.split(_with_head(model, self.seed))
        tokens = jax.device_put(_tokens(model.config, (batch, context), self.seed))
        read = _read(graphdef, params, tokens, room=self.tokens + self.drafts)
        options = dict(num_tokens=self.tokens, num_drafts=self.drafts, draft_vocab=self.draft_vocab)
        options |= dict(acceptance=self.acceptance)
        began = time.perf_counter()
        program = _draft.lower(graphdef, params, *read, **options).compile()
        first = time.perf_counter() - began
        timing = measure.by_clock(lambda: program(params, *read), self.repeats).over(self.tokens)
        accepted = np.asarray(program(params, *read)[1].accepted)
        passes = (accepted >= 0).sum()
        numbers = {
            "tokens/s": batch / timing.ms * 1e3,
            "tokens a pass": batch * (self.tokens - 1) / int(passes) if passes else None,
            "first s": first,
        }
        yield Result(about, timing, numbers)

    def save(self, content: dict[str, Any], results: list[Result]) -> None:
        """The JSON and the figure."""
        super().save(content, results)
        tokens = [r for r in results if r.about["what"] == "token" and r.timing is not None]
        if self.figure is not None and tokens:
            draw(self.figure, self.model, [r.values() for r in tokens])


@partial(jax.jit, static_argnums=0, static_argnames="num_tokens", donate_argnames="cache")
def _continue(graphdef, params, token, cache, *, num_tokens):
    """Tokens and cache after the loop of `generate` behind the prompt."""
    return decode(for_inference(nnx.merge(graphdef, params)), token, cache, num_tokens)


def _with_head(model: LanguageModel, seed: int) -> LanguageModel:
    """A copy with a head of random weights, whose projection to the words is zeros."""
    model = nnx.clone(model)
    model.mtp = nnx.data(MTPHead(model.config, rngs=nnx.Rngs(seed)))
    words = model.embedding if model.head is None else model.head
    words.set_value(jnp.zeros_like(words[...]))
    return model


@partial(jax.jit, static_argnums=0, static_argnames="room")
def _read(graphdef, params, tokens, *, room):
    """A prompt that the model has read, and the cache after it."""
    hidden, cache = for_inference(nnx.merge(graphdef, params)).hidden_states(tokens, return_cache=True)
    cache = tuple(reserve(c, room) if isinstance(c, AttentionCache) else c for c in cache or ())
    last = jnp.full(tokens.shape[0], tokens.shape[1] - 1)
    return Prompt(tokens, None, hidden, last), cache


@partial(jax.jit, static_argnums=0, static_argnames=("num_tokens", "num_drafts", "draft_vocab", "acceptance"))
def _draft(graphdef, params, prompt, cache, *, num_tokens, num_drafts, draft_vocab, acceptance):
    """The loop of `generate` with drafts, of which as many are right as asked for."""

    def choose(logits, numbers):
        """The likeliest word, which is the one that is guessed, or another one."""
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(0)))(numbers.reshape(-1))
        is_right = jax.vmap(partial(jax.random.bernoulli, p=acceptance))(keys).reshape(numbers.shape)
        likeliest = jnp.argmax(logits, axis=-1)
        return jnp.where(is_right, likeliest, likeliest + 1).astype(prompt.tokens.dtype)

    model, token = for_inference(nnx.merge(graphdef, params)), prompt.tokens[:, -1]
    return decode_with_drafts(model, prompt, token, cache, num_tokens, num_drafts, draft_vocab, choose=choose)


def _fill(model: LanguageModel, batch: int, context: int, capacity: int) -> Cache:
    """A cache of so many tokens, as if rows of random numbers had made it.

    Rows differ by signs alone, which is enough for them to choose other experts.
    """
    key, shapes = jax.random.key(0), jax.eval_shape(lambda: model.init_cache(batch, capacity))
    layers = enumerate(shapes)
    return jax.block_until_ready(
        tuple(_fill_layer(jax.random.fold_in(key, i), layer, batch, context) for i, layer in layers)
    )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _fill_layer(key, empty, batch: int, context: int):
    """One layer of a cache. One row is drawn: the random bits of all would need more memory than the cache itself."""
    keys = iter(jax.random.split(key, len(jax.tree.leaves(empty))))

    def drawn(x):
        key, other = jax.random.split(next(keys))
        signs = jax.random.rademacher(other, x.shape[:2], x.dtype)
        return jnp.expand_dims(signs, range(2, x.ndim)) * jax.random.normal(key, x.shape[1:], x.dtype)

    if isinstance(empty, AttentionCache | WindowCache):
        return empty._replace(k=drawn(empty.k), v=drawn(empty.v), length=jnp.full(batch, context, jnp.int32))
    return jax.tree.map(drawn, empty)


def _tokens(config: ModelConfig, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def bytes_ms(config: ModelConfig, batch: int, context: int) -> float | None:
    """Milliseconds of a step at the memory's published speed, by bytes alone; None where the device is not known.

    Experts are those that rows choose in the mean, see `bytes_of_step`.
    """
    speed = of_device(BANDWIDTH)
    if speed is None:
        return None
    weights = bytes_of_step(config, batch)
    # A state is read and written; of keys and values only those of one token are written.
    passes = {kind: 2 if config.attention_of(kind) is None else 1 for kind in config.types}
    rows = batch * sum(passes[kind] * layer_costs(config, kind, context).cache_bytes for kind in config.types)
    return (weights + rows) / speed * 1e3


def draw(path: Path, model: str, results: list[dict[str, Any]]) -> None:
    """Draws milliseconds of a token over the context, with the fastest and the slowest, and those of its bytes.

    Args:
      results: `Result.values` of tokens.
    """
    figure = Figure(figsize=(7, 4.3), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, batch in enumerate(dict.fromkeys(r["batch"] for r in results)):
        line = sorted((r for r in results if r["batch"] == batch), key=lambda r: r["context"])
        contexts, ms = [r["context"] for r in line], [r["ms"] for r in line]
        errors = [
            [r["ms"] - r["fastest"] for r in line],
            [r["slowest"] - r["ms"] for r in line],
        ]
        look: dict[str, Any] = dict(color=COLORS[i % len(COLORS)], lw=1.8)
        axes.errorbar(contexts, ms, errors, marker="o", ms=4, capsize=2, label=f"batch {batch}", **look)
        floor = [(r["context"], r["ms of bytes"]) for r in line if "ms of bytes" in r]
        if floor:
            label = f"batch {batch}, bytes alone"
            axes.plot(*zip(*floor, strict=True), ls="--", **look | {"lw": 1.0}, label=label)
    contexts = sorted({r["context"] for r in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(n) for n in contexts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("ms a token")
    axes.set_title(f"{model}, {jax.devices()[0].device_kind}", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5)
    with replacing(path) as file:
        figure.savefig(file, format="png")
