"""Options of `gdn train` and `gdn sweep`, one frozen dataclass a topic, and every check that needs no data.

The docstring under a field is its help text on the command line.
"""

import dataclasses
import math
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gdn_jax.commands.errors import RunError, fail, flag
from gdn_jax.tasks.options import (
    CopyOptions,
    NeedleOptions,
    ParityOptions,
    PermutationOptions,
    RecallOptions,
    SentenceOptions,
    TaskOptions,
    TextOptions,
)

Implementation = Literal["auto", "recurrent", "chunked", "mosaic_gpu"]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a run is: where it goes, how long it lasts, how often it reports."""

    out: Path | None = None
    """Run folder to create. Without it, a new folder runs/<task>-<number>."""
    resume: bool = False
    """Continue the run in --out: its stored options are used, and a different one is an error."""
    seed: int = 0
    """Seed of the initial weights, the batches and the sample."""
    steps: int = 800
    """Optimiser steps. The learning-rate schedule depends on it, never on the clock."""
    batch_size: int = 4
    """Sequences of one optimiser step."""
    accumulate: int = 1
    """Pieces the batch is cut into to save memory; the gradient is that of the whole batch."""
    log_every: int = 20
    """Steps between two lines of metrics.jsonl."""
    eval_every: int = 200
    """Steps between two validations (the last step is always validated)."""
    save_every: int = 200
    """Steps between two checkpoints (the last step is always saved)."""
    deterministic: bool = True
    """On a GPU, leave out operations that do not repeat bit for bit."""
    keep: int = 2
    """Checkpoints kept."""
    compilation_cache: bool = True
    """On an accelerator, keep compiled programs for the next run: in JAX_COMPILATION_CACHE_DIR, without it in the
    user's cache directory."""
    mesh: str | None = None
    """Run on all devices of all processes, split like data=2,head=2,context=2: rows, heads, and tokens of a row; with
    ,sharded each device of data keeps a part of the parameters. A resumed run may have another mesh."""
    max_minutes: float | None = None
    """Save and stop after this many minutes of training, finished or not. --resume continues."""


@dataclasses.dataclass(frozen=True)
class SizeOptions:
    """Size and arithmetic of a model, whatever its rule."""

    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Blocks of GatedDeltaNet and SwiGLU."""
    num_heads: int = 2
    """Heads of a GatedDeltaNet."""
    head_dim: int = 32
    """Width K of a key and of a query."""
    expand_v: float = 2.0
    """Width of a value over the width of a key, V / K."""
    conv_size: int = 4
    """Taps of the causal convolution, 2 to 4."""
    mlp_ratio: float = 2.0
    """Inner width of the SwiGLU over hidden_size."""
    time_step: float = 1.0
    """Factor of the initial time steps of the gates: 0.1 makes the first half-lives ten times as long."""
    write_start: float | None = None
    """Where the write strength starts, between 0 and 1 (twice as much where it goes to 2): a bias, which is learned.
    None: no bias, which starts at 0.5. A smaller one forgets less before anything is learned."""
    tie_embeddings: bool = False
    """Use the embedding as the output projection."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. auto: bfloat16 on an accelerator, float32 on a CPU. Parameters are float32."""
    implementation: Implementation = "auto"
    """Implementation of the delta rules. auto: the fastest that supports the call on this device."""
    remat: Literal["none", "rule", "full"] = "none"
    """What a block computes again in the backward pass to save memory: nothing, all but the rule, or all."""


RuleName = Literal["gated_delta", "delta", "mamba2", "linear_attention", "softmax_attention"]


@dataclasses.dataclass(frozen=True)
class ModelOptions(SizeOptions):
    """A model: its size, its layers and its rule."""

    model: Literal["gated_delta_net", "hybrid"] = "gated_delta_net"
    """hybrid: with attention in some layers, in the form of Qwen3.5, so that `save_hf` can write it."""
    attention_every: int = 4
    """In a hybrid the last layer of so many is attention."""
    rule: RuleName = "gated_delta"
    """What the token mixers do with q, k, v, g and beta."""
    allow_neg_eigval: bool = False
    """Write strength in [0, 2] instead of [0, 1]."""
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the residual stream between the blocks."""


NOT_IN_CONFIG = {"time_step", "model", "attention_every"}
"""Options of a model that are no fields of a ModelConfig: they change its initial weights, or set several fields."""

NOT_OPTIONS = {
    *("vocab_size", "num_v_heads", "intermediate_size", "norm_eps", "scan_layers"),
    *("layer_types", "attention", "experts", "dense_layers", "mixer_norm_eps", "zero_centred_norms"),
    *("scale_embedding", "weight_dtype"),
}
"""Fields of a ModelConfig that are no options: the task sets vocab_size, the others keep their defaults."""


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """AdamW with a linear warm-up and a cosine decay, whatever the learning rate."""

    end_lr: float = 0.02
    """Learning rate of the last step over the peak."""
    warmup: float = 0.05
    """Part of the steps with a rising learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; A_log, dt_bias, norms and biases have none."""
    clip: float = 1.0
    """Largest global norm of a gradient."""


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(ScheduleOptions):
    """An optimiser: its schedule and its learning rate."""

    lr: float = 3e-3
    """Peak learning rate."""


@dataclasses.dataclass(frozen=True)
class TrainOptions[T: TaskOptions]:
    """Everything that a run depends on."""

    task: T
    run: RunOptions = RunOptions()
    model: ModelOptions = ModelOptions()
    optimizer: OptimizerOptions = OptimizerOptions()


def _generated(task: TaskOptions, steps: int = 400, **model: Any) -> TrainOptions:
    return TrainOptions(
        task,
        RunOptions(batch_size=64, steps=steps, eval_every=100),
        ModelOptions(num_layers=2, expand_v=1.0, **model),
        OptimizerOptions(lr=5e-3),
    )


TASKS: dict[str, TrainOptions] = {
    "bytes": TrainOptions(TextOptions()),
    "recall": _generated(RecallOptions(), steps=800),  # of two seeds, one has learned nothing at 400
    "needle": _generated(NeedleOptions()),
    "sentence": _generated(SentenceOptions()),
    "parity": _generated(ParityOptions(), allow_neg_eigval=True),
    "permutation": _generated(PermutationOptions(), allow_neg_eigval=True),
    "copy": _generated(CopyOptions()),
}
"""Tasks by name, with their default options."""

_NOT_STORED = {
    *"out resume config max_minutes compilation_cache mesh".split()
}  # belong to one start of a run
_MAY_CHANGE = {"keep", "data"}  # on --resume; of the data the fingerprint counts, not where it lies
_YOUNGER = (
    "model attention_every remat write_start scales scaled lr_seeds train_sequences cases packages test_lengths"
).split()  # came after the first runs that are kept

_POSITIVE = (
    "steps batch_size accumulate log_every eval_every save_every keep max_minutes hidden_size num_layers "
    "num_heads head_dim expand_v mlp_ratio time_step lr clip length val_bytes sample_bytes num_pairs power "
    "val_sequences test_pairs test_lengths noise_tokens num_values needle_length num_tokens seeds lrs together "
    "scales lr_seeds train_sequences tokens top_k attention_every"
).split()
_NOT_NEGATIVE = "seed data_seed weight_decay temperature text_weight".split()
_FRACTION = "end_lr warmup".split()
_SEEDS = "seed data_seed".split()  # 32 bits without a sign
_REPEATS = {"cases"}  # how often a value stands there means something
_MOST_LAYERS = 10_000  # of a hybrid, whose configuration lists the type of each


def flat(options: Any) -> dict[str, Any]:
    """Every option by its name; names are unique over the groups."""
    groups = [getattr(options, group.name) for group in dataclasses.fields(options)]
    return {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}


def check_values(options: dict[str, Any]) -> None:
    """Raises RunError naming the first option whose value cannot be used, whatever the others are."""
    for name, given in options.items():
        if isinstance(given, tuple) and not (given and (name in _REPEATS or len(set(given)) == len(given))):
            fail(name, "different values, at least one", " ".join(map(str, given)) or "none")
        for value in given if isinstance(given, tuple) else (given,):
            if value is None:
                continue
            if name in _SEEDS and value >= 2**32:
                fail(name, "less than 2**32", value)
            if isinstance(value, int) and value >= 2**31 and name not in _SEEDS:
                fail(name, "less than 2**31", value)
            if isinstance(value, float) and not math.isfinite(value):
                fail(name, "a finite number", value)
            if name in _POSITIVE and not value > 0:
                fail(name, "a number above 0", value)
            if name in _NOT_NEGATIVE and not value >= 0:
                fail(name, "0 or more", value)
            if name in _FRACTION and not 0 <= value < 1:
                fail(name, "a fraction in [0, 1)", value)


def config_values(model: SizeOptions) -> dict[str, Any]:
    """The fields of a `gdn_jax.models.ModelConfig` that options set, by name; what is "auto" is left out."""
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    values = {name: value for name, value in values.items() if name not in NOT_IN_CONFIG and value != "auto"}
    return values | (
        hybrid_values(model) if isinstance(model, ModelOptions) and model.model == "hybrid" else {}
    )


def hybrid_values(model: "ModelOptions") -> dict[str, Any]:
    """The fields of a ModelConfig that make a model a hybrid in the form of Qwen3.5.

    Attention has as many heads as a GatedDeltaNet and is as wide as the model, up to 8 dimensions for each head; a
    quarter of each is rotated.
    """
    from gdn_jax.models.config import AttentionConfig, hybrid_layers

    head_dim = max(8, model.hidden_size // model.num_heads // 8 * 8)
    return {
        "layer_types": hybrid_layers(model.num_layers, model.attention_every),
        "attention": AttentionConfig(
            num_heads=model.num_heads,
            head_dim=head_dim,
            qk_norm="head",
            output_gate=True,
            rotary_dim=head_dim // 4,
        ),
        "zero_centred_norms": True,
        "scale_embedding": False,
    }


def check_size(model: SizeOptions) -> None:
    """Raises RunError naming an option of the model that does not fit the others."""
    from gdn_jax.models import ModelConfig

    try:
        ModelConfig(**config_values(model))
    except ValueError as error:
        name, _, message = str(error).partition(":")
        raise RunError(f"{flag(name)}:{message}") from error


def check_layers(model: ModelOptions) -> None:
    """Raises RunError where the layers of a hybrid cannot be had."""
    if model.model != "hybrid":
        return
    if model.num_layers > _MOST_LAYERS:
        fail("num_layers", f"at most {_MOST_LAYERS} in a hybrid", model.num_layers)
    if not 2 <= model.attention_every <= model.num_layers:
        fail("attention_every", f"2 to --num-layers {model.num_layers}", model.attention_every)
    for name, wanted in (("rule", "gated_delta"), ("allow_neg_eigval", False)):
        if getattr(model, name) != wanted:
            fail(name, f"{wanted} in a hybrid", getattr(model, name))


def check(options: TrainOptions) -> None:
    """Raises RunError naming the first option whose value cannot be used."""
    check_values(flat(options))
    run = options.run
    if run.batch_size % run.accumulate:
        fail("accumulate", f"a divisor of --batch-size {run.batch_size}", run.accumulate)
    check_layers(options.model)
    check_size(options.model)
    options.task.check()
    if isinstance(options.task, TextOptions) and options.model.rule == "softmax_attention":
        fail("rule", "a rule with a recurrent state, through which the sample is written", options.model.rule)


def to_json(options: Any) -> dict[str, object]:
    """Options as config.json keeps them: without those that belong to one start of a run."""
    values = {name: value for name, value in flat(options).items() if name not in _NOT_STORED}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    if isinstance(values.get("data"), Path):
        values["data"] = str(values["data"].resolve())
    return values


def from_json(name: str, stored: dict[str, object], run: RunOptions) -> TrainOptions:
    """Options of a stored run; those that are not stored come from `run`.

    Raises:
      RunError: the stored names are not those of this version.
    """
    default = TASKS[name]
    start = {name: getattr(run, name) for name in _NOT_STORED - {"config"}}
    return fill(default, younger(default) | stored, start)


def younger(default: Any) -> dict[str, object]:
    """Options that older runs did not store, with the defaults that those runs had."""
    values = to_json(default)
    return {name: values[name] for name in _YOUNGER if name in values}


def fill(default: Any, stored: dict[str, object], more: dict[str, object]) -> Any:
    """Options like `default` with the values of a JSON object, and some that are not stored.

    Raises:
      RunError: the stored names are not those of this version, or a value is not of its type.
    """
    known = set(flat(default)) - set(more)
    if set(stored) != known:
        odd = ", ".join(sorted(set(stored) ^ known))
        raise RunError(
            f"config.json: expected the options of this version of gdn-jax, got a difference in {odd}"
        )
    for group in dataclasses.fields(default):
        for name, hint in get_type_hints(type(getattr(default, group.name))).items():
            if name in known and not _fits(stored[name], hint):
                kind = getattr(hint, "__name__", hint)
                raise RunError(f"config.json: expected {name} of type {kind}, got {stored[name]!r}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
    if values.get("data") is not None:
        values["data"] = Path(str(values["data"]))
    values |= more
    groups = {}
    for group in dataclasses.fields(default):
        cls = type(getattr(default, group.name))
        groups[group.name] = cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})
    return type(default)(**groups)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of a JSON object can be an option of that type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, list) and all(_fits(x, inner[0]) for x in value)
    if origin is UnionType:
        return any(_fits(value, kind) for kind in inner)
    if isinstance(value, bool):
        return hint is bool
    kinds = {Path: str, float: (int, float)}
    return isinstance(value, kinds.get(hint, hint))


def check_same(stored: dict[str, object], asked: dict[str, object]) -> None:
    """Raises RunError naming the first option in which a resumed run would differ from its past."""
    for name, value in stored.items():
        if name not in _MAY_CHANGE and asked[name] != value:
            raise RunError(f"{flag(name)}: expected {value} as in the run to resume, got {asked[name]}")
