"""Matrices in 8 bits with a scale for each block, as FP8 checkpoints hold them.

    W[i, j] = values[i, j] * scales[i // 128, j // 128]

NAME holds the values [.., rows, columns] in E4M3, and NAME_scale_inv the scales [.., ceil(rows / 128),
ceil(columns / 128)] in a floating dtype: they multiply, although their name says that they divide. Blocks begin at
multiples of 128 of the tensor as it is stored, whatever it holds; the last ones of a row or a column are smaller. The
product is computed in float32, where it is exact for scales in bfloat16.

Activations are not rounded here, although config.json says that they are ("dynamic"): the model is the one of these
weights. Source: `integrations/finegrained_fp8.py` of transformers, which multiplies as above on a GPU.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gdn_jax.commands.errors import brief
from gdn_jax.hf.fields import MOST
from gdn_jax.hf.tensors import DTYPES, FLOAT8, Tensor

SCALES = "_scale_inv"
"""Ending of the name of a matrix' scales."""
BLOCK = (128, 128)
"""Rows and columns of a block of published checkpoints."""
LARGEST = 448.0
"""The largest number in E4M3."""

_KNOWN = {
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3",),
    "scale_fmt": ("float",),
    "weight_per_tensor": (False,),
    "act_per_tensor": (False,),
    "dequantize": (False, True),
}
"""Values that fields of quantization_config may have, if they are there."""
_LISTS = ("modules_to_not_convert", "ignored_layers")
"""Fields with the names of modules that are not quantized: of published files, and an older name."""


class Scaled(NamedTuple):
    """A matrix in 8 bits and its scales; to a reader it is a `Tensor` of floating numbers.

    Fields:
      values: the matrix, or matrices [.., rows, columns].
      scales: of its blocks.
      block: rows and columns of a block.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def name(self) -> str:
        """The matrix' name."""
        return self.values.name

    @property
    def file(self) -> Path:
        """The file with the values."""
        return self.values.file

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix' shape."""
        return self.values.shape

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors as they lie in files."""
        return self.values, self.scales

    def read(self) -> np.ndarray:
        """The matrix in float32.

        Raises:
          ValueError: a scale is negative or not finite, a value is NaN, or their product overflows; names tensor and
            file.
        """
        scales, matrix = self.read_scales(), self.read_codes().astype(np.float32)
        rows, columns = np.minimum(
            self.block, matrix.shape[-2:]
        )  # a block may say to be larger than any matrix
        for i in range(scales.shape[-2]):
            stripe = matrix[..., i * rows : (i + 1) * rows, :]
            stripe *= np.repeat(scales[..., i, :], columns, -1)[..., None, : matrix.shape[-1]]
        return matrix

    def read_scales(self) -> np.ndarray:
        """The scales of the blocks in float32.

        Raises:
          ValueError: see `read`.
        """
        scales = self.scales.read().astype(np.float32)
        with np.errstate(over="ignore"):
            whole = np.isfinite(LARGEST * scales) & (scales >= 0)
        if not whole.all():
            raise ValueError(
                f"{self.scales.file}: expected scales from 0 to {np.finfo(np.float32).max / LARGEST:.3g} in tensor "
                f"{self.scales.name}, got {scales[~whole].flat[0]:.3g}"
            )
        return scales

    def read_codes(self) -> np.ndarray:
        """The values in E4M3, without their scales.

        Raises:
          ValueError: see `read`.
        """
        codes = self.values.stored_values()
        if np.any(codes.view(np.uint8) & 0x7F == 0x7F):
            raise ValueError(
                f"{self.values.file}: expected numbers in tensor {self.values.name}, got NaN: it is damaged"
            )
        return codes


@dataclasses.dataclass(frozen=True)
class Float8:
    """The quantization of a config.json.

    Fields:
      block: rows and columns that share a scale.
      plain: names of modules that the config lists as unquantized.
    """

    block: tuple[int, int]
    plain: frozenset[str] = frozenset()

    def joined(self, folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor | Scaled]:
        """Tensors by name, every matrix in 8 bits with its scales.

        Raises:
          ValueError: scales are missing, of a wrong shape, or without a matrix in 8 bits, or a matrix is in 8 bits
            although its module is listed as plain; names tensor and file.
          NotImplementedError: scales are no floating numbers.
        """
        joined: dict[str, Tensor | Scaled] = {}
        for name, tensor in tensors.items():
            if not name.endswith(SCALES):
                scaled = tensor.dtype == FLOAT8
                joined[name] = self._scaled(tensor, tensors, folder) if scaled else tensor
            else:
                matrix = name.removesuffix(SCALES)
                if matrix not in tensors:
                    raise ValueError(
                        f"{tensor.file}: expected tensor {matrix[:200]} of the scales {name[:200]}, got none in any "
                        f"file"
                    )
                if tensors[matrix].dtype != FLOAT8:
                    raise ValueError(
                        f"{tensors[matrix].file}: expected dtype {FLOAT8} of tensor {matrix[:200]}, which has "
                        f"scales, got {tensors[matrix].dtype}"
                    )
        return joined

    def _scaled(self, values: Tensor, tensors: dict[str, Tensor], folder: Path) -> Scaled:
        name, scales = values.name[:200], tensors.get(values.name + SCALES)
        if values.name.removesuffix(".weight") in self.plain:
            raise ValueError(
                f"{values.file}: expected a floating dtype of tensor {name}, whose module is among those that "
                f"quantization_config says are not converted, got {FLOAT8}"
            )
        if len(values.shape) not in (2, 3):
            raise ValueError(
                f"{values.file}: expected a matrix or matrices in 8 bits as tensor {name}, got shape {values.shape}"
            )
        shape = scales_shape(values.shape, self.block)
        if scales is None:
            raise ValueError(
                f"{folder}: expected tensor {name}{SCALES} of shape {shape}, with the scales of a tensor in "
                f"{FLOAT8}, got none in any file"
            )
        if scales.shape != shape:
            raise ValueError(
                f"{scales.file}: expected tensor {scales.name[:200]} of shape {shape}, one scale for each block of "
                f"{self.block[0]} x {self.block[1]} numbers of {values.shape}, got {scales.shape}"
            )
        if scales.dtype not in DTYPES:
            raise NotImplementedError(
                f"{scales.file}: tensor {scales.name[:200]} has dtype {scales.dtype}; scales are supported in "
                f"{', '.join(DTYPES)}"
            )
        return Scaled(values, scales, self.block)


def described(config: dict[str, Any], where: str) -> Float8 | None:
    """The quantization of a config.json; None where it has none.

    Raises:
      ValueError: a field cannot be; names it.
      NotImplementedError: the weights are quantized in another way.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, got {brief(found)}")
    if found.get("quant_method") != "fp8":
        raise NotImplementedError(
            f"{where}: quant_method = {brief(found.get('quant_method'))}: only 'fp8' is supported, matrices in E4M3 "
            f"with a scale for each block"
        )
    for name, value in found.items():
        if name in ("quant_method", "weight_block_size", *_LISTS) or value is None:
            continue
        if value not in _KNOWN.get(name, (False, {}, [])):
            known = " or ".join(map(repr, _KNOWN.get(name, (None,))))
            raise NotImplementedError(f"{where}: {name} = {brief(value)}: only {known} is supported")
    block = found.get("weight_block_size")
    if block is None:
        raise NotImplementedError(
            f"{where}: weight_block_size = None: one scale for a whole matrix is not supported, only one for each "
            f"block"
        )
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(n) is int and 0 < n < MOST for n in block)
    ):
        raise ValueError(f"{where}: expected weight_block_size of two sizes above 0, got {brief(block)}")
    plain: set[str] = set()
    for name in _LISTS:
        modules = found.get(name) or []
        if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
            raise ValueError(f"{where}: expected names of modules {name}, got {brief(modules)}")
        plain.update(modules)
    return Float8((block[0], block[1]), frozenset(plain))


def written(block: tuple[int, int], plain: list[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint in blocks, with the names of modules that are not quantized."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [*block],
        "modules_to_not_convert": plain,
    }


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of matrices [.., rows, columns]."""
    *outer, rows, columns = shape
    return (*outer, -(-rows // block[0]), -(-columns // block[1]))


def block_scales(matrix: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Scales in bfloat16 that bring the largest number of each block of a matrix [rows, columns] to 448.

    bfloat16 is what published checkpoints have; values times these scales are exact in float32. No scale is less than
    2^-126, the least number that bfloat16 holds with all its digits.

    Raises:
      ValueError: a number of the matrix is not finite.
    """
    height, lefts = block[0], range(0, matrix.shape[1], block[1])
    largest = np.empty(scales_shape(matrix.shape, block), np.float32)
    for i in range(len(largest)):
        stripe = np.abs(matrix[i * height : (i + 1) * height]).max(0)
        largest[i] = np.maximum.reduceat(stripe.astype(np.float32), lefts)
    if not np.isfinite(largest).all():
        raise ValueError("expected finite numbers, got NaN or infinity")
    return np.maximum(largest / LARGEST, np.float32(2.0**-126)).astype(jnp.bfloat16)


def quantized(matrix: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The values of a matrix [rows, columns] in E4M3, rounded to nearest, for `block_scales`."""
    scales = block_scales(matrix, block).astype(np.float32)
    values = np.empty(matrix.shape, jnp.float8_e4m3fn)
    for i, row in enumerate(scales):
        stripe = slice(i * block[0], (i + 1) * block[0])
        spread = np.repeat(row, min(block[1], matrix.shape[1]))[: matrix.shape[1]]
        values[stripe] = matrix[stripe].astype(np.float32) / spread
    return values
