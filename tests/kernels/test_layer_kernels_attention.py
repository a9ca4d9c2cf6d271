"""The kernel of softmax attention of a token of each row, interpreted, and the operations that are made with it:
latent attention and grouped queries."""

from functools import partial

import jax
import jax.numpy as jnp
import layer_kernels
import numpy as np
import pytest
from device_arrays import put
from flax import nnx
from fused_harness import close, draws

from gdn_jax.layers.blocks import RMSNorm, from_stream
from gdn_jax.models.attention import Attention, FixedAttentionCache, WindowCache
from gdn_jax.models.config import AttentionConfig
from gdn_jax.models.inference.attention import AttentionRows
from gdn_jax.models.inference.part import Call
from gdn_jax.models.window import WindowAttention
from gdn_jax.parts import attention_rows as fused
from gdn_jax.parts import cached_attention as fused_token
from gdn_jax.parts.kernels import trusted
from pallas_kernels.rows import attention_rows
from pallas_kernels.rows.attention_rows import Config

pytestmark = pytest.mark.usefixtures("last_arrivals")

SCALE = 0.1


def softmax_rows(scores, lengths):
    """Weights of the first slots [B, .., S] of each row."""
    seen = np.arange(scores.shape[-1]) < np.clip(lengths, 1, None)[:, None]
    scores = np.where(seen.reshape(len(seen), *(1,) * (scores.ndim - 2), -1), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True), seen


def latents(lengths, S, H=8, C=128, R=64, dtype="bfloat16"):
    """Arguments of `latent_rows`, and its result in float64. The slots after the tokens hold NaN."""
    draw, B = draws(S), len(lengths)
    arrays = [draw(*s, dtype=dtype) for s in ((B, H, C), (B, H, R), (B, S, C), (B, S, R))]
    q, r, c, k = (np.asarray(x, np.float64) for x in arrays)
    p, seen = softmax_rows(
        (np.einsum("bhc,bsc->bhs", q, c) + np.einsum("bhr,bsr->bhs", r, k)) * SCALE, lengths
    )
    arrays[2:] = [put(np.where(seen[..., None], x, np.nan), dtype) for x in (c, k)]
    return *arrays, put(lengths, jnp.int32), np.einsum("bhs,bsc->bhc", p, c)


def grouped(lengths, S, H=6, N=2, K=64, V=128, dtype="bfloat16"):
    """The same of `attention_rows`, for H query heads and N key heads."""
    draw, B = draws(S), len(lengths)
    arrays = [draw(*s, dtype=dtype) for s in ((B, 1, H, K), (B, S, N, K), (B, S, N, V))]
    q, k, v = (np.asarray(x, np.float64) for x in arrays)
    p, seen = softmax_rows(np.einsum("bngk,bsnk->bngs", q.reshape(B, N, H // N, K), k) / K**0.5, lengths)
    arrays[1:] = [put(np.where(seen[..., None, None], x, np.nan), dtype) for x in (k, v)]
    return *arrays, put(lengths, jnp.int32), np.einsum("bngs,bsnv->bngv", p, v).reshape(B, 1, H, V)


OPERATIONS = {
    "latent": (latents, partial(fused.latent_rows, scale=SCALE)),
    "grouped": (grouped, fused.attention_rows),
}


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize(
    ("lengths", "S", "config"),
    [
        ((200, 0, 130), 200, Config(2, 5, ctas=2)),
        pytest.param((300,), 264, Config(1, 7, ctas=3), marks=pytest.mark.slow),
    ],
    ids=["rows of one token, and parts of none", "a cache that is full"],
)
def test_rows_meet_their_caches(kind, lengths, S, config, monkeypatch):
    """Rows of unlike lengths, a tile that ends beyond the cache, a ring that wraps, more items than CTAs."""
    arguments, operation = OPERATIONS[kind]
    calls = layer_kernels.interpret(monkeypatch)
    monkeypatch.setattr(Config, "default", classmethod(lambda *_: config))
    *arrays, length, want = arguments(lengths, S)
    got = operation(*arrays, length)
    assert calls == {"attention_rows": 1}
    close(want, got, "o", 2, dtype="bfloat16")  # weights are rounded, and the result
    do = draws(1)(*got.shape, dtype="bfloat16")

    @partial(jax.jit, static_argnums=0)
    def gradients(implementation, *arrays):
        plain = partial(operation, length=length, implementation=implementation)
        return jax.vjp(plain, *arrays)[1](do.astype(arrays[0].dtype))

    dx = gradients(None, *arrays)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in dx)
    # `attend` needs numbers in all slots.
    wide = [np.asarray(x, np.float32) for x in arrays]
    expected = gradients("chunked", *(np.where(np.isnan(x), 0, x) for x in wide))
    # Weights, their cotangents, those of scores and the result are rounded; latents are keys and values, twice the
    # last two. The expected ones are float32.
    for x, y in zip(dx, expected, strict=True):
        close(np.asarray(y, np.float64), x, "gradient", 6, dtype="bfloat16")


def test_rows_of_a_pool(monkeypatch):
    """The kernel reads the rows of a pool where they lie; other rows, and slots after the tokens, hold NaN."""
    calls = layer_kernels.interpret(monkeypatch)
    monkeypatch.setattr(Config, "default", classmethod(lambda *_: Config(2, 5, ctas=2)))
    q, k, v, length, want = grouped((70, 3), 72)
    pools = [np.full((4, *x.shape[1:]), np.nan, x.dtype) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[[3, 1]] = x

    rows = put([3, 1], jnp.int32)
    plain = jax.jit(partial(fused.attention_rows, implementation="chunked"))
    for op in (fused.attention_rows, plain):
        close(want, op(q, *map(jax.device_put, pools), length, rows=rows), "o", 2, dtype="bfloat16")
    assert calls == {"attention_rows": 1}


def token_of_a_layer(window, options, lengths, S, K=128, H=6):
    """A function of x, keys, values and lengths that gives what the layer without kernels and `cached_attention` make
    of a token, and its arguments. Slots after the tokens hold NaN."""
    config = AttentionConfig(H, head_dim=K, window=window, **options)
    kind, kept = (WindowAttention, WindowCache) if window else (Attention, FixedAttentionCache)
    half: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, zero_centred_norms=True)
    layer, draw = nnx.jit(lambda: kind(64, config, **half, rngs=nnx.Rngs(0)))(), draws(3)
    layer.implementation, N, B = "chunked", config.num_kv_heads or H, len(lengths)
    x, seen = draw(B, 1, 64, dtype="bfloat16"), np.arange(S) < np.array(lengths)[:, None]
    seen, heads = seen[..., None, None], fused_token.Heads(H, 1e-5, config.rotary_dim, config.rope_theta)
    cache = [np.where(seen, draw(B, S, N, K, dtype="bfloat16"), np.nan) for _ in range(2)]

    @jax.jit
    def tokens(x, k, v, length):
        projections = layer.q_proj, layer.k_proj, layer.v_proj
        channels = jnp.concatenate([linear(x) for linear in projections], axis=-1)[:, 0]
        known = kept(*(jnp.where(seen, a, 0) for a in (k, v)), length)
        one, none = jnp.ones_like(length), (None, None)
        expected = layer.mix(*layer.heads(x, length[:, None]), known, one, *none, False)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm.scale(jnp.float32), layer.k_norm.scale(jnp.float32)
        slot, count = (length % S, jnp.minimum(length + 1, S)) if window else (length, length + 1)
        assert fused_token.takes(channels, k, v, heads, None)
        place = fused_token.Place(length, slot, count)
        return expected, fused_token.cached_attention(channels, k, v, place, norms, heads)

    return tokens, (x, *(put(a, "bfloat16") for a in cache), put(lengths, jnp.int32))


LIKE_QWEN = dict(qk_norm="head", rotary_dim=64, output_gate=True, num_kv_heads=2)


def check_token(args, found, window):
    """Compares both results of `token_of_a_layer`. A row whose cache is full changes nothing and gives NaN; a window
    goes on."""
    (want, known), (o, *after) = found
    (_, *cache, lengths), S = args, args[1].shape[1]
    rows = [b for b, n in enumerate(lengths.tolist()) if window or n < S]
    assert np.isnan(np.delete(np.array(o, np.float32), rows, 0)).all()
    # Both round queries, keys, weights and the result; the plain layer also rounds the norm before the rotation.
    want, o = (np.array(x, np.float64)[rows] for x in (want[:, 0], o))
    close(want, o, "o", 4, dtype="bfloat16")
    for name, a, b, before in zip("kv", known, after, cache, strict=False):
        a, b, before = (np.array(x, np.float32) for x in (a, b, before))
        for row in rows:
            slot = int(lengths[row]) % S
            close(np.float64(a[row, slot]), b[row, slot], name, 2, dtype="bfloat16")
            b[row, slot] = before[row, slot] = np.nan
        np.testing.assert_array_equal(b, before)


@pytest.mark.parametrize(
    ("window", "options"),
    [(None, LIKE_QWEN), pytest.param(16, {}, marks=pytest.mark.slow)],
    ids=["norm, rotation and gate", "a window"],
)
def test_a_token_of_a_layer(window, options, monkeypatch):
    """From the products of its input on: what the layer gives without kernels, and its cache."""
    calls = layer_kernels.interpret(monkeypatch)
    monkeypatch.setattr(Config, "default", classmethod(lambda *_: Config(1, 5, ctas=2)))
    tokens, args = token_of_a_layer(window, options, [5, 16], 16)
    with trusted():
        found = tokens(*args)
    assert calls["cached_heads"] == calls["attention_rows"] == 1
    check_token(args, found, window)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (LIKE_QWEN, 2),
        pytest.param(dict(num_kv_heads=2), 1, marks=pytest.mark.slow),  # no gate
        pytest.param(dict(LIKE_QWEN, num_kv_heads=1), 25, marks=pytest.mark.slow),  # added up before
    ],
)
def test_a_layer_of_a_row(options, parts, small, monkeypatch):
    """In a copy for one row: norm and projections, the cache, attention, and its output, four kernels."""
    monkeypatch.setattr(Config, "default", classmethod(lambda *_: Config(parts, 5, ctas=2)))
    config, D = AttentionConfig(4, head_dim=128, **options), 256
    half: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    N, draw = config.num_kv_heads, draws(3)
    norm, x, y = RMSNorm(D, **half, implementation="chunked"), draw(1, 1, D), draw(1, 1, D)
    k, v = (draw(1, 16, N, 128, dtype="bfloat16") for _ in range(2))

    def layer(implementation):
        return Attention(D, config, **half, implementation=implementation, rngs=nnx.Rngs(0))

    @jax.jit
    def token(x, y, *cache):
        return from_stream(layer("chunked"))(norm, x, y, cache=FixedAttentionCache(*cache))

    cache = k, v, put([9], jnp.int32)
    s, (want, known) = token(x, y, *cache)
    rows = nnx.jit(lambda: AttentionRows.of(layer(None), Call(1, True)))()
    t, (got, after) = from_stream(rows)(norm, x, y, cache=FixedAttentionCache(*cache))
    np.testing.assert_allclose(t, s, rtol=1e-6, atol=1e-6)
    assert got.shape == want.shape and after.length == 10
    # Queries, keys, weights, what heads see, gates and the output are rounded.
    for expected, found, roundings in ((want, got, 8), (known.k, after.k, 4), (known.v, after.v, 4)):
        close(np.float64(expected), found, "token", roundings, dtype="bfloat16")
    kernels = "stream_product", "cached_heads", "attended_product"
    of_parts = "attention_rows" if parts > 24 else "attention_parts"
    assert {*kernels, of_parts} == {*small} - {"add_norm"}  # of the plain layer's heads


def test_parts_fill_the_multiprocessors():
    """A row has all of them, 128 rows have one each, and a short cache is in as many parts as it has tiles."""
    assert [Config.default(rows, 32768).parts for rows in (1, 32, 128)] == [132, 4, 1]
    assert [Config.default(rows, 192).parts for rows in (1, 32, 128)] == [3, 3, 1]


def test_what_the_kernel_takes():
    """Heads are filled up to eights; widths are whole pieces, and sums fit the registers."""

    def reason(heads, *widths, S=8, keys=1):
        queries = [np.zeros((1, 2, heads, width), jnp.bfloat16) for width in widths[:keys]]
        return attention_rows.check_supported(queries, [np.zeros((1, S, 2, w), jnp.bfloat16) for w in widths])

    assert reason(3, 64, 256) is reason(16, 512, 64, keys=2) is None
    assert reason(3, 64, 96) == (
        "3 heads, widths [64, 96]; the kernel takes multiples of 64, and of values times heads up to 8192"
    )
    assert (
        "heads" in reason(33, 64, 256)
        and reason(3, 64, 64, S=12) == "12 slots; the kernel takes multiples of 8"
    )
