"""`gdn sample`: what the model of a run of the task bytes writes after a prompt."""

import dataclasses
import sys
from pathlib import Path

import jax

from gdn_jax import models
from gdn_jax.tasks.options import prompt_bytes
from gdn_jax.training import options as options_lib
from gdn_jax.training.load import load_run
from gdn_jax.training.options import Implementation


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """What to write."""

    prompt: str = ""
    """Text to continue, any bytes; empty: the start of a new file."""
    tokens: int = 300
    """Bytes to write at most: the model may end the file before."""
    temperature: float = 0.7
    """0 takes the likeliest byte; above 0 bytes are drawn from softmax(logits / temperature)."""
    top_k: int | None = None
    """Draw among the k likeliest bytes only."""
    seed: int = 0
    """Seed of the draws."""
    implementation: Implementation | None = None
    """Implementation of the rule. None: that of the run."""


def sample(path: Path, options: SampleOptions) -> int:
    """Prints the continuation; returns the exit status.

    Raises:
      RunError: an option cannot be used, or the run.
    """
    options_lib.check_values(dataclasses.asdict(options))
    prompt_bytes(options.prompt)
    if options.top_k is not None and options.top_k > 256:
        options_lib.fail("top_k", "at most 256", options.top_k)
    run = load_run(path, implementation=options.implementation)
    for step in run.damaged:
        print(f"gdn: note: the checkpoint of step {step} is damaged, using step {run.step}", file=sys.stderr)
    written = models.generate(
        run.model,
        run.encode(options.prompt),
        options.tokens,
        rng=jax.random.key(options.seed),
        temperature=options.temperature,
        top_k=options.top_k,
    )
    print(run.decode(written[0]))
    return 0
