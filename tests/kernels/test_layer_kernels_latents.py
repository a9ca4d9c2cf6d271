"""The kernel of latent attention of a token of each row, interpreted, and the operation that is made with it."""

from functools import partial

import jax
import jax.numpy as jnp
import layer_kernels
import numpy as np
import pytest
from device_arrays import put
from fused_harness import close, draws

from gdn_jax.parts import latent_rows as fused
from pallas_kernels.layer import latent_rows
from pallas_kernels.layer.latent_rows import Config

SCALE = 0.1


def latents(lengths, S, H=8, C=128, R=64, dtype="bfloat16"):
    """Arrays of a call, and its result in float64. The slots after the tokens hold NaN."""
    draw, B = draws(S), len(lengths)
    arrays = [draw(*s, dtype=dtype) for s in ((B, H, C), (B, H, R), (B, S, C), (B, S, R))]
    q, r, c, k = (np.asarray(x, np.float64) for x in arrays)
    scores = (np.einsum("bhc,bsc->bhs", q, c) + np.einsum("bhr,bsr->bhs", r, k)) * SCALE
    seen = np.arange(S) < np.clip(lengths, 1, S)[:, None]
    scores = np.where(seen[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bhs,bsc->bhc", p / p.sum(-1, keepdims=True), c)
    arrays[2:] = [put(np.where(seen[..., None], x, np.nan), dtype) for x in (c, k)]
    return *arrays, put(lengths, jnp.int32), want


@pytest.mark.parametrize(
    ("lengths", "S", "config"),
    [
        ((200, 0, 130), 200, Config(2, 5, ctas=2)),
        pytest.param((300,), 264, Config(1, 7, ctas=3), marks=pytest.mark.slow),
    ],
    ids=["rows of one token, and parts of none", "a cache that is full"],
)
def test_rows_meet_their_caches(lengths, S, config, monkeypatch):
    """Rows of unlike lengths, a tile that ends beyond the cache, a ring that wraps, more items than CTAs."""
    calls = layer_kernels.interpret(monkeypatch)
    monkeypatch.setattr(Config, "default", classmethod(lambda *_: config))
    *arrays, want = latents(lengths, S)
    got = fused.latent_rows(*arrays, scale=SCALE)
    assert calls == {"latent_rows": 1}
    close(want, got, "o", 2, dtype="bfloat16")  # weights are rounded, and the result
    *arrays, length = arrays
    do = draws(1)(*got.shape, dtype="bfloat16")
    gradients, plain = (
        jax.vjp(partial(op, length=length, scale=SCALE), *arrays)[1](do)
        for op in (fused.latent_rows, partial(fused.latent_rows, implementation="chunked"))
    )
    for x, y in zip(gradients, plain, strict=True):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        np.testing.assert_array_equal(x, y)


def test_parts_fill_the_multiprocessors():
    """A row has all of them, 128 rows have one each, and a short cache is in one part."""
    assert [Config.default(rows, 32768).parts for rows in (1, 32, 128)] == [132, 4, 1]
    assert Config.default(32, 192).parts == 1
    reason = latent_rows.check_supported(
        *(jnp.zeros(s, "bfloat16") for s in ((1, 4, 64), (1, 4, 64), (1, 8, 64)))
    )
    assert reason == "4 heads, widths 64 and 64; the kernel takes multiples of 8 and 64, H C up to 8192"
