"""`gdn bench --what step`: times the whole training step of a model, and says where its time goes.

A step is what `gdn train` runs: forward, backward, clipping, AdamW, on random tokens. Its time is the mean of several
that follow one another without a pause. Seconds to the first step are those of initialising the model,
and of tracing, compiling and running the first step. On a GPU the kernels of a step are added up by kind from a
profile.
"""

import dataclasses
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from gdn_jax.bench import device_time
from gdn_jax.commands.errors import fail, one_line
from gdn_jax.commands.files import check_writable, write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.models.presets import PRESETS
from gdn_jax.tasks.batch import Batch
from gdn_jax.training import steps
from gdn_jax.training.options import ScheduleOptions
from gdn_jax.training.peak import attention_flops, multiplied_parameters, share_of_peak
from gdn_jax.training.steps import TrainState

SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(vocab_size=256, hidden_size=64, num_layers=2, num_heads=2, head_dim=16),
    "0.4b": dict(
        vocab_size=32768, hidden_size=1024, num_layers=24, num_heads=8, head_dim=128, intermediate_size=2736
    ),
    "1.3b": dict(
        vocab_size=32000, hidden_size=2048, num_layers=24, num_heads=16, head_dim=128, intermediate_size=5632
    ),
}
"""Models by name: fields of a ModelConfig. V = K in all of them. The names of PRESETS are models too."""

STEPS = 4
"""Steps of one measurement."""

RULE = ("chunk_gates", "gated_inverse", "outputs", "segment_", "chains", "gradients")
KINDS = (
    ("rule", re.compile("|".join(rf"^{name}\w*mosaic" for name in RULE))),
    (
        "products",
        re.compile(
            r"nvjet|gemm|cutlass|cublas|xmma|splitK|^swiglu_(product|cotangents)|^weight_gradient|^cross_entropy",
            re.IGNORECASE,
        ),
    ),
    (
        "fused parts",
        re.compile("^(short_conv|add_norm|gated_norm|swiglu|embedding_gradient|logit_cotangents)"),
    ),
    ("copies", re.compile("memcpy|memset|copy", re.IGNORECASE)),
    ("element-wise", re.compile("")),
)
"""Kind -> names of kernels, the first that fits."""


@dataclasses.dataclass(frozen=True)
class StepBenchOptions:
    """Options of `gdn bench --what step`."""

    what: Literal["step"] = "step"
    """The whole training step."""
    model: str = "0.4b"
    """The model: tiny, 0.4b with 24 layers of width 1024, 1.3b with 24 of width 2048, or a preset of gdn info, such
    as qwen3.5-0.8b."""
    lengths: tuple[int, ...] = (2048, 8192, 32768)
    """Tokens of a row, one line of the table for each."""
    tokens: int | None = None
    """Tokens of a step: its rows have the same length. Default: 65536, of a preset 32768."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype."""
    repeats: int = 5
    """Measurements, of four steps each."""
    options: tuple[str, ...] = ()
    """More fields of the ModelConfig, as in remat=rule."""
    json: Path | None = None
    """File for all numbers, rewritten after every length."""


class Result(NamedTuple):
    """One length."""

    length: int
    tokens_per_second: float
    share_of_peak: float | None
    """See `peak.share_of_peak`."""
    step_ms: float
    fastest_ms: float
    slowest_ms: float
    temporary_gib: float
    init_s: float
    first_step_s: float
    loss: float
    kinds_ms: dict[str, float]
    kernels_ms: dict[str, float]
    """The kernels that take longest."""


def config_of(options: StepBenchOptions) -> ModelConfig:
    """The model's configuration.

    Raises:
      RunError: there is no such model, an option does not name a field, or its value does not fit.
    """
    return model_config(options.model, options.options, dtype=options.dtype)


def model_config(name: str, options: tuple[str, ...], **values: Any) -> ModelConfig:
    """The configuration of a model of SIZES or PRESETS.

    Args:
      name: of the model.
      options: fields with a value, as in "remat=rule".
      values: of more fields.

    Raises:
      RunError: there is no such model, an option does not name a field, or its value does not fit.
    """
    if name not in SIZES and name not in PRESETS:
        fail("model", f"one of {', '.join([*SIZES, *PRESETS])}", name)
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    for text in options:
        field, _, value = text.partition("=")
        if field not in fields:
            fail("options", f"fields of ModelConfig with a value, as in {sorted(fields)[0]}=...", text)
        try:
            values[field] = json.loads(value)
        except json.JSONDecodeError:
            values[field] = value
    try:
        if name in PRESETS:
            return dataclasses.replace(PRESETS[name], **values)
        return ModelConfig(**SIZES[name] | {"expand_v": 1.0} | values)
    except (ValueError, TypeError) as error:
        fail("options", f"values that fit ({error})", " ".join(options))


def tokens_of(options: StepBenchOptions) -> int:
    """Tokens of a step."""
    if options.tokens is not None:
        return options.tokens
    return 32768 if options.model in PRESETS else 65536


def measure(config: ModelConfig, options: StepBenchOptions, length: int) -> Result:
    """Times the step on rows of one length."""
    started = time.perf_counter()
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)
    state = TrainState(params, jax.jit(optimizer.init)(params))
    jax.block_until_ready(state)
    init_s = time.perf_counter() - started

    rng, tokens = np.random.default_rng(0), tokens_of(options)
    shape = (tokens // length, length + 1)
    text = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    batch = jax.device_put(Batch(text[:, :-1], text[:, 1:], np.ones((shape[0], length), np.float32)))
    train = steps.make_functions(graphdef, rest, optimizer, 1).train
    started = time.perf_counter()
    run: Any = train
    compiled = run.lower(state, batch).compile()
    state, metrics = jax.block_until_ready(compiled(state, batch))
    first_step_s = time.perf_counter() - started
    loss = float(metrics.loss)

    def once() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    times = _times(once, options.repeats)
    kinds, kernels = _kinds(once) if jax.default_backend() == "gpu" else ({}, {})
    step_ms = float(np.median(times))
    per_second = tokens / step_ms * 1e3
    memory = compiled.memory_analysis()
    return Result(
        length,
        per_second,
        share_of_peak(multiplied_parameters(config), per_second, attention_flops(config, length)),
        step_ms,
        min(times),
        max(times),
        memory.temp_size_in_bytes / 2**30 if memory else float("nan"),
        init_s,
        first_step_s,
        loss,
        kinds,
        kernels,
    )


def _times(once: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of a step in each measurement, after one that warms up."""
    times = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        for _ in range(STEPS - 1):
            once()
        jax.block_until_ready(once())
        times.append((time.perf_counter() - started) / STEPS * 1e3)
    return times[1:]


def _kinds(once: Callable[[], Any], calls: int = 3) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a step by kind, and of the thirty kernels that take longest."""
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    for kernel in device_time.kernels(device_time.profile(lambda: jax.block_until_ready(once()), calls)):
        ms = (kernel.end_ns - kernel.start_ns) / 1e6 / calls
        by_kind[next(kind for kind, names in KINDS if names.search(kernel.name))] += ms
        by_name[kernel.name] += ms
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:30]
    return dict(by_kind), dict(longest)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each length, and where the time of a step goes."""
    options = parse(StepBenchOptions, argv, "gdn bench --what step", StepBenchOptions(), __doc__)
    config, tokens = config_of(options), tokens_of(options)
    if tokens < 1:
        fail("tokens", "at least 1", tokens)
    for length in options.lengths:
        if length < 1 or tokens % length:
            fail("lengths", f"divisors of --tokens {tokens}", length)
    if options.json is not None:
        check_writable("json", options.json)
    console, results = Console(), []
    console.print(", ".join(f"{name} {value}" for name, value in versions().items()), highlight=False)
    for length in options.lengths:
        try:
            result = measure(config, options, length)
        except jax.errors.JaxRuntimeError as error:  # out of memory, among others: the other lengths may fit
            console.print(f"length {length}: {one_line(error)}", highlight=False)
            continue
        results.append(result)
        console.print(f"length {length}: {result.tokens_per_second:.0f} tokens/s", highlight=False)
        if options.json is not None:
            lines = [result._asdict() for result in results]
            content = {"versions": versions(), "config": dataclasses.asdict(config), "results": lines}
            write_text(options.json, json.dumps(content, indent=1, default=str))
    console.print(_table(results))
    return 0 if results else 1


def _table(results: list[Result]) -> Table:
    table = Table()
    kinds = list(dict.fromkeys(kind for result in results for kind in result.kinds_ms))
    for name in ("length", "tokens/s", "of peak", "step ms", "spread ms", "temporaries GiB", "init s"):
        table.add_column(name, justify="right")
    for name in ("first step s", "loss", *(f"{kind} ms" for kind in kinds)):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            str(r.length),
            f"{r.tokens_per_second:.0f}",
            "" if r.share_of_peak is None else f"{100 * r.share_of_peak:.1f} %",
            f"{r.step_ms:.1f}",
            f"{r.fastest_ms:.1f} to {r.slowest_ms:.1f}",
            f"{r.temporary_gib:.1f}",
            f"{r.init_s:.1f}",
            f"{r.first_step_s:.1f}",
            f"{r.loss:.4f}",
            *(f"{r.kinds_ms.get(kind, 0.0):.1f}" for kind in kinds),
        )
    return table
