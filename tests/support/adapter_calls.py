"""Numbers, calls and comparisons of the tests of adapters."""

import jax
import numpy as np
from tolerances import assert_close, bound, head_axis

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def softplus(x):
    return np.logaddexp(0, x)


def arrays(tree):
    """NumPy's arrays as JAX's."""
    return jax.tree.map(lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, tree)


def call(function, *arguments, **options):
    """A function of arrays of JAX, which NumPy's become."""
    return function(*arrays(arguments), **arrays(options))


def close(name, expected, got):
    assert_close(expected, np.asarray(got), bound(name, "float32"), name, axis=head_axis(name))


def states_close(expected, got):
    close("final_state", np.asarray(expected), got)
