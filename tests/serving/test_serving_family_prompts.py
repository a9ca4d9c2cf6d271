"""Prompts with gates of each channel and with erase and write apart, against float64."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from serving_cases import (
    HK,
    HV,
    assert_same_bits,
    compiled,
    draw,
    draw_pool,
    expected,
    log_decay,
    strengths,
)
from tolerances import assert_close, bound

from gdn_jax import serving

N, SLOTS = 3, np.array([3, 0, 4])


def packed(x, lengths, T: int) -> dict:
    """Arguments of `prefill` for the first tokens of every request, one after the other, and padding up to T."""
    gates = dict(g=log_decay(x)) | strengths(x)
    arrays = dict(q=x.q, k=x.k, v=x.v, **{name: y.astype(np.float32) for name, y in gates.items()})

    def together(y):
        rows = np.concatenate([y[n, :length] for n, length in enumerate(lengths)])
        return put(np.resize(rows, (1, T, *rows.shape[1:])))

    arrays = {name: together(y) for name, y in arrays.items()}
    return arrays | dict(beta=None, cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]))


def assert_others_stay(before, after, used=SLOTS):
    others = np.setdiff1d(np.arange(len(before)), used)
    assert_same_bits(np.asarray(before)[others], np.asarray(after)[others])


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, on_ring",
    [("GDN-2", True), ("KDA", False), ("decay of a head", False)],
)
def test_prefill(rule, on_ring):
    """Prompts in two pieces, over a ring with tokens in it too: what the whole row leaves."""
    first, rest, T = np.array([3, 2, 4]), np.array([2, 4, 0]), 11
    x, pool = draw(N, 8, 3, gates=rule), draw_pool(7)
    pool[1:3], pool[5:] = np.nan, 3e38
    has_state = np.array([True, True, False])
    begin = np.where(has_state[:, None, None, None], pool[SLOTS], 0).astype(np.float64)
    start = put(pool)
    if on_ring:
        ring = serving.make_ring_pool(start, num_key_heads=HK, length=5, dtype=np.float32, channels=True)
        ring = ring._replace(k=ring.k * np.nan, u=ring.u * np.nan, g=ring.g * np.nan)
        _, start = x.at(slice(None), 7).call(serving.decode, ring, read_slots=np.array([-1, 0, -1]))
        begin[1] = expected(x.at(slice(None), slice(7, 8)), begin)[1][1]
    prefill = compiled(serving.prefill, use_qk_l2norm=True, chunk_size=16)
    # A request without a slot: nothing is read or written, outputs are zeros.
    o, same = prefill(
        **packed(x, first, T), pool=start, read_slots=np.array([3, -1, 4]), has_initial_state=has_state
    )
    assert not np.asarray(o)[0, 3:5].any()
    assert_others_stay(pool, same.state if on_ring else same, [3, 4])
    o, pieces = prefill(**packed(x, first, T), pool=start, read_slots=SLOTS, has_initial_state=has_state)
    after = x.each(lambda y: np.stack([np.roll(y[n], -first[n], 0) for n in range(N)]))
    more, pieces = prefill(
        **packed(after, rest, T), pool=pieces, read_slots=SLOTS, has_initial_state=np.ones(3, bool)
    )
    left = compiled(serving.snapshot)(pieces, SLOTS) if on_ring else np.asarray(pieces)[SLOTS]
    ends, ends_more = np.cumsum(first), np.cumsum(rest)
    for n, length in enumerate(first + rest):
        want, last = expected(x.at(slice(n, n + 1), slice(length)), begin[n : n + 1])
        got = [o[0, ends[n] - first[n] : ends[n]], more[0, ends_more[n] - rest[n] : ends_more[n]]]
        assert_close(want[0], np.concatenate(got), bound("o", "float32"), f"o of request {n}", 1)
        assert_close(last[0], left[n], bound("final_state", "float32"), f"state of request {n}")
    assert_others_stay(pool, pieces.state if on_ring else pieces)


@pytest.mark.slow
def test_prompts_that_erase_alone():
    """All is written then, but padding nothing."""
    x, pool = draw(N, 4, 6, gates="GDN-2"), draw_pool(5)
    args = packed(x, [2, 1, 1], 6) | dict(pool=put(pool), read_slots=SLOTS)
    prefill = compiled(serving.prefill, use_qk_l2norm=True, chunk_size=16)
    every = prefill(**args | dict(write=jnp.ones((1, 6, HV), jnp.float32)))
    for a, b in zip(prefill(**args | dict(write=None)), every, strict=True):
        assert_close(b, a, 1e-5)


@pytest.mark.slow
def test_checkpoints_and_pieces():
    """States at every 64 tokens, and pieces of a prompt that have the bits of the whole one."""
    x, pool = draw(1, 130, 4, gates="KDA"), draw_pool(9)
    args = packed(x, [130], 130)
    prefill = partial(compiled, serving.prefill, use_qk_l2norm=True)
    slots = dict(read_slots=np.array([2]), checkpoint_slots=np.array([[5, 6]]))
    o, new = prefill(checkpoint_every=64)(**args, pool=put(pool), **slots)
    for slot, length in ((5, 64), (6, 128), (2, 130)):
        want, last = expected(x.at(slice(None), slice(length)), pool[2:3])
        assert_close(last[0], new[slot], bound("final_state", "float32"))
    assert_close(want[0], o[0], bound("o", "float32"))
    whole = prefill(checkpoint_every=64, batch_invariant=True)(**args, pool=put(pool), **slots)
    piece = {name: y[:, :64] if getattr(y, "ndim", 0) > 1 else y for name, y in args.items()}
    rest = {name: y[:, 64:] if getattr(y, "ndim", 0) > 1 else y for name, y in args.items()}
    piece["cu_seqlens"], rest["cu_seqlens"] = np.array([0, 64]), np.array([0, 66])
    of_pieces, slots = prefill(batch_invariant=True), dict(read_slots=np.array([2]))
    start, pieces = of_pieces(**piece, pool=put(pool), **slots)
    end, pieces = of_pieces(**rest, pool=pieces, **slots)
    assert_same_bits(whole[0], np.concatenate([start, end], 1))
    assert_same_bits(whole[1][2], pieces[2])
