"""Text of a checkpoint as tokens and back, and the tokens that have a meaning of their own."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gdn_jax.commands.errors import brief, one_line
from gdn_jax.commands.files import parse_json, read_file
from gdn_jax.hf.checkpoint import CONFIG, read_json

TOKENIZER = "tokenizer.json"

_MOST_GROWTH = 1000
"""How many times longer a tokenizer may make a text before it cuts it into tokens, or after it joins them."""
_MOST_SPECIAL = 1000
"""Tokens that a tokenizer may add to a text."""


class Tokenizer:
    """The tokenizer of a checkpoint, by the package `tokenizers`.

    Its "truncation" and "padding" are switched off, as transformers does: they are for batches of a length.

    Args:
      file: tokenizer.json.
      vocab_size: tokens of the model.

    Raises:
      ValueError: it is no ordinary file, damaged, or would make endless texts of short ones.
      NotImplementedError: it draws tokens at random.
    """

    def __init__(self, file: Path, vocab_size: int):
        import tokenizers

        self._file, self._vocab_size = file, vocab_size
        try:
            content = read_file(file)
            parts = parse_json(content)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{file}: expected a tokenizer, got a damaged file: {reason}") from None
        with self._one_error("expected a tokenizer, got a damaged file"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            special = self._tokenizer.num_special_tokens_to_add(False)
        growth = {name: _growth(parts.get(name)) for name in ("normalizer", "post_processor", "decoder")}
        for name, times in growth.items():
            if times > _MOST_GROWTH:
                raise ValueError(
                    f"{file}: expected {name} that makes a text at most {_MOST_GROWTH} times longer, got {times:.3g}"
                )
        if special > _MOST_SPECIAL:
            raise ValueError(
                f"{file}: expected post_processor that adds at most {_MOST_SPECIAL} tokens, got {special}"
            )
        if parts["model"].get("dropout"):
            raise NotImplementedError(
                f"{file}: model: dropout = {brief(parts['model']['dropout'])}: tokens that are drawn at random are "
                f"not supported"
            )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text, with those that the checkpoint wants at its beginning, or without such `special` ones.

        Raises:
          ValueError: the tokenizer cannot, or a token is none of the model's.
        """
        with self._one_error("expected a tokenizer of any text, got one that fails"):
            tokens = self._tokenizer.encode(text, add_special_tokens=special).ids
        if tokens and (most := max(tokens)) >= self._vocab_size:
            raise ValueError(
                f"{self._file}: expected tokens below the vocabulary's size {self._vocab_size}, got {most}"
            )
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, without special ones, as it is: also with what a terminal would obey."""
        with self._one_error("expected a tokenizer of any tokens, got one that fails"):
            return self._tokenizer.decode(tokens)

    @contextlib.contextmanager
    def _one_error(self, what: str) -> Iterator[None]:
        """Raises ValueError for every error of the package, which are of no type, and for its panics."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic is no Exception
            raise ValueError(f"{self._file}: {what}: {one_line(error)}") from None


def _growth(part: Any) -> float:
    """How many times longer a part of a tokenizer makes a text, at most, by its replacements one after another."""
    if isinstance(part, list):
        times = 1.0
        for one in part:
            times *= _growth(one)
        return times
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Replace":
        pattern, content = part.get("pattern"), part.get("content")
        plain = pattern.get("String") if isinstance(pattern, dict) else pattern
        put = len(os.fsencode(content)) if isinstance(content, str) else 0
        found = len(os.fsencode(plain)) if isinstance(plain, str) else 0
        return max(1.0, put / found) if found else put + 1.0  # an expression may find nothing at every place
    if part.get("type") == "TemplateProcessing" and isinstance(single := part.get("single"), list):
        return float(max(1, sum(isinstance(one, dict) and "Sequence" in one for one in single)))
    inner = ("normalizers", "processors", "decoders", "pretokenizers")
    return _growth([part.get(name) for name in inner])


def stop_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a text, of generation_config.json or config.json; none where neither says any.

    Raises:
      ValueError: they are no tokens of a model of this size; names file and field.
    """
    for file in (folder / "generation_config.json", folder / CONFIG):
        if not os.path.lexists(file):
            continue
        config = read_json(file)
        for fields in (config, config.get("text_config")):
            found = fields.get("eos_token_id") if isinstance(fields, dict) else None
            if found is None:
                continue
            tokens = found if isinstance(found, list) else [found]
            for token in tokens:
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{file}: expected eos_token_id to be tokens from 0 to {vocab_size - 1}, got {brief(token)}"
                    )
            return tuple(tokens)
    return ()


def check_text_only(config: dict[str, Any], tokens: list[int]) -> None:
    """Raises NotImplementedError for a token that stands for an image or a video."""
    for name in ("image_token_id", "video_token_id"):
        if config.get(name) in tokens:
            raise NotImplementedError(
                f"prompt: token {config[name]} is {name}: images are not supported, models take text only"
            )


def is_checkpoint(folder: Path) -> bool:
    """Tells whether a folder has the config.json of a checkpoint: one with a model_type."""
    try:
        return "model_type" in read_json(folder / CONFIG)
    except (OSError, ValueError):
        return False
