"""The axes of a mesh: rows of the batch, heads and tokens of a row.

data      rows of a batch; with sharded parameters also the weights and the optimiser's state
head      heads of the token mixers and inner width of the SwiGLU
context   tokens of every row
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

DATA, HEAD, CONTEXT = AXES = ("data", "head", "context")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The numbers of devices along each axis, and whether the parameters are split over data.

    Fields:
      data, head, context: devices along each axis, at least 1.
      shard_parameters: each device of the data axis keeps a part of the parameters and of the optimiser's state,
        which are gathered where they are used.

    Raises:
      ValueError: names the field, what was expected and what came.
    """

    data: int = 1
    head: int = 1
    context: int = 1
    shard_parameters: bool = False

    def __post_init__(self):
        for name in AXES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}: expected a number of devices, at least 1, got {size!r}")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Reads a shape such as "data=2,head=2,context=2", each axis at most once; "sharded" shards the parameters.

        Raises:
          ValueError: the text is no such list.
        """
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, number = part.strip().partition("=")
            if name == "sharded" and not number and "shard_parameters" not in values:
                values["shard_parameters"] = True
            elif name in AXES and name not in values and number.isdecimal() and len(number) < 10:
                values[name] = int(number)
            else:
                raise ValueError(
                    f"mesh: expected axes out of {', '.join(AXES)} with their devices, and sharded, each at most "
                    f"once, as in data=2,head=2,context=2,sharded; got {part!r}"
                )
        return cls(**values)

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1]
        return ",".join([*parts, *(["sharded"] if self.shard_parameters else [])]) or "data=1"

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.head * self.context

    def make(self, devices: list[jax.Device] | None = None) -> Mesh:
        """Makes the mesh, of automatic axes. Devices along context are neighbours, then those along head.

        Args:
          devices: default: all that JAX sees, of all processes.

        Raises:
          ValueError: there are fewer devices.
        """
        devices = jax.devices() if devices is None else devices
        if len(devices) != self.size:
            raise ValueError(
                f"mesh: expected {len(devices)} devices as there are, got {self} with {self.size}"
            )
        grid = np.array(devices).reshape(self.data, self.head, self.context)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def axes_set() -> dict[str, int] | None:
    """Numbers of devices along the axes of the mesh that is set; None without a mesh, and inside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != AXES or any(kind != AxisType.Auto for kind in mesh.axis_types) or mesh.size == 1:
        return None
    return dict(mesh.shape)


def dividing(sizes: dict[str, int], axis: str, *dimensions: int) -> str | None:
    """Returns the axis if its devices divide all dimensions, else None.

    Args:
      sizes: devices along each axis, as `axes_set` gives them.
      axis: one of them.
      dimensions: numbers of rows, heads or channels.
    """
    return axis if all(n % sizes[axis] == 0 for n in dimensions) else None


def tokens_of(sizes: dict[str, int], shape: tuple[int, ...]) -> PartitionSpec:
    """The PartitionSpec of the rows and tokens of an array [B, T, .., D], as far as devices divide them.

    Args:
      sizes: devices along each axis, as `axes_set` gives them.
      shape: of the array.
    """
    axes = [dividing(sizes, axis, n) for axis, n in zip((DATA, CONTEXT), shape[:-1], strict=False)]
    return PartitionSpec(*axes, *[None] * (len(shape) - 1 - len(axes)))


def check_tokens(T: int, sizes: dict[str, int]) -> None:
    """Checks that the devices along context divide a row's tokens.

    Args:
      T: tokens of a row.
      sizes: devices along each axis, as `axes_set` gives them.

    Raises:
      ValueError: they do not.
    """
    if T % sizes[CONTEXT]:
        raise ValueError(
            f"x: expected rows of a multiple of {sizes[CONTEXT]} tokens, the devices of context, got {T}"
        )


class ShardAxes(NamedTuple):
    """The mesh axes next to context that arrays are split over; None where rows or heads are not split."""

    rows: str | None
    heads: str | None

    @property
    def tokens(self) -> PartitionSpec:
        """PartitionSpec of arrays [B, T, heads or channels, ..]."""
        return PartitionSpec(self.rows, CONTEXT, self.heads)

    @property
    def states(self) -> PartitionSpec:
        """PartitionSpec of arrays [N, heads or channels, ..]."""
        return PartitionSpec(self.rows, self.heads)

    def named(self, arrays: dict[str, Any]) -> dict[str, PartitionSpec]:
        """PartitionSpecs of arguments by name; an argument without a rule is the same on every device."""
        known = {"initial_state": self.states, "segment_ids": PartitionSpec(self.rows, CONTEXT)}
        return {name: known.get(name, PartitionSpec()) for name in arrays}
