"""Requests whose prompts begin alike: what is remembered of beginnings, and that nobody sees it in the tokens."""

import contextlib

import numpy as np
import pytest
from test_serving_batching import CONFIG, make_server

from gdn_jax.models.served import slot_bytes
from gdn_jax.serving.prefixes import Prefixes


@pytest.mark.parametrize(
    ("count", "ring"),
    [
        (24, None),
        pytest.param(300, 4, marks=pytest.mark.slow),
        pytest.param(2000, None, marks=pytest.mark.crossed),
    ],
)
def test_requests_that_begin_alike(count, ring):
    """Prompts of three beginnings, some cut short or changed, with requests that are preempted and cancelled: each
    gets what it would get alone. What is kept never takes more than its bytes, which do not suffice for all."""
    rng, size = np.random.default_rng(7), slot_bytes(CONFIG, ring=ring) + 4
    begins = [rng.integers(0, CONFIG.vocab_size, 192) for _ in range(3)]
    begins[1][:64] = begins[0][:64]
    prompts = []
    for _ in range(count):
        begin = begins[rng.integers(3)][: rng.choice([10, 64, 130, 192])]
        prompts.append(np.concatenate([begin, rng.integers(0, CONFIG.vocab_size, rng.integers(1, 4))]))
    alone = make_server(max_batch=4, max_waiting=count, ring=ring)
    wanted = {alone.submit(prompt, 3): i for i, prompt in enumerate(prompts)}
    wanted = {wanted[number]: tokens for number, tokens in alone.run().items()}
    server = make_server(max_waiting=count, ring=ring, prefix_bytes=3 * size, prefix_stride=64)
    numbers, got, gone = {server.submit(prompt, 3): i for i, prompt in enumerate(prompts)}, {}, set()
    while len(got) + len(gone) < count:
        got |= server.step()
        assert server.prefixes.bytes <= 3 * size
        number = int(rng.choice([*numbers]))
        with contextlib.suppress(ValueError):  # it has ended, or waits
            if rng.random() < 0.3:
                server.preempt(number)
            elif rng.random() < 0.3 and number not in got:
                server.cancel(number)
                gone.add(number)
    for number, tokens in got.items():
        np.testing.assert_array_equal(
            tokens, wanted[numbers[number]], err_msg=f"{len(prompts[numbers[number]])}"
        )
    assert server.prefixes.bytes == 3 * size and server.tokens_shared > 10 * count and gone


def test_what_is_kept_of_prompts():
    """Found by tokens alone, the longest first, used last longest; larger than all room, nothing."""
    kept, prompt = Prefixes(64, 3000), np.arange(300, dtype=np.int32)
    contents = [np.full(250, i, np.int32) for i in range(5)]  # 1000 bytes each
    for i, seen in enumerate((64, 128, 192)):
        assert kept.wants(prompt, seen) and not kept.wants(prompt, seen + 1)
        kept.keep(prompt, seen, contents[i])
    assert (
        kept.find(prompt)[0] == 192
        and kept.find(prompt[:192])[0] == 128
        and kept.find(prompt[:64]) == (0, None)
    )
    other = np.concatenate([prompt[:130], prompt[:100]])
    length, found = kept.find(other)
    assert length == 128 and found is contents[1]
    kept.keep(other, 192, contents[3])  # that of 64 tokens was used longest ago
    assert kept.bytes == 3000 and kept.find(prompt[:100]) == (0, None) and kept.find(other)[0] == 192
    kept.keep(prompt, 256, np.zeros(1000, np.int32))
    assert kept.find(prompt)[0] == 192 and kept.bytes == 3000
    assert [kept.whole(prompt, *x) for x in ((0, 100), (0, 64), (64, 70), (256, 44), (10, 20))] == [
        64,
        64,
        64,
        44,
        20,
    ]
    for options, said in (
        (dict(stride=100), "prefix_stride: expected a multiple of 64, got 100"),
        (dict(most_bytes=-1), "prefix_bytes"),
        (dict(stride=32), "prefix_stride"),
    ):
        with pytest.raises(ValueError, match=said):
            Prefixes(**({"stride": 64, "most_bytes": 0} | options))
