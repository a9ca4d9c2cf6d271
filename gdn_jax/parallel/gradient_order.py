"""When the devices of a mesh add up the gradients of a deep model's weights: while the backward pass goes on.

A weight's gradient is a product whose sum over the devices nothing in the backward pass waits for. Left to itself XLA
makes these products last, all of them: every block's activations stay in memory until then, so that recomputing
blocks saves nothing, and no other work is left to run during the sums.
"""

import jax
from jaxtyping import Array, Float, PyTree

from gdn_jax.parallel.mesh import axes_set


def orders_gradients() -> bool:
    """Whether a program is traced for a mesh of `MeshShape.make`, whose devices add up gradients."""
    return axes_set() is not None


@jax.custom_vjp
def before_earlier(x: Float[Array, "B T D"], later: PyTree) -> tuple[Float[Array, "B T D"], PyTree]:
    """Both arguments as they are; in the backward pass what comes before x waits for the gradients of `later`.

    Args:
      x: input of a block.
      later: weights of the block after it. While that block's gradients are summed over the devices, this block's
        backward pass runs.
    """
    return x, later


def _forward(x, later):
    return before_earlier(x, later), None


def _backward(_, cotangents):
    return jax.lax.optimization_barrier(cotangents)


before_earlier.defvjp(_forward, _backward)
