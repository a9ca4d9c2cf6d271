"""The kernels of a batch's tokens on a GPU of compute capability 9.0, at the widths of Ling-3.0-tiny: values against
float64 formulas, and the same bits in every call."""

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_harness import close, draws
from test_layer_kernels_latents import latents

from gdn_jax.fused import experts
from gdn_jax.fused.latent_rows import latent_rows

pytestmark = pytest.mark.gpu

REPEATS = 20


@pytest.mark.parametrize("N", [8, 16, 128])
def test_experts_of_few_rows(N):
    """Tiles of 8, 16 and 32 rows; an expert that all rows choose, and one that none does."""
    (D, F, E, k), draw, random = (1536, 512, 16, 4), draws(N), np.random.default_rng(N)
    chosen = np.argsort(random.random((N, E - 2)), axis=1)[:, :k].astype(np.int32)
    chosen[:, 0] = E - 2
    rows, weights = draw(N, D, dtype="bfloat16"), jnp.abs(draw(N, k))
    gate_up, down = (draw(E, *s, dtype="bfloat16", scale=s[0] ** -0.5) for s in ((D, 2 * F), (F, D)))
    call = jax.jit(experts.mixture)
    args = rows, weights, jnp.asarray(chosen), gate_up, down
    assert "expert_swiglu" in call.lower(*args).as_text()
    got = call(*args)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(*args), got)
    x, g, d = (fused_oracle.wide(y) for y in (rows, gate_up, down))
    want = np.zeros((N, D))
    for e in range(E - 1):
        at, place = np.nonzero(chosen == e)
        branches = x[at] @ g[e]
        y = fused_oracle.branches(branches[:, :F], branches[:, F:]) @ d[e]
        np.add.at(want, at, np.asarray(weights, np.float64)[at, place][:, None] * y)
    close(want, got, "y", 1, dtype="bfloat16")  # h is rounded


@pytest.mark.parametrize(
    ("lengths", "S"), [((4100,), 4104), ((1, 700, 64, 1023), 1024), (tuple(range(1, 200)), 200)]
)
def test_latents_of_rows(lengths, S):
    """One row in many parts, rows of unlike lengths, and more rows than multiprocessors."""
    *arrays, want = latents(lengths, S, H=16, C=512)
    call = jax.jit(lambda *args: latent_rows(*args, scale=0.1))
    assert "mosaic_gpu" in call.lower(*arrays).as_text()
    got = call(*arrays)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(*arrays), got)
    close(want, got, "o", 2, dtype="bfloat16")  # weights are rounded, and the result
