"""Text of a checkpoint as tokens and back, and the tokens that have a meaning of their own."""

from pathlib import Path
from typing import Any

from gdn_jax.hf.checkpoint import CONFIG, read_json

TOKENIZER = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a checkpoint, by the package `tokenizers`.

    Args:
      file: tokenizer.json.

    Raises:
      ValueError: it is damaged.
    """

    def __init__(self, file: Path):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package has no type of its own for it
            raise ValueError(f"{file}: expected a tokenizer, got a damaged file: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text, with those that the checkpoint wants at its beginning, or without such `special` ones."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, without special ones."""
        return self._tokenizer.decode(tokens)


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Tokens that end a text, of generation_config.json or config.json; none where neither says any."""
    for file in (folder / "generation_config.json", folder / CONFIG):
        if not file.exists():
            continue
        config = read_json(file)
        for fields in (config, config.get("text_config")):
            found = fields.get("eos_token_id") if isinstance(fields, dict) else None
            if isinstance(found, int):
                return (found,)
            if isinstance(found, list) and all(isinstance(token, int) for token in found):
                return tuple(found)
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
