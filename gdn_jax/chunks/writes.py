"""k^T x over the tokens of a chunk, in bfloat16, with a rule of its own for `vmap`.

Batched in x alone this product becomes one that XLA's CPU backend has not got for bfloat16. Here both operands are
batched then, and every other call lowers to the plain product.

The sign that this may go: jaxlib 0.12.0 says "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32";
`tests/test_transforms.py::test_bfloat16_write_batched_by_xla` fails when it no longer does.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_write_p = Primitive("gdn_chunk_write")


def write(k: jax.Array, x: jax.Array, precision: jax.lax.Precision, dtype: jnp.dtype) -> jax.Array:
    """k^T x: [.., C, K] and [.., C, V] to [.., K, V]; leading axes broadcast.

    Args:
      k, x: operands of one dtype, with equally many axes.
      precision: of a float32 product on hardware that could round its operands.
      dtype: of the sums.
    """
    return _write_p.bind(k, x, precision=precision, dtype=dtype)


def _plain(k, x, *, precision, dtype):
    return jnp.einsum("...ck,...cv->...kv", k, x, precision=precision, preferred_element_type=dtype)


def _batched(arguments, axes, **how):
    """Both operands get the axis, in front."""
    size = next(y.shape[axis] for y, axis in zip(arguments, axes, strict=True) if axis is not None)
    k, x = (
        jnp.broadcast_to(y, (size, *y.shape)) if axis is None else jnp.moveaxis(y, axis, 0)
        for y, axis in zip(arguments, axes, strict=True)
    )
    return _write_p.bind(k, x, **how), 0


def _transposed(n: int, cotangent, k, x, **how):
    """Cotangent of operand n, by the plain product, whose transposes the backend has in every form."""
    other, unknown = (x, k) if n == 0 else (k, x)
    product = partial(_plain, **how)
    of_one = (lambda y: product(y, other)) if n == 0 else (lambda y: product(other, y))
    (found,) = jax.linear_transpose(of_one, unknown.aval)(cotangent)
    return found


_write_p.def_impl(_plain)
_write_p.def_abstract_eval(lambda k, x, **how: jax.make_jaxpr(partial(_plain, **how))(k, x).out_avals[0])
mlir.register_lowering(_write_p, mlir.lower_fun(_plain, multiple_results=False))
ad.defbilinear(_write_p, partial(_transposed, 0), partial(_transposed, 1))
batching.primitive_batchers[_write_p] = _batched
