"""`gdn bench --what generate`: how fast a language model with random weights reads a prompt and writes.

Reading is a call of `gdn_jax.models.generate` for one token, with all that the call does: its time over the tokens of
the prompt. Writing is the loop that `generate` compiles, `models.generate.decode`, over a cache that is filled with
random numbers in the place of a prompt: the time of a call over its steps. Tokens are the likeliest ones. A call
ends when its results are on the device; times are by the clock, after calls that compile and warm up. The cache is
given to the call and comes back from it, so that there is one in memory. Weights have the compute dtype, as those of
a checkpoint have.

What a token has to move at least, at the memory's published speed: the weights that it is multiplied by, all states
once in and once out, all keys and values once in. What grows with the context in it is the attention layers'.
"""

import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from gdn_jax.bench.step import model_config
from gdn_jax.commands.errors import fail, one_line
from gdn_jax.commands.files import check_writable, replacing, write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions
from gdn_jax.models import LanguageModel, ModelConfig, generate
from gdn_jax.models.attention import AttentionCache
from gdn_jax.models.costs import COSTS, model_costs
from gdn_jax.models.decoder import Cache
from gdn_jax.models.generate import decode
from gdn_jax.models.inference import for_inference
from gdn_jax.training.peak import BANDWIDTH, multiplied_parameters, of_device

WARM_UP = 2
"""Calls before those that are timed; the first one compiles."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Those of Okabe and Ito."""


@dataclasses.dataclass(frozen=True)
class GenerateBenchOptions:
    """Options of `gdn bench --what generate`."""

    what: Literal["generate"] = "generate"
    """A language model that reads a prompt and writes."""
    model: str = "0.4b"
    """The model: tiny, 0.4b or 1.3b as of gdn bench --what step, or a preset of gdn info, such as qwen3.5-0.8b."""
    batches: tuple[int, ...] = (1, 32, 256)
    """Rows that are written at once, one line of the table for each and every context."""
    contexts: tuple[int, ...] = (128,)
    """Tokens in the cache before the first timed one."""
    tokens: int = 64
    """Timed tokens of a row in one measurement."""
    prefill: int = 32768
    """Tokens of the prompt whose reading is timed, in one row; 0 leaves that out."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and computation."""
    options: tuple[str, ...] = ()
    """More fields of the ModelConfig, as in residual_dtype=bfloat16."""
    repeats: int = 5
    """Measurements."""
    largest_cache: float = 120.0
    """Lines whose cache would have more GB (10^9 bytes) are left out."""
    json: Path | None = None
    """File for all numbers, rewritten after every line."""
    figure: Path | None = None
    """PNG to draw: milliseconds of a token over the context, a line for each batch; drawn again after every line."""


class Prefill(NamedTuple):
    """Reading of a prompt."""

    length: int
    tokens_per_second: float
    ms: float
    fastest_ms: float
    slowest_ms: float


class Result(NamedTuple):
    """Writing at one batch and context; milliseconds are those of a step, a token of every row."""

    batch: int
    context: int
    tokens_per_second: float
    ms: float
    fastest_ms: float
    slowest_ms: float
    bytes_ms: float | None
    """What the bytes take that a step has to move, see the module docstring; None where the device is not known."""
    cache_gb: float


def measure_prefill(model: LanguageModel, options: GenerateBenchOptions) -> Prefill:
    """Times a call of `generate` for one token."""
    L = options.prefill
    prompt = jax.device_put(_tokens(model.config, (1, L)))
    times = _times(lambda: generate(model, prompt, 1), options.repeats)
    ms = float(np.median(times))
    return Prefill(L, L / ms * 1e3, ms, min(times), max(times))


def compile_all(
    model: LanguageModel, options: GenerateBenchOptions, lines: list[tuple[int, int]]
) -> dict[tuple[int, int], Future[Any]]:
    """The loop of `generate` for each (context, batch), compiled side by side, all of them when this returns."""
    graphdef, params = nnx.split(model)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = {}
        for context, batch in lines:
            token = jax.ShapeDtypeStruct((batch,), jnp.int32)
            cache = _empty(model, batch, context + options.tokens)
            lowered = _continue.lower(graphdef, params, token, cache, num_tokens=1 + options.tokens)
            found[context, batch] = threads.submit(lowered.compile)
    return found


def measure(
    model: LanguageModel, options: GenerateBenchOptions, batch: int, context: int, program: Callable[..., Any]
) -> Result:
    """Times the loop of `generate` at one batch and context, a program of `compile_all`."""
    params = nnx.state(model)
    token = jax.device_put(_tokens(model.config, (batch,)))
    cache = _fill(model, batch, context, context + options.tokens)

    def once() -> Any:
        nonlocal cache
        tokens, cache = program(params, token, cache)
        return tokens, cache

    def rewind() -> None:
        nonlocal cache
        length = np.full(batch, context, np.int32)
        # A length for each layer: a call is given, and overwrites, every array of the cache.
        cache = tuple(
            c._replace(length=jax.device_put(length)) if isinstance(c, AttentionCache) else c for c in cache
        )
        jax.block_until_ready(cache)

    times = [ms / options.tokens for ms in _times(once, options.repeats, rewind)]
    ms = float(np.median(times))
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    floor = bytes_ms(model.config, batch, context + options.tokens // 2)
    return Result(batch, context, batch / ms * 1e3, ms, min(times), max(times), floor, size / 1e9)


@partial(jax.jit, static_argnums=0, static_argnames="num_tokens", donate_argnames="cache")
def _continue(graphdef, params, token, cache, *, num_tokens):
    """What `generate` does behind the prompt."""
    return decode(for_inference(nnx.merge(graphdef, params)), token, cache, num_tokens)


def _fill(model: LanguageModel, batch: int, context: int, capacity: int) -> Cache:
    """A cache of so many tokens, as if rows of random numbers had made it; all rows have the same ones."""
    key = jax.random.key(0)
    layers = enumerate(_empty(model, batch, capacity))
    return jax.block_until_ready(
        tuple(_fill_layer(jax.random.fold_in(key, i), layer, batch, context) for i, layer in layers)
    )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _fill_layer(key, empty, batch: int, context: int):
    """One layer of a cache. One row is drawn: the random bits of all would need more memory than the cache itself."""
    keys = iter(jax.random.split(key, len(jax.tree.leaves(empty))))

    def drawn(x):
        return jnp.broadcast_to(jax.random.normal(next(keys), x.shape[1:], x.dtype), x.shape)

    if isinstance(empty, AttentionCache):
        return empty._replace(k=drawn(empty.k), v=drawn(empty.v), length=jnp.full(batch, context, jnp.int32))
    return jax.tree.map(drawn, empty)


def _empty(model: LanguageModel, batch: int, capacity: int) -> Cache:
    """Shapes of a cache."""
    return jax.eval_shape(lambda: model.init_cache(batch, capacity))


def _tokens(config: ModelConfig, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)


def _times(once: Callable[[], Any], repeats: int, prepare: Callable[[], None] = lambda: None) -> list[float]:
    """Milliseconds of calls by the clock, without what prepares them."""
    times = []
    for _ in range(WARM_UP + repeats):
        prepare()
        started = time.perf_counter()
        jax.block_until_ready(once())
        times.append((time.perf_counter() - started) * 1e3)
    return times[WARM_UP:]


def bytes_ms(config: ModelConfig, batch: int, context: int) -> float | None:
    """Milliseconds of a step at the memory's published speed, by bytes alone; None where the device is not known.

    Of experts, those of one token count, in whatever batch.
    """
    speed = of_device(BANDWIDTH)
    if speed is None:
        return None
    weights = multiplied_parameters(config) * jnp.dtype(config.dtype).itemsize
    # A state is read and written; of keys and values only those of one token are written.
    passes = {"attention": 1, "gated_delta_net": 2}
    rows = batch * sum(passes[kind] * COSTS[kind](config, context).cache_bytes for kind in config.types)
    return (weights + rows) / speed * 1e3


def main(argv: list[str] | None = None) -> int:
    """Prints a line for the prompt, and one for each batch and context."""
    options = parse(GenerateBenchOptions, argv, "gdn bench --what generate", GenerateBenchOptions(), __doc__)
    values = {"dtype": options.dtype, "weight_dtype": options.dtype}
    config = model_config(options.model, options.options, **values)
    _check(options)
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in versions().items()), highlight=False)
    started = time.perf_counter()
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    jax.block_until_ready(nnx.state(model))
    console.print(f"{options.model}: initialised in {time.perf_counter() - started:.1f} s", highlight=False)
    prefill, results = None, []

    def save() -> None:
        if options.json is not None:
            content = {
                "versions": versions(),
                "config": dataclasses.asdict(config),
                "prefill": None if prefill is None else prefill._asdict(),
                "results": [result._asdict() for result in results],
            }
            write_text(options.json, json.dumps(content, indent=1))

    if options.prefill:
        try:
            prefill = measure_prefill(model, options)
        except jax.errors.JaxRuntimeError as error:  # out of memory, among others
            console.print(f"prompt of {options.prefill}: {one_line(error)}", highlight=False)
        else:
            spread = f"{prefill.fastest_ms:.1f}-{prefill.slowest_ms:.1f}"
            line = f"{prefill.tokens_per_second:.0f} tokens/s, {prefill.ms:.1f} ms ({spread})"
            console.print(f"prompt of {prefill.length}: {line}", highlight=False)
            save()
    lines = []
    for context, batch in itertools.product(options.contexts, options.batches):
        size = batch * model_costs(config, context + options.tokens).cache_bytes / 1e9
        if size > options.largest_cache:
            why = f"its cache has {size:.3g} GB, more than {options.largest_cache:g}"
            console.print(f"context {context}, batch {batch}: left out, {why}", highlight=False)
        else:
            lines.append((context, batch))
    started = time.perf_counter()
    programs = compile_all(model, options, lines)
    console.print(f"{len(programs)} programs in {time.perf_counter() - started:.1f} s", highlight=False)
    for (context, batch), program in programs.items():
        name = f"context {context}, batch {batch}"
        try:
            result = measure(model, options, batch, context, program.result())
        except jax.errors.JaxRuntimeError as error:  # out of memory, among others: the other lines may fit
            console.print(f"{name}: {one_line(error)}", highlight=False)
            continue
        results.append(result)
        line = f"{result.ms:.3f} ms a token, {result.tokens_per_second:.0f} tokens/s"
        console.print(f"{name}: {line}", highlight=False)
        save()
        if options.figure is not None:
            draw(options.figure, options.model, results)
    console.print(_table(results))
    return 0 if results else 1


def _check(options: GenerateBenchOptions) -> None:
    """Raises RunError for the first option that cannot be used."""
    for name in ("batches", "contexts"):
        values = getattr(options, name)
        if not values or min(values) < 1:
            fail(name, "numbers of at least 1", " ".join(map(str, values)) or "none")
    for name in ("tokens", "repeats"):
        if getattr(options, name) < 1:
            fail(name, "at least 1", getattr(options, name))
    if options.prefill < 0:
        fail("prefill", "0 or more", options.prefill)
    if not 0 < options.largest_cache < math.inf:
        fail("largest_cache", "a positive number", options.largest_cache)
    for name in ("json", "figure"):
        if getattr(options, name) is not None:
            check_writable(name, getattr(options, name))


def _table(results: list[Result]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("context", "batch", "tokens/s", "ms a token", "spread", "ms of bytes", "cache GB"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            str(r.context),
            str(r.batch),
            f"{r.tokens_per_second:.0f}",
            f"{r.ms:.3f}",
            f"{r.fastest_ms:.3f}-{r.slowest_ms:.3f}",
            "" if r.bytes_ms is None else f"{r.bytes_ms:.3f}",
            f"{r.cache_gb:.2f}",
        )
    return table


def draw(path: Path, model: str, results: list[Result]) -> None:
    """Draws milliseconds of a token over the context, with the fastest and the slowest, and what bytes take."""
    figure = Figure(figsize=(7, 4.3), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, batch in enumerate(dict.fromkeys(r.batch for r in results)):
        line = sorted((r for r in results if r.batch == batch), key=lambda r: r.context)
        contexts, ms = [r.context for r in line], [r.ms for r in line]
        errors = [[r.ms - r.fastest_ms for r in line], [r.slowest_ms - r.ms for r in line]]
        options: dict[str, Any] = dict(color=COLORS[i % len(COLORS)], lw=1.8)
        axes.errorbar(contexts, ms, errors, marker="o", ms=4, capsize=2, label=f"batch {batch}", **options)
        floor = [(r.context, r.bytes_ms) for r in line if r.bytes_ms is not None]
        if floor:
            label = f"batch {batch}, bytes alone"
            axes.plot(*zip(*floor, strict=True), ls="--", **options | {"lw": 1.0}, label=label)
    contexts = sorted({r.context for r in results})
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
