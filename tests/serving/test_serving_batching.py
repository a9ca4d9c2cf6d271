"""The loop over requests: uneven lengths, slots used again, preemption; each request as if it were alone."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from small_models import made

from gdn_jax import serving
from gdn_jax.models import ModelConfig, generate
from gdn_jax.models.attention import FixedAttentionCache
from gdn_jax.models.served import ServedModel
from gdn_jax.serving import batching

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=1,
    num_v_heads=2,
    head_dim=16,
    expand_v=1.0,
    allow_neg_eigval=True,
)
# Prompts shorter than the filter, on the grid of 64 tokens, and longer than a step takes.
REQUESTS = ((5, 7), (64, 3), (150, 5), (1, 12), (33, 1), (70, 9), (2, 4), (65, 6))
SLOTS = 5


@functools.cache
def model():
    return made(CONFIG)


@functools.cache
def served(batch_invariant=False):
    return ServedModel(model(), batch_invariant=batch_invariant)


@functools.cache
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, CONFIG.vocab_size, length) for length, _ in REQUESTS]


def dirty(pools):
    """Slots that hold the remains of other requests, which no new request may read."""
    return jax.tree.map(
        lambda x: jnp.full_like(x, 3) if x.dtype == jnp.int32 else jnp.full_like(x, jnp.nan), pools
    )


@functools.cache
def functions(batch_invariant=False):
    """prefill and decode of one model, so that servers share what is compiled."""
    model = served(batch_invariant)
    return model.prefill, model.decode


def make_server(*, batch_invariant=False, ring=None, **options):
    pools = dirty(served(batch_invariant).make_pools(SLOTS, ring=ring))
    options = {"max_batch": 4, "prefill_tokens": 128} | options
    params = served(batch_invariant).params
    return serving.Server(*functions(batch_invariant), params, pools, **options)


def serve_all(server):
    numbers = {server.submit(prompts()[i], REQUESTS[i][1]): i for i in range(len(REQUESTS))}
    return {numbers[number]: tokens for number, tokens in server.run().items()}


@functools.cache
def wanted():
    """The tokens that `generate` gives for each request."""
    together = {}
    longest = max(length for length, _ in REQUESTS)
    rows = np.zeros((len(REQUESTS), longest), np.int32)
    mask = np.zeros(rows.shape, bool)
    for i, prompt in enumerate(prompts()):
        rows[i, : len(prompt)], mask[i, : len(prompt)] = prompt, True
    tokens = np.asarray(generate(model(), put(rows), max(n for _, n in REQUESTS), mask=put(mask)))
    for i, (_, number) in enumerate(REQUESTS):
        together[i] = tokens[i, :number]
    return together


def assert_same_tokens(want, got):
    assert want.keys() == got.keys()
    for i, tokens in got.items():
        np.testing.assert_array_equal(want[i], tokens, err_msg=f"request {i}")


@pytest.mark.slow
@pytest.mark.parametrize("ring", [None, pytest.param(4, marks=pytest.mark.crossed)])
def test_every_request_gets_what_generate_gives(ring):
    """Eight requests through four places and five slots that held NaN; with deferred writes too."""
    assert_same_tokens(wanted(), serve_all(make_server(ring=ring)))


def test_a_request_beyond_the_capacity_is_refused():
    """Of the pool with the least room, of one kind or another; the last new token needs none."""
    pools = {
        name: FixedAttentionCache(np.zeros((3, S, 1, 1)), np.zeros((3, S, 1, 1)), np.zeros(3, np.int32))
        for name, S in (("a", 30), ("b", 20))
    }
    server = serving.Server(*recording({}), None, (np.zeros((3, 1)), pools), max_batch=1)
    message = r"num_tokens: expected a prompt .* capacity of 20 tokens, got 10 \+ 12 - 1 = 21"
    with pytest.raises(ValueError, match=message):
        server.submit([1] * 10, 12)
    for length, number in ((21, 1), (1, 10**30)):
        with pytest.raises(ValueError, match="num_tokens: expected a prompt"):
            server.submit([1] * length, number)
    assert server.submit([1] * 10, 11) == 1 and server.submit([1] * 20, 1) == 2


def test_the_queue_is_bounded():
    server = make_server(max_waiting=2)
    waiting, numbers = list(range(len(REQUESTS))), {}
    got = {}
    while waiting or len(got) < len(REQUESTS):
        while waiting:
            try:
                numbers[server.submit(prompts()[waiting[0]], REQUESTS[waiting[0]][1])] = waiting[0]
            except serving.QueueFull as error:
                assert "2 requests wait already" in str(error)
                break
            waiting.pop(0)
        got |= {numbers[number]: tokens for number, tokens in server.step().items()}
    assert_same_tokens(wanted(), got)


several = pytest.mark.parametrize("most_tokens", [1, 2])
"""Most tokens of a request in a step."""


@several
def test_preempted_requests_go_on_where_they_were(most_tokens):
    """At every stage: within a prompt, after it, among new tokens; the slot serves others meanwhile."""
    server = make_server(most_tokens=most_tokens)
    numbers = {server.submit(prompts()[i], REQUESTS[i][1]): i for i in range(len(REQUESTS))}
    rng = np.random.default_rng(3)
    got, preempted = {}, 0
    for _ in range(200):
        got |= {numbers[number]: tokens for number, tokens in server.step().items()}
        for number in numbers:
            if rng.random() < 0.3:
                try:
                    server.preempt(number)
                    preempted += 1
                except ValueError as error:
                    assert "number: expected a running request" in str(error)
        if len(got) == len(REQUESTS):
            break
    assert preempted > 5
    assert_same_tokens(wanted(), got)


@several
def test_cancelled_requests_change_no_other(most_tokens):
    """At every stage, some after they have lost their slot or when only a token is unread. What has been read of them
    is how they begin, and no step returns them; all slots serve again."""
    server, rng = make_server(most_tokens=most_tokens), np.random.default_rng(5)
    numbers = {server.submit(prompts()[i % 8], REQUESTS[i % 8][1]): i % 8 for i in range(24)}
    got, cancelled = {}, {}
    while len(got) + len(cancelled) < len(numbers):
        got |= server.step()
        for number in [n for n in numbers if n not in got and n not in cancelled]:
            if rng.random() < 0.1:
                with contextlib.suppress(ValueError):  # it waits, or its last token is unread
                    server.preempt(number)
            if rng.random() < 0.08:
                cancelled[number] = server.cancel(number)
    assert len(cancelled) > 5 and max(len(tokens) for tokens in cancelled.values()) > 1
    for number, tokens in got.items():
        np.testing.assert_array_equal(tokens, wanted()[numbers[number]])
    for number, tokens in cancelled.items():
        np.testing.assert_array_equal(tokens, wanted()[numbers[number]][: len(tokens)])
        with pytest.raises(ValueError, match=f"number: expected a request that waits or runs, got {number}"):
            server.cancel(number)
    assert_same_tokens(wanted(), serve_all(server))


@pytest.mark.slow
def test_a_preempted_request_is_the_next():
    server = make_server(max_batch=1)
    first, second = (server.submit(prompts()[0], 7) for _ in range(2))
    server.step()
    assert [*server.occupied.values()] == [first]
    server.preempt(first)
    server.step()
    assert [*server.occupied.values()] == [first] and second != first


def test_a_request_whose_end_is_read_after_it_lost_its_slot():
    """It ends once, and its slot serves the next; three others have the other places all the time."""
    first, stop = map(int, wanted()[0][:2])
    assert first != stop
    server = make_server()
    number = server.submit(prompts()[0], 7, stop_token=stop)
    for _ in range(3):
        server.submit(prompts()[0], 40)
    other = server.submit(prompts()[6], 4)
    server.step()  # reads the first token, and starts the one that ends it
    assert server.read[number] == [first]
    server.preempt(number)
    ended = {}
    while not (ended := ended | server.step()):
        pass
    assert [*ended] == [number] and ended[number].tolist() == [first, stop]
    while other not in (new := server.step()):
        assert number not in server.occupied.values() and number not in new


def test_a_stop_token_ends_a_request():
    """It is noticed a step late; what was made meanwhile is dropped, and the slot is used again."""
    want = dict(wanted())
    stop = int(want[3][2])
    server = make_server()
    numbers = {
        server.submit(prompts()[i], REQUESTS[i][1], stop_token=stop if i == 3 else None): i
        for i in range(len(REQUESTS))
    }
    first = int(np.argmax(want[3] == stop))
    want[3] = want[3][: first + 1]
    assert_same_tokens(want, {numbers[number]: tokens for number, tokens in server.run().items()})


def test_a_stop_token_that_comes_again_ends_nothing():
    """The token that was started before the first one was read is dropped, also where it is the same."""

    def prefill(params, tokens, cu_seqlens, slots, has_initial_state, pools):
        return jnp.full(slots.shape, 5, jnp.int32), pools

    def decode(params, tokens, slots, pools):
        return jnp.full(slots.shape, 5, jnp.int32), pools

    server = serving.Server(prefill, decode, None, put(np.zeros((2, 1), np.float32)), max_batch=1)
    number = server.submit([1], 4, stop_token=5)
    assert_same_tokens({number: np.array([5])}, server.run())


@pytest.mark.slow
@pytest.mark.parametrize("ring", [pytest.param(None, marks=pytest.mark.crossed), 9])
def test_speculative_decoding(ring):
    """Three drafts a step, some of which are wrong: what is accepted is what `generate` gives, token for token. The
    convolution is rolled back with the recurrent states, or with the cursors of their rings."""
    chosen, T = [0, 3, 5], 4
    lengths = [REQUESTS[i][0] for i in chosen]
    slots = np.random.default_rng(1).permutation(12).reshape(3, T).astype(np.int32)
    pools = dirty(served().make_pools(12, ring=ring))
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    row = np.concatenate([prompts()[i] for i in chosen])[None].astype(np.int32)
    newest, pools = jax.jit(served().prefill)(served().params, row, cu, slots[:, 0], np.zeros(3, bool), pools)
    got = [[int(token)] for token in newest]
    verify, rng = jax.jit(served().verify), np.random.default_rng(2)
    accepted, seen = np.ones(3, np.int32), set()
    for _ in range(12):
        known = [np.r_[wanted()[i], np.zeros(64, int)] for i in chosen]
        right = [each[len(new) : len(new) + T - 1] for each, new in zip(known, got, strict=True)]
        drafts = np.where(rng.random((3, T - 1)) < 0.7, right, rng.integers(0, CONFIG.vocab_size, (3, T - 1)))
        tokens = np.concatenate([[[new[-1]] for new in got], drafts], 1).astype(np.int32)
        after, pools = verify(served().params, tokens, slots, accepted, pools)
        accepted = 1 + np.cumprod(drafts == np.asarray(after)[:, :-1], 1).sum(1).astype(np.int32)
        for n in range(3):
            got[n] += np.asarray(after)[n, : accepted[n]].tolist()
        seen |= set(accepted.tolist())
    assert seen == {1, 2, 3, 4}
    for i, new in zip(chosen, got, strict=True):
        number = REQUESTS[i][1]
        np.testing.assert_array_equal(wanted()[i], new[:number], err_msg=f"request {i}")


def recording(logits: dict):
    """A model of one number a request, whose outputs are kept by slot and step: the sum of all tokens so far."""

    def keep(kind, slots, values):
        logits.setdefault(kind, []).append((np.array(slots), np.array(values)))

    def prefill(_, tokens, cu_seqlens, slots, has_initial_state, pools):
        at = serving.take_slots(pools, slots)
        before = jnp.where(has_initial_state, at, 0)
        owner = jnp.searchsorted(cu_seqlens, jnp.arange(tokens.shape[1]), side="right") - 1
        sums = jax.ops.segment_sum(tokens[0], owner, num_segments=slots.shape[0])
        total = before + sums
        jax.debug.callback(functools.partial(keep, "prefill"), slots, total)
        return total % 7, serving.put_slots(pools, slots, total)

    def decode(_, tokens, slots, pools):
        total = serving.take_slots(pools, slots) + tokens
        jax.debug.callback(functools.partial(keep, "decode"), slots, total)
        return total % 7, serving.put_slots(pools, slots, total)

    return prefill, decode


def test_indices_are_never_written_to_again():
    """The device may read them long after the call: each is a new array, read-only, and unchanged at the end."""
    seen = []

    def watch(f):
        def g(*args):
            seen.extend((x, np.array(x)) for x in args if isinstance(x, np.ndarray))
            return f(*args)

        return g

    prefill, decode = recording({})
    server = serving.Server(prefill, decode, None, jnp.full(3, 9), max_batch=2, prefill_tokens=64)
    names = ("run_prefill", "run_decode")
    originals = {name: getattr(batching, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(batching, name, watch(originals[name]))
        for length in (3, 70, 1, 130):
            server.submit(np.ones(length, int), 3)
        got = server.run()
    assert len(seen) > 10 and len({id(x) for x, _ in seen}) == len(seen)
    for array, copy in seen:
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, copy)
    for number, length in enumerate((3, 70, 1, 130), 1):
        total, want = length, []
        for _ in range(3):
            want.append(total % 7)
            total += want[-1]
        np.testing.assert_array_equal(got[number], want)


def test_the_same_batches_have_the_same_bits():
    """Two servers with the same requests leave the same bits in every slot."""
    states = []
    for _ in range(2):
        server = make_server()
        serve_all(server)
        states.append(jax.tree.leaves(server._state))
    for a, b in zip(*states, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("where", ["prefill", "decode", "read", "put_slots"])
def test_an_interrupted_step_loses_nothing(where, monkeypatch):
    """As Ctrl-C does while a program is compiled or its tokens are waited for: the next steps go on from there."""
    interruptions = []

    def interrupted(f):
        def once(*args):
            if not interruptions:
                interruptions.append(where)
                raise KeyboardInterrupt
            return f(*args)

        return once

    calls = dict(zip(("prefill", "decode"), recording({}), strict=True))
    calls |= {where: interrupted(calls[where])} if where in calls else {}
    server = serving.Server(*calls.values(), None, jnp.full(3, 9), max_batch=2, prefill_tokens=64)
    if where == "read":  # of tokens that some request owns: those of a piece of a prompt are nobody's
        read, once = server._read, interrupted(server._read)
        monkeypatch.setattr(server, "_read", lambda new, owners: (once if any(owners) else read)(new, owners))
    if where == "put_slots":
        monkeypatch.setattr(batching, "put_slots", interrupted(batching.put_slots))
    numbers, got = {server.submit([1] * length, 4): length for length in (70, 3)}, {}
    for step in range(12):
        if step == 2:
            server.preempt(min(server.occupied.values()))
        try:
            got |= server.step()
        except KeyboardInterrupt:
            pass
    assert interruptions and len(server._free) == 3 and got.keys() == numbers.keys()
    for number, total in numbers.items():
        for token in got[number]:
            assert token == total % 7
            total += token


@pytest.mark.usefixtures("no_type_checks")
def test_a_model_whose_tokens_are_none():
    prefill, decode = recording({})
    for wrong, message in (
        (lambda x: x / 2, "tokens: expected an integer dtype, got float32"),
        (lambda x: x[:, None], r"tokens: expected shape \[.\] = \[1\], got \[1, 1\]"),
    ):
        spoilt = [
            lambda *args, f=f, wrong=wrong: (lambda new, pools: (wrong(new), pools))(*f(*args))
            for f in (prefill, decode)
        ]
        for name, functions in (("prefill", (spoilt[0], decode)), ("decode", (prefill, spoilt[1]))):
            server = serving.Server(*functions, None, jnp.zeros(3, jnp.int32), max_batch=1)
            server.submit([1], 2)
            with pytest.raises(ValueError, match=f"{name}'s {message}"):
                server.run()


@pytest.mark.usefixtures("no_type_checks")
def test_errors():
    prefill, decode = recording({})
    pools = jnp.zeros(3)
    with pytest.raises(ValueError, match="max_batch: expected 1 to 3, got 4"):
        serving.Server(prefill, decode, None, pools, max_batch=4)
    with pytest.raises(ValueError, match="max_waiting: expected at least 1, got 0"):
        serving.Server(prefill, decode, None, pools, max_batch=1, max_waiting=0)
    with pytest.raises(ValueError, match="prefill_tokens: expected at least 64, got 63"):
        serving.Server(prefill, decode, None, pools, max_batch=1, prefill_tokens=63)
    server = serving.Server(prefill, decode, None, pools, max_batch=1)
    with pytest.raises(ValueError, match="prompt: expected a row of at least one token"):
        server.submit([], 1)
    with pytest.raises(ValueError, match="num_tokens: expected at least 1, got 0"):
        server.submit([1], 0)
    for sizes in ([], [128, 64], [64, 64]):
        with pytest.raises(ValueError, match=r"prefill_tokens: expected a number, or several in ascending"):
            serving.Server(prefill, decode, None, pools, max_batch=1, prefill_tokens=sizes)
    with pytest.raises(ValueError, match=r"prefill_tokens: expected at least 64, got 100\.5"):
        serving.Server(prefill, decode, None, pools, max_batch=1, prefill_tokens=100.5)
    with pytest.raises(ValueError, match="max_batch: expected 1 to 3, got '2'"):
        serving.Server(prefill, decode, None, pools, max_batch="2")
    with pytest.raises(ValueError, match=r"num_tokens: expected at least 1, got 2\.5"):
        server.submit([1], 2.5)
    with pytest.raises(ValueError, match="stop_token: expected 0 to 2147483647, got 'x'"):
        server.submit([1], 1, stop_token="x")
    for token in (-1, 2**40):
        with pytest.raises(ValueError, match=f"prompt: expected tokens from 0 to 2147483647, got {token}"):
            server.submit([1, token], 1)
    small = serving.Server(prefill, decode, None, pools, max_batch=1, vocab_size=7)
    with pytest.raises(ValueError, match="prompt: expected tokens from 0 to 6, got 7"):
        small.submit([7], 1)
    with pytest.raises(ValueError, match="number: expected a running request, got 5"):
        server.preempt(5)
