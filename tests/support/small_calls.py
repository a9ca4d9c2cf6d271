"""A small call of the public operation, with one argument or another changed."""

import jax
import numpy as np

from gdn_jax.checks import cases

SMALL = cases.Case("api", T=5, B=2, heads=(2, 2, 4), K=6, V=3)


def arguments(case=SMALL, dtype="float32", **change):
    return on_device(cases.inputs(case, dtype).arguments | change)


def on_device(x):
    """NumPy arrays as JAX's, where there are some: nothing is compiled for that."""
    return {name: jax.device_put(y) for name, y in x.items() if y is not None}


X = cases.inputs(SMALL)
f32 = np.float32


def changed(change):
    call = {name: y for name, y in (X.arguments | change).items() if y is not None}
    return {name: jax.device_put(y) if isinstance(y, np.ndarray) else y for name, y in call.items()}
