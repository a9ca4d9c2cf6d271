"""`gdn eval`: bits per byte of any text under the model of a run of the task bytes."""

import dataclasses
from pathlib import Path
from typing import Annotated

import jax
from flax import nnx

from gdn_jax.commands import fields
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Positive
from gdn_jax.tasks import next_byte, text
from gdn_jax.training import steps
from gdn_jax.training.load import TrainedRun, load_text_run
from gdn_jax.training.options import Implementation
from gdn_jax.training.steps import Sums


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Bits per byte of a text under the model of a run of the task bytes."""

    data: Path | None = None
    """File or folder, all of which is new to the model if the number is to mean anything."""
    glob: str = "*"
    """Names of the files read below a folder."""
    val_bytes: Annotated[int, Positive] = 131072
    """Bytes scored at most, in windows of the run's length, spread evenly over the text."""
    implementation: Implementation | None = None
    """Implementation of the rule. None: that of the run."""


def bits_per_byte(run: TrainedRun, texts: list[bytes], val_bytes: int) -> tuple[float, int]:
    """Returns the mean bits per byte of texts under a run's model, and how many bytes were scored.

    Bytes are scored in windows of the run's --length, each from those before it in the window.

    Raises:
      RunError: the run's task has no text, or the texts are shorter than a window.
    """
    run.check_bytes()
    stream, length = text.stream(texts), run.options.task.length
    if stream.size < length + 1:
        fail("data", f"at least {length - 1} bytes of text, a window of the run", stream.size - 2)
    starts = text.window_starts(stream.size, length, val_bytes)
    size = run.options.run.batch_size // run.options.run.accumulate
    graphdef, params, rest = nnx.split(run.model, nnx.Param, ...)
    score = jax.jit(lambda params, batch: steps.loss_sum(graphdef, rest, params, batch)[1])
    sums = [Sums(*score(params, batch)) for batch in next_byte.batches(stream, starts, length, size)]
    return next_byte.bits(steps.mean(sums)[0]), len(starts) * length


def evaluate(path: Path, options: EvalOptions) -> int:
    """Prints the bits per byte; returns the exit status.

    Raises:
      RunError: an option cannot be used, or the run.
    """
    fields.check(options)
    if options.data is None:
        fail("data", "a file or a folder", "none")
    source, files = text.read(options.data, options.glob)
    run = load_text_run(path, options.implementation)
    bits, count = bits_per_byte(run, [content for _, content in files], options.val_bytes)
    total = sum(len(content) for _, content in files)
    print(f"{bits:.4f} bits per byte over {count} of {total} bytes in {len(files)} files of {source}")
    return 0
