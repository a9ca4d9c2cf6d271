"""Results of kernels of one row that are added to the residual stream, in parts that several CTAs make."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_pytree_node_class
class Parts:
    """Parts [P, D] of what is added to a stream of one row, which is their sum. A pytree.

    The derivative of the kernels that make parts has one cotangent for all of them, that of their sum: a part alone
    would get a wrong gradient. So none can be read: `sum` adds them up, and `addends` is for kernels that do.
    """

    def __init__(self, parts: Float[Array, "P D"]):
        self._parts = parts

    def sum(self) -> Float[Array, " D"]:
        """Adds them up: the result is added to the stream."""
        return jnp.sum(self._parts, axis=0)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """See `jax.tree_util.register_pytree_node_class`."""
        return (self._parts,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "Parts":
        """See `jax.tree_util.register_pytree_node_class`."""
        parts = object.__new__(cls)
        (parts._parts,) = children
        return parts


def addends(y: Any) -> Any:
    """The array of `Parts`, for a kernel that adds them up and has the same derivative for each of them; else y."""
    return y._parts if isinstance(y, Parts) else y
