"""`gdn generate`: text that a Hugging Face checkpoint, or a run of the task bytes, writes after a prompt."""

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import models
from gdn_jax.commands import fields
from gdn_jax.commands.errors import RunError, fail, harmless
from gdn_jax.commands.fields import NotNegative, Positive, Range, Seed
from gdn_jax.commands.interrupts import INTERRUPTED, listen
from gdn_jax.hf.checkpoint import CONFIG, read_json
from gdn_jax.hf.load import load_hf
from gdn_jax.hf.text import TOKENIZER, Tokenizer, check_text_only, is_checkpoint, stop_tokens
from gdn_jax.models.costs import model_costs
from gdn_jax.training.load import load_text_run
from gdn_jax.training.memory import available
from gdn_jax.training.options import Implementation
from gdn_jax.training.tasks import next_byte
from gdn_jax.training.tasks.options import prompt_text
from gdn_jax.training.tasks.task import Text

BYTES = 256
"""Vocabulary size of a model that reads and writes bytes."""


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Text that continues a prompt, by the model of a run or of a Hugging Face checkpoint."""

    prompt: str = ""
    """Text to continue, any bytes. The model of a run may begin with none: then it writes a new file."""
    tokens: Annotated[int, Positive] = 300
    """Most tokens to write; the model may end the text before."""
    temperature: Annotated[float, NotNegative] = 0.7
    """0: greedy. Above 0: tokens are sampled from softmax(logits / temperature)."""
    top_k: Annotated[int | None, Positive] = None
    """Top-k: sample among the k likeliest tokens only."""
    top_p: Annotated[float | None, Range("a number above 0 and up to 1", lambda x: 0 < x <= 1)] = None
    """Top-p (nucleus): sample among the likeliest tokens that together have this probability."""
    min_p: Annotated[float | None, Range("a number from 0 to 1", lambda x: 0 <= x <= 1)] = None
    """Min-p: sample among tokens whose probability is at least this fraction of the likeliest token's."""
    drafts: Literal["none", "mtp"] = "none"
    """mtp: the model's head for multi-token prediction guesses tokens, and one pass of the model reads the last token
    and the guesses. The likeliest tokens stay the same, but for ties within rounding; tokens that are drawn have the
    same probabilities. The model needs such a head, as published checkpoints of Qwen3.5 have it."""
    num_drafts: Annotated[int, Range("1 to 32", lambda x: 1 <= x <= 32)] = 3
    """Drafts in a pass, with --drafts."""
    draft_vocab: Annotated[int | None, Positive] = None
    """Drafts are among this number of first tokens of the vocabulary, with --drafts: each reads fewer bytes, and
    fewer are right. None: among all."""
    seed: Annotated[int, Seed] = 0
    """Seed of the sampling."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of a checkpoint's weights and products. auto: the dtype of its files."""
    implementation: Implementation | None = None
    """Implementation of the rule. auto: the fastest on this device. None: the run's own; auto for a checkpoint."""


class Writer(NamedTuple):
    """A model with its text.

    Fields:
      model: the model.
      prompt: its tokens.
      decode: gives the text of all new tokens.
      stops: tokens that end the text.
    """

    model: models.LanguageModel
    prompt: list[int]
    decode: Callable[[list[int]], str]
    stops: tuple[int, ...]


def generate(path: Path, options: GenerateOptions) -> int:
    """Prints the prompt and, token by token, what the model writes after it; returns the exit status.

    Raises:
      RunError: an option cannot be used, or the checkpoint or run.
    """
    fields.check(options)
    prompt = prompt_text(options.prompt)
    if not path.exists():
        raise RunError(
            f"expected a run folder or a folder with a Hugging Face checkpoint, got {path}, which does not exist "
            f"(names of a hub are not downloaded)"
        )
    try:
        writer = (_open_checkpoint if is_checkpoint(path) else _open_run)(path, options)
        for name in ("top_k", "draft_vocab"):
            number, most = getattr(options, name), writer.model.config.vocab_size
            if number is not None and number > most:
                fail(name, f"at most {most}", number)
        if options.drafts == "mtp" and writer.model.mtp is None:
            fail("drafts", "none for a model without a head for multi-token prediction", options.drafts)
        _check_cache(path, writer, options)
        return _write(writer, prompt, options)
    except ValueError as error:
        raise RunError(str(error)) from error


def _check_cache(path: Path, writer: Writer, options: GenerateOptions) -> None:
    """Raises RunError where the cache cannot fit into memory, as that of a window of 2**31 tokens."""
    needed = model_costs(writer.model.config, len(writer.prompt) + options.tokens).cache_bytes
    if needed > (there := available()):
        raise RunError(
            f"{path}: expected a cache of the prompt, --tokens {options.tokens} and windows of attention that fits "
            f"into the {there / 2**30:.1f} GiB of this device's memory, got one of {needed / 2**30:.1f} GiB"
        )


def _open_checkpoint(path: Path, options: GenerateOptions) -> Writer:
    given = options.dtype, options.implementation
    dtype, implementation = (None if value == "auto" else value for value in given)
    model = load_hf(path, dtype=dtype, implementation=implementation)
    size = model.config.vocab_size
    if os.path.lexists(path / TOKENIZER):
        tokenizer = Tokenizer(path / TOKENIZER, size)
        prompt, decode = tokenizer.encode(prompt_text(options.prompt)), tokenizer.decode
    elif size == BYTES:
        print(f"gdn: note: {path} has no {TOKENIZER}; its 256 tokens are taken as bytes", file=sys.stderr)
        prompt, decode = _in(next_byte.TEXT, options.prompt)
    else:
        raise RunError(f"{path}: expected {TOKENIZER} for a vocabulary of {size}, got none")
    if not prompt:
        raise RunError("--prompt: expected a text of one token or more, got none")
    check_text_only(read_json(path / CONFIG), prompt)
    return Writer(model, prompt, decode, stop_tokens(path, size))


def _open_run(path: Path, options: GenerateOptions) -> Writer:
    if options.dtype != "auto":
        raise RunError(f"--dtype: expected auto for a run, whose dtype is its own, got {options.dtype}")
    run = load_text_run(path, options.implementation)
    return Writer(run.model, *_in(run.text, options.prompt), run.text.stops)


def _in(text: Text, prompt: str) -> tuple[list[int], Callable[[list[int]], str]]:
    """The tokens of a prompt, and the function from tokens to what they say."""
    tokens = [int(token) for token in np.asarray(text.encode(prompt))[0]]
    return tokens, lambda tokens: text.decode(jnp.asarray(tokens, jnp.int32))


def _write(writer: Writer, prompt: str, options: GenerateOptions) -> int:
    """Prints the prompt, which can be printed, and what follows it."""
    written: list[int] = []
    shown = ""

    def show(end: bool = False) -> None:
        """Prints the text that is new; what may be the beginning of a character waits for its end."""
        nonlocal shown
        text = harmless(writer.decode(written))
        whole = text if end else text.rstrip("\ufffd")
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shown, whole, strict=False))
        print(whole[sum(1 for _ in same) :], end="", flush=True)
        shown = whole

    print(harmless(prompt), end="", flush=True)
    with listen("ending the text after this token") as asked:

        def on_token(new: np.ndarray) -> bool:
            token = int(new[0])
            if token not in writer.stops:
                written.append(token)
                show()
            return asked.is_set()

        draws: dict[str, Any] = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p}
        models.generate(
            writer.model,
            jnp.asarray([writer.prompt], jnp.int32),
            options.tokens,
            rng=jax.random.key(options.seed),
            temperature=options.temperature,
            stop_tokens=writer.stops,
            on_token=on_token,
            drafts=None if options.drafts == "none" else options.drafts,
            num_drafts=options.num_drafts,
            draft_vocab=options.draft_vocab,
            **draws,
        )
        show(end=True)
        print()
        return INTERRUPTED if asked.is_set() else 0
