"""A server whose model drafts by its head: the tokens of `generate` without drafts, several a step."""

import contextlib
import dataclasses
import functools

import hf_checkpoints
import jax
import numpy as np
import pytest
from device_arrays import put
from flax import nnx
from test_drafts import CONFIG, made

from gdn_jax import serving
from gdn_jax.hf import load_hf
from gdn_jax.layers.erase_then_delta import MIXERS
from gdn_jax.models import LanguageModel, generate
from gdn_jax.models.served import ServedModel
from gdn_jax.rule import arguments

SMALL = dataclasses.replace(CONFIG, vocab_size=5)  # of so few words a head without training guesses some
REQUESTS = ((5, 7), (64, 3), (150, 25), (1, 12), (33, 1), (70, 9), (2, 4), (65, 6))
CAPACITY = 190


@functools.cache
def model():
    return made(SMALL, 1)


@functools.cache
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 5, length) for length, _ in REQUESTS]


@functools.cache
def wanted():
    """The tokens that `generate` gives for each request."""
    mask = np.arange(150) < np.array([[length] for length, _ in REQUESTS])
    rows = np.zeros(mask.shape, np.int32)
    rows[mask] = np.concatenate(prompts())
    return np.asarray(generate(model(), put(rows), 40, mask=put(mask)))


@functools.cache
def functions(num_drafts, words=None):
    served = ServedModel(model(), drafts="mtp", num_drafts=num_drafts, draft_vocab=words)
    return served, (served.prefill, served.decode)


def dirty(pools):
    """Slots that hold the remains of other requests."""
    return jax.tree.map(lambda x: put(np.full(x.shape, 3 if x.dtype == np.int32 else np.nan, x.dtype)), pools)


def make_server(num_drafts, ring=None, words=None, **options):
    served, calls = functions(num_drafts, words)
    pools = dirty(served.make_pools(5, ring=ring, capacity=CAPACITY))
    options = {"max_batch": 4, "prefill_tokens": 128} | options
    return serving.Server(*calls, served.params, pools, **options)


@pytest.mark.parametrize(
    ("num_drafts", "ring", "words"),
    [(3, None, None), pytest.param(1, None, None, marks=pytest.mark.slow), (2, 4, 3)],
)
def test_every_request_gets_what_generate_gives(num_drafts, ring, words):
    """Of slots that held NaN, with prompts in pieces, stop tokens, requests that are preempted and cancelled. They
    take fewer steps than tokens."""
    server, rng = make_server(num_drafts, ring, words), np.random.default_rng(1)
    numbers, stops, gone, got = {}, {}, set(), {}
    for i, (_, number) in enumerate((*REQUESTS, *REQUESTS)):
        stops[i] = int(wanted()[i % 8, 4]) if i % 3 == 0 else None
        numbers[server.submit(prompts()[i % 8], number, stop_token=stops[i])] = i
    while len(got) + len(gone) < len(numbers):
        got |= server.step()
        number = int(rng.choice([*numbers]))
        with contextlib.suppress(ValueError):  # it has ended, or waits
            if rng.random() < 0.2:
                server.preempt(number)
            elif rng.random() < 0.05:
                read = server.cancel(number)
                np.testing.assert_array_equal(read, wanted()[numbers[number] % 8, : len(read)])
                gone.add(number)
    assert len(got) > 10 and gone
    for number, tokens in got.items():
        i = numbers[number]
        want = wanted()[i % 8, : REQUESTS[i % 8][1]].tolist()
        end = want.index(stops[i]) + 1 if stops[i] in want else len(want)
        assert tokens.tolist() == want[:end], i


def test_erasures():
    """A token that is two of the delta rule is verified as one; rings, which count entries, are refused."""
    eda = made(dataclasses.replace(SMALL, mixer=MIXERS["eda"], layer_types=("eda", "attention")), 1)
    served = ServedModel(eda, drafts="mtp", num_drafts=2)
    server = serving.Server(
        served.prefill, served.decode, served.params, served.make_pools(2, capacity=64), max_batch=2
    )
    numbers = [server.submit(prompts()[i], 20) for i in (0, 3)]
    got = server.run()
    for i, number in zip((0, 3), numbers, strict=True):
        want = generate(eda, put(prompts()[i][None].astype(np.int32)), 20)
        np.testing.assert_array_equal(got[number], np.asarray(want)[0])
    with pytest.raises(ValueError, match="ring: expected None with drafts of Erase"):
        served.make_pools(2, ring=8, capacity=64)


@pytest.mark.parametrize("name", ["qwen3_5_mtp", pytest.param("qwen3_5_moe_mtp", marks=pytest.mark.slow)])
def test_rounds_are_those_of_transformers(name):
    """How many drafts of each step are right. Prompts in two pieces leave the pairs of whole prompts."""
    folder = hf_checkpoints.FOLDER.parent / name
    model, expected = load_hf(folder, implementation="recurrent"), hf_checkpoints.expected_of(folder)
    text, accepted = expected["generated"], expected["spec_accepted"]
    served = ServedModel(model, drafts="mtp")
    prefill, decode = jax.jit(served.prefill), jax.jit(served.decode)
    slots, got, fresh = np.array([2, 0, -1]), [[], []], dirty(served.make_pools(4, capacity=64))
    whole = np.array([0, 21, 42, 42]), slots, np.zeros(3, bool)
    _, at_once = prefill(served.params, text[:, :21].reshape(1, -1), *whole, fresh)
    pools = fresh
    for begin, end in ((0, 8), (8, 21)):
        row = np.ones((1, 26), np.int32)  # the rest of the first row is padding
        row[0, : 2 * (end - begin)] = text[:, begin:end].ravel()
        cu_seqlens, goes_on = np.array([0, 1, 2, 2]) * (end - begin), np.full(3, begin > 0)
        newest, pools = prefill(served.params, row, cu_seqlens, slots, goes_on, pools)
    for pair in ("k", "v"):
        there, want = (np.asarray(getattr(x.pairs, pair))[slots[:2], :20] for x in (pools, at_once))
        np.testing.assert_allclose(there, want, rtol=0, atol=1e-4)
    for _ in range(accepted.shape[1]):
        (tokens, count), pools = decode(served.params, newest, slots, pools)
        newest = np.take_along_axis(np.asarray(tokens), np.asarray(count)[:, None] - 1, 1)[:, 0]
        for new, right, list_of in zip(np.asarray(tokens), np.asarray(count), got, strict=False):
            list_of.append(new[:right])
    for row, rounds, want in zip(got, accepted, text[:, 22:], strict=True):
        rounds = rounds[rounds >= 0]
        assert [len(new) - 1 for new in row[: len(rounds)]] == rounds.tolist() and rounds.max() > 1
        np.testing.assert_array_equal(np.concatenate(row[: len(rounds)])[: len(want)], want)
    for x, y in zip(*map(jax.tree.leaves, (pools, fresh)), strict=True):
        np.testing.assert_array_equal(x[1::2], y[1::2])


@pytest.mark.slow
def test_a_request_fills_its_slot(monkeypatch):
    """Steps that start before the last tokens are read have room for all their drafts; else it would be an error."""
    monkeypatch.setattr(arguments, "debug_checks_are_on", lambda: True)
    served = ServedModel(model(), drafts="mtp", num_drafts=3)
    pools = served.make_pools(2, capacity=40)
    server = serving.Server(served.prefill, served.decode, served.params, pools, max_batch=2)
    for i in (1, 3):
        server.submit(prompts()[0] if i == 1 else prompts()[3], 30 if i == 1 else 34)
    with pytest.raises(ValueError, match=r"capacity of 34 tokens, got 5 \+ 31 - 1 = 35"):
        server.submit(prompts()[0], 31)
    got = server.run()
    jax.effects_barrier()
    for number, i, length in ((1, 0, 30), (2, 3, 34)):
        np.testing.assert_array_equal(got[number], wanted()[i, :length])


def test_room_for_the_steps_of_a_server():
    """Of a model whose drafts are all right: the last step of a request ends at most two steps' drafts after its last
    token, and some do."""

    def prefill(_, tokens, cu_seqlens, slots, has_initial_state, pools):
        return tokens[0, :1], (np.full(1, 5, np.int32), pools[1])

    def decode(_, tokens, slots, pools):
        read, end = pools
        tokens = jax.numpy.arange(1, 5) + tokens[:, None]
        return serving.Chain(tokens, np.full(1, 4, np.int32)), (read + 4, jax.numpy.maximum(end, read + 4))

    most = []
    for number in range(2, 14):
        pools = put(np.zeros(1, np.int32)), put(np.zeros(1, np.int32))
        server = serving.Server(prefill, decode, None, pools, max_batch=1)
        server.submit([1] * 5, number)
        assert server.run()[1].tolist() == [*range(1, number + 1)]
        most.append(int(server._state.pools[1][0]) - (5 + number - 1))
    assert max(most) == 2 * 3


@pytest.mark.slow
def test_requests_that_begin_alike():
    """They start after what is kept of the beginning, with the head's pairs, and have the same drafts."""
    begin = np.random.default_rng(3).integers(0, 5, 130).tolist()
    rows = [begin + end for end in ([1], [2, 3], [4], [1, 1])]
    given = {}
    for size in (0, 10**7):
        server = make_server(3, prefix_bytes=size, prefix_stride=64)
        steps, got = 0, {}
        for row in rows:
            server.submit(row, 20)
            while len(got) < server._number:
                got |= server.step()
                steps += 1
        given[size] = steps, [got[i + 1].tolist() for i in range(4)]
        assert (server.tokens_shared == 3 * 128) == bool(size)
    assert given[0][1] == given[10**7][1] and given[10**7][0] < given[0][0] < 4 * 20


def test_what_cannot_be():
    plain = nnx.eval_shape(lambda: LanguageModel(SMALL, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="drafts: expected None for a model without a head"):
        ServedModel(plain, drafts="mtp")
    with pytest.raises(ValueError, match="drafts: expected one of"):
        ServedModel(model(), drafts="eagle")
    served = functions(3)[0]
    with pytest.raises(ValueError, match="ring: expected at least 4, got 3"):
        served.make_pools(2, ring=3, capacity=9)
    with pytest.raises(ValueError, match="capacity: expected the tokens of a request"):
        served.make_pools(2)
