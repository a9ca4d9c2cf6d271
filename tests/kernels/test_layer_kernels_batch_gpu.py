"""The kernels of a batch's tokens on a GPU of compute capability 9.0, at the widths of Ling-3.0-tiny: values against
float64 formulas, and the same bits in every call."""

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_harness import close, draws
from test_layer_kernels_attention import LIKE_QWEN, OPERATIONS, check_token, token_of_a_layer

from gdn_jax.parts import experts, few_product, routing
from gdn_jax.shapes import Choice

pytestmark = pytest.mark.gpu

REPEATS = 20


@pytest.mark.parametrize(("N", "D", "F"), [(8, 1024, 4224), (32, 1024, 8320), (24, 2560, 8192)])
def test_the_product_of_few_rows(N, D, F):
    draw = draws(N)
    x, weight = draw(N, 1, D, dtype="bfloat16"), draw(F, D, dtype="bfloat16", scale=D**-0.5)
    assert few_product.takes(x, weight)
    call = jax.jit(few_product.few_product)
    y = call(x, weight)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(x, weight), y)
    close(fused_oracle.wide(x) @ fused_oracle.wide(weight).T, y, "y", dtype="bfloat16")


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
    "choice", [Choice(8, 1, 1, True, 1.0), Choice(8, 8, 4, True, 2.5)], ids=["all", "groups"]
)
@pytest.mark.parametrize("n", [0, 13, 27, 28, 29, 31])
def test_a_row_of_nan_leaves_the_experts_of_other_rows_alone(n, choice, N=32, E=128, D=1536, F=512):
    """Its own experts still differ. The others' results, choices and gradients have the bits that they have without
    it, and so have the gradients of experts that it has not chosen."""
    draw, others = draws(n), np.arange(N) != n
    x, scores, bias = draw(N, D, dtype="bfloat16"), draw(N, E), jnp.zeros(E)
    gate_up, down = (draw(E, *s, dtype="bfloat16", scale=s[0] ** -0.5) for s in ((D, 2 * F), (F, D)))

    @jax.jit
    def run(x, scores):
        weights, chosen = routing.choose(scores, bias, choice)
        y, pull = jax.vjp(
            lambda *args: experts.mixture(*args[:2], chosen, *args[2:]), x, weights, gate_up, down
        )
        return chosen, y, pull(jnp.ones_like(y))

    bad = scores.at[n].set(jnp.nan), scores.at[n, 5].set(jnp.nan)
    for changed in ((x, bad[0]), (x, bad[1]), (x.at[n].set(jnp.nan), bad[0])):
        chosen, y, (dx, dweights, *_) = run(x, jnp.where(jnp.isnan(changed[1]), 1e4, changed[1]))
        want = [np.asarray(z)[others] for z in (chosen, y, dx, dweights)]
        for _ in range(REPEATS):
            chosen, y, (dx, dweights, *gradients) = run(*changed)
            assert all(len(set(row)) == choice.per_token for row in np.asarray(chosen).tolist())
            for a, z in zip(want, (chosen, y, dx, dweights), strict=True):
                np.testing.assert_array_equal(a, np.asarray(z)[others])
        rest = ~np.isin(np.arange(E), chosen[n])
        assert all(np.isfinite(np.asarray(z, np.float32)[rest]).all() for z in gradients)


@pytest.mark.parametrize(
    ("lengths", "S"), [((4100,), 4104), ((1, 700, 64, 1023), 1024), (tuple(range(1, 200)), 200)]
)
@pytest.mark.parametrize(
    ("kind", "sizes"), [("latent", dict(H=16, C=512)), ("grouped", dict(H=8, N=2, K=256, V=256))]
)
def test_attention_of_rows(kind, sizes, lengths, S):
    """One row in many parts, rows of unlike lengths, and more rows than multiprocessors."""
    arguments, operation = OPERATIONS[kind]
    *arrays, want = arguments(lengths, S, **sizes)
    call = jax.jit(operation)
    assert "mosaic_gpu" in call.lower(*arrays).as_text()
    got = call(*arrays)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(*arrays), got)
    close(want, got, "o", 2, dtype="bfloat16")  # weights are rounded, and the result


@pytest.mark.parametrize(
    ("window", "options", "lengths", "S"),
    [
        (None, LIKE_QWEN, [131], 192),
        (None, LIKE_QWEN, [0, 200, 64, 263, 264], 264),
        (128, {}, [5, 127, 128, 5000], 128),
    ],
    ids=["one row", "rows, one of which is full", "windows"],
)
def test_a_token_of_a_layer(window, options, lengths, S):
    """From the products of its input on, with the heads of Qwen3.5 0.8B: what the layer gives without kernels."""
    tokens, args = token_of_a_layer(window, options, lengths, S, K=256, H=8)
    assert tokens.lower(*args).as_text().count("mosaic_gpu") >= 2
    found = tokens(*args)
    check_token(args, found, window)
    for a, b in zip(found[1], tokens(*args)[1], strict=True):
        # As float32: NumPy does not take two NaN of bfloat16, which free slots hold, for equal.
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (a, b)))
