"""Weights that a model keeps in 8 bits: from the tensors of a checkpoint, and back.

A model has codes and a scale for each row of outputs and each block of inputs, see `gdn_jax.parts.block_weights`. A
checkpoint has a scale for each block of both. Rows of tensors that are several parameters are taken apart for both
alike.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gdn_jax.hf import float8
from gdn_jax.hf.float8 import Scaled
from gdn_jax.hf.tensors import Tensor
from gdn_jax.hf.weights import Weight
from gdn_jax.layers.block_weights import BLOCKS

BLOCK = float8.BLOCK[1]
CODES, SCALES = f"{BLOCKS}.codes", f"{BLOCKS}.scales"
"""Endings of names of parameters, after the name that one has in a model whose weights are whole."""


def read(weight: Weight, tensors: Mapping[str, Tensor | Scaled]) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of a weight by name, read from its tensors; floating ones are quantised in blocks of 128 x 128.

    Raises:
      ValueError: a tensor is damaged, or not finite.
      NotImplementedError: blocks have not 128 columns.
    """
    for ending, of in ((CODES, _codes), (SCALES, _scales)):
        arrays = weight.read(of(tensors[name]) for name in weight.tensors)
        for name, array in zip(weight.params, arrays, strict=True):
            yield name + ending, np.swapaxes(array, -1, -2)


def _codes(tensor: Tensor | Scaled) -> np.ndarray:
    if isinstance(tensor, Scaled):
        return tensor.read_codes()
    return _each(float8.quantized, tensor)


def _scales(tensor: Tensor | Scaled) -> np.ndarray:
    """The scales of every row."""
    if isinstance(tensor, Scaled):
        scales, (rows, columns) = tensor.read_scales(), tensor.block
        if columns != BLOCK:
            raise NotImplementedError(
                f"{tensor.file}: weights='float8': tensor {tensor.name} has a scale for {columns} columns; blocks of "
                f"{BLOCK} columns are kept"
            )
    else:
        scales, rows = _each(float8.block_scales, tensor).astype(np.float32), BLOCK
    F = tensor.shape[-2]
    return np.repeat(scales, min(rows, F), axis=-2)[..., :F, :]


def _each(make: Any, tensor: Tensor) -> np.ndarray:
    """A function of a matrix and its blocks, of all matrices of a tensor."""
    array = tensor.read()
    try:
        matrices = [make(matrix, float8.BLOCK) for matrix in array.reshape(-1, *array.shape[-2:])]
    except ValueError as error:
        raise ValueError(f"{tensor.file}: tensor {tensor.name} in 8 bits: {error}") from None
    return np.stack(matrices).reshape(*array.shape[:-2], *matrices[0].shape)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A weight that a model keeps in 8 bits; NumPy makes an array of it by dequantising it.

    Fields:
      codes: [.., outputs, inputs].
      scales: [.., outputs, blocks of inputs].
      dtype: of the dequantised weight.
    """

    codes: Any
    scales: Any
    dtype: np.dtype

    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales in the layout of a weight, inputs before outputs."""
        codes, scales = (np.swapaxes(np.asarray(x), -1, -2) for x in (self.codes, self.scales))
        return codes, scales

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The weight [.., inputs, outputs]."""
        codes, scales = self.parts()
        spread = np.repeat(scales, BLOCK, axis=-2)[..., : codes.shape[-2], :]
        return (codes.astype(np.float32) * spread).astype(self.dtype if dtype is None else dtype)


def named(params: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Parameters by the names of a model whose weights are whole: a `Kept` in the place of codes and scales."""
    found = {name.removesuffix(CODES): array for name, array in params.items() if name.endswith(CODES)}
    rest = {name: array for name, array in params.items() if not name.endswith((CODES, SCALES))}
    return rest | {name: Kept(codes, params[name + SCALES], dtype) for name, codes in found.items()}


def tensors_of(weight: Weight, kept: list[Kept]) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Codes and scales of blocks of 128 x 128 of each tensor of a weight.

    None where rows of one block have unlike scales: somebody quantised the parameters one by one.
    """
    codes, scales = zip(*(x.parts() for x in kept), strict=True)
    rows = [*weight.write([*scales])]
    for of_rows in rows:
        first = np.repeat(of_rows[..., ::BLOCK, :], BLOCK, axis=-2)[..., : of_rows.shape[-2], :]
        if not np.array_equal(first, of_rows):
            return None
    return [*weight.write([*codes])], [of_rows[..., ::BLOCK, :] for of_rows in rows]
