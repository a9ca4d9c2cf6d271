"""Helpers of the tests of the parts around the rule: inputs, a function with its gradients, and bounds."""

import jax
import numpy as np
from device_arrays import put
from tolerances import assert_close

# One rounding is off by at most half a unit of the last place: in bfloat16 2^-8 of a number whose significand is 1,
# and 2^-9 of one just below 2. It is as likely anywhere in between: its rms, 3^(-1/2) of that, is below 2^-9. float16
# has three digits more. Several roundings, independent of each other, add in squares, so n times this bounds n of
# them with room.
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 0.0}

# What is float32 throughout: sums of some hundred terms, in which errors of 2^-24 = 6e-8 of a term add in squares,
# and about ten roundings of the sigmoid, root and products.
SUMS = 1e-6

# float32 with the GPU's approximate exponential, root and division: each is off by up to 2^-22 = 2.4e-7 (PTX ISA,
# ex2.approx, rsqrt.approx and div.full), and the argument of the exponential is rounded, 5 * 2^-24 of e^5.
SUMS_ON_A_GPU = 2e-6

SWIGLU_NAMES = ("y", "dx", "dgate_kernel", "dup_kernel", "ddown_kernel")
"""Names of the results of `fused_oracle.swiglu`."""

SWIGLU_ROUNDINGS = 5
"""Between its input and a result of a SwiGLU: of both branches, of their product or of its cotangent, of their
cotangents, and of the result."""


def close(expected, got, name: str, roundings: int = 1, sums: float = SUMS, dtype: str | None = None) -> None:
    """Fails where a result is further off than so many roundings to its dtype (or another) and float32 sums leave."""
    got = np.asarray(got)
    assert_close(expected, got, sums + roundings * ROUNDING[dtype or got.dtype.name], name)


def close_windows(expected, got) -> None:
    """Fails where windows of a convolution [.., channels, W - 1] after a token are further apart than float32 sums.

    The older inputs are copied, bit for bit. The token's own are sums of 64 products of its channels with weights.
    Roundings of u = 2^-24 of the partial sums add in squares: sqrt(64) u of a sum that is as large as those. Two
    programs sum in two orders, and each is off by as much.
    """
    np.testing.assert_array_equal(expected[..., :-1], got[..., :-1])
    close(expected[..., -1], got[..., -1], "window", sums=(2 * 64) ** 0.5 * 2.0**-24)


def draws(seed: int):
    """A function that draws arrays of a shape and dtype."""
    rng = np.random.default_rng(seed)
    return lambda *shape, dtype="float32", scale=1.0: put(scale * rng.standard_normal(shape), dtype)


def compiled_vjp(f):
    """run(cotangents, *primals): the results of f and the gradients of its primals, in one compiled function."""

    @jax.jit
    def run(cotangents, *primals):
        values, back = jax.vjp(f, *primals)
        return values, back(cotangents)

    return run


def value_and_vjp(f, cotangents, *primals):
    """Results and gradients as NumPy arrays; None for a primal of None."""
    values, gradients = compiled_vjp(f)(cotangents, *primals)
    for primal, gradient in zip(primals, gradients, strict=True):
        assert primal is None or gradient.dtype == primal.dtype, "a gradient has not the dtype of its primal"
    return jax.device_get((values, gradients))
