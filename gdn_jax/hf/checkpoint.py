"""A folder of Hugging Face's: config.json and one or more safetensors files."""

import json
from pathlib import Path
from typing import Any

from gdn_jax.hf.tensors import Tensor, read_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
      ValueError: there is none; names the file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file.parent}: expected a folder with {file.name}, got none") from None
    except ValueError as error:
        raise ValueError(f"{file}: expected a JSON object, got a damaged file: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, of one file or of those that an index lists. Reads headers only.

    Raises:
      ValueError: files are missing, damaged or do not fit the index; names file and tensor.
      NotImplementedError: the weights are in another format.
    """
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise NotImplementedError(f"{folder}: pickled weights are not supported, only {WEIGHTS}")
        raise ValueError(f"{folder}: expected {WEIGHTS} or {INDEX}, got neither")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{folder / INDEX}: expected a weight_map from tensors to files, got none")
    headers = {}
    for name, place in places.items():
        file = folder / place
        if not file.is_file():
            raise ValueError(f"{file}: expected this file, of tensor {name}, as {INDEX} says, got none")
        if place not in headers:
            headers[place] = read_header(file)
        if name not in headers[place]:
            raise ValueError(f"{file}: expected tensor {name}, as {INDEX} says, got none of that name")
    for place, header in headers.items():
        for name in header:
            if places.get(name) != place:
                raise ValueError(
                    f"{folder / place}: tensor {name} is not there according to {INDEX}, got it in the file"
                )
    return {name: headers[place][name] for name, place in places.items()}
