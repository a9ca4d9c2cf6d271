"""Options that tasks have in common. A task has a frozen dataclass of its own, with the checks that need no data.

The docstring of such a class is the task's description on the command line, that under a field its help text.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, MayChange, Positive
from gdn_jax.rules import Rule


def prompt_bytes(prompt: str) -> bytes:
    """Returns a prompt in UTF-8. Bytes of a command line that are no UTF-8 come as surrogates and leave as they were.

    Raises:
      RunError: it holds other surrogates, which stand for no bytes.
    """
    try:
        return prompt.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        fail("prompt", "text, or bytes of a command line", ascii(prompt))


def prompt_text(prompt: str) -> str:
    """Returns a prompt as text that can be written and printed: bytes that are no UTF-8 become U+FFFD.

    Raises:
      RunError: see `prompt_bytes`.
    """
    return prompt_bytes(prompt).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Options of a task.

    Attributes:
      task: its name.
      length: tokens of a training sequence.
    """

    task: ClassVar[str]
    if TYPE_CHECKING:  # a field of each task, in its own place among the others

        @property
        def length(self) -> int: ...

    def check(self) -> None:
        """Raises RunError naming an option that does not fit the others; here all do."""

    def check_rule(self, rule: Rule) -> None:
        """Raises RunError where a model with this rule cannot be trained on the task; here all can."""

    def check_sweep(self, batch_size: int | None) -> None:
        """Raises RunError naming an option with which runs cannot be compared; here all can.

        Args:
          batch_size: sequences of a step, and of a batch of the validation set; None in a sweep that goes on.
        """

    def pretrained(self) -> "Pretrained | None":
        """Returns the checkpoint that the run begins with and whose sizes the model has, None for a fresh model."""
        return None

    def drawn(self) -> tuple[int, list[int]]:
        """Returns the sequences of each set that is drawn and kept, and the tokens of one of them by set.

        Validation comes first; of windows of a text, which is there, nothing is kept.
        """
        return 0, []

    def longest(self) -> int:
        """Returns the tokens of the longest training sequence, at least."""
        return self.length

    def trained_size(self) -> int:
        """Returns the size of the largest training sequences, in the unit of the tests."""
        return self.length


@dataclasses.dataclass(frozen=True)
class CorpusOptions(TaskOptions):
    """A text, a part of which is held out."""

    data: Annotated[Path | None, MayChange] = None
    """File or folder. Without it, the .py files of the running Python's standard library. With --resume: where the
    same text lies now."""
    glob: str = "*"
    """Names of the files read below a folder."""
    packages: bool = False
    """Treat the folder as one of packages: hold out whole packages, and leave out repeated files. Without --data: the
    .py files of all packages that are installed next to this one."""


@dataclasses.dataclass(frozen=True)
class Pretrained(TaskOptions):
    """A checkpoint that a run begins with."""

    from_: Annotated[Path | None, MayChange] = None
    """Folder of the checkpoint, for model and tokenizer. With --resume: where it lies now."""
    lora_rank: Annotated[int | None, Positive] = None
    """LoRA: train low-rank changes of this rank, and freeze the weights. None: train all weights."""
    lora_projections: Annotated[tuple[str, ...], Distinct] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Projections to change by LoRA, in all layers that have them. Experts are not changed."""

    def pretrained(self) -> "Pretrained":
        return self
