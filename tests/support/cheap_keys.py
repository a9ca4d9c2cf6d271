"""Random keys whose draws compile in half the time: most of a program that draws weights are threefry's rounds.

Each key is one number, and each draw is a hash of the key and the index (Wellons' lowbias32, twice).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

STEP = np.uint32(0x9E3779B9)
"""Between neighbours: 2^32 divided by the golden ratio."""


def _mixed(x):
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _indices(shape):
    return STEP * jax.lax.iota(np.uint32, math.prod(shape)).reshape(shape)


def _seed(seed):
    return _mixed(seed.astype(np.uint32).reshape(1) + STEP)


def _fold_in(key, data):
    return _mixed(_mixed(key) + STEP * (data.astype(np.uint32) + np.uint32(1)))


def _split(key, shape):
    return _mixed(_mixed(key + np.uint32(1)) + _indices(shape)[..., None])


def _bits(key, width, shape):
    bits = _mixed(_mixed(key[0]) + _indices(shape))
    return (bits >> (32 - width)).astype(jnp.dtype(f"uint{width}"))


_IMPLEMENTATION = define_prng_impl(
    key_shape=(1,), seed=_seed, split=_split, random_bits=_bits, fold_in=_fold_in, name="cheap", tag="cheap"
)


def key(seed):
    """A key for `jax.random` and `nnx.Rngs`; for draws of at most 32 bits."""
    return jax.random.key(seed, impl=_IMPLEMENTATION)
