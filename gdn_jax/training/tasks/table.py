"""Which task belongs to which options."""

import json
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Int

from gdn_jax.commands.errors import RunError
from gdn_jax.training.tasks import generated, next_byte, next_token
from gdn_jax.training.tasks.options import TaskOptions, TokensOptions
from gdn_jax.training.tasks.task import Task


def make_task(options: TaskOptions, batch_size: int, seed: int = 0) -> Task:
    """Makes the task of the options and reads its data.

    Args:
      options: of the task.
      batch_size: sequences of a training step.
      seed: of the training batches and of the validation and test sets.

    Raises:
      RunError: the data cannot be used.
    """
    return _TASKS[options.task](options, batch_size, seed)


@runtime_checkable
class Text(Protocol):
    """Text of a task as tokens and back."""

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...

    def encode(self, prompt: str) -> Int[Array, "1 T"]:
        """Returns the tokens of a prompt."""
        ...

    def decode(self, tokens: Int[Array, " T"]) -> str:
        """Returns the text of tokens up to one that ends it."""
        ...


def text_of(options: TaskOptions) -> Text | None:
    """The text of a task's tokens; None where they stand for none.

    Raises:
      RunError: the checkpoint of its tokens is gone.
    """
    if isinstance(options, TokensOptions):
        size = next_token.vocab_size(options)
        assert options.from_ is not None
        return next_token.Words(options.from_, size)
    return next_byte.TEXT if options.task == "bytes" else None


def vocab_size(options: TaskOptions) -> int:
    """Returns how many tokens the task's model has, without reading a text that may be elsewhere by now."""
    if isinstance(options, TokensOptions):
        return next_token.vocab_size(options)
    return next_byte.BytesTask.vocab_size if options.task == "bytes" else make_task(options, 1).vocab_size


_TASKS: dict[str, Callable[..., Task]] = {
    "bytes": next_byte.BytesTask,
    "tokens": next_token.TokensTask,
    "recall": generated.RecallTask,
    "needle": generated.NeedleTask,
    "sentence": generated.SentenceTask,
    "parity": generated.ParityTask,
    "permutation": generated.PermutationTask,
    "copy": generated.CopyTask,
    "palindrome": generated.PalindromeTask,
    "stack": generated.StackTask,
}


def check_same_data(stored: dict[str, object], task: Task) -> None:
    """Raises RunError when the data of a run to resume has changed."""
    now = task.describe()
    if now["fingerprint"] != stored.get("fingerprint"):
        facts = json.dumps({k: v for k, v in now.items() if isinstance(v, str | int)})
        raise RunError(
            f"--resume: expected the data of the run ({stored.get('source')}), got other data: {facts}"
        )
