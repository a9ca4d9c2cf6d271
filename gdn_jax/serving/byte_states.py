"""States in 8 bits: a code for each number, and a scale for each row of a state as it lies in memory.

    state[i, j] = codes[i, j] * scale[i];   scale[i] = max_j |state[i, j]| / largest code

A row is that of a key channel, or with state_layout "vk" that of a value channel, so a large channel costs the others
no digits, and a kernel can multiply a row's sum in the place of its numbers.

Each write rounds a whole state anew. These pools are for the checkpoints of rings, which are written once in as many
tokens as a ring is long; docs/accuracy.md has the errors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from gdn_jax.serving import slots
from gdn_jax.serving.arguments import check_places
from gdn_jax.serving.pools import Pool
from gdn_jax.serving.slots import Address
from gdn_jax.shapes import Dims, check_array, check_floating


@dataclass(frozen=True)
class Code:
    """A dtype of 8 bits."""

    largest: int
    """The largest number that it holds."""
    rounded: Callable[[Array], Array] = lambda x: x
    """Rounds numbers to ones that it holds, where its conversion would not."""


CODES: dict[str, Code] = {"int8": Code(127, jnp.round), "float8_e4m3fn": Code(448)}
"""Codes by the name of their dtype."""


class ByteStates(NamedTuple):
    """The arrays of a pool of states in 8 bits."""

    codes: Num[Array, "slots *layers HO rows columns"]
    """int8 or float8_e4m3fn."""
    scale: Float[Array, "slots *layers HO rows"]
    """float32; 0 for a row of zeros."""


class BytePool(Pool, of=ByteStates):
    """The arrays of `ByteStates`, with the operations of serving in plain JAX."""

    arrays: ByteStates
    names: ClassVar[Any] = ByteStates._make(("h . .", "h ."))

    @property
    def states(self) -> Any:
        """The codes, which have the states' shape."""
        return self.arrays.codes

    def check(self, dims: Dims, layer: Any) -> None:
        """Raises ValueError unless codes and scales have the heads and widths of a call."""
        codes, scale = self.arrays
        check_places("pool.codes", codes, *self.state_shape(dims), layer)
        self.check_dtype("pool")
        check_array("pool.scale", scale, codes.shape[:-1], "slots, layers if any, HO, rows")

    def check_dtype(self, name: str) -> None:
        """Raises ValueError, by that name of the arrays, unless there are codes of their dtype."""
        _code(self.arrays.codes.dtype, f"{name}.codes")
        if self.arrays.scale.dtype != jnp.float32:
            raise ValueError(f"{name}.scale: expected dtype float32, got {self.arrays.scale.dtype}")

    def take(self, at: Address) -> Float[Array, "*N HO _ _"]:
        """States of some slots in float32, zeros for padding."""
        return decoded(slots.take(self.arrays, at))

    def put(self, at: Address, states: Float[Array, "*N HO _ _"]) -> Any:
        """The pool with states in some slots, rounded to codes."""
        return self.holding(slots.put(self.arrays, at, encoded(states, self.states.dtype)))

    def beside_rings(self) -> tuple[Any, Any]:
        """The codes and their scales."""
        return self.arrays.codes, self.arrays.scale


def make_byte_states(states: Float[Array, "slots *state"], *, dtype: DTypeLike = jnp.int8) -> ByteStates:
    """States in 8 bits, for `make_ring_pool`.

    Args:
      states: [slots, HO, K, V], or [slots, HO, V, K]; [slots, layers, ...] for a whole model.
      dtype: int8 or float8_e4m3fn, of the codes. int8 has the smaller error; see docs/accuracy.md.

    Raises:
      ValueError: an argument is wrong.
    """
    check_floating("states", states)
    if len(states.shape) not in (4, 5):
        want = "[slots, HO, K, V] or [slots, layers, HO, K, V]"
        raise ValueError(f"states: expected shape {want}, got {states.shape}")
    return encoded(states, dtype)


def of_dtype(states: Float[Array, "slots *state"], dtype: DTypeLike) -> Array | ByteStates:
    """The arrays of a pool that holds states in a dtype: floating, or of 8 bits with scales.

    Raises:
      ValueError: there are no states of that dtype.
    """
    if jnp.dtype(dtype).name in CODES:
        return make_byte_states(states, dtype=dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize == 1:
        raise ValueError(
            f"dtype: expected a floating dtype of 16 bits or more, or {' or '.join(CODES)}, got {dtype!r}"
        )
    return states.astype(dtype)


def encoded(states: Float[Array, "*N rows columns"], dtype: DTypeLike) -> ByteStates:
    """States as codes of a dtype, each rounded to the nearest.

    Args:
      states: of any floating dtype, float32 inside. A row with a NaN or an infinity is NaN afterwards.
      dtype: int8 or float8_e4m3fn.

    Raises:
      ValueError: there are no codes of the dtype.
    """
    code, x = _code(dtype, "dtype"), states.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), -1) / code.largest
    # The largest quotient may round to more than the largest code, by an ulp that `rounded` or the conversion drops.
    quotient = x / jnp.where(scale == 0, 1, scale)[..., None]
    return ByteStates(code.rounded(quotient).astype(dtype), scale)


def decoded(states: ByteStates) -> Float[Array, "*N rows columns"]:
    """The states in float32."""
    return states.codes.astype(jnp.float32) * states.scale[..., None]


def _code(dtype: Any, name: str) -> Code:
    try:
        return CODES[jnp.dtype(dtype).name]
    except (KeyError, TypeError):
        raise ValueError(f"{name}: expected dtype {' or '.join(CODES)}, got {dtype!r}") from None
