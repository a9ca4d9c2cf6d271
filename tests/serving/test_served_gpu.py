"""A served model on a GPU: its decoding program and several tokens in a step, next to `generate` and plain JAX."""

import functools

import jax
import numpy as np
import pytest
from device_arrays import put
from flax import nnx
from tolerances import assert_close

from gdn_jax import serving
from gdn_jax.checks.accuracy import BOUNDS
from gdn_jax.models import AttentionConfig, LanguageModel, ModelConfig, generate
from gdn_jax.models.served import ServedModel

pytestmark = pytest.mark.gpu

SIZES = dict(vocab_size=512, hidden_size=256, num_layers=3, num_heads=4, head_dim=64, intermediate_size=384)
LAYERS = dict(layer_types=("gated_delta_net", "gated_delta_net", "attention"))
ATTENTION = AttentionConfig(8, 2, 64, qk_norm="head", rotary_dim=64, output_gate=True)
REQUESTS = ((5, 30), (150, 41), (1, 12), (70, 9), (33, 25), (300, 18))


@functools.cache
def model(implementation=None):
    config = dict(**SIZES, **LAYERS, attention=ATTENTION, dtype="bfloat16", expand_v=1.0)
    config = ModelConfig(**config, implementation=implementation)
    return nnx.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))()


@functools.cache
def requests():
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 512, length).astype(np.int32), number) for length, number in REQUESTS]


@functools.cache
def answers(max_batch, slots, most_tokens, **options):
    served = ServedModel(model(), max_batch=max_batch, **options)
    server = serving.Server(
        *(served.prefill, served.decode, served.params, served.make_pools(slots, capacity=384)),
        max_batch=max_batch,
        prefill_tokens=128,
        most_tokens=most_tokens,
    )
    numbers = [server.submit(prompt, number) for prompt, number in requests()]
    got = server.run()
    return [got[number].tolist() for number in numbers]


@pytest.mark.parametrize("max_batch, slots", [(4, 5), (128, 128), (1, 2), (1, 1)])
def test_several_tokens_in_a_step_are_those_of_one(max_batch, slots):
    """Whatever the order in which requests meet."""
    assert answers(max_batch, slots, 8) == answers(max_batch, slots, 1)


def test_a_request_alone_gets_what_generate_gives():
    """Its slot is the cache of a row, and its weights lie as kernels of a row read them."""
    want = [np.asarray(generate(model(), put(prompt[None]), n))[0].tolist() for prompt, n in requests()]
    got = answers(1, 1, 1)
    # Both read prompts by programs of their own, which round in other places: near ties may differ.
    same = [a == b for a, b in zip(want, got, strict=True)]
    first = [a[0] == b[0] for a, b in zip(want, got, strict=True)]
    assert all(first) and sum(same) >= 4, (same, want, got)


@pytest.mark.parametrize("max_batch", [4, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_after_tokens_are_those_of_plain_jax(max_batch, dtype):
    """The same tokens by kernels and, where the model names "chunked", in plain JAX; a request that is none among
    them. The slot of no request keeps its bits."""
    pools, rng = {}, np.random.default_rng(1)
    slots = np.array([3, -1, 0, 1], np.int32)[:max_batch]
    tokens = rng.integers(0, 512, (8, max_batch)).astype(np.int32)
    for implementation in (None, "chunked"):
        served = ServedModel(model(implementation), max_batch=max_batch)
        decode = jax.jit(served.decode, donate_argnums=3)
        text = str(
            jax.make_jaxpr(served.decode)(served.params, tokens[0], slots, served.make_pools(4, capacity=64))
        )
        names = ("conv_update", "decode_step", "cached_heads", "attention_rows")
        assert [name in text for name in names] == [implementation is None] * 4
        pool = served.make_pools(4, dtype=dtype, capacity=64)
        for token in tokens:
            _, pool = decode(served.params, token, slots, pool)
        pools[implementation] = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(pool)]
    for want, got in zip(pools["chunked"], pools[None], strict=True):
        # Later layers see what earlier ones round differently.
        assert_close(want, got, 8 * BOUNDS["bfloat16"][0]["final_state"])
        assert not got[2].any()
