"""A folder of Hugging Face's: config.json and one or more safetensors files."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gdn_jax.commands.errors import brief
from gdn_jax.commands.files import parse_json, read_file
from gdn_jax.hf.tensors import Tensor, read_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LONGEST_NAME = 255  # bytes of a file's name


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
      ValueError: there is none; names the file.
    """
    if not file.is_file():
        advice = (
            ""
            if file.parent.exists()
            else "; names of a hub are not downloaded, give the folder of a checkpoint"
        )
        raise ValueError(f"{file.parent}: expected a folder with {file.name}, got none{advice}")
    try:
        content = parse_json(read_file(file))
    except OSError as error:
        raise ValueError(f"{file}: expected a JSON object, got: {error.strerror}") from None
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
        if not _is_name(place):
            raise ValueError(
                f"{folder / INDEX}: expected tensor {name[:200]} in a file of this folder, got {brief(place)}"
            )
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


def new_folder(path: Path) -> Path:
    """The temporary folder, which is not yet made, for one that is to be written.

    Raises:
      ValueError: one of the two exists.
    """
    if path.exists() or path.is_symlink():
        raise ValueError(f"path: expected a folder that does not exist, got {path}")
    temporary = path.with_name(path.name + ".tmp")
    if temporary.exists() or temporary.is_symlink():
        raise ValueError(
            f"path: expected no {temporary}: another save_hf writes there, or one was killed and it can be deleted"
        )
    return temporary


@contextlib.contextmanager
def writing(temporary: Path, path: Path) -> Iterator[None]:
    """Makes the temporary folder, and renames it when the block has filled it; after an error nothing is left."""
    temporary.mkdir(parents=True)
    try:
        yield
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _is_name(place: str) -> bool:
    """Tells whether a file of a folder can have this name."""
    try:
        length = len(os.fsencode(place))
    except UnicodeEncodeError:  # half of a character, as JSON can spell it
        return False
    if "\0" in place or not 0 < length <= _LONGEST_NAME:
        return False
    return Path(place).name == place and place != ".."


def stays_inside(file: Path, folder: Path) -> bool:
    """Tells whether a checkpoint's file, or the target of its link, lies in the checkpoint's folder or its cache.

    A folder in the cache of Hugging Face's hub, models--NAME/snapshots/REVISION, is made of links into
    models--NAME/blobs.
    """
    folder = folder.resolve()
    allowed = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    return any(file.resolve().is_relative_to(place) for place in allowed)
