"""Options of `gdn sweep`, and their two sets of defaults: small for two CPU cores, full for one GPU."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gdn_jax.commands.errors import RunError, fail
from gdn_jax.commands.fields import Distinct, Later, PerStart, Positive, Range, Seed
from gdn_jax.commands.files import parse_json, read_file
from gdn_jax.training import options as options_lib
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.options import ScheduleOptions, SizeOptions
from gdn_jax.training.tasks.copying import CopyOptions, PalindromeOptions
from gdn_jax.training.tasks.needle import NeedleOptions
from gdn_jax.training.tasks.next_byte import TextOptions
from gdn_jax.training.tasks.options import TaskOptions
from gdn_jax.training.tasks.recall import RecallOptions
from gdn_jax.training.tasks.sentence import SentenceOptions
from gdn_jax.training.tasks.stacks import StackOptions
from gdn_jax.training.tasks.state_tracking import ParityOptions, PermutationOptions

if TYPE_CHECKING:
    MixerName = str
else:
    MixerName = Literal[tuple(MIXERS)]


_MOST_RUNS = 100_000
"""Runs of a grid at most: they are listed, and each has a line of runs.jsonl, which is read after every group."""

_Share = Range("a number between 0 and 1", lambda x: 0 < x < 1)


@dataclasses.dataclass(frozen=True)
class GridOptions:
    """The grid of runs that are compared: mixers x scales x learning rates x seeds."""

    out: Annotated[Path | None, PerStart] = None
    """Folder to create. Without it, a new folder runs/sweep-<task>-<number>."""
    resume: Annotated[bool, PerStart] = False
    """Continue the sweep in --out: its stored options are used, and a different one is an error. Other processes may
    be at it: each takes mixers that no other one is at."""
    config: Annotated[Path | None, PerStart] = None
    """JSON file whose "options" take the place of the defaults, such as the config.json of a sweep."""
    size: Literal["small", "full"] = "small"
    """Defaults of all other options. small: minutes on two CPU cores; full: minutes on one H200."""
    mixers: Annotated[tuple[MixerName, ...], Distinct] = (
        "linear_attention",
        "mamba2",
        "delta_net",
        "gated_delta_net",
        "gated_delta_net_neg",
        "softmax_attention",
    )
    """Token mixers. The first six have the same parameters, and for a seed the same initial weights."""
    scales: Annotated[tuple[int, ...], Distinct, Positive] = (1,)
    """Factors of the model's size, each with learning rates and seeds of its own."""
    scaled: Literal["width", "depth", "state"] = "width"
    """Sizes that --scales multiply. width: --hidden-size and --num-heads, and so the state; depth: --num-layers;
    state: --head-dim, and so the state by the square."""
    lrs: Annotated[tuple[float, ...], Distinct, Positive] = (4e-3, 1.2e-2)
    """Peak learning rates. The one with the lowest mean validation loss over the seeds counts, for each mixer."""
    seeds: Annotated[int, Positive] = 3
    """Runs that differ in their initial weights and batches: seeds 0, 1, ..."""
    lr_seeds: Annotated[int | None, Positive] = None
    """The first so many seeds try every learning rate, the others the one that was best there. None: all try all."""
    data_seed: Annotated[int, Seed] = 0
    """Seed of the validation and test sets, which all runs share."""
    steps: Annotated[int, Positive] = 500
    """Optimiser steps of a run."""
    batch_size: Annotated[int, Positive] = 32
    """Sequences of an optimiser step."""
    write_starts: Annotated[tuple[float, ...] | None, Distinct, _Share] = None
    """Where write strengths start, each with learning rates and seeds of its own; in the place of --write-start. All
    runs have the bias that says it, also those that start at 0.5."""
    time_steps: Annotated[tuple[float, ...] | None, Distinct, Positive] = None
    """Factors of the gates' initial time steps, likewise; in the place of --time-step."""
    curve_every: Annotated[int | None, Positive] = None
    """Steps between two validations of every run, kept in runs.jsonl; None: no curves."""
    max_minutes: Annotated[float | None, PerStart, Positive] = None
    """Stop before runs that would not be finished after so many minutes. --resume continues."""
    together: Annotated[int, Positive] = 1
    """Runs of a mixer that advance side by side in one program. More use a GPU better."""
    deterministic: bool = True
    """On a GPU, leave out operations that do not repeat bit for bit."""
    keep_weights: Annotated[bool, Later] = False
    """Keep the weights of every run in the folder `weights`; `gdn_jax.sweeps.weights.load` reads its model."""

    def runs(self) -> int:
        """Returns the number of runs, without listing them."""
        trying = self.seeds if self.lr_seeds is None else self.lr_seeds
        starts = len(self.write_starts or (None,)) * len(self.time_steps or (None,))
        rows = len(self.mixers) * len(self.scales) * starts
        return rows * (trying * len(self.lrs) + self.seeds - trying)


@dataclasses.dataclass(frozen=True)
class SweepOptions[T: TaskOptions]:
    """Everything that a sweep depends on."""

    task: T
    sweep: GridOptions = GridOptions()
    model: SizeOptions = dataclasses.field(default_factory=SizeOptions)
    optimizer: ScheduleOptions = dataclasses.field(default_factory=ScheduleOptions)


# Of rows this short the scan over tokens is faster on a CPU than the chunked form. Several heads: the first decays
# are drawn for each head, and one head alone may forget within a few tokens.
_SMALL = SizeOptions(
    hidden_size=32, num_layers=1, num_heads=4, head_dim=8, expand_v=1.0, implementation="recurrent"
)
_FULL = SizeOptions(hidden_size=128, num_layers=2, num_heads=4, head_dim=32, expand_v=1.0)
# A small state in a model that is wide enough to use it. Two heads may both be drawn to forget within ten tokens, and
# then find out late that remembering pays: decays begin ten times as slow, in every mixer alike.
_FULL_STATE = dataclasses.replace(_FULL, hidden_size=64, num_heads=2, head_dim=8, time_step=0.1)


def _small(task: TaskOptions, **grid: Any) -> SweepOptions:
    return SweepOptions(task, GridOptions(**grid), _SMALL)


def _full(task: TaskOptions, **changes: Any) -> SweepOptions:
    grid: dict[str, Any] = {
        "lrs": (1e-3, 3e-3, 1e-2),
        "steps": 2000,
        "batch_size": 64,
        "together": 9,
        "curve_every": 250,
    } | changes
    return SweepOptions(task, GridOptions(size="full", **grid), _FULL)


# Linear attention, the gate alone, the delta rule alone, both.
_FOUR: tuple[MixerName, ...] = ("linear_attention", "mamba2", "delta_net", "gated_delta_net")
_FIVE: tuple[MixerName, ...] = (*_FOUR, "softmax_attention")
_ALL: tuple[MixerName, ...] = (*_FOUR, "gated_delta_net_neg", "softmax_attention", "hybrid")

# 30M parameters with a mixer of about 6 hidden_size^2 of them. Without cuDNN softmax attention would keep a score for
# every two tokens of a row for the backward pass: the parts around a rule are computed again, this rule with them.
_TEXT = SizeOptions(
    hidden_size=512, num_layers=8, num_heads=4, head_dim=96, expand_v=2.0, mlp_ratio=8 / 3, remat="rule"
)

PRESETS: dict[str, dict[str, SweepOptions]] = {
    # Keys come again: where each is written once, a state that only adds up is as good a memory as one that erases
    # (notebooks/01_from_attention_to_the_delta_rule.ipynb). Sequences of few pairs are learned first. Decays begin
    # slow, as for _FULL_STATE: with the usual ones some seeds of the gated mixers do not learn a single pair in 600
    # steps. What came of it is in results/README.md.
    "recall": {
        "small": dataclasses.replace(
            _small(
                RecallOptions(
                    vocab_size=24,
                    num_pairs=10,
                    vary_pairs=True,
                    rewrite=True,
                    length=40,
                    test_pairs=(1, 2, 4, 8, 10),
                    val_sequences=256,
                ),
                mixers=_FOUR,
                lrs=(1e-2, 2.5e-2),
                steps=500,
                batch_size=64,
            ),
            model=dataclasses.replace(_SMALL, num_heads=2, head_dim=16, time_step=0.1),
        ),
        # 16 keys in heads of 8 numbers cannot be orthogonal, and 32 pairs write each of them twice.
        "full": dataclasses.replace(
            _full(
                RecallOptions(
                    vocab_size=32,
                    num_pairs=32,
                    vary_pairs=True,
                    rewrite=True,
                    length=128,
                    test_pairs=(1, 2, 4, 8, 16, 32),
                ),
                mixers=_FIVE,
                lrs=(4e-3, 1.2e-2),
                together=6,
                steps=3000,
            ),
            model=_FULL_STATE,
        ),
    },
    "needle": {
        "small": _small(
            NeedleOptions(length=32, test_lengths=(32, 64, 128, 256), val_sequences=256),
            mixers=_FOUR,
            steps=800,
        ),
        # A haystack of pairs like those of the needle: every state takes them in before the marker makes them void.
        # Noise that is never asked for is told from a needle when it comes, and a correction alone keeps it apart.
        "full": dataclasses.replace(
            _full(
                NeedleOptions(
                    haystack="pairs",
                    noise_tokens=64,
                    needle_length=8,
                    test_lengths=(64, 128, 256, 512, 1024),
                    val_sequences=256,
                ),
                mixers=_FIVE,
                lrs=(4e-3, 1.2e-2),
                together=6,
                steps=2000,
            ),
            model=_FULL_STATE,
        ),
    },
    "sentence": {
        "small": _small(
            SentenceOptions(length=256, test_lengths=(256, 512), val_sequences=64), mixers=_FOUR, steps=400
        ),
        "full": _full(
            SentenceOptions(length=1024, test_lengths=(1024, 2048, 4096, 8192), val_sequences=256),
            mixers=_FIVE,
            together=1,
        ),
    },
    "bytes": {
        "small": dataclasses.replace(
            _small(
                TextOptions(length=128, test_lengths=(64, 128, 256, 512), val_bytes=32768),
                mixers=_FOUR,
                steps=400,
                batch_size=16,
            ),
            model=dataclasses.replace(_SMALL, hidden_size=64, num_layers=2, num_heads=2, head_dim=16),
        ),
        # 30M parameters, 66M bytes.
        "full": dataclasses.replace(
            _full(
                TextOptions(
                    packages=True,
                    length=2048,
                    test_lengths=(256, 512, 1024, 2048, 4096, 8192, 16384),
                    val_bytes=2**20,
                ),
                mixers=_ALL,
                lrs=(1e-3, 3e-3),
                lr_seeds=1,
                batch_size=32,
                steps=1000,
                together=1,
                curve_every=None,  # its loss falls from the first step on
            ),
            model=_TEXT,
        ),
    },
    "parity": {
        "small": _small(ParityOptions(val_sequences=256), steps=800),
        "full": _full(
            ParityOptions(length=64, test_lengths=(64, 128, 256, 512), val_sequences=512), steps=1000
        ),
    },
    "permutation": {
        "small": _small(PermutationOptions(val_sequences=256), steps=800),
        "full": _full(PermutationOptions(length=64, test_lengths=(64, 128, 256, 512), val_sequences=512)),
    },
    "copy": {
        "small": _small(CopyOptions(val_sequences=256), steps=800),
        "full": _full(CopyOptions(length=64, test_lengths=(16, 32, 64, 128), val_sequences=512)),
    },
    "palindrome": {
        "small": _small(PalindromeOptions(val_sequences=256), steps=800),
        "full": _full(PalindromeOptions(length=64, test_lengths=(16, 32, 64, 128), val_sequences=512)),
    },
    "stack": {
        "small": _small(
            StackOptions(num_stacks=4, length=48, test_lengths=(48, 96), val_sequences=256), steps=800
        ),
        "full": _full(
            StackOptions(
                num_stacks=64, num_tokens=64, length=192, test_lengths=(192, 384, 768), val_sequences=512
            )
        ),
    },
}
"""Default options by task and size."""


def scaled_model(options: SweepOptions, scale: int) -> SizeOptions:
    """The model at one of the sweep's scales."""
    model = options.model
    if options.sweep.scaled == "depth":
        return dataclasses.replace(model, num_layers=scale * model.num_layers)
    if options.sweep.scaled == "state":
        return dataclasses.replace(model, head_dim=scale * model.head_dim)
    return dataclasses.replace(
        model, hidden_size=scale * model.hidden_size, num_heads=scale * model.num_heads
    )


def state_size(model: SizeOptions) -> int:
    """Numbers in the states of all layers of a model without attention."""
    return model.num_layers * model.num_heads * model.head_dim * round(model.head_dim * model.expand_v)


def check(options: SweepOptions) -> None:
    """Raises RunError naming the first option whose value cannot be used."""
    options_lib.check_fields(options)
    grid = options.sweep
    if grid.lr_seeds is not None and grid.lr_seeds > grid.seeds:
        fail("lr_seeds", f"at most --seeds = {grid.seeds}", grid.lr_seeds)
    if (number := grid.runs()) > _MOST_RUNS:
        fail("seeds", f"a grid of at most {_MOST_RUNS} runs", f"{grid.seeds} of {number} runs together")
    for scale in grid.scales:
        model = scaled_model(options, scale)
        for mixer in grid.mixers:
            MIXERS[mixer].model(model).check()
    options.task.check()
    if isinstance(options.task, TextOptions) and options.task.test_lengths is None:
        fail("test_lengths", "at least one length", "none")
    if isinstance(options.task, RecallOptions) and not grid.resume:
        # Batches of the validation set take the kinds of rows in turn.
        least = (len(dict(options.task.parsed_cases())) - 1) * grid.batch_size + 1
        if options.task.val_sequences < least:
            fail("val_sequences", f"at least {least}, a batch of each of --cases", options.task.val_sequences)
    if grid.lr_seeds is None:
        runs = grid.seeds * len(grid.lrs) * len(grid.write_starts or (1,)) * len(grid.time_steps or (1,))
        if runs % grid.together:
            fail("together", f"a divisor of the runs of a mixer at a scale, {runs}", grid.together)


def from_file(task: str, path: Path, grid: GridOptions) -> SweepOptions:
    """Options that a file gives, in the place of the defaults of its "size"; where the sweep lies comes from `grid`.

    Raises:
      RunError: the file cannot be read, is of another task, or names an option that there is not.
    """
    try:
        content = parse_json(read_file(path))
    except OSError as error:
        raise RunError(f"--config: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"--config: expected JSON in {path}, got {error}") from None
    if not isinstance(content, dict) or not isinstance(options := content.get("options"), dict):
        fail("config", 'an object with "task" and "options"', path)
    if content.get("task") != f"sweep {task}":
        fail("config", f"a file of the task sweep {task}", f"{content.get('task')} in {path}")
    size = options.get("size", "small")
    if size not in ("small", "full"):
        fail("config", "the size small or full", size)
    default = PRESETS[task][size]
    return options_lib.from_json(default, options_lib.to_json(default) | options, grid)
