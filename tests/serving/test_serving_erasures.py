"""Erase-then-Delta Attention over pools of states and rings, against float64 token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from serving_cases import assert_same_bits, compiled
from small_models import made
from tolerances import assert_close, bound

from gdn_jax import serving
from gdn_jax.models import ModelConfig, generate
from gdn_jax.models.served import ServedModel

N, T, HK, HV, K, V = 3, 5, 1, 2, 8, 6
SLOTS = np.array([3, 0, 4])
LOWER = -5.0


def draw(seed=0, tokens=T):
    """Tokens of N requests with raw gates, and the parameters of the decay; all but those by the arguments' names."""
    rng = np.random.default_rng(seed)
    heads, values = (N, tokens, HK, K), (N, tokens, HV)
    x = dict(q=heads, k=heads, v=(*values, V), a=(*values, K), b=values, erase_key=heads, w=values)
    x = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in x.items()}
    rates = dict(A_log=rng.standard_normal(HV), dt_bias=rng.standard_normal((HV, K)) - 2)
    return x, {name: y.astype(np.float32) for name, y in rates.items()}


def finished(x, rates, doubled=False, lower_bound=LOWER):
    """g, beta and gamma in float64."""
    softplus = np.logaddexp(0, x["a"].astype(np.float64) + rates["dt_bias"])
    g = -np.exp(rates["A_log"].astype(np.float64))[:, None] * softplus
    if lower_bound is not None:
        g = lower_bound * (1 - np.exp(g / -lower_bound))
    beta, gamma = (1 / (1 + np.exp(-x[name].astype(np.float64))) for name in ("b", "w"))
    return g, (1 + doubled) * beta, gamma


def expected(x, rates, S, parents=None, **gates):
    """Outputs and the states after every token, in float64."""
    g, beta, gamma = finished(x, rates, **gates)
    q, k, e = (np.repeat(x[name].astype(np.float64), HV // HK, 2) for name in ("q", "k", "erase_key"))
    q, k, e = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k, e))
    states, outputs = [], []
    for t in range(q.shape[1]):
        before = S if not states else states[-1]
        if parents is not None:
            before = np.stack([S[n] if p < 0 else states[p][n] for n, p in enumerate(parents[:, t])])
        h = before * np.exp(g[:, t])[..., None]
        for key, strength, value in ((e, gamma, 0), (k, beta, x["v"][:, t])):
            u = strength[:, t, :, None] * (value - np.einsum("nhk,nhkv->nhv", key[:, t], h))
            h = h + key[:, t, :, :, None] * u[:, :, None]
        states.append(h)
        outputs.append(np.einsum("nhk,nhkv->nhv", q[:, t], h) * K**-0.5)
    return np.stack(outputs, 1), np.stack(states, 1)


def draw_pool(slots=6, seed=1):
    return np.random.default_rng(seed).standard_normal((slots, HV, K, V)).astype(np.float32)


def token(x, t):
    return {name: put(y[:, t]) for name, y in x.items()}


def tokens(x, first=0, last=None):
    return {name: put(y[:, first:last]) for name, y in x.items()}


def close(want, got, name="o"):
    assert_close(want, np.asarray(got), bound(name, "float32"), name)


@pytest.mark.parametrize(
    ("doubled", "lower_bound"), [(False, LOWER), pytest.param(True, None, marks=pytest.mark.slow)]
)
def test_decode(doubled, lower_bound):
    """Tokens in place one after another; a request without a slot reads and writes nothing."""
    x, rates = draw()
    pool = draw_pool()
    want, states = expected(
        x, rates, pool[SLOTS].astype(np.float64), doubled=doubled, lower_bound=lower_bound
    )
    decode = compiled(serving.erase_then_delta_decode, lower_bound=lower_bound, allow_neg_eigval=doubled)
    now = put(pool)
    for t in range(T):
        o, now = decode(**token(x, t), pool=now, **rates, read_slots=SLOTS)
        close(want[:, t], o)
    close(states[:, -1], np.asarray(now)[SLOTS], "final_state")
    others = np.setdiff1d(np.arange(len(pool)), SLOTS)
    assert_same_bits(pool[others], np.asarray(now)[others])
    o, same = decode(**token(x, 0), pool=now, **rates, read_slots=np.array([3, -1, 4]))
    assert not np.asarray(o)[1].any()
    assert_same_bits(np.asarray(same)[0], np.asarray(now)[0])


@pytest.mark.parametrize("tree", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["chain", "tree"])
def test_verify(tree):
    """A state after every token; the next call goes on from that of the last token that was accepted."""
    (x, rates), pool = draw(tokens=3), draw_pool(10)
    slots = np.array([[1, 2, 3], [4, -1, 6], [-1, -1, -1]])
    parents = np.array([[-1, 0, 0], [-1, -1, 1], [-1, 0, 1]]) if tree else None
    accepted = np.array([1, 3, 1])
    start = np.stack([pool[1], pool[6], 0 * pool[0]]).astype(np.float64)
    want, states = expected(x, rates, start, parents)
    o, new = compiled(serving.erase_then_delta_verify, lower_bound=LOWER)(
        **tokens(x), pool=put(pool), **rates, state_slots=slots, num_accepted_tokens=accepted,
        num_tokens=np.array([3, 2, 3]), **({} if parents is None else dict(parents=parents)),
    )  # fmt: skip
    close(want[0], np.asarray(o)[0])
    close(want[1, :2], np.asarray(o)[1, :2])
    assert not np.asarray(o)[2].any() and not np.asarray(o)[1, 2].any()
    for n, t in ((0, 0), (0, 1), (0, 2), (1, 0)):
        close(states[n, t], np.asarray(new)[slots[n, t]], "final_state")


def test_rings():
    """Prompts, single tokens and drafts over rings, which hold two entries for each token."""
    x, rates = draw(tokens=12)
    pool = draw_pool()
    want, states = expected(x, rates, pool[SLOTS].astype(np.float64))
    ring = serving.make_ring_pool(put(pool), num_key_heads=HK, length=8, dtype=np.float32, channels=True)
    options = dict(lower_bound=LOWER)
    decode = compiled(serving.erase_then_delta_decode, **options)
    verify = compiled(serving.erase_then_delta_verify, **options)
    snapshot = compiled(serving.snapshot)
    for t in range(4):
        o, ring = decode(**token(x, t), pool=ring, **rates, read_slots=SLOTS)
        close(want[:, t], o)
    close(states[:, 3], snapshot(ring, SLOTS), "final_state")
    # Three drafts after the tokens of `decode`; two of them stay, the third comes again with others.
    call = dict(pool=ring, **rates, state_slots=SLOTS)
    o, ring = verify(**tokens(x, 4, 7), num_accepted_tokens=np.ones(N, np.int32), **call)
    close(want[:, 4:7], o)
    call = dict(pool=ring, **rates, state_slots=SLOTS)
    o, ring = verify(**tokens(x, 6, 9), num_accepted_tokens=np.full(N, 2), **call)
    close(want[:, 6:9], o)
    call = dict(pool=ring, **rates, state_slots=SLOTS)
    o, ring = verify(**tokens(x, 7, 10), num_accepted_tokens=np.full(N, 1), **call)
    close(want[:, 7:10], o)
    # The prompt empties the rings; the next token's call has nothing to drop.
    g, beta, gamma = (y.astype(np.float32) for y in finished(x, rates))
    first = dict(q=x["q"], k=x["k"], v=x["v"], g=g, beta=beta, erase_key=x["erase_key"], erase_strength=gamma)
    row = {name: put(y[:, :4].reshape(1, 4 * N, *y.shape[2:])) for name, y in first.items()}
    prefill = compiled(serving.erase_then_delta_prefill, use_qk_l2norm=True, chunk_size=16)
    offsets, fresh = np.arange(0, 4 * N + 1, 4), np.zeros(N, bool)
    o, ring = prefill(**row, cu_seqlens=offsets, pool=ring, read_slots=SLOTS, has_initial_state=fresh)
    again, _ = expected(x, rates, np.zeros((N, HV, K, V)))
    close(again[:, :4], np.asarray(o).reshape(N, 4, HV, V))
    o, ring = verify(**tokens(x, 4, 7), num_accepted_tokens=np.ones(N, np.int32), **call | dict(pool=ring))
    close(again[:, 4:7], o)


def test_what_does_not_fit(no_type_checks):
    x, rates = draw()
    wrong = token(x, 0) | dict(erase_key=put(np.zeros((N, 2, K), np.float32)))
    with pytest.raises(ValueError, match=r"erase_key: expected shape \[N, T, Hk, K\]"):
        serving.erase_then_delta_decode(**wrong, pool=put(draw_pool()), **rates, read_slots=SLOTS)


CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=1, num_v_heads=2, head_dim=16, expand_v=1.0, mixer="eda"
)  # fmt: skip
REQUESTS = ((5, 6), (70, 4), (2, 7))
"""Tokens of prompts, and new tokens."""


@functools.cache
def model():
    return made(CONFIG)


@functools.cache
def wanted():
    """The prompts, and the tokens that `generate` gives for each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, length) for length, _ in REQUESTS]
    rows, mask = np.zeros((3, 70), np.int32), np.zeros((3, 70), bool)
    for i, prompt in enumerate(prompts):
        rows[i, : len(prompt)], mask[i, : len(prompt)] = prompt, True
    tokens = np.asarray(generate(model(), put(rows), 7, mask=put(mask)))
    return prompts, [tokens[i, :number] for i, (_, number) in enumerate(REQUESTS)]


def dirty(pools):
    """Slots that hold the remains of other requests."""
    return jax.tree.map(lambda x: jnp.full_like(x, 3 if x.dtype == jnp.int32 else jnp.nan), pools)


@pytest.mark.parametrize("ring", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_server(ring):
    """Three requests through two places get what `generate` gives; with deferred writes too."""
    served = ServedModel(model())
    pools = dirty(served.make_pools(3, ring=ring))
    options = dict(max_batch=2, prefill_tokens=64)
    server = serving.Server(served.prefill, served.decode, served.params, pools, **options)
    prompts, want = wanted()
    numbers = [server.submit(p, number) for p, (_, number) in zip(prompts, REQUESTS, strict=True)]
    got = server.run()
    for number, tokens in zip(numbers, want, strict=True):
        np.testing.assert_array_equal(tokens, got[number])


def test_rings_hold_tokens():
    """The pool of a served model has rings of two entries for each of the tokens that were asked for."""
    shapes = jax.eval_shape(lambda: ServedModel(model()).make_pools(3, ring=4))
    assert {layer.state.length for layer in shapes} == {8}


@pytest.mark.slow
@pytest.mark.parametrize("ring", [None, 6])
def test_drafts_of_a_served_model(ring):
    """Two drafts a step, some of them wrong: what is accepted is what `generate` gives."""
    served, (prompts, want) = ServedModel(model()), wanted()
    slots = np.arange(9).reshape(3, 3).astype(np.int32)
    row, cu = (
        np.concatenate(prompts)[None].astype(np.int32),
        np.cumsum([0, *map(len, prompts)]).astype(np.int32),
    )
    pools = dirty(served.make_pools(9, ring=ring))
    newest, pools = jax.jit(served.prefill)(served.params, row, cu, slots[:, 0], np.zeros(3, bool), pools)
    got, verify, accepted = [[int(x)] for x in newest], jax.jit(served.verify), np.ones(3, np.int32)
    for step in range(5):
        known = [np.r_[tokens, np.zeros(9, int)] for tokens in want]
        drafts = np.array([each[len(new) : len(new) + 2] for each, new in zip(known, got, strict=True)])
        drafts[step % 3, step % 2] += 1
        tokens = np.concatenate([[[new[-1]] for new in got], drafts], 1).astype(np.int32)
        after, pools = verify(served.params, tokens, slots, accepted, pools)
        accepted = 1 + np.cumprod(drafts == np.asarray(after)[:, :-1], 1).sum(1).astype(np.int32)
        for n in range(3):
            got[n] += np.asarray(after)[n, : accepted[n]].tolist()
    for tokens, new in zip(want, got, strict=True):
        np.testing.assert_array_equal(tokens, new[: len(tokens)])
