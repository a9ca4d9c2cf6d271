"""What a step of a Server tells: new tokens as they are read, and the seconds in which it waited."""

import itertools
import types

import jax.numpy as jnp
import numpy as np
from device_arrays import put

from gdn_jax import serving
from gdn_jax.serving import batching


def prefill(params, tokens, cu_seqlens, slots, has_initial_state, pools):
    return jnp.zeros(slots.shape, jnp.int32), pools


def decode(params, tokens, slots, pools):
    return tokens + 1, pools


def make_server():
    return serving.Server(prefill, decode, None, put(np.zeros((3, 1), np.float32)), max_batch=2)


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
            assert tokens and len(tokens) <= 2  # the first comes with the second
            told.setdefault(number, []).extend(tokens)
    assert told == {number: [*range(n)] for number, n in lengths.items()}
    assert told == {number: tokens.tolist() for number, tokens in ended.items()}
    server.step()
    assert server.read == {}


def test_what_a_step_waits_for(monkeypatch):
    """Results alone: those of the prompt and of a token, which the second step reads. The clock ticks once a call."""
    monkeypatch.setattr(batching, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))
    server = make_server()
    server.submit([1], 2)
    server.step()
    assert server.waited == 0
    server.step()
    assert server.waited == 2
