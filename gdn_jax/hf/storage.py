"""How the weights of a model lie in a checkpoint that is written: as floating numbers, or in FP8 blocks."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.hf import float8, kept
from gdn_jax.hf.float8 import Scaled
from gdn_jax.hf.kept import Kept
from gdn_jax.hf.tensors import STORED, Entry, Tensor
from gdn_jax.hf.weights import Weight


class Part(NamedTuple):
    """Tensors of one dtype that are made together, and what makes them, one by one."""

    entries: list[Entry]
    arrays: Callable[[], Iterator[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Plain:
    """Weights in the dtypes in which a model has them.

    Fields:
      dtype: of the model's weights; matrices that a loaded model does not use are brought from 8 bits to it.
    """

    dtype: np.dtype

    def parts(self, weight: Weight, params: Mapping[str, jax.Array | Kept]) -> list[Part]:
        """The tensors of a weight."""
        arrays = [params[name] for name in weight.params]
        entries = [Entry(name, arrays[0].dtype, shape) for name, shape in weight.tensors.items()]
        return [Part(entries, lambda: _written(weight, arrays))]

    def copied(self, tensor: Tensor | Scaled) -> list[Part]:
        """A tensor of the checkpoint that a model was loaded from.

        Raises:
          NotImplementedError: its dtype is not known.
        """
        if isinstance(tensor, Scaled):
            entry = Entry(tensor.name, self.dtype, tensor.shape)
            return [Part([entry], lambda: iter([tensor.read().astype(self.dtype)]))]
        return [_copy(tensor)]

    def fields(self, entries: list[Entry]) -> dict[str, Any]:
        """Fields of config.json that tell of this, given all tensors."""
        return {}


@dataclasses.dataclass(frozen=True)
class InBlocks(Plain):
    """Chosen matrices in E4M3 with a scale for each block, the rest as `Plain` has it.

    Fields:
      block: rows and columns of a block.
      chosen: finds the names of the matrices.
    """

    block: tuple[int, int]
    chosen: re.Pattern[str]

    def parts(self, weight: Weight, params: Mapping[str, jax.Array | Kept]) -> list[Part]:
        """The tensors of a weight, scales before values: as a model keeps them, or quantised."""
        if not all(self.chosen.search(name) for name in weight.tensors):
            return Plain.parts(self, weight, params)
        arrays = [params[name] for name in weight.params]
        if (found := self._kept(weight, arrays)) is not None:
            return found
        scales = [
            Entry(name + float8.SCALES, np.dtype(jnp.bfloat16), float8.scales_shape(shape, self.block))
            for name, shape in weight.tensors.items()
        ]
        values = [Entry(name, np.dtype(jnp.float8_e4m3fn), shape) for name, shape in weight.tensors.items()]

        def each(make: Callable[[np.ndarray, tuple[int, int]], np.ndarray]) -> Iterator[np.ndarray]:
            for name, matrix in zip(weight.tensors, _written(weight, arrays), strict=True):
                try:
                    yield make(matrix, self.block)
                except ValueError as error:
                    raise ValueError(f"model: tensor {name} in 8 bits: {error}") from None

        return [
            Part(scales, lambda: each(float8.block_scales)),
            Part(values, lambda: each(float8.quantized)),
        ]

    def _kept(self, weight: Weight, arrays: list[Any]) -> list[Part] | None:
        """The codes and scales of a model as they are; None where it has none in blocks as these."""
        of_model = [array for array in arrays if isinstance(array, Kept)]
        if len(of_model) < len(arrays) or self.block != float8.BLOCK:
            return None
        if (found := kept.tensors_of(weight, of_model)) is None:
            return None
        codes, scales = found
        narrow = all(np.array_equal(x.astype(jnp.bfloat16).astype(np.float32), x) for x in scales)
        dtype = np.dtype(jnp.bfloat16 if narrow else np.float32)
        of_scales = [
            Entry(name + float8.SCALES, dtype, x.shape)
            for name, x in zip(weight.tensors, scales, strict=True)
        ]
        of_codes = [Entry(name, x.dtype, x.shape) for name, x in zip(weight.tensors, codes, strict=True)]
        return [
            Part(of_scales, lambda: (x.astype(dtype) for x in scales)),
            Part(of_codes, lambda: iter(codes)),
        ]

    def copied(self, tensor: Tensor | Scaled) -> list[Part]:
        """A tensor of the checkpoint that a model was loaded from, and its scales, as they lie there."""
        return [_copy(stored) for stored in tensor.stored]

    def fields(self, entries: list[Entry]) -> dict[str, Any]:
        """The quantization_config: all modules with a matrix that is not in 8 bits are listed."""
        names = [entry.name for entry in entries if len(entry.shape) > 1 and entry.dtype != jnp.float8_e4m3fn]
        plain = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
        return {"quantization_config": float8.written(self.block, plain)}


def _written(weight: Weight, arrays: list[Any]) -> Iterator[np.ndarray]:
    return weight.write([np.asarray(array) for array in arrays])


def _copy(tensor: Tensor) -> Part:
    if tensor.dtype not in STORED:
        raise NotImplementedError(
            f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}, cannot copy it"
        )
    entry = Entry(tensor.name, np.dtype(STORED[tensor.dtype]), tensor.shape)
    return Part([entry], lambda: iter([tensor.stored_values()]))
