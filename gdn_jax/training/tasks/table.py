"""Tasks by name. A task is a file with its options and its class, and an entry here."""

import json

from gdn_jax.commands.errors import RunError
from gdn_jax.training.tasks import (
    copying,
    evictions,
    needle,
    next_byte,
    next_token,
    recall,
    scopes,
    sentence,
    stacks,
    state_tracking,
)
from gdn_jax.training.tasks.options import TaskOptions
from gdn_jax.training.tasks.task import Task

CLASSES: dict[str, type[Task]] = {
    task.Options.task: task
    for task in (
        next_byte.BytesTask,
        next_token.TokensTask,
        recall.RecallTask,
        needle.NeedleTask,
        sentence.SentenceTask,
        state_tracking.ParityTask,
        state_tracking.PermutationTask,
        copying.CopyTask,
        copying.PalindromeTask,
        stacks.StackTask,
        scopes.ScopeTask,
        evictions.EvictionTask,
    )
}


def make_task(options: TaskOptions, batch_size: int, seed: int = 0) -> Task:
    """Makes the task of the options and reads its data.

    Args:
      options: of the task.
      batch_size: sequences of a training step.
      seed: of the training batches and of the validation and test sets.

    Raises:
      RunError: the data cannot be used.
    """
    return CLASSES[options.task](options, batch_size, seed)


def check_same_data(stored: dict[str, object], task: Task) -> None:
    """Raises RunError when the data of a run to resume has changed."""
    now = task.describe()
    if now["fingerprint"] != stored.get("fingerprint"):
        facts = json.dumps({k: v for k, v in now.items() if isinstance(v, str | int)})
        raise RunError(
            f"--resume: expected the data of the run ({stored.get('source')}), got other data: {facts}"
        )
