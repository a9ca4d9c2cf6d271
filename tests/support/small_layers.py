"""Small layers of Gated DeltaNet and their inputs."""

import numpy as np
from flax import nnx
from tolerances import FLOAT32

from gdn_jax.layers import GatedDeltaNet

# The layer is the rule between sums of at most 36 terms: the rule's own bound holds for y and the state.
F32 = FLOAT32["o"]
D, W = 20, 4

SIZES = {"num_heads": 2, "num_v_heads": 4, "head_dim": 6, "expand_v": 1.5}


def make(seed=0, **options):
    return GatedDeltaNet(D, **{**SIZES, "rngs": nnx.Rngs(seed), **options})


def inputs(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
