"""Requests of a server that draw, each in its own way: the tokens of `generate` for the request alone."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from device_arrays import put
from flax import nnx
from test_drafts import made
from test_served_drafts import SMALL

from gdn_jax import serving
from gdn_jax.models import generate
from gdn_jax.models.served import ServedModel
from gdn_jax.serving.draws import Draw, Draws

WAYS = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 2},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 4, "top_p": 0.95, "min_p": 0.05},
)


@functools.cache
def model():
    return made(SMALL, 1)


@functools.cache
def requests():
    """Prompts, how many tokens follow, how they are drawn, and the tokens of `generate`.

    By their keys the request that only has a temperature gets tokens that a top_p of 0.9 would leave out.
    """
    rng, found = np.random.default_rng(0), []
    for i in range(5):
        prompt = rng.integers(0, 5, rng.integers(1, 15)).astype(np.int32)
        way = dict(WAYS[i % len(WAYS)], rng=jax.random.key(i + 1))
        tokens = np.asarray(generate(model(), put(prompt[None]), 9, **way))[0]
        found.append((prompt, int(rng.integers(2, 10)), way, tokens))
    return found


def make_server(num_drafts, slots=5, **options):
    drafts = {"drafts": "mtp", "num_drafts": num_drafts} if num_drafts else {}
    served = ServedModel(model(), **drafts)
    pools = served.make_pools(slots, capacity=40)
    options = {"max_batch": slots - 1, "prefill_tokens": 64, "sampling": True} | options
    return serving.Server(served.prefill, served.decode, served.params, pools, **options)


@pytest.mark.parametrize(
    "num_drafts, most_tokens", [(2, 1), *(pytest.param(0, n, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_every_request_gets_what_generate_gives(num_drafts, most_tokens):
    """By its own key, whatever the others do, with drafts, without, and with several tokens in a step, also where it
    loses its place for a time."""
    server, rng = make_server(num_drafts, vocab_size=5, most_tokens=most_tokens), np.random.default_rng(1)
    numbers, got = {}, {}
    for i, (prompt, count, way, _) in enumerate(requests() * 3):
        numbers[server.submit(prompt, count, **way)] = i % 5
    while len(got) < len(numbers):
        got |= server.step()
        if rng.random() < 0.3:
            with contextlib.suppress(ValueError):  # it has ended, or waits
                server.preempt(int(rng.choice([*numbers])))
    for number, tokens in got.items():
        _, count, _, want = requests()[numbers[number]]
        assert tokens.tolist() == want[:count].tolist(), numbers[number]
    assert len({tuple(tokens[:2]) for *_, tokens in requests()}) > 2


@pytest.mark.slow
def test_drawn_tokens_have_the_probabilities_of_the_model():
    """Three tokens after one prompt, of 4096 requests with drafts: how often each of 125 triples comes, by a test of
    chi squared. Some drafts are right and some are not."""
    N, V, prompt = 4096, 5, [1, 4, 2]
    server = make_server(2, slots=64, max_batch=64, max_waiting=N, prefill_tokens=192)
    key = jax.random.key_data(jax.random.key(0))
    for i in range(N):
        server.submit(prompt, 3, temperature=3.0, rng=np.asarray(key) + np.uint32([0, i]))
    got, steps = {}, []
    while len(got) < N:
        got |= server.step()
        steps += [len(x) for x in server.read.values()]
    assert {*steps} == {1, 2}  # after the first token one more, or two
    got = np.array([*got.values()])
    every = np.array(np.meshgrid(*[range(V)] * 3, indexing="ij")).reshape(3, -1).T
    rows = np.concatenate([np.tile([prompt], (V**3, 1)), every], axis=1).astype(np.int32)
    logits = np.asarray(nnx.jit(lambda model, rows: model(rows)[0])(model(), put(rows)), np.float64)[:, 2:5]
    p = np.exp(logits / 3.0)
    p = np.take_along_axis(p / p.sum(-1, keepdims=True), every[..., None], axis=2)[..., 0].prod(1)
    counts = np.bincount(got @ [V * V, V, 1], minlength=V**3)
    assert p.min() * N > 5
    # 124 degrees of freedom: above 186 with a probability of 3e-4.
    assert ((counts - N * p) ** 2 / (N * p)).sum() < 186


def test_what_cannot_be():
    server = make_server(0, vocab_size=5)
    assert Draws.of([Draw.none()] * 2).key.shape == (2, 2)
    for way, said in (
        ({"temperature": 1.0}, "rng: expected a key with temperature = 1.0, got None"),
        ({"temperature": -1.0}, "temperature: expected 0 or more, got -1.0"),
        ({"temperature": 1.0, "rng": np.zeros(3, np.uint32)}, r"rng: expected a key of 2 words.*uint32\[3\]"),
        ({"top_k": 6}, "top_k: expected 1 to vocab_size = 5, got 6"),
        ({"top_p": 0.0}, "top_p: expected a number above 0 and up to 1, got 0.0"),
        ({"min_p": 2.0}, "min_p: expected a number from 0 to 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match=said):
            server.submit([1], 2, **way)
    without = make_server(0, sampling=False)
    with pytest.raises(ValueError, match="temperature: expected 0 of a request to a server without sampling"):
        without.submit([1], 2, temperature=0.5, rng=jax.random.key(0))
