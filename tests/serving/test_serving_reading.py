"""What a step of a Server reads of prompts, and what it tells: new tokens, one or several, and how long it waited."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put

from gdn_jax import serving
from gdn_jax.serving import batching


def prefill(params, tokens, cu_seqlens, slots, has_initial_state, pools):
    return jnp.zeros(slots.shape, jnp.int32), pools


def decode(params, tokens, slots, pools):
    return tokens + 1, pools


def make_server(decode=decode, **options):
    return serving.Server(prefill, decode, None, put(np.zeros((3, 1), np.float32)), max_batch=2, **options)


def test_tokens_are_told_as_they_are_read():
    """Joined over the steps they are the answers; nothing comes after a stop token, or of a request of an earlier
    step."""
    server, told, ended = make_server(), {}, {}
    lengths = {
        server.submit([1] * 5, 4): 4,
        server.submit([1], 1): 1,
        server.submit([1] * 3, 9, stop_token=2): 3,
    }
    while len(ended) < len(lengths):
        ended |= server.step()
        for number, tokens in server.read.items():
            assert len(tokens) == 1
            told.setdefault(number, []).extend(tokens)
    assert told == {number: [*range(n)] for number, n in lengths.items()}
    assert told == {number: tokens.tolist() for number, tokens in ended.items()}
    server.step()
    assert server.read == {}


def test_several_tokens_in_a_step(monkeypatch):
    """Not while a prompt is left to read, and not where no request needs more than half of them. What comes after a
    stop token, or after the end of a request within the program, is dropped."""
    server, steps = make_server(most_tokens=4, prefill_tokens=64), []
    lengths = {server.submit([1] * n, count): count for n, count in ((5, 4), (150, 10), (3, 7), (3, 19))}
    lengths[server.submit([1], 30, stop_token=6)] = 7
    run, of_programs, ended = batching.run_decode, [], {}
    monkeypatch.setattr(batching, "run_decode", lambda *x: (of_programs.append(x[1]), run(*x))[1])
    while len(ended) < len(lengths):
        ended |= server.step()
        steps.append({number: len(tokens) for number, tokens in server.read.items()})
    for number, length in lengths.items():
        assert ended[number].tolist() == [*range(length)]
    # The first request goes on during a prompt of three pieces. Then the third ends within a program, before the
    # fourth has its slot, and the second before the fifth. The last two tokens of the fourth come one by one.
    assert [step[1] for step in steps if 1 in step] == [1, 1, 1, 1]
    assert [step[2] for step in steps if 2 in step] == [1, 4, 4, 1]
    assert [step[3] for step in steps if 3 in step] == [1, 4, 2]
    assert of_programs == [1, 1, 1, *[4] * 6, 1, 1]


def test_chains_come_one_in_a_step():
    def chains(params, tokens, slots, pools):
        return serving.Chain(jnp.stack([tokens, tokens], 1), jnp.ones_like(tokens)), pools

    server = make_server(chains, most_tokens=4)
    server.submit([1], 9)
    with pytest.raises(ValueError, match="most_tokens: expected 1, since decode gives chains, got 4"):
        server.run()


def test_what_a_step_waits_for(monkeypatch):
    """Results alone: the first token while the next one is made, which the second step reads; a token that is the
    only one a step later. The clock ticks once a call."""
    monkeypatch.setattr(batching, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))
    server = make_server()
    server.submit([1], 2)
    for waited in (1, 2):
        server.step()
        assert server.waited == waited
    server.submit([1], 1)
    for waited in (2, 3):
        server.step()
        assert server.waited == waited


def test_pieces_of_prompts_end_on_multiples_of_64():
    """Of 100 tokens a step a prompt of 70 leaves 30, no piece of one of 150: of that come 64, then the rest. A short
    prompt does not overtake the long one."""
    lengths = []

    def prefill(params, tokens, cu_seqlens, slots, has_initial_state, pools):
        jax.debug.callback(lambda cu: lengths.append([n for n in np.diff(cu).tolist() if n]), cu_seqlens)
        return jnp.zeros(slots.shape, jnp.int32), pools

    server = serving.Server(
        prefill, lambda *x: (x[1], x[3]), None, jnp.zeros((3, 1)), max_batch=3, prefill_tokens=100
    )
    for length in (70, 150, 5):
        server.submit([1] * length, 1)
    server.run()
    jax.effects_barrier()
    assert lengths == [[70], [64, 5], [86]]


def test_a_step_runs_the_smallest_program_that_has_room():
    """Of programs of 64 and 128 tokens: 5 tokens, then 100, then 150 in two pieces."""
    sizes = []

    def prefill(params, tokens, cu_seqlens, slots, has_initial_state, pools):
        jax.debug.callback(lambda cu: sizes.append((tokens.shape[1], int(cu[-1]))), cu_seqlens)
        return jnp.zeros(slots.shape, jnp.int32), pools

    pools = put(np.zeros((3, 1), np.float32))
    options = dict(max_batch=1, prefill_tokens=(64, 128))
    server = serving.Server(prefill, lambda *x: (x[1], x[3]), None, pools, **options)
    for length in (5, 100, 150):
        server.submit([1] * length, 1)
    server.run()
    jax.effects_barrier()
    assert sizes == [(64, 5), (128, 100), (128, 128), (64, 22)]
