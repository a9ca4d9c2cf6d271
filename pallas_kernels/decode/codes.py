"""Numbers of a state as they lie in memory: as they are, or as codes of 8 bits with a scale for each row.

    state[i, j] = codes[i, j] scale[i];   scale[i] = max_j |state[i, j]| / largest code

A kernel that walks over states takes their rows through one of these objects, and never asks which. A row's scale is
a factor of the number that the row is multiplied by, or of the row's sum, so that codes are multiplied as they are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.tiles import load, spread
from pallas_kernels.device.memory import Buffer, Memory, store_any

ROUNDER = 1.5 * 2**23
"""A float32 number that is added to numbers of at most 2^22 and subtracted again has rounded them to whole ones."""


class Rows(NamedTuple):
    """Rows of a state in memory."""

    numbers: Any
    """Reference [rows, columns]."""
    scale: Any = None
    """Reference [rows], float32, of codes."""

    def some(self, first: Any, number: int) -> "Rows":
        """So many of the rows, from one on."""
        here = pl.ds(first, number)
        return Rows(self.numbers.at[here], None if self.scale is None else self.scale.at[here])


class Floats:
    """States in float32 or bfloat16."""

    copies = 1
    """Copies that bring rows."""

    def memory(self, warpgroups: int, stages: int, rows: int) -> Memory:
        """Memory that rows need beside their numbers."""
        return {}

    def copy(self, source: Rows, target: Rows, barrier: Any) -> None:
        """Starts the copies of rows to shared memory."""
        plgpu.copy_gmem_to_smem(source.numbers, target.numbers, barrier)

    def widened(self, x: jax.Array, layout: Any, device: Any) -> jax.Array:
        """Numbers of rows as they were loaded, in float32: the state, or codes.

        Args:
          device: by which pairs of neighbours are widened; None: as the compiler does it.
        """
        return x.astype(jnp.float32) if device is None else device.widen(x, layout)

    def scaled(self, x: list[jax.Array], rows: Rows, layout: Any) -> list[jax.Array]:
        """Numbers [rows] that belong to rows, times what makes their codes the state."""
        del rows, layout
        return x

    def times(self, S: jax.Array, factor: jax.Array, rows: Rows, layout: Any) -> jax.Array:
        """Rows of the state in a layout times a number, from `widened` ones."""
        del rows, layout
        return S * factor

    def put(self, new: jax.Array, layout: Any, *targets: Rows) -> None:
        """Writes rows of a state, float32 in a layout."""
        x = new.astype(targets[0].numbers.dtype)
        for target in targets:
            store_any(target.numbers, x)


class Codes(Floats):
    """States in 8 bits.

    Args:
      largest: code.
      dtype: of the codes.
    """

    copies = 2

    def __init__(self, largest: int, dtype: str):
        self.largest, self.dtype = largest, jnp.dtype(dtype)

    def memory(self, warpgroups: int, stages: int, rows: int) -> Memory:
        """Scales of the rows."""
        return {"scale": Buffer((warpgroups, stages, rows))}

    def copy(self, source: Rows, target: Rows, barrier: Any) -> None:
        """Starts the copies of rows and of their scales."""
        super().copy(source, target, barrier)
        plgpu.copy_gmem_to_smem(source.scale, target.scale, barrier)

    def widened(self, x: jax.Array, layout: Any, device: Any) -> jax.Array:
        """Codes in float32."""
        del layout, device
        return x.astype(jnp.float32)

    def scaled(self, x: list[jax.Array], rows: Rows, layout: Any) -> list[jax.Array]:
        """See `Floats.scaled`."""
        scale = load(rows.scale, layout.reduce(1))
        return [y * scale for y in x]

    def times(self, S: jax.Array, factor: jax.Array, rows: Rows, layout: Any) -> jax.Array:
        """See `Floats.times`."""
        scale = load(rows.scale, layout.reduce(1)) * factor
        return S * spread(scale, S.shape, 0, layout)

    def put(self, new: jax.Array, layout: Any, *targets: Rows) -> None:
        """Writes rows of a state as codes, and their scales. A row with a NaN or an infinity is NaN afterwards."""
        scale = jnp.max(jnp.abs(new), axis=1) * jnp.float32(1 / self.largest)
        inverse = 1.0 / jnp.where(scale == 0, jnp.float32(1), scale)
        x = self.rounded(new * spread(inverse, new.shape, 0, layout))
        for target in targets:
            store_any(target.numbers, x)
            store_any(target.scale, scale)

    def rounded(self, x: jax.Array) -> jax.Array:
        """Quotients as codes."""
        return x.astype(self.dtype)


class WholeCodes(Codes):
    """States in 8 bits as whole numbers."""

    def rounded(self, x: jax.Array) -> jax.Array:
        """See `Codes.rounded`."""
        return ((x + ROUNDER) - ROUNDER).astype(self.dtype)


NUMBERS: dict[str, Floats] = {
    "float32": Floats(),
    "bfloat16": Floats(),
    "int8": WholeCodes(127, "int8"),
    "float8_e4m3fn": Codes(448, "float8_e4m3fn"),
}
"""Numbers of states by the name of their dtype."""
