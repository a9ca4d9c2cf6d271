"""Small language models for tests, calls of them in one compilation, and what differences between them are due to."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from programs import eqns
from small_layers import drawn
from tolerances import FLOAT32, rms_ratio

from gdn_jax.models import LanguageModel, ModelConfig, generate

# Two blocks of float32 sums after the rule, whose bound is 1e-5; the residual stream adds their errors.
F32 = 2 * FLOAT32["o"]
# bfloat16 against float32: two blocks of some ten roundings of 2^-9 each (tests/layers/test_layers.py), and a
# factor of 3.
BF16 = 3e-2

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 6,
    "expand_v": 1.5,
    "implementation": "recurrent",  # compiles fast; tests/layers/test_layers.py takes the chunked form too
}


def rounding_bounds(f, params, passes):
    """How far two programs of f may be apart in float32, as a share of each result's rms. Nothing in it is fitted.

    A sum of n products with weights, in which roundings of u = 2^-24 add in squares, is the exact sum with weights
    that are off by sqrt(n) u of themselves. So the weights are moved, each by 2^-10 of itself up or down; what the
    results move by is told for sqrt(n) u. n is the longest sum, of a SwiGLU's inner width. Every pass rounds anew, a
    derivative being one more; there are about as many other sums, in norms and the rule, as products with weights;
    and both programs are off. All these add in squares.

    Args:
      f: from parameters to a tree of results, compiled.
      passes: passes that the deepest result takes.
    """
    rng = np.random.default_rng(0)
    moved = jax.tree.map(
        lambda x: x * (1 + 2.0**-10 * rng.choice([-1.0, 1.0], x.shape).astype(np.float32)), params
    )
    n = ModelConfig(**SIZES).mlp_size
    scale = (2 * 2 * passes * n) ** 0.5 * 2.0**-24 / 2.0**-10
    return jax.tree.map(lambda x, y: scale * rms_ratio(x, y), f(params), f(moved))


def made(config, seed=0):
    """A model with fresh weights, drawn by one program."""
    return drawn(lambda rngs: LanguageModel(config, rngs=rngs), seed)


def make(seed=0, **options):
    return made(ModelConfig(**{**SIZES, **options}), seed)


@nnx.jit(static_argnames="return_cache")
def _call(model, tokens, **options):
    return model(tokens, **options)


def call(model, tokens, **options):
    return jax.device_get(_call(model, tokens, **options))


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], shape).astype(np.int32)


def continued(model, prompt, num_tokens, mask=None, **options):
    """`generate` from NumPy arrays, which the type checks of the test run do not let in."""
    mask = None if mask is None else jax.device_put(mask)
    return np.asarray(generate(model, jax.device_put(prompt), num_tokens, mask=mask, **options))


def loss_of(graphdef, row, **options):
    def loss(params):
        model = nnx.merge(graphdef, params)
        return jnp.sum(jnp.sin(model(row, **options)[0]))

    return loss


def operations(f, *args):
    """How many operations of every name the program of f holds; a loop's body counts once."""
    return collections.Counter(eqn.primitive.name for eqn in eqns(jax.make_jaxpr(f)(*args).jaxpr))


class Shift(nnx.Module):
    """A mixer that is not a GatedDeltaNet: y_t = x_{t-1}; its cache is the last x."""

    def __call__(self, x, *, cache=None, mask=None, segment_ids=None, return_cache=False):
        first = jnp.zeros_like(x[:, :1]) if cache is None else cache
        y = jnp.concatenate([first, x[:, :-1]], axis=1)
        return y, x[:, -1:] if return_cache or cache is not None else None

    def init_cache(self, batch):
        return jnp.zeros((batch, 1, SIZES["hidden_size"]))
