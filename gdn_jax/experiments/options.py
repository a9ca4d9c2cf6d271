"""Options of `gdn train`, one frozen dataclass a topic, and every check that needs no data.

The docstring under a field is its help text on the command line.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from gdn_jax.experiments.errors import RunError


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
    max_minutes: float | None = None
    """Save and stop after this many minutes of training, finished or not. --resume continues."""


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Size and arithmetic of the model."""

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
    allow_neg_eigval: bool = False
    """Write strength in [0, 2] instead of [0, 1]."""
    tie_embeddings: bool = False
    """Use the embedding as the output projection."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. auto: bfloat16 on an accelerator, float32 on a CPU. Parameters are float32."""
    implementation: Literal["auto", "recurrent", "chunked", "mosaic_gpu"] = "auto"
    """Implementation of the rule. auto: the fastest that supports the call on this device."""


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with a linear warm-up and a cosine decay."""

    lr: float = 3e-3
    """Peak learning rate."""
    end_lr: float = 0.02
    """Learning rate of the last step over the peak."""
    warmup: float = 0.05
    """Part of the steps with a rising learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; A_log, dt_bias, norms and biases have none."""
    clip: float = 1.0
    """Largest global norm of a gradient."""


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """The text and what is written at the end."""

    data: Path | None = None
    """File or folder. Without it, the .py files of the running Python's standard library."""
    glob: str = "*"
    """Names of the files read below a folder."""
    length: int = 256
    """Bytes of a training sequence, T."""
    val_bytes: int = 131072
    """Held-out bytes scored by a validation, spread evenly over the held-out text."""
    prompt: str = ""
    """Start of the sample; empty: the start of a new file."""
    sample_bytes: int = 600
    """Bytes of the sample."""
    temperature: float = 0.7
    """Temperature of the sample; 0 takes the likeliest byte."""


@dataclasses.dataclass(frozen=True)
class RecallTaskOptions:
    """Size of the recall problem."""

    vocab_size: int = 64
    """Tokens: the first half are keys, the second half values."""
    num_pairs: int = 8
    """Key-value pairs of a sequence, each queried once."""
    length: int = 32
    """Tokens of a sequence, even and at least four a pair."""
    power: float = 0.01
    """Exponent a of the gap law p(gap) ~ gap^(a - 1): small is short gaps."""
    val_sequences: int = 512
    """Fresh sequences of a validation."""


@dataclasses.dataclass(frozen=True)
class BytesOptions:
    """Next-byte modelling of real text; validated in bits per byte on held-out files."""

    run: RunOptions = RunOptions()
    model: ModelOptions = ModelOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    text: TextOptions = TextOptions()


@dataclasses.dataclass(frozen=True)
class RecallOptions:
    """Multi-query associative recall (Arora et al. 2023, "Zoology"); accuracy on fresh sequences."""

    run: RunOptions = RunOptions(batch_size=64, steps=400, eval_every=100)
    model: ModelOptions = ModelOptions(num_layers=2, expand_v=1.0)
    optimizer: OptimizerOptions = OptimizerOptions(lr=5e-3)
    recall: RecallTaskOptions = RecallTaskOptions()


TrainOptions = BytesOptions | RecallOptions
TASKS: dict[str, type[BytesOptions] | type[RecallOptions]] = {"bytes": BytesOptions, "recall": RecallOptions}

_NOT_STORED = {"out", "resume", "max_minutes"}  # belong to one start of a run
_MAY_CHANGE = {"keep"}  # on --resume

_POSITIVE = (
    "steps batch_size accumulate log_every eval_every save_every keep max_minutes hidden_size num_layers "
    "num_heads head_dim expand_v mlp_ratio lr clip length val_bytes sample_bytes num_pairs power "
    "val_sequences"
).split()
_NOT_NEGATIVE = "seed weight_decay temperature".split()
_FRACTION = "end_lr warmup".split()


def task_name(options: TrainOptions) -> str:
    """Name of the task on the command line."""
    return next(name for name, cls in TASKS.items() if isinstance(options, cls))


def flat(options: TrainOptions) -> dict[str, Any]:
    """Every option by its name; names are unique over the groups."""
    groups = [getattr(options, group.name) for group in dataclasses.fields(options)]
    return {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}


def flag(name: str) -> str:
    """Name of an option as typed."""
    return "--" + name.replace("_", "-")


def _fail(name: str, expected: str, got: object) -> None:
    raise RunError(f"{flag(name)}: expected {expected}, got {got}")


def check(options: TrainOptions) -> None:
    """Raises RunError naming the first option whose value cannot be used."""
    values = flat(options)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            _fail(name, "a finite number", value)
        if name in _POSITIVE and value is not None and not value > 0:
            _fail(name, "a number above 0", value)
        if name in _NOT_NEGATIVE and not value >= 0:
            _fail(name, "0 or more", value)
        if name in _FRACTION and not 0 <= value < 1:
            _fail(name, "a fraction in [0, 1)", value)
    run, model = options.run, options.model
    if run.seed >= 2**32:
        _fail("seed", "less than 2**32", run.seed)
    if run.batch_size % run.accumulate:
        _fail("accumulate", f"a divisor of --batch-size {run.batch_size}", run.accumulate)
    if run.resume and run.out is None:
        _fail("resume", "--out with the run folder to continue", "no --out")
    if model.conv_size not in (2, 3, 4):
        _fail("conv_size", "2, 3 or 4", model.conv_size)
    if not (model.head_dim * model.expand_v).is_integer():
        _fail("expand_v", f"a whole number of values with --head-dim {model.head_dim}", model.expand_v)
    if isinstance(options, RecallOptions):
        recall = options.recall
        if recall.length % 2:
            _fail("length", "an even number", recall.length)
        if recall.length < 4 * recall.num_pairs:
            _fail("length", f"at least 4 * --num-pairs = {4 * recall.num_pairs}", recall.length)
        if recall.vocab_size % 2 or recall.vocab_size < 2 * recall.num_pairs:
            expected = f"an even number, at least 2 * --num-pairs = {2 * recall.num_pairs}"
            _fail("vocab_size", expected, recall.vocab_size)


def to_json(options: TrainOptions) -> dict[str, object]:
    """Options as config.json keeps them: without those that belong to one start of a run."""
    values = {name: value for name, value in flat(options).items() if name not in _NOT_STORED}
    if isinstance(values.get("data"), Path):
        values["data"] = str(values["data"].resolve())
    return values


def from_json(name: str, stored: dict[str, object], run: RunOptions) -> TrainOptions:
    """Options of a stored run; those that are not stored come from `run`.

    Raises:
      RunError: the stored names are not those of this version.
    """
    cls = TASKS[name]
    known = set(flat(cls())) - _NOT_STORED
    if set(stored) != known:
        odd = ", ".join(sorted(set(stored) ^ known))
        raise RunError(
            f"config.json: expected the options of this version of gdn-jax, got a difference in {odd}"
        )
    values = dict(stored)
    if values.get("data") is not None:
        values["data"] = Path(str(values["data"]))
    values |= {name: getattr(run, name) for name in _NOT_STORED}
    groups = {}
    for group in dataclasses.fields(cls):
        group_cls = type(getattr(cls(), group.name))
        groups[group.name] = group_cls(**{f.name: values[f.name] for f in dataclasses.fields(group_cls)})
    return cls(**groups)


def check_same(stored: TrainOptions, asked: TrainOptions) -> None:
    """Raises RunError naming the first option in which a resumed run would differ from its past."""
    old, new = to_json(stored), to_json(asked)
    for name, value in old.items():
        if name not in _MAY_CHANGE and new[name] != value:
            raise RunError(f"{flag(name)}: expected {value} as in the run to resume, got {new[name]}")
