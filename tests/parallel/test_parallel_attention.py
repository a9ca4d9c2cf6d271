"""Attention layers on meshes whose context axis splits the tokens of a row, beside one device."""

import math
import warnings

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_from
from tolerances import assert_close

import gdn_jax
from gdn_jax.bench.collectives import traffic
from gdn_jax.models.attention import Attention
from gdn_jax.models.config import AttentionConfig
from gdn_jax.parallel.mesh import CONTEXT, DATA, MeshShape

B, T, WIDTH = 4, 32, 24


def run(text, config, *, segments=False, masked=False, length=T):
    """y, the gradients of x and of the weights, and what is sent, by the text of a mesh."""
    mesh = mesh_from(text)[1]
    graphdef, params = nnx.split(Attention(WIDTH, config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((B, length, WIDTH)).astype(np.float32) for _ in range(2))
    ids = np.sort(rng.integers(0, 4, (B, length)), 1) if segments else None
    mask = np.arange(length) < rng.integers(1, length, (B, 1)) if masked else None

    @jax.jit
    def value_and_gradients(params, x, dy, ids, mask):
        def call(params, x):
            return nnx.merge(graphdef, params)(x, segment_ids=ids, mask=mask)[0]

        y, vjp = jax.vjp(call, params, x)
        return y, vjp(dy)

    tokens = NamedSharding(mesh, PartitionSpec(DATA, CONTEXT))
    with jax.set_mesh(mesh):
        x, dy, ids, mask = (None if a is None else jax.device_put(a, tokens) for a in (x, dy, ids, mask))
        compiled = value_and_gradients.lower(params, x, dy, ids, mask).compile()
        return jax.tree.leaves(compiled(params, x, dy, ids, mask)), traffic(compiled.as_text())


def check(text, config, **options):
    """Compares with one device; returns what is sent."""
    expected, _ = run("data=1", config, **options)
    got, sent = run(text, config, **options)
    for i, (y, want) in enumerate(zip(got, expected, strict=True)):
        assert_close(np.asarray(want, np.float64), y, 1e-5 if i == 0 else 1e-4, f"result {i}")
    return sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("head=2,context=4", (8, 2)),
        pytest.param("data=2,context=4", (8, 8), marks=pytest.mark.crossed),
        pytest.param("context=8", (8, 1), marks=pytest.mark.slow),
        pytest.param("context=4", (12, 6), marks=pytest.mark.crossed),
        pytest.param("data=2,head=2,context=2", (4, 2), marks=pytest.mark.slow),
    ],
)
def test_tokens_are_exchanged_for_heads(text, heads):
    """Results are those of one device; the compiled program has all-to-alls of q, k, v and o, in both directions."""
    shape, D = MeshShape.parse(text), 4
    config = AttentionConfig(*heads, D, qk_norm="head", rotary_dim=4, output_gate=True)
    sent = check(text, config)
    assert set(sent.count) <= {"all-to-all", "all-reduce"}
    n = shape.context
    H, Hkv = heads[0] // shape.head, math.lcm(math.lcm(heads[1], shape.head) // shape.head, n)
    held = 4 * (B // shape.data) * (T // n) * D * (2 * H + 2 * Hkv)
    assert sent.sent["all-to-all"] == 2 * held * (n - 1) // n


@pytest.mark.slow
def test_segments_and_padding():
    config = AttentionConfig(8, 4, 4)
    sent = check("data=2,context=4", config, segments=True)
    gathered = sent.sent.get("all-gather", 0)
    assert gathered <= 4 * B // 2 * T, "ids alone"
    check("data=2,context=4", config, segments=True, masked=True)


def test_heads_that_do_not_divide_are_gathered():
    """The results are right, and `debug_checks` tells of it."""
    gdn_jax.debug_checks(True)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            sent = check("data=2,context=4", AttentionConfig(6, 3, 4))
    finally:
        gdn_jax.debug_checks(False)
    text = "attention: 6 heads cannot be split over the 4 devices of a row; keys and values are gathered"
    assert text in {str(w.message) for w in told}
    assert "all-gather" in sent.count or "collective-permute" in sent.count


@pytest.mark.slow
def test_what_is_sent_grows_with_the_tokens_of_a_device_alone():
    """Twice the devices and twice the tokens: a device sends what it holds, less the part that it keeps."""
    config = AttentionConfig(8, 8, 4)
    two, four = (run(f"context={n}", config, length=32 * n)[1].sent["all-to-all"] for n in (2, 4))
    assert two * 3 / 4 == four / 2
