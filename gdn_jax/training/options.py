"""Options of `gdn train` and `gdn sweep`, one frozen dataclass a topic, and every check that needs no data.

The docstring under a field is its help text on the command line.
"""

import dataclasses
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from gdn_jax.commands import fields
from gdn_jax.commands.errors import RunError, fail, flag
from gdn_jax.commands.fields import (
    Fraction,
    Later,
    MayChange,
    NotInStep,
    NotNegative,
    PerStart,
    Positive,
    Range,
    Seed,
)
from gdn_jax.layers.table import TOKEN_MIXERS
from gdn_jax.rule.implementations import BY_KERNELS, IMPLEMENTATIONS
from gdn_jax.rules import RULES
from gdn_jax.shapes import ArgumentError
from gdn_jax.training.optimizers import OPTIMIZERS
from gdn_jax.training.starts import STARTS
from gdn_jax.training.tasks.options import TaskOptions
from gdn_jax.training.tasks.table import CLASSES
from gdn_jax.training.tasks.task import Task

if TYPE_CHECKING:
    Implementation = RuleName = MixerName = OptimizerName = StartName = str
else:  # for the command line
    StartName = Literal[tuple(STARTS)]
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    Implementation = Literal["auto", *IMPLEMENTATIONS]
    RuleName, MixerName = Literal[tuple(RULES)], Literal[tuple(TOKEN_MIXERS)]
Form = Literal["gated_delta_net", "hybrid", "hybrid_control", "transformer"]
NotInConfig = fields.Mark("It is no field of a ModelConfig: it changes its weights, or sets several fields.")
_MOST_LAYERS = 10_000
"""Layers at most: a model is made layer by layer, and the configuration of a hybrid lists the type of each."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """A run: where it goes, how long it lasts, how often it reports."""

    out: Annotated[Path | None, PerStart] = None
    """Run folder to create. Without it, a new folder runs/<task>-<number>."""
    resume: Annotated[bool, PerStart] = False
    """Continue the run in --out: its stored options are used, and a different one is an error."""
    init_from: Annotated[Path | None, PerStart] = None
    """Start a new run, with a schedule of its own, from the weights of this run of the same task. Options have their
    defaults, but the seed is the next one, so the batches differ."""
    seed: Annotated[int, NotInStep, Seed] = 0
    """Seed of the initial weights, the batches and the sample."""
    steps: Annotated[int, Positive] = 800
    """Optimiser steps. The learning-rate schedule depends on it, never on the clock."""
    batch_size: Annotated[int, Positive] = 4
    """Sequences of one optimiser step."""
    accumulate: Annotated[int, Positive] = 1
    """Number of micro-batches of a batch, to save memory. The gradient is the same as without."""
    start: Annotated[StartName, Later] = "empty"
    """Initial recurrent states of the rows of a training batch. passed: the states after the row before, without a
    gradient through them; so a model learns to read on after more tokens than a row has."""
    log_every: Annotated[int, NotInStep, Positive] = 20
    """Steps between two lines of metrics.jsonl."""
    eval_every: Annotated[int, NotInStep, Positive] = 200
    """Steps between two validations (the last step is always validated)."""
    save_every: Annotated[int, NotInStep, Positive] = 200
    """Steps between two checkpoints (the last step is always saved)."""
    deterministic: bool = True
    """On a GPU, use only operations that give the same bits each time."""
    keep: Annotated[int, MayChange, Positive] = 2
    """Checkpoints kept."""
    compilation_cache: Annotated[bool, PerStart] = True
    """On an accelerator, keep compiled programs for the next run, in JAX_COMPILATION_CACHE_DIR or else in the user's
    cache directory."""
    mesh: Annotated[str | None, PerStart] = None
    """Split the work over all devices of all processes, as in data=2,head=2,context=2: rows, heads, and tokens of a
    row. With ,sharded the devices of data share the parameters. A resumed run may have another mesh."""
    max_minutes: Annotated[float | None, PerStart, Positive] = None
    """Save and stop after this many minutes of training. --resume continues."""


@dataclasses.dataclass(frozen=True)
class SizeOptions:
    """Size and arithmetic of a model, whatever its rule."""

    hidden_size: Annotated[int, Positive] = 128
    """Width of the residual stream."""
    num_layers: Annotated[int, Positive] = 4
    """Number of blocks; each has a token mixer and a SwiGLU."""
    num_heads: Annotated[int, Positive] = 2
    """Number of heads in a recurrent layer."""
    head_dim: Annotated[int, Positive] = 32
    """Width K of a key and of a query."""
    expand_v: Annotated[float, Positive] = 2.0
    """Width of a value divided by the width of a key, V / K."""
    conv_size: Annotated[int, Positive] = 4
    """Taps of the causal convolution, 2 to 4."""
    mlp_ratio: Annotated[float, Positive] = 2.0
    """Inner width of the SwiGLU divided by hidden_size."""
    time_step: Annotated[float, Positive, NotInConfig] = 1.0
    """Factor on the initial time steps (dt) of the gates: 0.1 makes the initial half-lives ten times as long."""
    write_start: Annotated[float | None, Range("a number between 0 and 1", lambda x: 0 < x < 1)] = None
    """Initial write strength (beta), between 0 and 1, set by a learned bias; with --allow-neg-eigval twice as much.
    None: no bias, so that beta starts at 0.5. With a smaller start the untrained model forgets less: with
    16-dimensional keys models learn recall sooner from 0.06, see results/README.md."""
    tie_embeddings: bool = False
    """Use the embedding as the output projection."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. auto: bfloat16 on an accelerator, float32 on a CPU. Parameters are float32."""
    implementation: Implementation = "auto"
    """Implementation of the delta rules. auto: the fastest one that this device supports."""
    remat: Literal["none", "rule", "full"] = "none"
    """Recomputation in the backward pass, to save memory. rule: all of a block but the rule. full: all of it."""
    matmul: Literal["default", "float8", "float8_e4m3"] = "default"
    """Dtype of the products of projections: the compute dtype, or FP8 with cotangents in E5M2 (float8) or in E4M3
    (float8_e4m3). FP8 is for GPUs of compute capability 9.0."""

    def config_values(self) -> dict[str, Any]:
        """Returns the fields of a `gdn_jax.models.ModelConfig` that options set; what is "auto" is left out."""
        names = {field.name for field in dataclasses.fields(self)} - fields.marked(type(self), NotInConfig)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name in names and value != "auto"}

    def check(self) -> None:
        """Raises RunError naming an option that does not fit the others."""
        if self.num_layers > _MOST_LAYERS:
            fail("num_layers", f"at most {_MOST_LAYERS}", self.num_layers)
        from gdn_jax.models import ModelConfig

        try:
            ModelConfig(**self.config_values())
        except ArgumentError as error:
            fail(error.name, error.expected, error.got)


# The form of Qwen3.5 beside its attention layers.
_QWEN3_5 = {"zero_centred_norms": True, "scale_embedding": False}


@dataclasses.dataclass(frozen=True)
class ModelOptions(SizeOptions):
    """A model: its size, its layers and its rule."""

    model: Annotated[Form, NotInConfig] = "gated_delta_net"
    """Architecture. hybrid: like Qwen3.5, with attention in some layers; `save_hf` can write one of gated_delta_net.
    hybrid_control: the same without attention, as a baseline. transformer: attention with RoPE in every layer."""
    attention_every: Annotated[int, Positive, NotInConfig] = 4
    """Period of the attention layers in a hybrid: with 4, every fourth layer is attention."""
    mixer: Annotated[MixerName, Later] = "gated_delta_net"
    """Token mixer of the recurrent layers. gated_delta_product takes two steps for each token; with
    --allow-neg-eigval these can be reflections."""
    rule: RuleName = "gated_delta"
    """Rule of a gated_delta_net: how q, k, v, g and beta become outputs."""
    allow_neg_eigval: bool = False
    """Write strength in [0, 2] instead of [0, 1]."""
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the residual stream between the blocks."""
    mtp_weight: Annotated[float, NotNegative, NotInConfig, Later] = 0.0
    """Weight of the loss of a multi-token-prediction head, from which generation can draft. The model needs an
    attention layer, and a checkpoint needs the head. 0: no such loss."""

    def config_values(self) -> dict[str, Any]:
        forms = {
            "hybrid": self.hybrid_values,
            "hybrid_control": lambda: _QWEN3_5,
            "transformer": self.transformer_values,
        }
        return super().config_values() | (forms[self.model]() if self.model in forms else {})

    def hybrid_values(self) -> dict[str, Any]:
        """Returns the fields of a ModelConfig that make a model a hybrid in the form of Qwen3.5.

        Attention has as many heads as the mixer and is as wide as the model, up to 8 dimensions for each head. A
        quarter of each head is rotated.
        """
        from gdn_jax.models.config import AttentionConfig, hybrid_layers

        mixer = TOKEN_MIXERS[self.mixer]
        head_dim = self._attention_dim()
        return {
            "layer_types": hybrid_layers(self.num_layers, self.attention_every, mixer.name),
            "attention": AttentionConfig(
                num_heads=self.num_heads,
                head_dim=head_dim,
                qk_norm="head",
                output_gate=True,
                rotary_dim=head_dim // 4,
            ),
            **_QWEN3_5,
        }

    def transformer_values(self) -> dict[str, Any]:
        """Returns the fields of a ModelConfig that make a model a Transformer.

        Attention has as many heads as a GatedDeltaNet, is as wide as the model, and rotates whole heads; queries and
        keys have no convolution, no activation and no norm. The SwiGLU is wider or narrower by what attention has
        less or more than a GatedDeltaNet, so that there are about as many parameters.
        """
        from gdn_jax.models.config import AttentionConfig

        head_dim, keys = self._attention_dim(), self.num_heads * self.head_dim
        mixer = 2 * keys + 3 * round(keys * self.expand_v)  # q, k; v, gate, o
        return {
            "layer_types": ("attention",) * self.num_layers,
            "attention": AttentionConfig(num_heads=self.num_heads, head_dim=head_dim, rotary_dim=head_dim),
            "mlp_ratio": self.mlp_ratio + (mixer - 4 * self.num_heads * head_dim) / (3 * self.hidden_size),
        }

    def _attention_dim(self) -> int:
        """Width of a head of attention that is as wide as the model, a multiple of 8."""
        return max(8, self.hidden_size // self.num_heads // 8 * 8)

    def check(self) -> None:
        if self.model == "hybrid" and not 2 <= self.attention_every <= self.num_layers:
            fail("attention_every", f"2 to --num-layers {self.num_layers}", self.attention_every)
        if self.model != "gated_delta_net":
            if self.model == "transformer" and self.mixer != "gated_delta_net":
                fail("mixer", "gated_delta_net in a transformer, which has no recurrent layer", self.mixer)
            for name, wanted in (("rule", "gated_delta"), ("allow_neg_eigval", False)):
                if getattr(self, name) != wanted and self.mixer == "gated_delta_net":
                    fail(name, f"{wanted} in a {self.model}", getattr(self, name))
        rule = RULES.get(self.rule)  # ModelConfig knows what is none
        if self.implementation in BY_KERNELS and rule is not None and "implementation" not in rule.options:
            fail(
                "implementation", f"auto with the rule {self.rule}, which has no kernels", self.implementation
            )
        super().check()


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """An optimiser with a linear warm-up and a cosine decay, whatever the learning rate."""

    optimizer: Annotated[OptimizerName, Later] = "adamw"
    """muon: Muon for the matrices of all layers, scaled to AdamW's update size and with its learning rates, and AdamW
    for everything else. It needs one device, and all weights trained."""
    end_lr: Annotated[float, Fraction] = 0.02
    """Learning rate of the last step, as a fraction of the peak."""
    warmup: Annotated[float, Fraction] = 0.05
    """Fraction of the steps in which the learning rate rises."""
    weight_decay: Annotated[float, NotNegative] = 0.1
    """Decoupled weight decay, of matrices only: not of A_log, dt_bias, norms and biases."""
    clip: Annotated[float, Positive] = 1.0
    """Largest global norm of a gradient."""


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(ScheduleOptions):
    """An optimiser: its schedule and its learning rate."""

    lr: Annotated[float, Positive] = 3e-3
    """Peak learning rate."""


@dataclasses.dataclass(frozen=True)
class TrainOptions[T: TaskOptions]:
    """All options of a run."""

    task: T
    run: RunOptions = RunOptions()
    model: ModelOptions = ModelOptions()
    optimizer: OptimizerOptions = OptimizerOptions()


def _of_task(task: type[Task]) -> TrainOptions:
    """Returns the default options of a task."""

    def group(cls: type) -> Any:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in task.training.items() if name in names})

    return TrainOptions(task.Options(), group(RunOptions), group(ModelOptions), group(OptimizerOptions))


TASKS: dict[str, TrainOptions] = {name: _of_task(task) for name, task in CLASSES.items()}
"""Tasks by name, with their default options."""


OF_A_CHECKPOINT = {"mtp_weight", "dtype", "implementation", "remat"}
"""Options of a model that one from a checkpoint has too."""


def flat(options: Any) -> dict[str, Any]:
    """Returns every option by its name. No two groups have an option of the same name."""
    groups = [getattr(options, group.name) for group in dataclasses.fields(options)]
    return {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}


def check(options: TrainOptions) -> None:
    """Raises RunError naming the first option whose value cannot be used."""
    check_fields(options)
    run = options.run
    if run.resume and run.init_from is not None:
        fail("init_from", "none with --resume, which has weights of its own", run.init_from)
    if run.batch_size % run.accumulate:
        fail("accumulate", f"a divisor of --batch-size {run.batch_size}", run.accumulate)
    pretrained, optimizer = options.task.pretrained(), options.optimizer.optimizer
    if optimizer == "muon" and (run.mesh or (pretrained is not None and pretrained.lora_rank is not None)):
        fail("optimizer", "adamw with --mesh or --lora-rank", optimizer)
    if run.start == "passed":
        if run.mesh or options.model.remat != "none" or options.model.matmul != "default":
            fail("start", "empty with --mesh, --remat or --matmul", run.start)
        if run.batch_size == run.accumulate:
            fail("start", "empty where batches, or their pieces, are single rows", run.start)
    options.model.check()
    options.task.check()
    options.task.check_rule(RULES[options.model.rule])
    if pretrained is not None:
        given, default = vars(options.model), vars(ModelOptions())
        for name in default:
            if name not in OF_A_CHECKPOINT and given[name] != default[name]:
                fail(name, f"{default[name]}, the value of the --from checkpoint", given[name])


def after(options: TrainOptions) -> TrainOptions:
    """Returns options of a run that begins with the weights of a run with these."""
    seed = (options.run.seed + 1) % 2**32
    return dataclasses.replace(options, run=dataclasses.replace(options.run, seed=seed))


def check_fields(options: Any) -> None:
    """Raises RunError for the first option of all groups that its own checks refuse."""
    for group in dataclasses.fields(options):
        fields.check(getattr(options, group.name))


def to_json(options: Any) -> dict[str, object]:
    """Returns options as config.json keeps them: without those that belong to one start of a run."""
    left_out = _marked(options, PerStart)
    values = {name: value for name, value in flat(options).items() if name not in left_out}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {
        name: str(value.resolve()) if isinstance(value, Path) else value for name, value in values.items()
    }


def of_step(options: Any) -> dict[str, object]:
    """Returns the options that the program of the training step may depend on."""
    left_out = _marked(options, MayChange) | _marked(options, NotInStep)
    return {name: value for name, value in to_json(options).items() if name not in left_out}


def from_json(default: Any, stored: dict[str, object], start: Any) -> Any:
    """Returns stored options.

    Args:
      default: options of the same task, whose values do not count.
      stored: as `to_json` made it.
      start: the group of options whose values come from this start of the run where they are not stored.

    Raises:
      RunError: the stored names are not those of this version, or a value is not of its type.
    """
    known = {*flat(default)} - _marked(default, PerStart)
    stored = _later(default) | stored
    if set(stored) != known:
        odd = ", ".join(sorted(set(stored) ^ known))
        raise RunError(
            f"config.json: expected the options of this version of gdn-jax, got a difference in {odd}"
        )
    for group in dataclasses.fields(default):
        for name, hint in get_type_hints(type(getattr(default, group.name))).items():
            if name in known and not _is_of(stored[name], hint):
                kind = getattr(hint, "__name__", hint)
                raise RunError(f"config.json: expected {name} of type {kind}, got {stored[name]!r}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
    for name in {"data", "from_"} & values.keys():
        values[name] = None if values[name] is None else Path(str(values[name]))
    values |= {name: getattr(start, name) for name in fields.marked(type(start), PerStart)}
    groups = {}
    for group in dataclasses.fields(default):
        cls = type(getattr(default, group.name))
        groups[group.name] = cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})
    return type(default)(**groups)


def _later(options: Any) -> dict[str, Any]:
    """Returns the defaults of the options of all groups that runs of earlier versions have not stored."""
    groups = (dataclasses.fields(getattr(options, group.name)) for group in dataclasses.fields(options))
    later = _marked(options, Later)
    return {field.name: field.default for group in groups for field in group if field.name in later}


def _marked(options: Any, mark: fields.Mark) -> set[str]:
    """Returns the names of the options of all groups that carry a mark."""
    groups = (type(getattr(options, group.name)) for group in dataclasses.fields(options))
    return set().union(*(fields.marked(group, mark) for group in groups))


def _is_of(value: object, hint: Any) -> bool:
    """Says whether a value of a JSON object can be an option of that type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, list) and all(_is_of(x, inner[0]) for x in value)
    if origin is UnionType:
        return any(_is_of(value, kind) for kind in inner)
    if isinstance(value, bool):
        return hint is bool
    if hint is Path and isinstance(value, str) and "\0" in value:
        return False  # no file has such a name
    kinds = {Path: str, float: (int, float)}
    return isinstance(value, kinds.get(hint, hint))


def check_same(stored: Any, asked: Any, advice: str = "") -> None:
    """Raises RunError naming the first option in which a resumed run would differ from its past, with advice."""
    may_change, now = _marked(stored, MayChange), to_json(asked)
    for name, value in to_json(stored).items():
        if name not in may_change and now[name] != value:
            raise RunError(f"{flag(name)}: expected {value} as in the run to resume, got {now[name]}{advice}")
