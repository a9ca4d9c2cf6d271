"""Tensors of a checkpoint and parameters of a model that hold the same numbers in another layout.

Hugging Face's projections are [outputs, inputs], ours [inputs, outputs]. Some of theirs are several of ours.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from gdn_jax.models.config import AttentionConfig


class Weight(NamedTuple):
    """Tensors of a checkpoint and the parameters that hold the same numbers.

    Fields:
      tensors: names in the checkpoint, with their shapes.
      params: names in the model, as in "blocks.0.mixer.q_proj.kernel".
      read: from the tensors, in order and one at a time, to the parameters.
      write: back, for parameters of any dtype.
    """

    tensors: Mapping[str, tuple[int, ...]]
    params: tuple[str, ...]
    read: Callable[[Iterator[np.ndarray]], list[np.ndarray]]
    write: Callable[[list[np.ndarray]], Iterator[np.ndarray]]


def same(tensor: str, param: str, *shape: int) -> Weight:
    """A tensor that is a parameter."""
    return Weight({tensor: shape}, (param,), list, iter)


def reshaped(tensor: str, param: str, shape: tuple[int, ...], to: tuple[int, ...]) -> Weight:
    """A tensor of a shape; the parameter has the same numbers in the shape `to`."""

    def reshape(arrays, shape):
        return [array.reshape(shape) for array in arrays]

    return Weight({tensor: shape}, (param,), lambda x: reshape(x, to), lambda x: iter(reshape(x, shape)))


def projection(tensor: str, param: str, outputs: int, inputs: int) -> Weight:
    """A projection [outputs, inputs]; the parameter is [inputs, outputs]."""
    return rows(tensor, {param: outputs}, inputs)


def rows(tensor: str, params: dict[str, int], inputs: int, groups: int = 1) -> Weight:
    """A projection that is several, [outputs, inputs]; the parameters are [inputs, outputs of one].

    Args:
      tensor: name in the checkpoint.
      params: how many rows of a group each parameter has, in the order in which they lie.
      inputs: columns.
      groups: of rows, one after another, each with rows of every parameter.
    """
    sizes = list(params.values())

    # Of any number of columns: the second factor of a low-rank change has the same rows and few columns.
    def read(tensors):
        (tensor,) = tensors
        columns = tensor.shape[1]
        return [part.reshape(-1, columns).T for part in _parts(tensor.reshape(groups, -1, columns), sizes)]

    def write(params):
        columns = len(params[0])
        parts = [param.T.reshape(groups, size, columns) for param, size in zip(params, sizes, strict=True)]
        yield np.concatenate(parts, 1).reshape(-1, columns)

    return Weight({tensor: (groups * sum(sizes), inputs)}, tuple(params), read, write)


def bias_rows(tensor: str, params: dict[str, int], groups: int = 1) -> Weight:
    """A bias that is several, as `rows`."""
    sizes = list(params.values())

    def read(tensors):
        (tensor,) = tensors
        return [part.reshape(-1) for part in _parts(tensor.reshape(groups, -1), sizes)]

    def write(params):
        parts = [param.reshape(groups, size) for param, size in zip(params, sizes, strict=True)]
        yield np.concatenate(parts, 1).reshape(-1)

    return Weight({tensor: (groups * sum(sizes),)}, tuple(params), read, write)


def _parts(rows: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Parts of every group [groups, rows, ..] of these sizes."""
    return np.split(rows, np.cumsum(sizes)[:-1], axis=1)


def row(tensor: str, param: str, inputs: int) -> Weight:
    """A projection to one number [1, inputs]; the parameter is [inputs]."""
    return Weight(
        {tensor: (1, inputs)},
        (param,),
        lambda tensors: [tensor[0] for tensor in tensors],
        lambda params: iter([param[None] for param in params]),
    )


def convolution(tensors: dict[str, int], param: str, width: int) -> Weight:
    """Depthwise convolutions [channels, 1, width] side by side; the parameter is [all channels, width]."""
    ends = np.cumsum(list(tensors.values()))

    def read(parts):
        return [np.concatenate([part[:, 0] for part in parts])]

    def write(params):
        return iter([part[:, None] for part in np.split(params[0], ends[:-1])])

    shapes = {name: (channels, 1, width) for name, channels in tensors.items()}
    return Weight(shapes, (param,), read, write)


def fused_experts(gate_up: str, down: str, param: str, experts: int, size: int, hidden: int) -> list[Weight]:
    """Experts in two tensors, [E, 2 size, hidden] and [E, hidden, size]."""

    def transposed(tensor: str, name: str, *shape: int) -> Weight:
        def swap(parts):
            return [np.swapaxes(part, 1, 2) for part in parts]

        return Weight({tensor: shape}, (name,), swap, lambda params: iter(swap(params)))

    return [
        transposed(gate_up, f"{param}.gate_up", experts, 2 * size, hidden),
        transposed(down, f"{param}.down", experts, hidden, size),
    ]


class _OfExperts(Mapping[str, tuple[int, ...]]):
    """Tensors of separate experts and their shape, PREFIX.0.PART.weight and so on.

    Names are made when they are asked for: a config.json may tell of more experts than a checkpoint has tensors.
    """

    def __init__(self, prefix: str, experts: int, parts: tuple[str, ...], shape: tuple[int, ...]):
        self._prefix, self._experts, self._parts, self._shape = prefix, experts, parts, shape
        choices = "|".join(map(re.escape, parts))
        self._name = re.compile(rf"{re.escape(prefix)}\.(0|[1-9][0-9]{{0,9}})\.({choices})\.weight")

    def __getitem__(self, name: str) -> tuple[int, ...]:
        found = self._name.fullmatch(name)
        if found is None or int(found[1]) >= self._experts:
            raise KeyError(name)
        return self._shape

    def __iter__(self) -> Iterator[str]:
        return (
            f"{self._prefix}.{expert}.{part}.weight"
            for expert in range(self._experts)
            for part in self._parts
        )

    def __len__(self) -> int:
        return self._experts * len(self._parts)


def separate_experts(
    prefix: str,
    param: str,
    experts: int,
    size: int,
    hidden: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Weight]:
    """Experts in three tensors each: PREFIX.0.gate_proj.weight [size, hidden], up_proj, down_proj [hidden, size].

    Args: parts are the names of these three.
    """

    def read_gate_up(tensors):
        first = next(tensors)
        whole = np.empty((experts, first.shape[1], 2 * size), first.dtype)  # scales have fewer columns
        for i, tensor in enumerate(itertools.chain([first], tensors)):
            half = i % 2 * size
            whole[i // 2, :, half : half + size] = tensor.T
        return [whole]

    def write_gate_up(params):
        for expert in params[0]:
            yield expert[:, :size].T
            yield expert[:, size:].T

    def read_down(tensors):
        first = next(tensors)
        whole = np.empty((experts, *first.T.shape), first.dtype)
        for i, tensor in enumerate(itertools.chain([first], tensors)):
            whole[i] = tensor.T
        return [whole]

    def write_down(params):
        return (expert.T for expert in params[0])

    gate_up = _OfExperts(prefix, experts, parts[:2], (size, hidden))
    down = _OfExperts(prefix, experts, parts[2:], (hidden, size))
    return [
        Weight(gate_up, (f"{param}.gate_up",), read_gate_up, write_gate_up),
        Weight(down, (f"{param}.down",), read_down, write_down),
    ]


def attention_weights(
    a: AttentionConfig, hidden: int, tensors: str, params: str, projections: str = "qkvo"
) -> Iterator[Weight]:
    """Weights of an attention layer: some of its projections with biases, and its norms of queries and keys."""
    width, kv_width = a.num_heads * a.head_dim, (a.num_kv_heads or a.num_heads) * a.head_dim
    sizes = {"q": (width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden), "o": (hidden, width)}
    for name in projections:
        theirs, ours = f"{tensors}.{name}_proj", f"{params}.{name}_proj"
        yield projection(f"{theirs}.weight", f"{ours}.kernel", *sizes[name])
        if a.bias:
            yield same(f"{theirs}.bias", f"{ours}.bias", sizes[name][0])
    for name in "qk":
        size = a.head_dim if a.qk_norm == "head" else sizes[name][0]
        yield same(f"{tensors}.{name}_norm.weight", f"{params}.{name}_norm.weight", size)
