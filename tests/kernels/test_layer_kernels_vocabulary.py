"""The kernels of the embedding's gradient and of the loss, without a GPU: interpreted, and their seams."""

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from fused_harness import close, draws
from layer_kernels import INTERPRET

from gdn_jax.losses import linear_softmax_cross_entropy, token_log_probs
from gdn_jax.parts import embedding as fused_embedding
from pallas_kernels.layer import cross_entropy, embedding, tiles


@pytest.mark.parametrize(("D", "dtype"), [(256, "float32"), (384, "bfloat16")])
def test_embedding_gradient(D, dtype):
    """Ids of no token, of one, of as many as are read at once, and of more; columns of one CTA and of three. The last
    three tokens have no id."""
    counts = (3, 0, 8, 1, 17, 0)
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(7), (*counts, 3)))
    order = np.argsort(ids, kind="stable").astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    dx = draws(D)(len(ids), D, dtype=dtype)
    assert embedding.check_supported(dx) is None
    got = embedding.embedding_gradient(dx, put(order), put(starts), interpret=INTERPRET)
    assert got.dtype == jnp.float32
    close(fused_oracle.embedding_gradient(ids, dx, 6), got, "gradient")


@pytest.mark.parametrize("tokens", [[[1, 1, -1, 0], [7, -8, 2**30, 1]], [[-7, 6, 6, 6]]])
def test_seam_of_embed(tokens, interpreted):
    """-1 is the last row; tokens outside the table name none, and give none a gradient."""
    draw, tokens = draws(4), put(tokens)
    table, dx = draw(7, 128), draw(*tokens.shape, 128)
    x, back = jax.vjp(lambda table: fused_embedding.embed(table, tokens), table)
    np.testing.assert_array_equal(x, jnp.take(table, tokens, axis=0, mode="fill"))
    close(fused_oracle.embedding_gradient(tokens, dx, 7), back(dx)[0], "gradient")
    assert interpreted == {"embedding_gradient": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "V", "D", "lead"),
    [
        (136, 320, 64, 2),
        pytest.param(264, 512, 64, 1, marks=pytest.mark.slow),
        pytest.param(264, 512, 256, 1, marks=pytest.mark.slow),
    ],
    ids=["ends in tiles", "short tiles have no lead", "lead"],
)
def test_cross_entropy(T, V, D, lead):
    """Words that end inside a tile; equal largest logits in one tile and in two; a target that there is not."""
    draw, rng = draws(V), np.random.default_rng(0)
    x, weight, targets = draw(T, D, dtype="bfloat16"), draw(V, D, scale=3.2 * D**-0.5), rng.integers(0, V, T)
    # Largest, and for every row: words 5 and 9 are equal, and 260 to both. In the last row all words are.
    x, weight = (
        x.at[:, 0].set(1.0).at[-1].set(0.0),
        weight.at[:, 0].set(0.0).at[put([5, 9, 260])].set(jnp.eye(D)[0] * 20),
    )
    weight = weight.astype(jnp.bfloat16)
    targets[:4] = 5, 9, 260, -1
    config = tiles.Config(lead=lead, clusters=1, down=True)
    got = cross_entropy.cross_entropy(x, weight, put(targets), config=config, interpret=INTERPRET)
    logits = fused_oracle.wide(x) @ fused_oracle.wide(weight).T
    padded = np.pad(logits, ((0, 0), (0, -V % tiles.COLUMNS)), constant_values=-np.inf)
    of_tiles = padded.reshape(T, -1, tiles.COLUMNS).swapaxes(0, 1)
    m = of_tiles.max(2)
    exps = np.exp(of_tiles - m[..., None])
    close(m, got.m, "m")
    close(exps.sum(2), got.s, "s")
    close(exps.swapaxes(0, 1).reshape(T, -1)[:, :V], got.u, "u")
    firsts = tiles.COLUMNS * np.arange(len(m))[:, None]
    np.testing.assert_array_equal(got.best, of_tiles.argmax(2) + firsts)
    here = (firsts <= targets) & (targets < firsts + tiles.COLUMNS)
    close(np.where(here, logits[np.arange(T), targets], 0), got.of_target, "of_target")


@pytest.mark.slow
def test_seam_of_the_loss(interpreted):
    """The results are those of plain JAX, but for numbers of the cotangent of the logits that are rounded otherwise,
    and once more."""
    draw, rng = draws(6), np.random.default_rng(0)
    x, weight = draw(24, 64, dtype="bfloat16"), draw(384, 64, scale=0.4)
    targets = put(rng.integers(0, 384, 24)).at[3].set(384)
    label_weights = jnp.ones(24).at[3].set(0.0)

    def value_and_gradients(implementation):
        def loss(x, weight, label_weights):
            options = dict(z_loss=0.01, tile=32, implementation=implementation)
            sums = linear_softmax_cross_entropy(x, weight, targets, label_weights=label_weights, **options)
            return sums.loss, sums

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weight, label_weights)

    ((_, expected), gradients), ((_, got), kernels) = map(value_and_gradients, ("chunked", None))
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for name, a, b in zip(("dx", "dweight", "dlabel_weights"), gradients, kernels, strict=True):
        close(np.asarray(a, np.float64), b, name, 3, dtype="bfloat16")
    assert interpreted == {"cross_entropy": 1, "logit_cotangents": 1}


@pytest.mark.slow
def test_seam_of_log_probabilities(interpreted):
    """The kernels of the loss make the gradients for cotangents of both signs; the forward pass has none."""
    draw, rng = draws(6), np.random.default_rng(0)
    # Shapes that no other test has: JAX keeps their programs, and no kernel would be called.
    x, weight = draw(16, 64, dtype="bfloat16"), draw(256, 64, scale=0.4)
    targets, cotangents = put(rng.integers(0, 256, 16)), draw(16)

    def value_and_gradients(implementation):
        def f(x, weight):
            return token_log_probs(x, weight, targets, tile=32, implementation=implementation)

        value, back = jax.vjp(f, x, weight)
        return value, back(cotangents)

    (expected, gradients), (got, kernels) = map(value_and_gradients, ("chunked", None))
    np.testing.assert_array_equal(expected, got)
    for name, a, b in zip(("dx", "dweight"), gradients, kernels, strict=True):
        close(np.asarray(a, np.float64), b, name, 3, dtype="bfloat16")
    assert interpreted == {"cross_entropy": 1, "logit_cotangents": 1}
