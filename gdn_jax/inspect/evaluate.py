"""`gdn eval`: bits per byte of any text under the model of a run of the task bytes."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import jax
from flax import nnx

from gdn_jax.commands import fields
from gdn_jax.commands.errors import RunError, fail, printable
from gdn_jax.commands.fields import Positive
from gdn_jax.training import steps
from gdn_jax.training.load import TrainedRun, load_text_run
from gdn_jax.training.options import Implementation
from gdn_jax.training.steps import Sums
from gdn_jax.training.tasks import next_byte, text


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Bits per byte of a text under the model of a run of the task bytes."""

    data: Path | None = None
    """File or folder of text that the model was not trained on."""
    glob: str = "*"
    """Names of the files read below a folder."""
    val_bytes: Annotated[int, Positive] = 131072
    """Most bytes to score, in windows of the run's length, spread evenly over the text."""
    implementation: Implementation | None = None
    """Implementation of the rule. None: the run's own."""


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


def trained_on(run: TrainedRun, texts: list[bytes]) -> int | None:
    """Returns how many bytes of some texts a run was trained on; None: its own text has changed or is gone.

    Of files those count that are files of the training part, whole, and of the only file of a run its beginning.
    """
    task = run.options.task
    try:
        corpus = text.load(task.data, task.glob, packages=task.packages, length=task.length)
    except RunError:
        return None
    if corpus.fingerprint != run.config["data"].get("fingerprint"):
        return None
    known = {*corpus.train.tobytes().split(b"\0")} - {b""}
    beginning = known.pop() if len(known) == 1 else None

    def seen(content: bytes) -> int:
        if beginning is not None:
            return len(beginning) if content.startswith(beginning) else len(content) * (content in beginning)
        return len(content) if {*content.split(b"\0")} - {b""} <= known else 0

    return sum(map(seen, texts))


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
    texts = [content for _, content in files]
    bits, count = bits_per_byte(run, texts, options.val_bytes)
    total, length = sum(map(len, texts)), run.options.task.length
    print(
        f"{bits:.4f} bits per byte over {count} of {total} bytes in {_many(len(files), 'file')} of {source}: "
        f"{_many(count // length, 'window')} of {length} bytes, spread evenly over the text"
    )
    seen = trained_on(run, texts)
    if seen is None:
        whose = printable(str(run.config["data"].get("source")))
        note = f"its own text, {whose}, has changed or is gone"
        print(
            f"gdn: note: whether the run was trained on these bytes cannot be told: {note}", file=sys.stderr
        )
    elif seen:
        print(
            f"gdn: note: the run was trained on {seen} of the {total} bytes, so that this says little of new text",
            file=sys.stderr,
        )
    return 0


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
