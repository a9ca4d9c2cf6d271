"""Next-token modelling of a text in the tokens of a Hugging Face checkpoint, as a task."""

import dataclasses
import hashlib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from gdn_jax import models
from gdn_jax.commands.errors import RunError, fail
from gdn_jax.commands.fields import NotNegative, Positive
from gdn_jax.hf.checkpoint import CONFIG, read_json
from gdn_jax.hf.families import describe
from gdn_jax.hf.text import TOKENIZER, Tokenizer, check_text_only, stop_tokens
from gdn_jax.training.tasks import next_byte, ngrams, text
from gdn_jax.training.tasks.options import CorpusOptions, Pretrained, prompt_bytes, prompt_text


@dataclasses.dataclass(frozen=True)
class TokensOptions(Pretrained, CorpusOptions):
    """Fine-tuning of a Hugging Face checkpoint on real text, in its own tokens; validated in bits per byte."""

    task: ClassVar[str] = "tokens"

    length: Annotated[int, Positive] = 256
    """Tokens of a training sequence, T."""
    val_tokens: Annotated[int, Positive] = 32768
    """Held-out tokens scored by a validation, spread evenly over the held-out text."""
    prompt: str = ""
    """Start of the sample; empty: the start of a new text."""
    sample_tokens: Annotated[int, Positive] = 150
    """Tokens of the sample."""
    temperature: Annotated[float, NotNegative] = 0.7
    """Temperature of the sample; 0 takes the likeliest token."""

    def check(self) -> None:
        prompt_bytes(self.prompt)


COUNTED = 131072
"""Held-out bytes that the tables of counts are scored on, at most."""


class Words:
    """The text of a checkpoint's tokens, as a run of the task has it.

    Args:
      folder: of the checkpoint.
      vocab_size: tokens of its model.

    Raises:
      RunError: it has no tokenizer, a damaged one, or one that does not fit the model.
    """

    def __init__(self, folder: Path, vocab_size: int):
        if not (folder / TOKENIZER).is_file():
            raise RunError(f"--from: expected {TOKENIZER} in {folder}, got none")
        try:
            self._tokenizer = Tokenizer(folder / TOKENIZER, vocab_size)
            self._config, self.stops = read_json(folder / CONFIG), stop_tokens(folder, vocab_size)
        except (ValueError, NotImplementedError) as error:
            raise RunError(f"--from: {error}") from error

    def encode(self, prompt: str) -> Int[Array, "1 T"]:
        """Returns the tokens of a prompt. An empty prompt becomes the token that ends a text.

        Raises:
          RunError: the prompt has no token, and none ends a text; or it has one that is none of the model's.
          NotImplementedError: a token stands for an image.
        """
        tokens = self._encode(prompt_text(prompt)) or [*self.stops[:1]]
        if not tokens:
            fail("prompt", "a text of one token or more", "none")
        check_text_only(self._config, tokens)
        return jnp.asarray([tokens], jnp.int32)

    def decode(self, tokens: Int[Array, " T"]) -> str:
        """Returns the text of tokens up to one that ends it."""
        found = [int(token) for token in np.asarray(tokens)]
        ends = [i for i, token in enumerate(found) if token in self.stops]
        return self._decode(found[: ends[0]] if ends else found)

    def stream(self, texts: np.ndarray) -> Int[np.ndarray, " n"]:
        """Returns the tokens of texts, of bytes with zeros around each; a token that ends a text stands for those."""
        end, found = [*self.stops[:1]], []
        for part in texts.tobytes().split(b"\0"):
            if part:
                found += end + self._encode(part.decode(errors="replace"), special=False)
        return np.asarray(found + end, np.int32)

    def check(self, prompt: str, vocab_size: int) -> None:
        """Raises RunError, before any training, for a prompt or a tokenizer that the sample would fail with."""
        self.encode(prompt)
        self._decode([*range(vocab_size)])

    def _decode(self, tokens: list[int]) -> str:
        try:
            return self._tokenizer.decode(tokens)
        except ValueError as error:
            raise RunError(f"--from: {error}") from error

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        try:
            return self._tokenizer.encode(text, special=special)
        except ValueError as error:
            raise RunError(f"--from: {error}") from error


class TokensTask(next_byte.BytesTask):
    """Next-token modelling of a text. Losses are in bits per byte, so that tokenizers can be compared."""

    Options = TokensOptions
    training: ClassVar[dict[str, Any]] = {"lr": 1e-4}
    axis = "tokens"

    def __init__(self, options: TokensOptions, batch_size: int, seed: int):
        self.vocab_size = self.vocabulary(options)
        self.options, self.batch_size, self.seed = options, batch_size, seed
        self.size = self.length = options.length
        self.tests = ()
        self.words = self.text(options)
        self.words.check(options.prompt, self.vocab_size)
        self.corpus = text.load(options.data, options.glob, packages=options.packages)
        self.data, self.val = self.words.stream(self.corpus.train), self.words.stream(self.corpus.val)
        for side, part in (("training", self.data), ("held-out", self.val)):
            if part.size < self.length + 1:
                fail("data", f"at least --length + 1 = {self.length + 1} {side} tokens", part.size)
        self.starts = text.window_starts(self.val.size, self.length, options.val_tokens)
        self.bytes_per_token = self.corpus.val.size / self.val.size

    @classmethod
    def vocabulary(cls, options: Any) -> int:
        """Returns how many tokens the checkpoint's model has.

        Raises:
          RunError: there is no such checkpoint.
        """
        if options.from_ is None:
            fail("from_", "the folder of a checkpoint", "none")
        try:
            file = options.from_ / CONFIG
            return describe(read_json(file), str(file)).fields.size("vocab_size")
        except (ValueError, NotImplementedError) as error:
            raise RunError(f"--from: {error}") from error

    @classmethod
    def text(cls, options: Any) -> Words:
        size = cls.vocabulary(options)
        assert options.from_ is not None
        return Words(options.from_, size)

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        del accuracy
        return {"bpb": next_byte.bits(loss) / self.bytes_per_token}

    @cached_property
    def _tables(self) -> dict[str, float]:
        positions = text.window_starts(self.corpus.val.size, 1, COUNTED) + 1
        return ngrams.bits_per_byte(self.corpus.train, self.corpus.val, positions)

    def describe(self) -> dict[str, object]:
        corpus = self.corpus
        digest = hashlib.sha256(self.data.tobytes() + b"held out" + self.val.tobytes())
        return {
            "source": corpus.source,
            "fingerprint": digest.hexdigest()[:16],
            "train_tokens": self.data.size,
            "val_tokens": self.val.size,
            "val_tokens_scored": len(self.starts) * self.length,
            "bytes_per_token": self.bytes_per_token,
            "train_files": len(corpus.train_files),
            "val_files": list(corpus.val_files),
        }

    def summary(self) -> str:
        bytes_per_token = f"{self.bytes_per_token:.2f} bytes each"
        return f"{super().summary()}, {self.data.size} and {self.val.size} tokens of {bytes_per_token}"

    def sample(self, model: models.LanguageModel) -> str:
        o, prompt = self.options, self.words.encode(self.options.prompt)
        rng = jax.random.fold_in(jax.random.key(self.seed), 2)
        stops = self.words.stops
        out = models.generate(
            model, prompt, o.sample_tokens, rng=rng, temperature=o.temperature, stop_tokens=stops
        )
        return prompt_text(o.prompt) + self.words.decode(out[0])
