"""The safetensors format: a JSON header with the place of every tensor, then their bytes.

The first 8 bytes are the length of the header, little-endian. Offsets count from the end of the header. Here because
the package `safetensors` writes a file only from tensors that are all in memory, and has one error for every damage.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from gdn_jax.commands.errors import brief
from gdn_jax.commands.files import parse_json

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
"""Floating dtypes by their name in a header."""
FLOAT8 = "F8_E4M3"
"""The dtype of matrices that need scales, see `float8.py`."""
STORED = DTYPES | {FLOAT8: jnp.float8_e4m3fn}
"""Dtypes whose bytes are read and written."""

_MAX_HEADER = 100_000_000  # bytes, as in the package
_MAX_RANK = 32  # dimensions; with more or larger ones to multiply the count of numbers would take minutes


class Tensor(NamedTuple):
    """A tensor in a file.

    Fields:
      name: of the tensor.
      file: that holds it.
      dtype: its name in the header, for example "BF16".
      shape: of the tensor.
      begin, end: where its bytes lie in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def stored(self) -> "tuple[Tensor, ...]":
        """The tensors that lie in files for it: itself."""
        return (self,)

    def read(self) -> np.ndarray:
        """The values, in memory of their own.

        Raises:
          ValueError: the file has become shorter than it was; names tensor and file.
          NotImplementedError: the dtype is none of `DTYPES`.
        """
        if self.dtype not in DTYPES:
            raise NotImplementedError(
                f"{self.file}: tensor {self.name} has dtype {self.dtype}; quantized weights and others that are no "
                f"floating numbers are not supported, only {', '.join(DTYPES)}"
            )
        return self.stored_values()

    def stored_values(self) -> np.ndarray:
        """The values as `read` has them, also of a dtype of `STORED` that needs scales.

        Raises:
          ValueError: as `read`.
        """
        dtype, count = np.dtype(STORED[self.dtype]), math.prod(self.shape)
        values = np.fromfile(self.file, dtype, count, offset=self.begin)
        if values.size != count:
            raise ValueError(f"{self.file}: expected {count} values of tensor {self.name}, got {values.size}")
        return values.reshape(self.shape)


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; reads the header only.

    Raises:
      ValueError: the file is damaged or cut off; names the file, and the tensor where one is concerned.
      OSError: it cannot be read.
    """
    if not file.is_file():
        raise ValueError(f"{file}: expected a safetensors file, got something else")
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ValueError(f"{file}: expected a safetensors file, got no header of a possible length")
        try:
            header = parse_json(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file}: expected a JSON header, got a damaged one: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: expected a JSON object as header, got {type(header).__name__}")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.begin):
        if tensor.end > size:
            raise ValueError(
                f"{file}: expected tensor {tensor.name} up to byte {tensor.end}, got a file of {size} bytes: it is "
                f"cut off"
            )
        if tensor.begin != end:
            raise ValueError(f"{file}: expected tensor {tensor.name} at byte {end}, got {tensor.begin}")
        end = tensor.end
    if end != size:
        raise ValueError(f"{file}: expected a file of {end} bytes, got {size}")
    return tensors


def _tensor(file: Path, name: str, entry: Any, start: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        whole = (
            all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)) and len(shape) <= _MAX_RANK
        )
    except (KeyError, TypeError, ValueError):
        dtype, shape, begin, end, whole = "", (), 0, 0, False
    if not whole:
        raise ValueError(
            f"{file}: expected dtype, shape and data_offsets of tensor {name[:200]}, got {brief(entry)}"
        )
    size = math.prod(shape) * np.dtype(STORED[dtype]).itemsize if dtype in STORED else end - begin
    if end - begin != size:
        raise ValueError(f"{file}: expected {size} bytes of tensor {name}, got {end - begin}")
    return Tensor(name, file, dtype, shape, start + begin, start + end)


class Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(stream: BinaryIO, entries: list[Entry], arrays: Iterable[np.ndarray]) -> None:
    """Writes tensors one by one: no more than one of `arrays` need be in memory.

    Args:
      stream: of an empty file.
      entries: names, dtypes and shapes.
      arrays: the values, in the order of the entries.
    """
    names = {np.dtype(dtype): name for name, dtype in STORED.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for entry in entries:
        place = [end, end + entry.size]
        header[entry.name] = {
            "dtype": names[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": place,
        }
        end += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes of tensors begin at a multiple of 8
    stream.write(len(text).to_bytes(8, "little") + text)
    for entry, array in zip(entries, arrays, strict=True):
        assert (array.dtype, array.shape) == (entry.dtype, entry.shape), (entry, array.dtype, array.shape)
        stream.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
