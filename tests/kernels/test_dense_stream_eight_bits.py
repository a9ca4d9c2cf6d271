"""The second half of a layer of one row by weights in 8 bits: the kernel, what it takes, and the part of a model."""

import functools

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_kernels
from device_arrays import put
from flax import nnx
from fused_harness import close, draws
from layer_kernels import INTERPRET

from gdn_jax.layers import GatedDeltaNet, RecurrentCache
from gdn_jax.layers.block_weights import BlockSwiGLU, keep_projections
from gdn_jax.layers.blocks import RMSNorm, SwiGLU, from_stream, whole
from gdn_jax.models.inference.dense import BlockDenseRow
from gdn_jax.models.inference.part import Call
from gdn_jax.models.inference.recurrent import DeltaRow, HeadRows
from gdn_jax.parts.products import array_of
from pallas_kernels.rows import attention_rows, delta_layer, dense_stream, row_product
from pallas_kernels.rows import delta_plan as token_plan

F8 = jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((512, 288, 2), (17, 8, 2)),  # a slice in two blocks of rows
        ((512, 1088, 1), (9, 8, 2)),  # slices of more rows than a block
        pytest.param((512, 140, 1), (17, 8, 2), marks=pytest.mark.slow),  # the last slice begins earlier
        pytest.param((2560, 152, 1), (85, 16, 4, 2), marks=pytest.mark.crossed),  # two tiles to a row
    ],
)
def test_codes_and_their_scales(sizes, config):
    args, s, want = row_kernels.dense_codes(*sizes)
    options: dict = dict(eps=1e-6, config=dense_stream.Config(*config), interpret=INTERPRET)
    stream, z = dense_stream.dense_stream(*args, **options)
    np.testing.assert_allclose(np.asarray(stream, np.float64), s, rtol=0.01, atol=0.01)  # of bfloat16
    np.testing.assert_allclose(np.asarray(z, np.float64), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    "config", [(4, 3), (8, 2, 2), (8, 1)]
)  # rows of a CTA in two blocks, in one, and whole blocks
def test_products_of_a_stream_by_codes(config):
    args, s, want = row_kernels.stream_codes(512, 256)
    options: dict = dict(config=row_product.Config(*config), dtype=jnp.float32, interpret=INTERPRET)
    stream, got = row_product.stream_product(*args, eps=1e-6, **options)
    np.testing.assert_allclose(np.asarray(stream, np.float64), s, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("config", [(4, 3), (8, 2)])
def test_products_of_heads_by_codes(config):
    (o, channels, *args), want = row_kernels.heads_codes(4, 128, 256, 256, "silu")
    options: dict = dict(config=row_product.Config(*config), dtype=jnp.float32, interpret=INTERPRET)
    z = channels.reshape(-1, 128)
    got = row_product.heads_product(o, z, *args, eps=1e-6, activation="silu", **options)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_products_of_attended_heads_by_codes():
    """Of several parts, by CTAs whose rows lie in two blocks."""
    parts, z, weight, scales, want = row_kernels.attended(2, 2, 3, 256, 256, True, codes=True)
    options: dict = dict(group=2, dtype=jnp.float32, config=row_product.Config(4, 3), interpret=INTERPRET)
    length = put([7], jnp.int32)
    got, after = row_product.attended_product(
        attention_rows.Parts(*parts), length, z, weight, scales, **options
    )
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert after == 8


def test_products_of_a_recurrent_layer(small, monkeypatch):
    """In a copy for one row: codes and narrow projections, each with the norm in its kernel."""
    dtypes: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    mixer = GatedDeltaNet(256, num_heads=1, head_dim=128, expand_v=1.0, rngs=nnx.Rngs(0), **dtypes)
    keep_projections(mixer)
    norm, draw = RMSNorm(256, dtype=jnp.bfloat16, implementation="chunked"), draws(3)
    x, y = draw(1, 1, 256), draw(1, 1, 256, dtype="bfloat16")
    s, n = norm.add(x, y)
    names = ("q", "k", "v", "g", "a", "b")
    want = jnp.concatenate([getattr(mixer, f"{name}_proj")(n) for name in names], -1)
    rows, cache = HeadRows.of(mixer, Call(1, True)), mixer.init_cache(1)
    found = []

    def token(self, channels, raw, x, cache):
        found.append((channels, raw))
        return y, cache

    monkeypatch.setattr(HeadRows, "_token", token)
    stream, _ = from_stream(rows)(norm, x, y, cache=cache)
    ((channels, raw),) = found
    assert small == {"stream_product": 2}
    got = jnp.concatenate([channels, *[gates[..., start : start + 1] for gates, start in raw]], -1)
    np.testing.assert_allclose(stream, s, rtol=1e-6, atol=1e-6)
    want, got = fused_oracle.wide(want), fused_oracle.wide(got)
    np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())


def test_a_recurrent_layer_is_one_kernel(small, monkeypatch):
    """In a copy for one row, where the kernel has a plan for its codes and its narrow projections: what the layer
    itself gives for the norm."""
    monkeypatch.setattr(delta_layer, "FEWEST_CTAS", 1)
    monkeypatch.setattr(token_plan, "most_ctas", lambda: 8)
    norm, draw = RMSNorm(512, implementation="chunked"), draws(3)
    x, y, cache = draw(1, 1, 512), draw(2, 1, 512), RecurrentCache(draw(1, 384, 3), draw(1, 1, 128, 128))

    @nnx.jit
    def made():
        mixer = GatedDeltaNet(512, num_heads=1, head_dim=128, expand_v=1.0, norm_eps=0.1, rngs=nnx.Rngs(0))
        keep_projections(mixer)
        return mixer, HeadRows.of(nnx.clone(mixer), Call(1, True))

    mixer, row = made()
    assert isinstance(row, DeltaRow)
    mixer.implementation = "chunked"
    run = nnx.jit(lambda part, y: from_stream(part)(norm, x, y, cache=cache))
    want = run(mixer, put(np.asarray(y).sum(0)[None]))
    after, (out, states) = run(row, y)
    assert small == {"delta_layer": 1}
    got = after, (whole(out, x), states)
    for expected, result in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        close(expected, result, "token", sums=2 * row_kernels.IN_TURN)


def test_what_it_takes():
    def reason(ctas, D, F, gate_up=F8, down=F8):
        shapes = ((1, D), jnp.bfloat16), ((2 * F, D), gate_up), ((F, D), down)
        return dense_stream.check_supported(*(jax.ShapeDtypeStruct(*s) for s in shapes), ctas)

    assert [reason(n, 2560, 9216) for n in (108, 114, 132, 144, 148)] == [None] * 5
    assert [reason(132, D, F) for D, F in ((1024, 3584), (4096, 12288), (5120, 17408))] == [None] * 3
    assert (
        reason(114, 5120, 17408)
        == "slices of 156 of an inner width of 17408, some of which lie in three blocks of 128"
    )
    assert (
        reason(132, 2560, 9214)
        == "an inner width of 9214; of weights in 8 bits the kernel takes multiples of 4"
    )
    assert reason(132, 2560, 9216, jnp.bfloat16).startswith("weights of bfloat16 and float8_e4m3fn")
    assert reason(132, 2560, 9216, jnp.float8_e5m2, jnp.float8_e5m2).startswith("weights of float8_e5m2")


def test_it_lowers():
    shapes = ((1, 2560), jnp.bfloat16), ((32, 2560), jnp.bfloat16), ((2560,), jnp.float32)
    shapes += ((18432, 2560), F8), ((9216, 2560), F8), ((3, 72, 20), jnp.float32)
    call = functools.partial(dense_stream.dense_stream, eps=1e-6, config=dense_stream.Config.of(132))
    traced = jax.jit(call).trace(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_a_swiglu_of_one_row(small, monkeypatch):
    """In a copy for one row, with the norm before it: that of the SwiGLU itself, also of more rows. Blocks of other
    rows are not taken."""
    monkeypatch.setattr(dense_stream.Config, "default", lambda: dense_stream.Config(17, 8, 2))
    monkeypatch.setattr(dense_stream, "check_supported", lambda *_: None)
    dtypes: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    norm = RMSNorm(512, dtype=jnp.bfloat16, implementation="chunked")
    mlp = BlockSwiGLU(SwiGLU(512, 288, implementation="chunked", rngs=nnx.Rngs(0), **dtypes))
    draw = draws(2)
    x, y = draw(1, 1, 512), draw(1, 1, 512, dtype="bfloat16")
    want = from_stream(mlp)(norm, x, y)
    assert BlockDenseRow.of(mlp, Call(1, True)) is mlp and BlockDenseRow.of(mlp, Call(2, True)) is mlp
    mlp.implementation = None
    row = BlockDenseRow.of(mlp, Call(1, True))
    assert isinstance(row, BlockDenseRow) and len(row.token_weights()) == 2
    got = from_stream(row)(norm, x, y)
    assert small == {"dense_stream": 1}
    np.testing.assert_allclose(got[0], want[0], rtol=0.01, atol=0.01)
    wide = fused_oracle.wide(want[1])
    np.testing.assert_allclose(
        fused_oracle.wide(array_of(got[1])), wide, rtol=0, atol=0.02 * np.abs(wide).max()
    )
    rows = draw(2, 3, 512, dtype="bfloat16")
    np.testing.assert_array_equal(row(rows), mlp(rows))
    mlp.down_proj.kernel_blocks.rows = 64
    assert BlockDenseRow.of(mlp, Call(1, True)) is mlp
