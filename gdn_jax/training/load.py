"""A trained run as an object: its model with the weights, its options, and the way from text to tokens and back.

run = load_run("runs/book")
tokens = generate(run.model, run.encode("It was "), 200)
print(run.decode(tokens[0]))
"""

import dataclasses
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from flax import nnx
from jaxtyping import Array, Int

from gdn_jax.commands.errors import RunError
from gdn_jax.models import LanguageModel
from gdn_jax.models.costs import parameters
from gdn_jax.models.lora import merge_lora
from gdn_jax.training import options as options_lib
from gdn_jax.training import steps
from gdn_jax.training.checkpoints import Checkpoints, stored_layers
from gdn_jax.training.options import Implementation, RunOptions, TrainOptions
from gdn_jax.training.runs import RunFolder
from gdn_jax.training.steps import TrainState
from gdn_jax.training.tasks.table import CLASSES
from gdn_jax.training.tasks.task import Text


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run folder that was read.

    Fields:
      path: of the folder.
      config: its config.json.
      options: of the run.
      step: optimiser steps that led to the weights.
      model: with these weights.
      damaged: later checkpoints that could not be read, by step, with the reason.
    """

    path: Path
    config: dict[str, Any]
    options: TrainOptions
    step: int
    model: LanguageModel
    damaged: dict[int, str]

    def encode(self, prompt: str) -> Int[Array, "1 T"]:
        """Returns the tokens of a prompt: of the task bytes a zero, which begins every file, and the prompt in UTF-8.

        Raises:
          RunError: the run's task has no text.
        """
        return self.text.encode(prompt)

    def decode(self, tokens: Int[Array, " T"]) -> str:
        """Returns the text of tokens up to one that ends it. Bytes that are not printable become U+FFFD.

        Raises:
          RunError: the run's task has no text.
        """
        return self.text.decode(tokens)

    @cached_property
    def text(self) -> Text:
        """The text of the run's tokens.

        Raises:
          RunError: the run's task has none.
        """
        text = CLASSES[self.options.task.task].text(self.options.task)
        if text is None:
            raise RunError(
                f"{self.path}: expected a run of the task bytes or tokens, got {self.options.task.task}"
            )
        return text

    def check_bytes(self) -> None:
        """Raises RunError unless the run's task is text in bytes."""
        if self.options.task.task != "bytes":
            raise RunError(f"{self.path}: expected a run of the task bytes, got {self.options.task.task}")


def open_run(path: Path) -> tuple[RunFolder, dict[str, Any], TrainOptions]:
    """Opens a run of `gdn train`; returns its folder, config.json and options.

    Raises:
      RunError: there is no such run, or its options cannot be used.
    """
    folder, config = RunFolder.open(path)
    if config["task"] not in options_lib.TASKS:
        raise RunError(f"{path}: expected a run of gdn train, got one of the task {config['task']}")
    options = options_lib.from_json(options_lib.TASKS[config["task"]], config["options"], RunOptions())
    options_lib.check(options)
    return folder, config, options


def check_size(folder: RunFolder, config: dict[str, Any], options: TrainOptions) -> None:
    """Raises RunError, before the model is made, where the options of a run are those of another one.

    To make a model of thousands of layers takes minutes and gigabytes, before the first array is missed. Checkpoints
    tell how many there are; without any, config.json says how many parameters the run has.
    """
    task = options.task
    if task.pretrained() is not None:  # a model of its checkpoint's size
        return
    file, layers = folder.path / "config.json", stored_layers(folder)
    if layers is not None:
        if layers < (got := options.model.num_layers):
            raise RunError(f"{file}: expected num_layers as in its checkpoints, {layers}, got {got}")
        return
    made = sum(parameters(steps.model_config(options.model, CLASSES[task.task].vocabulary(task))).values())
    if made != (said := config.get("parameters")):
        raise RunError(
            f"{file}: expected options of a model of {said} parameters, as it says, got one of {made}"
        )


def load_run(path: str | Path, *, implementation: Implementation | None = None) -> TrainedRun:
    """Loads the latest whole checkpoint of a run; the folder is only read, and the run may still be at work.

    The model computes in the dtype of the run; where that was "auto", in this device's.

    Args:
      path: run folder of `gdn train`.
      implementation: of the rule, "auto" for the fastest on this device; None: that of the run.

    Raises:
      RunError: there is no such run, or no checkpoint that can be read.
    """
    folder, config, options = open_run(Path(path))
    check_size(folder, config, options)
    task, size = options.task, options.model
    if implementation is not None:
        size = dataclasses.replace(size, implementation=implementation)
    model = steps.start_model(task, size, CLASSES[task.task].vocabulary(task), 0)
    graphdef, params, rest = nnx.split(model, steps.trained(task), ...)
    optimizer = steps.make_optimizer(options.optimizer, options.run.steps, options.optimizer.lr)
    restored = None
    if folder.checkpoints.is_dir():
        store = Checkpoints(folder, None)
        try:
            restored = store.restore(TrainState(params, optimizer.init(params)))
        finally:
            store.close()
    if restored is None:
        raise RunError(f"{path}: expected a run with a checkpoint, got none: it has not come so far")
    trained = nnx.merge(graphdef, restored.state.params, rest)
    merge_lora(trained)
    return TrainedRun(folder.path, config, options, restored.step, trained, restored.damaged)


def load_text_run(path: Path, implementation: Implementation | None) -> TrainedRun:
    """`load_run` for a command that reads or writes text: it also tells on stderr of damaged checkpoints.

    Raises:
      RunError: as `load_run`, or the run's task has no text.
    """
    run = load_run(path, implementation=implementation)
    _ = run.text
    for step in run.damaged:
        print(f"gdn: note: the checkpoint of step {step} is damaged, using step {run.step}", file=sys.stderr)
    return run
