"""`gdn bench serve`: requests in flight, what is counted of them, and answers that are wrong."""

import itertools
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put

from gdn_jax import serving
from gdn_jax.bench import serve
from gdn_jax.commands import cli
from gdn_jax.models.served import slot_bytes

TINY = "--model tiny --dtype float32 --requests 3 --prompt-tokens 2 9 --answer-tokens 2 5 --prefill-tokens 64"
TINY = [*TINY.split(), "--repeats", "12", "--options", "implementation=recurrent"]  # compiles fast


def prefill(params, tokens, cu_seqlens, slots, has_initial_state, pools):
    return jnp.zeros(slots.shape, jnp.int32), pools


def decode(params, tokens, slots, pools):
    return tokens + 1, pools


def test_lengths_are_drawn():
    """Within their bounds, half of them below the geometric mean; the seed decides."""
    options = serve.ServeBenchmark(prompt_tokens=(4, 64), answer_tokens=(3, 3), seed=7)
    requests = options.draw(11)
    lengths = np.array([len(request.prompt) for request in requests])
    assert len(requests) == serve.DRAWN and (lengths.min(), lengths.max()) == (4, 64)
    assert 0.45 < np.mean(lengths < 16) < 0.55  # three standard deviations of 1024 draws are 0.047
    assert {request.num_tokens for request in requests} == {3}
    tokens = np.concatenate([request.prompt for request in requests])
    assert (tokens.min(), tokens.max()) == (0, 10)
    again, other = options.draw(11), serve.ServeBenchmark(prompt_tokens=(4, 64), seed=8).draw(11)
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(requests, again, strict=True))
    assert not all(len(a.prompt) == len(b.prompt) for a, b in zip(requests, other, strict=True))


def test_prompts_that_begin_alike():
    """All begin with the same tokens; the rest is that without them."""
    options = dict(prompt_tokens=(2, 9), answer_tokens=(2, 5), seed=7)
    alone = serve.ServeBenchmark(**options).draw(11)
    both = serve.ServeBenchmark(system_tokens=70, **options).draw(11)
    assert len({request.prompt[:70].tobytes() for request in both}) == 1
    for a, b in zip(alone, both, strict=True):
        np.testing.assert_array_equal(a.prompt, b.prompt[70:])
        assert a.num_tokens == b.num_tokens


@pytest.mark.slow
def test_a_system_prompt_is_shared(tmp_path):
    """Within the timed steps requests find it; their answers are whole."""
    path, begin = tmp_path / "serve.json", ["--system-tokens", "256", "--prefix-gb", "0.01"]
    assert cli.main(["bench", "serve", *TINY, *begin, "--json", str(path)]) == 0
    [result] = json.loads(path.read_text())["results"]
    assert result["shared tokens/s"] > 0 and result["error"] == 0


def test_steps_and_requests_are_counted(monkeypatch):
    """By a clock that ticks once a call. Two requests are in flight, each for three steps, each of
    which tells a new token."""
    monkeypatch.setattr(serve, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))
    pools = put(np.zeros((2, 1), np.float32))
    server = serving.Server(prefill, decode, None, pools, max_batch=2, max_waiting=2)
    traffic = serve.Traffic(server, 2, [serve.Request(np.ones(5, np.int32), 3)])
    timing, numbers = traffic.timed(9)
    # Ticks: one before the first step; then of each step one for its end and one for the end of its step in `timed`,
    # and one for each of the two requests that a third of the steps submit.
    assert (timing.fastest, timing.ms, timing.slowest) == (2000, 2000, 4000)
    seconds, requests = 9 * 2 + 3 * 2, 6
    assert numbers["tokens/s"] == pytest.approx(3 * requests / seconds)
    assert numbers["prompt tokens/s"] == pytest.approx(5 * requests / seconds)
    # The first of two is submitted a tick earlier. Its token is there at the end of the same step.
    assert (numbers["first ms"], numbers["first ms 95 %"]) == (1500, 2000)
    assert 90 < numbers["loop %"] <= 100 and traffic.ended == [True] * 6


@pytest.mark.slow
def test_a_server_is_timed(tmp_path, capsys):
    path = tmp_path / "serve.json"
    assert cli.main(["bench", "serve", *TINY, "--json", str(path)]) == 0
    assert "| tiny  | 3 " in capsys.readouterr().out
    (result,) = json.loads(path.read_text())["results"]
    assert result["requests"] == 3 and result["errors"] == {"wrong answers": 0}
    assert 0 < result["loop %"] <= 100 and result["first ms"] <= result["first ms 95 %"]
    assert min(result[name] for name in ("tokens/s", "prompt tokens/s", "first s")) > 0
    config = serve.ServeBenchmark(model="tiny", dtype="float32").config()
    assert result["pool GB"] == pytest.approx(3 * slot_bytes(config, capacity=9 + 5) / 1e9)


def test_wrong_answers_are_not_timed():
    """A token of -1 stands for logits that are NaN."""
    served = object.__new__(serve.ServedModel)  # with another model inside
    served.params, served.prefill = None, prefill
    served.decode = lambda params, tokens, slots, pools: (jnp.full_like(tokens, -1), pools)
    served.make_pools = lambda slots, **_: put(np.zeros((slots, 1), np.float32))
    options = serve.ServeBenchmark(model="tiny", answer_tokens=(2, 5))
    (result,) = options.time_steps(served, {"requests": 1})
    assert result.failure == "wrong: wrong answers 1.0e+00 > 0.0e+00" and result.timing is None


@pytest.mark.parametrize(
    "words, message",
    [
        ("--prompt-tokens 9 8", "--prompt-tokens: expected a shortest and a longest length, got 9 8"),
        ("--answer-tokens 0 8", "--answer-tokens: expected a number above 0, got 0"),
        ("--prefill-tokens 63", "--prefill-tokens: expected numbers in ascending order, 64 or more, got 63"),
        (
            "--prefill-tokens 128 64",
            "--prefill-tokens: expected numbers in ascending order, 64 or more, got 128 64",
        ),
        ("--requests 0", "--requests: expected a number above 0, got 0"),
        ("--ring 0", "--ring: expected a number above 0, got 0"),
        ("--model qwen9", "--model: expected one of tiny, 0.4b, 1.3b, qwen3.5-small"),
    ],
)
def test_wrong_options(words, message, capsys):
    assert cli.main(["bench", "serve", *words.split()]) != 0
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
