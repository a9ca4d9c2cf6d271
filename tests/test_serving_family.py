"""Serving with gates of each channel and with erase and write apart: every way of taking tokens, against float64."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from meshes import mesh_of, spec
from serving_cases import HK, HV, K, V, assert_same_bits, compiled, draw_pool, fresh
from tolerances import assert_close, bound

from gdn_jax import serving
from gdn_jax.checks import family_oracle
from gdn_jax.serving.call import interpreted

STATE_F32 = 1e-5
N, SLOTS, LENGTH = 3, np.array([3, 0, 4]), 5
GATES = ("A_log", "dt_bias", "lower_bound", "allow_neg_eigval", "use_qk_l2norm")
RULES = {
    "KDA": dict(a="channel", b="head"),
    "KDA bounded": dict(a="channel", b="head", A_log=None, lower_bound=-5.0, allow_neg_eigval=True),
    "GDN-2": dict(a="channel", b="channel", w="channel", allow_neg_eigval=True),
    "decay of a head": dict(a="head", b="channel", w="head"),
}


class Tokens(NamedTuple):
    """Raw tokens [N, T, ...] of a rule, and the options of the call that makes its gates."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    a: np.ndarray
    b: np.ndarray
    w: np.ndarray | None
    options: dict

    def at(self, *index) -> "Tokens":
        return Tokens(*(None if x is None else x[index] for x in self[:6]), self.options)

    def call(self, f, pool, **more):
        """f of the tokens on a pool, compiled; the pool stays as it is."""
        static = {name: x for name, x in (self.options | more).items() if not hasattr(x, "shape")}
        arrays = {name: x for name, x in (self.options | more).items() if hasattr(x, "shape")}
        arrays |= {} if self.w is None else {"w": self.w}
        return compiled(f, **static)(*self[:5], pool, **arrays)

    def gates(self) -> dict:
        """Log decays and strengths, in float64."""
        a, b, w, bias = (None if x is None else np.asarray(x, np.float64)
                         for x in (*self[3:6], self.options["dt_bias"]))  # fmt: skip
        A_log, bounded = self.options["A_log"], self.options.get("lower_bound")
        rate = np.ones(HV) if A_log is None else np.exp(np.asarray(A_log, np.float64))
        rate = rate[:, None] if a.ndim == 4 else rate
        x = a + bias
        with np.errstate(over="ignore"):
            g = -rate * np.logaddexp(0, x) if bounded is None else bounded / (1 + np.exp(-rate * x))
        erase = (1 + self.options.get("allow_neg_eigval", False)) / (1 + np.exp(-b))
        return dict(g=g, erase=erase, write=erase if w is None else 1 / (1 + np.exp(-w)))

    def expected(self, states) -> tuple[np.ndarray, np.ndarray]:
        """Outputs [N, T, HV, V] and last states of requests that start from states [N, ...]."""
        q, k, v = (np.asarray(x, np.float64) for x in self[:3])
        do, dh = np.zeros((*q.shape[:2], HV, V)), np.zeros_like(states, np.float64)
        states = np.asarray(states, np.float64)
        r = family_oracle.evaluate(
            q, k, v, **self.gates(), initial_state=states, use_qk_l2norm=True, do=do, dh_T=dh
        )
        return r["o"], r["final_state"]

    def every_state(self, states, parents=None) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and the states after every token [N, T, ...], along the paths of trees."""
        T = self.q.shape[1]
        parents = np.tile(np.arange(-1, T - 1), (len(states), 1)) if parents is None else parents
        after, o = np.zeros((len(states), T, *states.shape[1:])), np.zeros((*self.v.shape[:2], HV, V))
        for n, t in np.ndindex(len(states), T):
            before = states[n] if parents[n, t] < 0 else after[n, parents[n, t]]
            got, state = self.at(slice(n, n + 1), slice(t, t + 1)).expected(before[None])
            o[n, t], after[n, t] = got[0, 0], state[0]
        return o, after


def draw(rule: str, T: int, seed: int = 0, dtype=np.float32) -> Tokens:
    rng = np.random.default_rng(seed)
    options = dict(RULES[rule])

    def normal(*shape):
        return rng.standard_normal((N, T, *shape)).astype(np.float32).astype(dtype)

    kinds = [options.pop(name, None) for name in ("a", "b", "w")]
    widths = (
        {None: None, "head": (HV,), "channel": (HV, width)}[kind]
        for kind, width in zip(kinds, (K, K, V), strict=True)
    )
    a, b, w = (None if shape is None else normal(*shape) for shape in widths)
    # From channels that hardly decay to some that forget everything at once.
    bias = rng.uniform(-9, 6, (HV, K) if a.ndim == 4 else (HV,)).astype(np.float32)
    A_log = np.log(rng.uniform(0.05, 4, HV)).astype(np.float32)
    options = {"A_log": A_log} | options | {"dt_bias": bias}
    return Tokens(normal(HK, K), normal(HK, K), normal(HV, V), a, b, w, options)


def littered(pool: np.ndarray, used=SLOTS) -> np.ndarray:
    """The pool with huge numbers and NaN in the slots that no request has."""
    others = np.setdiff1d(np.arange(len(pool)), used)
    pool = pool.copy()
    pool[others[::2]], pool[others[1::2]] = 3e38, np.nan
    return pool


def make_ring(pool, trees: bool = False, dtype=np.float32):
    options = dict(num_key_heads=HK, length=LENGTH, dtype=dtype, trees=trees, channels=True)
    ring = serving.make_ring_pool(jnp.asarray(pool), **options)
    return ring._replace(k=ring.k * np.nan, u=ring.u * np.nan, g=ring.g * np.nan)


def assert_others_stay(before, after, used=SLOTS):
    others = np.setdiff1d(np.arange(len(before)), used)
    assert_same_bits(np.asarray(before)[others], np.asarray(after)[others])


def rules(*quick: str):
    """Parameters of which all but some are slow."""
    marks = {name: () if name in quick else pytest.mark.slow for name in RULES}
    return pytest.mark.parametrize("rule", [pytest.param(name, marks=mark) for name, mark in marks.items()])


@rules("KDA bounded")
def test_decode(rule):
    """Token for token the oracle's outputs and states, from a pool of states and from a ring; padding gives zeros."""
    T = 7
    x, pool = draw(rule, T), littered(draw_pool(6))
    pool[SLOTS[0], 0, 0, 0] = -0.0
    want, last = x.expected(pool[SLOTS])
    plain, ring = pool, make_ring(pool)
    assert_same_bits(compiled(serving.snapshot)(ring, SLOTS), pool[SLOTS])
    for t in range(T):
        token = x.at(slice(None), t)
        o, plain = token.call(serving.decode, plain, read_slots=SLOTS, null_slot=5)
        on_ring, ring = token.call(serving.decode, ring, read_slots=SLOTS, null_slot=5)
        assert_close(want[:, t], o, STATE_F32, f"o of token {t}", 1)
        assert_close(want[:, t], on_ring, STATE_F32, f"o of token {t} on a ring", 1)
    assert_close(last, np.asarray(plain)[SLOTS], STATE_F32, "states", 1)
    present = compiled(serving.snapshot)(ring, SLOTS)
    assert_close(last, present, STATE_F32, "present states", 1)
    flushed = compiled(serving.flush)(ring, SLOTS)
    assert_same_bits(present, np.asarray(flushed.state)[SLOTS])
    for new in (plain, ring.state, flushed.state):
        assert_others_stay(pool, new)
    np.testing.assert_array_equal(np.asarray(ring.count)[SLOTS], T % LENGTH)
    some = np.array([3, -1, 5])  # slot 5 is the one that is kept free
    for start in (plain, ring):
        o, new = x.at(slice(None), 0).call(serving.decode, start, read_slots=some, null_slot=5)
        assert not np.asarray(o)[1:].any()
        states = new if start is plain else new.state
        assert_others_stay(plain if start is plain else ring.state, states, [3])


TREE = np.array([[-1, 0, 0, 1], [-1, -1, 1, 0], [-1, 0, 1, 2]])


@pytest.mark.parametrize(
    "rule, parents",
    [pytest.param("KDA", None, id="chain"), pytest.param("GDN-2", TREE, id="tree", marks=pytest.mark.slow)],
)
def test_verify(rule, parents):
    """Drafts of which some are accepted: a state after each in a pool of states, and the same from a ring."""
    T, steps = 4, 4
    x, start = draw(rule, T * steps, 1), littered(draw_pool(14), np.arange(12))
    of_tokens = np.arange(12).reshape(N, T)
    states, pool, ring = (
        start[of_tokens[:, 0]].astype(np.float64),
        start,
        make_ring(start, trees=parents is not None),
    )
    rng, accepted = np.random.default_rng(0), np.ones(N, int)
    rings = np.array(of_tokens[:, 0])
    for i in range(steps):
        span = x.at(slice(None), slice(T * i, T * i + T))
        spans = dict(num_accepted_tokens=accepted) | ({} if parents is None else dict(parents=parents))
        want, after = span.every_state(states, parents)
        o, pool = span.call(serving.verify, pool, state_slots=of_tokens, **spans)
        on_ring, ring = span.call(serving.verify, ring, state_slots=rings, **spans)
        assert_close(want, o, STATE_F32, f"o of step {i}", 1)
        assert_close(want, on_ring, STATE_F32, f"o of step {i} on a ring", 1)
        assert_close(after, np.asarray(pool)[of_tokens], STATE_F32, f"states of step {i}", 1)
        accepted = rng.integers(1, T + 1, N)
        states = after[np.arange(N), accepted - 1]
    ring = compiled(serving.accept)(ring, rings, accepted)
    assert_close(states, compiled(serving.snapshot)(ring, rings), STATE_F32, "accepted states", 1)
    assert_others_stay(start, pool, np.arange(12))


def test_drafts_that_are_no_numbers():
    """Padding behind the tokens of a request may hold anything."""
    x, pool = draw("KDA", 4), draw_pool(6)
    lengths = np.array([2, 0, 4])
    junk = np.arange(4)[None] >= lengths[:, None]
    filled = Tokens(*(None if y is None else np.where(junk.reshape(N, 4, *(1,) * (y.ndim - 2)), np.nan, y)
                      for y in x[:6]), x.options)  # fmt: skip
    spans = dict(num_accepted_tokens=np.ones(N, int), num_tokens=lengths)
    o, ring = filled.call(serving.verify, make_ring(pool), state_slots=SLOTS, **spans)
    want, after = x.every_state(pool[SLOTS].astype(np.float64))
    assert_close(want[0, :2], o[0, :2], STATE_F32)
    assert_close(want[2], o[2], STATE_F32)
    assert not np.asarray(o)[junk].any()
    kept = compiled(serving.snapshot)(compiled(serving.accept)(ring, SLOTS, np.array([2, 1, 4])), SLOTS)
    assert_close(np.stack([after[0, 1], pool[0], after[2, 3]]), kept, STATE_F32)


def packed(x: Tokens, lengths, T: int) -> dict:
    """Arguments of `prefill` for the first tokens of every request, one behind the other, and padding up to T."""
    arrays = dict(q=x.q, k=x.k, v=x.v, **{name: y.astype(np.float32) for name, y in x.gates().items()})

    def together(y):
        rows = np.concatenate([y[n, :length] for n, length in enumerate(lengths)])
        return jnp.asarray(np.resize(rows, (1, T, *rows.shape[1:])))

    arrays = {name: together(y) for name, y in arrays.items()}
    return arrays | dict(beta=None, cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]))


@pytest.mark.parametrize(
    "rule, on_ring",
    [
        ("GDN-2", True),
        pytest.param("KDA", False, marks=pytest.mark.slow),
        pytest.param("decay of a head", False, marks=pytest.mark.slow),
    ],
)
def test_prefill(rule, on_ring):
    """Prompts in two pieces, over a ring with tokens in it too: what the whole row leaves."""
    first, rest, T = np.array([3, 2, 4]), np.array([2, 4, 0]), 11
    x, pool = draw(rule, 8, 3), littered(draw_pool(7))
    has_state = np.array([True, True, False])
    begin = np.where(has_state[:, None, None, None], pool[SLOTS], 0).astype(np.float64)
    start = jnp.asarray(pool)
    if on_ring:
        token = x.at(slice(None), slice(7, 8))
        _, start = token.at(slice(None), 0).call(
            serving.decode, make_ring(pool), read_slots=np.array([-1, 0, -1])
        )
        begin[1] = token.expected(begin)[1][1]
    prefill = compiled(serving.prefill, use_qk_l2norm=True, chunk_size=16)
    # A request without a slot: nothing is read or written, outputs are zeros.
    o, same = prefill(
        **packed(x, first, T), pool=start, read_slots=np.array([3, -1, 4]), has_initial_state=has_state
    )
    assert not np.asarray(o)[0, 3:5].any()
    assert_others_stay(pool, same.state if on_ring else same, [3, 4])
    o, pieces = prefill(**packed(x, first, T), pool=start, read_slots=SLOTS, has_initial_state=has_state)
    behind = Tokens(*(None if y is None else np.stack([np.roll(y[n], -first[n], 0) for n in range(N)])
                      for y in x[:6]), x.options)  # fmt: skip
    more, pieces = prefill(
        **packed(behind, rest, T), pool=pieces, read_slots=SLOTS, has_initial_state=np.ones(3, bool)
    )
    left = compiled(serving.snapshot)(pieces, SLOTS) if on_ring else np.asarray(pieces)[SLOTS]
    ends, ends_more = np.cumsum(first), np.cumsum(rest)
    for n, length in enumerate(first + rest):
        want, last = x.at(slice(n, n + 1), slice(length)).expected(begin[n : n + 1])
        got = [o[0, ends[n] - first[n] : ends[n]], more[0, ends_more[n] - rest[n] : ends_more[n]]]
        assert_close(want[0], np.concatenate(got), bound("o", "float32"), f"o of request {n}", 1)
        assert_close(last[0], left[n], bound("final_state", "float32"), f"state of request {n}")
    assert_others_stay(pool, pieces.state if on_ring else pieces)


@pytest.mark.slow
def test_prompts_that_erase_alone():
    """All is written then, but padding nothing."""
    x, pool = draw("GDN-2", 4, 6), draw_pool(5)
    args = packed(x, [2, 1, 1], 6) | dict(pool=jnp.asarray(pool), read_slots=SLOTS)
    prefill = compiled(serving.prefill, use_qk_l2norm=True, chunk_size=16)
    every = prefill(**args | dict(write=jnp.ones((1, 6, HV), jnp.float32)))
    for a, b in zip(prefill(**args | dict(write=None)), every, strict=True):
        assert_close(b, a, STATE_F32)


@pytest.mark.slow
def test_checkpoints_and_pieces():
    """States at every 64 tokens, and pieces of a prompt that have the bits of the whole one."""
    x, pool = draw("KDA", 130, 4), draw_pool(9)
    x = Tokens(*(None if y is None else y[:1] for y in x[:6]), x.options)
    args = packed(x, [130], 130)
    prefill = partial(compiled, serving.prefill, use_qk_l2norm=True)
    slots = dict(read_slots=np.array([2]), checkpoint_slots=np.array([[5, 6]]))
    o, new = prefill(checkpoint_every=64)(**args, pool=jnp.asarray(pool), **slots)
    for slot, length in ((5, 64), (6, 128), (2, 130)):
        want, last = x.at(slice(None), slice(length)).expected(pool[2:3])
        assert_close(last[0], new[slot], bound("final_state", "float32"))
    assert_close(want[0], o[0], bound("o", "float32"))
    whole = prefill(checkpoint_every=64, batch_invariant=True)(**args, pool=jnp.asarray(pool), **slots)
    piece = {name: y[:, :64] if getattr(y, "ndim", 0) > 1 else y for name, y in args.items()}
    rest = {name: y[:, 64:] if getattr(y, "ndim", 0) > 1 else y for name, y in args.items()}
    piece["cu_seqlens"], rest["cu_seqlens"] = np.array([0, 64]), np.array([0, 66])
    of_pieces, slots = prefill(batch_invariant=True), dict(read_slots=np.array([2]))
    start, pieces = of_pieces(**piece, pool=jnp.asarray(pool), **slots)
    end, pieces = of_pieces(**rest, pool=pieces, **slots)
    assert_same_bits(whole[0], np.concatenate([start, end], 1))
    assert_same_bits(whole[1][2], pieces[2])


def test_bfloat16_pools_and_huge_neighbours():
    """bfloat16 tokens and states, float32 gates: within the bounds of the gated delta rule's own tests."""
    bf16 = ml_dtypes.bfloat16
    x, pool = draw("KDA", 6, 5, bf16), littered(draw_pool(6, dtype=bf16))
    want, last = x.expected(pool[SLOTS])
    states, ring = pool, make_ring(pool, dtype=bf16)
    for t in range(6):
        token = x.at(slice(None), t)
        o, states = token.call(serving.decode, states, read_slots=SLOTS)
        on_ring, ring = token.call(serving.decode, ring, read_slots=SLOTS)
        for got in (o, on_ring):
            assert got.dtype == bf16
            assert_close(want[:, t], np.asarray(got, np.float64), bound("o", "bfloat16"), f"o of token {t}")
    assert ring.g.dtype == jnp.float32
    assert_close(last, np.asarray(states)[SLOTS].astype(np.float64), bound("final_state", "bfloat16"))
    assert_close(last, compiled(serving.snapshot)(ring, SLOTS), bound("final_state", "bfloat16"))
    assert_others_stay(pool, states)
    assert_others_stay(pool, ring.state)


def test_equal_channels_are_one_decay_a_head():
    """With one number in all channels the family's call is the other one, to 1e-6."""
    x, pool = draw("decay of a head", 1), draw_pool(6)
    a, b = jnp.asarray(x.a[:, 0]), jnp.asarray(x.b[:, 0, :, 0])
    bias = jnp.asarray(x.options["dt_bias"])
    common = dict(A_log=jnp.asarray(x.options["A_log"]), read_slots=SLOTS)
    token = [jnp.asarray(y[:, 0]) for y in x[:3]]
    want = serving.decode(*token, a, b, fresh(pool), dt_bias=bias, **common)
    wide, bias = (jnp.repeat(y[..., None], K, -1) for y in (a, bias))
    got = serving.decode(*token, wide, b, fresh(pool), dt_bias=bias, **common)
    for one, other in zip(want, got, strict=True):
        assert_close(np.asarray(one), np.asarray(other), 1e-6)
    qkv = jnp.concatenate([y.reshape(N, -1) for y in token], -1)
    together = serving.decode_packed(qkv, wide, b, fresh(pool), dt_bias=bias, **common)
    for one, other in zip(got, together, strict=True):
        assert_same_bits(one, other)


@pytest.mark.slow
def test_heads_on_a_mesh():
    """Every device serves its own heads of a pool of states and of a ring."""
    x, pool = draw("GDN-2", 1), draw_pool(6)
    mesh, heads = mesh_of((2,), ("heads",)), spec(None, "heads")
    token = x.at(slice(None), 0)
    place = partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, heads))
    split = Tokens(*place(token[:6]), token.options)
    for start in (jnp.asarray(pool), make_ring(pool)):
        want, left = token.call(serving.decode, start, read_slots=SLOTS)
        o, new = split.call(serving.decode, place(start), read_slots=SLOTS)
        assert_close(np.asarray(want), np.asarray(o), 1e-6)
        for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(new), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_layers_and_lone_requests():
    """One layer of a pool of several, and a request whose bits do not depend on the others of its call."""
    x, pool = draw("GDN-2", 3), draw_pool(6)
    token, alone = x.at(slice(None), 0), x.at(slice(1, 2), 0)
    layers = jnp.stack([jnp.asarray(pool) + 1, jnp.asarray(pool)], 1)
    ring = serving.make_ring_pool(layers, num_key_heads=HK, length=LENGTH, channels=True)
    for start, whole in ((jnp.asarray(pool), layers), (make_ring(pool, dtype=jnp.bfloat16), ring)):
        want, left = token.call(serving.decode, start, read_slots=SLOTS, batch_invariant=True)
        o, new = token.call(serving.decode, whole, read_slots=SLOTS, batch_invariant=True, layer=1)
        assert_same_bits(want, o)
        states, one, before = (getattr(y, "state", y) for y in (new, left, whole))
        assert_same_bits(one, states[:, 1])
        assert_same_bits(before[:, 0], states[:, 0])
        lone, _ = alone.call(serving.decode, start, read_slots=SLOTS[1:2], batch_invariant=True)
        assert_same_bits(want[1:2], lone)
        spans = dict(num_accepted_tokens=np.ones(N, int), batch_invariant=True)
        slots = (
            SLOTS if hasattr(start, "state") else np.pad(SLOTS[:, None], ((0, 0), (0, 2)), constant_values=-1)
        )
        want, _ = x.call(serving.verify, start, state_slots=slots, **spans)
        spans["num_accepted_tokens"] = spans["num_accepted_tokens"][:1]
        lone, _ = x.at(slice(1, 2)).call(serving.verify, start, state_slots=slots[1:2], **spans)
        assert_same_bits(want[1:2], lone)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(a=np.zeros((N, HV, 3), np.float32)),
            r"a: expected shape \[B, HO, K\] = \[3, 4, 8\], got \[3, 4, 3\]",
        ),
        (dict(w=np.zeros((N, HV, K), np.float32)), r"w: expected shape \[B, HO, V\] = \[3, 4, 6\]"),
        (
            dict(b=np.zeros((N, HV, K), np.float32)),
            "w: expected an array, since b has a number for each key channel",
        ),
        (dict(dt_bias=np.zeros((HV, 3), np.float32)), r"dt_bias: expected shape \[HO, K\] = \[4, 8\]"),
        (dict(A_log=np.zeros(3, np.float32)), r"A_log: expected shape \[HO\] = \[4\]"),
        (dict(lower_bound=1.0), "lower_bound: expected a number below 0 or None, got 1.0"),
    ],
)
def test_errors(change, message, no_type_checks):
    x, pool = draw("KDA", 1), jnp.asarray(draw_pool(6))
    token = dict(q=x.q[:, 0], k=x.k[:, 0], v=x.v[:, 0], a=x.a[:, 0], b=x.b[:, 0])
    with pytest.raises(ValueError, match=message):
        serving.decode(**(token | x.options | change), pool=pool, read_slots=SLOTS)


def test_a_ring_is_made_for_its_gates(no_type_checks):
    x, pool = draw("KDA", 1), jnp.asarray(draw_pool(6))
    ring = serving.make_ring_pool(pool, num_key_heads=HK)
    with pytest.raises(
        ValueError, match=r"pool: expected a ring for gates of each channel.*got one for one gate a head"
    ):
        serving.decode(*(y[:, 0] for y in x[:5]), ring, **x.options, read_slots=SLOTS)
    ring = serving.make_ring_pool(pool, num_key_heads=HK, channels=True)
    with pytest.raises(
        ValueError, match=r"pool: expected a ring for one gate a head.*got one for gates of each channel"
    ):
        gates = dict(A_log=np.zeros(HV, np.float32), dt_bias=np.zeros(HV, np.float32))
        serving.decode(*(y[:, 0] for y in x[:3]), x.b[:, 0], x.b[:, 0], ring, **gates, read_slots=SLOTS)


@pytest.mark.parametrize(
    ("bias", "strengths"),
    [
        ("channel", "beta"),
        pytest.param("head", "beta", marks=pytest.mark.slow),
        ("channel", "of channels"),
        pytest.param("head", "of heads", marks=pytest.mark.slow),
    ],
)
def test_a_token_by_the_kernel(bias, strengths):
    """Interpreted, from the packed channels of a convolution: outputs and pool of plain JAX, padding and all."""
    rng, heads, width = np.random.default_rng(0), 2, 32
    N, slots = 3, np.array([3, -1, 0], np.int32)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    channels = (width,) if bias == "channel" else ()
    token = (
        normal(N, 4 * width + heads * width, dtype=jnp.bfloat16),
        normal(N, heads, *channels),
        normal(N, heads, *((width,) if strengths == "of channels" else ())),
    )
    gates = dict(A_log=normal(heads), dt_bias=normal(heads, *channels), lower_bound=-5.0)
    gates |= {} if strengths == "beta" else dict(w=normal(*token[2].shape))
    pool = normal(5, heads, width, width)

    def decode(by):
        return serving.decode_packed(*token, jnp.array(pool), **gates, read_slots=slots, implementation=by)

    want = decode("xla")
    with interpreted(plgpu.InterpretGPUParams(detect_races=True)):
        got = decode("mosaic_gpu")
    assert_close(np.asarray(want[0], np.float64), np.asarray(got[0], np.float64), bound("o", "bfloat16"))
    assert not np.asarray(got[0], np.float64)[1].any()
    assert_close(np.asarray(want[1])[slots[::2]], np.asarray(got[1])[slots[::2]], STATE_F32)
    assert_others_stay(pool, got[1], slots[::2])
