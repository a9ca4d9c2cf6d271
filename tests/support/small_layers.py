"""Small layers of Gated DeltaNet and their inputs."""

from collections.abc import Callable

import cheap_keys
import jax
import numpy as np
from flax import nnx
from tolerances import FLOAT32

from gdn_jax.layers import GatedDeltaNet

# The layer is the rule between sums of at most 36 terms: the rule's own bound holds for y and the state.
F32 = FLOAT32["o"]
D, W = 20, 4

SIZES = {"num_heads": 2, "num_v_heads": 4, "head_dim": 6, "expand_v": 1.5}


def drawn[M: nnx.Module](build: Callable[[nnx.Rngs], M], seed: int = 0) -> M:
    """The module of `build(rngs)`, whose weights one program draws: outside of `jit` each draw is a program."""
    graphdef = None

    @jax.jit
    def draw(seed):
        nonlocal graphdef
        graphdef, state = nnx.split(build(nnx.Rngs(cheap_keys.key(seed))))
        return state

    state = draw(seed)
    return nnx.merge(graphdef, state)


def empty_cache(module: nnx.Module, batch: int):
    """`init_cache` of a layer or a model without a program for every array."""
    shapes = jax.eval_shape(lambda: module.init_cache(batch))
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), shapes)


def make(seed=0, **options):
    return drawn(lambda rngs: GatedDeltaNet(D, **{**SIZES, **options}, rngs=rngs), seed)


def inputs(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
