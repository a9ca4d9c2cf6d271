"""Cosines and sines of large angles."""

import math

import jax
import jax.numpy as jnp

TURN = (6.28125, 0.0019350051879882812, 3.0199159819567e-07)
"""2 pi in parts, of which the first two have so few bits that up to 2^15 times each is exact."""


def cos_and_sin(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of angles from 0 to 2^17, float32: those of the processor are right for small ones alone."""
    turns = angle * (0.5 / math.pi)
    turns = (turns + 0.5).astype(jnp.int32).astype(jnp.float32)
    for part in TURN:
        angle = angle - turns * part
    return jnp.cos(angle), jnp.sin(angle)
