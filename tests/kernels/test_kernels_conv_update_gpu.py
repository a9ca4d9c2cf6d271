"""The convolution of a token by its kernel on a GPU of compute capability 9.0, and the token behind it, through the
public calls: the bits of every slot, values, and generation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pool_steps
import pytest
from flax import nnx
from pool_steps import Case
from serving_cases import assert_same_bits
from test_kernels_conv_update import BF16, CALLS, F32, Call, packed
from tolerances import assert_close

from gdn_jax import serving
from gdn_jax.checks.accuracy import BOUNDS
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.models.generate import decode
from gdn_jax.models.inference.program import for_inference

pytestmark = pytest.mark.gpu

HEADS = (16, 16, 32)


def assert_right(call: Call, arguments: dict, pool: jax.Array) -> None:
    """The bits of all slots are those that plain JAX leaves, and y differs by rounding."""

    def run(implementation):
        f = partial(serving.causal_conv1d_update, implementation=implementation, **arguments)
        return jax.jit(lambda pool: f(pool=pool))(pool)

    want, plain = run("xla")
    y, new = run("mosaic_gpu")
    bound = F32 if y.dtype == jnp.float32 else BF16
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (want, y)), **bound)
    assert_same_bits(plain, new)


@pytest.mark.parametrize("name", CALLS)
def test_small(name):
    assert_right(CALLS[name], *CALLS[name].draw())


@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [8192, 8200])
def test_batch(D, pool_dtype):
    """All of 512 requests, some of them padding, and some that write where others read."""
    rng = np.random.default_rng(D)
    x, weight = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((512, D), (D, 4)))
    pool = jnp.asarray(rng.standard_normal((600, D, 3), np.float32), pool_dtype)
    read = rng.permutation(600)[:512]
    read[::50] = -1
    for write in (None, np.roll(read, 7) if D == 8192 else rng.permutation(600)[:512]):
        if write is not None:
            write = np.where(write < 0, np.where(np.arange(512) % 2, -1, write), write)
        arguments = dict(x=x.astype("bfloat16"), weight=weight, read_slots=read, write_slots=write)
        assert_right(Call(), arguments, pool)


@pytest.mark.parametrize("N", [1, 128])
@pytest.mark.parametrize(("kv_layout", "pool_dtype"), [(True, "float32"), (False, "bfloat16")])
def test_decode_from_one_array(N, kv_layout, pool_dtype):
    """The kernel gives the bits that it gives from three arrays."""
    case = Case(
        "packed", N, heads=HEADS, kv_layout=kv_layout, pool_dtype=pool_dtype, padding=N > 1, slots=200
    )
    x = pool_steps.draw(case, lambda shape: jax.random.normal(jax.random.key(0), shape))
    results = [jax.jit(partial(f, case))(x) for f in (pool_steps.serve, packed)]
    for want, got in zip(*results, strict=True):
        assert_same_bits(want, got)


@pytest.mark.parametrize("rows", [1, 32])
def test_tokens_of_a_model(rows):
    """A token of a layer is two kernels that read one product; states after eight tokens are those of plain JAX."""
    sizes = dict(vocab_size=64, hidden_size=256, num_layers=1, num_heads=8, head_dim=128, expand_v=1.0)
    config = dict(**sizes, intermediate_size=384, dtype="bfloat16")
    caches = {}
    for implementation in (None, "chunked"):
        model = LanguageModel(ModelConfig(**config, implementation=implementation), rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(for_inference(model))

        def write(params, token, cache, graphdef=graphdef):
            # The same tokens by both, whatever the logits say.
            choose = lambda logits, i: jnp.full(rows, i, jnp.int32)  # noqa: E731
            return decode(nnx.merge(graphdef, params), token, cache, 9, choose=choose)[1]

        token, cache = jnp.zeros(rows, jnp.int32), model.init_cache(rows)
        text = str(jax.make_jaxpr(write)(params, token, cache))
        assert ("conv_update" in text and "decode_step" in text) == (implementation is None)
        (caches[implementation],) = jax.jit(write)(params, token, cache)
    # Inputs of the convolution are rounded once; either final state may be that far from the exact one.
    bounds = 2**-8, 2 * BOUNDS["bfloat16"][0]["final_state"]
    for want, got, bound in zip(caches["chunked"], caches[None], bounds, strict=True):
        assert_close(np.asarray(want).astype(np.float64), np.asarray(got), bound)
