"""A served model with latent attention and a window: prompts in pieces, a token, drafts that are accepted or not."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fused_harness import close
from small_models import made

from gdn_jax.models import AttentionConfig, ModelConfig
from gdn_jax.models.attention import Attention
from gdn_jax.models.config import LatentAttentionConfig
from gdn_jax.models.inference.attention import AttentionRows
from gdn_jax.models.inference.latent import LatentRows
from gdn_jax.models.latent import LatentAttention
from gdn_jax.models.served import ServedModel
from gdn_jax.models.served_layers import Attending
from gdn_jax.parts.kernels import trusted
from gdn_jax.rule import arguments
from pallas_kernels.rows.attention_rows import Config

CONFIG = ModelConfig(
    vocab_size=19,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    head_dim=6,
    intermediate_size=16,
    layer_types=("window_attention", "attention"),
    attention=LatentAttentionConfig(2, 4, 4, 6, 5, 7, 100.0, True),
    window_attention=AttentionConfig(2, 1, 8, rotary_dim=8, window=5),
    implementation="recurrent",
)


@pytest.mark.slow
def test_pieces_a_token_and_drafts_give_the_likeliest_tokens():
    """Of slots that held NaN; the window is shorter than the prompts, and drafts fill the pool to its last token."""
    model, rng = made(CONFIG), np.random.default_rng(0)
    server = ServedModel(model)
    with pytest.raises(ValueError, match="capacity: expected the tokens of a request"):
        server.make_pools(2)
    prompts = [rng.integers(0, 19, n) for n in (9, 6)]
    rows, mask = np.zeros((2, 30), np.int32), np.zeros((2, 30), bool)
    likeliest = nnx.jit(lambda model, rows, mask: jnp.argmax(model(rows, mask=mask)[0], -1))
    lengths, want = [9, 6], []
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    for _ in range(12):  # greedy, one whole pass a token
        mask = np.arange(30) < np.array(lengths)[:, None]
        new = np.asarray(likeliest(model, rows, mask))[[0, 1], np.array(lengths) - 1]
        rows[[0, 1], lengths] = new
        want.append(new)
        lengths = [n + 1 for n in lengths]
    want = np.stack(want, 1)

    prefill, decode, verify = map(jax.jit, (server.prefill, server.decode, server.verify))
    pools = jax.tree.map(
        lambda x: jnp.full_like(x, 3 if x.dtype == jnp.int32 else jnp.nan), server.make_pools(7, capacity=19)
    )
    slots = np.array([[5, 1, 2], [0, 3, 4]])
    first, none = np.append(slots[:, 0], -1), np.zeros(3, bool)
    # The second prompt whole and four tokens of the first, then its others; the rest of a row is padding.
    pieces = np.concatenate([prompts[0][:4], prompts[1], [7, 7]])
    new, pools = prefill(server.params, pieces[None], np.array([0, 4, 10, 10]), first, none, pools)
    assert new[1] == want[1, 0]
    rest = np.append(prompts[0][4:], [7] * 7)
    ends, goes_on = np.array([0, 5, 5, 5]), np.array([True, False, False])
    new, pools = prefill(server.params, rest[None], ends, np.array([5, -1, -1]), goes_on, pools)
    assert new[0] == want[0, 0]
    new, pools = decode(server.params, want[:, 0], slots[:, 0], pools)
    np.testing.assert_array_equal(new, want[:, 1])

    have, accepted = np.array([2, 2]), np.array([1, 1])
    for good in ((2, 0), (0, 2), (1, 1), (0, 1)):
        drafts = np.stack([row[n - 1 : n + 2] for row, n in zip(want, have, strict=True)])
        for row, n in zip(drafts, good, strict=True):
            row[n + 1 :] += 1  # no longer the likeliest
        out, pools = verify(server.params, drafts % 19, slots, accepted, pools)
        for row, n, start, right in zip(np.asarray(out), good, have, want, strict=True):
            np.testing.assert_array_equal(row[: n + 1], right[start : start + n + 1])
        accepted = np.array(good) + 1
        have = have + accepted


HYBRID = dataclasses.replace(CONFIG, num_layers=3, layer_types=("gated_delta_net", *CONFIG.layer_types))
SLOTS, CAPACITY = 130, 6  # more slots than int8 counts
LAYER = AttentionConfig(2, 1, 8, rotary_dim=8)


@functools.cache
def hybrid():
    """A model, and a program with a call of each kind: two pieces of prompts, a token of each, two drafts of each."""
    server = ServedModel(made(HYBRID))

    @jax.jit
    def serve(params, pools, cu_seqlens, drafts, accepted):
        tokens, none = jnp.arange(9)[None], np.zeros(3, bool)
        first, pools = server.prefill(params, tokens, cu_seqlens, drafts[:, 0], none, pools)
        second, pools = server.decode(params, first, drafts[:, 0], pools)
        third, pools = server.verify(params, jnp.stack([second, first], 1), drafts, accepted, pools)
        return (first, second, third), pools

    return server, serve


def served(lengths, dtype=np.int32):
    """Tokens of two requests with such prompts, and of one that is padding; the pools behind them."""
    server, serve = hybrid()
    offsets = np.cumsum([0, *lengths, 0])
    numbers = offsets, np.array([[5, 100], [7, 2], [-1, -1]]), np.ones(3)
    return serve(
        server.params, server.make_pools(SLOTS, capacity=CAPACITY), *(x.astype(dtype) for x in numbers)
    )


@pytest.mark.parametrize(
    "dtype", [np.int8, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.uint8, np.uint32))]
)
def test_slots_lengths_and_offsets_of_narrow_integers(dtype):
    """The same bits as with int32. The largest unsigned number is padding, too."""
    for want, got in zip(*(jax.tree.leaves(served((3, 2), kind)) for kind in (np.int32, dtype)), strict=True):
        np.testing.assert_array_equal(want, got)


@functools.cache
def attending(N):
    """A layer of attention with a pool of keys and values, and its `prefill` of N pieces, lowered and run."""
    mixer, kind = nnx.eval_shape(lambda: Attention(16, LAYER, rngs=nnx.Rngs(0))), Attending(False)
    graphdef, params = nnx.split(mixer)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: rng.normal(0, 0.25, x.shape).astype(np.float32), params)
    pool = jax.eval_shape(lambda: kind.make_pool(mixer, 16, "float32", None, 160))
    pool = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), pool)

    def prefill(params, pool, x, cu_seqlens, slots, goes_on):
        return kind.prefill(nnx.merge(graphdef, params), x, pool, cu_seqlens, slots, goes_on)

    return functools.partial(jax.jit(prefill), params), pool


def test_pieces_longer_than_a_block_of_queries():
    """Pieces of many lengths, some of which go on, give the bits of float32 sums that each of them gives alone."""
    rng = np.random.default_rng(0)
    many, pool = attending(5)
    x = rng.normal(size=(1, 220, 16)).astype(np.float32)
    slots, none, before = np.array([3, 0, 7, 1, -1]), np.zeros(5, bool), np.array([0, 5, 70, 75, 75, 75])
    _, pool = many(pool, x, before, slots, none)
    cu_seqlens, goes_on = np.array([0, 1, 71, 71, 201, 201]), np.array([True, True, True, False, False])
    o, after = many(pool, x, cu_seqlens, slots, goes_on)
    alone, _ = attending(1)
    for slot, old, (begin, end) in zip(slots, goes_on, itertools.pairwise(cu_seqlens), strict=True):
        if begin == end:
            continue
        row = np.zeros_like(x)
        row[:, : end - begin] = x[:, begin:end]
        want, own = alone(pool, row, np.array([0, end - begin]), np.array([slot]), np.array([old]))
        close(want[:, : end - begin], o[:, begin:end], "o", 0)
        for name in ("k", "v", "length"):
            np.testing.assert_array_equal(getattr(own, name)[slot], getattr(after, name)[slot])


def test_queries_of_many_pieces_are_not_those_of_each():
    """A step with room for 16 pieces costs at most four times the arithmetic of one with a single piece."""
    x = np.zeros((1, 1024, 16), np.float32)

    def flops(N):
        run, pool = attending(N)
        arrays = pool, x, np.arange(N + 1), np.arange(N), np.zeros(N, bool)
        return run.func.lower(*run.args, *arrays).compile().cost_analysis()["flops"]

    assert flops(16) < 4 * flops(1)


def test_tokens_beyond_the_capacity_are_none():
    """A token is -1 where there is no room for all before it; the other request does not notice."""
    (want, _), (beyond, _), (last, _) = (served((2, length)) for length in (2, 7, 4))
    for right, wrong in zip(want, beyond, strict=True):
        right, wrong = np.asarray(right), np.asarray(wrong)
        assert (right >= 0).all() and (wrong[1] == -1).all()
        np.testing.assert_array_equal(right[0], wrong[0])
    assert (last[2][1] < 0).tolist() == [False, True]  # the last draft alone has no room

    server, _ = hybrid()
    pools = server.make_pools(2, capacity=CAPACITY)
    with pytest.raises(
        ValueError, match="pools: expected a capacity of at least 7, the tokens of a request, got 6"
    ):
        known = np.array([0, 7]), np.array([1]), np.zeros(1, bool)
        jax.eval_shape(lambda: server.prefill(server.params, jnp.zeros((1, 9), jnp.int32), *known, pools))
    for options, message in (
        (dict(capacity=-1), "capacity: expected at least 0, got -1"),
        (dict(slots=-1, capacity=3), "slots: expected at least 1, got -1"),
        (dict(ring=0, capacity=3), "ring: expected at least 1, got 0"),
        (dict(dtype="x", capacity=3), "dtype: expected a dtype of states, got 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            server.make_pools(**{"slots": 2} | options)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Attention, AttentionConfig(3, 1, 64)),
        (LatentAttention, LatentAttentionConfig(8, 8, 64, 8, 64, rope_theta=100.0)),
    ],
)
@pytest.mark.usefixtures("last_arrivals")
def test_a_token_by_the_kernel(kind, config, interpreted, monkeypatch):
    """Requests in any slots, one of them no request; a slot that nobody has holds NaN. Where bits must not hang on
    other requests there is no kernel. Of a copy for single tokens, heads are made by a kernel, too."""
    options: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    rng, slots = np.random.default_rng(0), np.array([2, -1, 0])
    mixer = nnx.jit(lambda: kind(16, config, rngs=nnx.Rngs(0), **options))()
    x = np.asarray(rng.standard_normal((3, 1, 16)), jnp.bfloat16)
    pool = jax.eval_shape(lambda: Attending(False).make_pool(mixer, 3, jnp.float32, None, 72))
    k, v = (np.asarray(rng.standard_normal(x.shape), x.dtype) for x in pool[:2])
    k[1] = v[1] = np.nan
    pool = type(pool)(k, v, np.array([5, 9, 66], np.int32))
    monkeypatch.setattr(Config, "default", classmethod(lambda *_: Config(2, 5, ctas=2)))

    def decode(batch_invariant, mixer=mixer):
        y, after = jax.jit(lambda x, pool: Attending(batch_invariant).decode(mixer, x, pool, slots))(x, pool)
        return np.asarray(y, np.float32), [np.asarray(a, np.float32)[slots[::2]] for a in after]

    mixer.implementation = "chunked"
    want, pools = decode(False)
    mixer.implementation = None
    with trusted():
        got, after = decode(False)
        assert interpreted == {"attention_rows": 1}
        decode(True)
        assert interpreted == {"attention_rows": 1}
        heads = dict(cached_heads=1) if kind is Attention else {}
        rows = nnx.jit(AttentionRows if heads else LatentRows)(nnx.clone(mixer))
        single = decode(False, rows)
    assert interpreted == heads | {"attention_rows": 2}
    close(want, single[0], "y", 6, dtype="bfloat16")
    for a, b in zip(pools, single[1], strict=True):
        np.testing.assert_array_equal(a, b)
    # Both programs round the weights of values, what heads see, and the output.
    close(want, got, "y", 6, dtype="bfloat16")
    for a, b in zip(pools, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tokens_beyond_the_capacity_are_an_error_in_debug(monkeypatch):
    monkeypatch.setattr(arguments, "debug_checks_are_on", lambda: True)
    mixer = Attention(8, AttentionConfig(1, 1, 4), rngs=nnx.Rngs(0))
    pool = Attending(False).make_pool(mixer, 3, np.float32, None, 2)
    decode = jax.jit(lambda x, slots, pool: Attending(False).decode(mixer, x, pool, slots)[1])
    token = np.ones((2, 1, 8), np.float32), np.array([1, -1])
    pool = decode(*token, decode(*token, pool))
    with pytest.raises(Exception, match="pools: expected a capacity of at least 3"):
        jax.block_until_ready(decode(*token, pool))
        jax.effects_barrier()


@pytest.mark.usefixtures("no_type_checks")
def test_a_mixer_that_cannot_be_served_is_refused():
    other = types.SimpleNamespace(blocks=[types.SimpleNamespace(mixer=object())])
    with pytest.raises(NotImplementedError, match="model: expected attention and delta rules of one step"):
        ServedModel(other)
