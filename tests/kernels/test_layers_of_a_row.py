"""Layers of a model in a copy for single tokens, by the kernels of one row, interpreted: as without kernels."""

import dataclasses
import re

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

from gdn_jax.layers import GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention, RecurrentCache
from gdn_jax.layers.blocks import RMSNorm, SwiGLU, from_stream, whole
from gdn_jax.models import ExpertsConfig, LanguageModel
from gdn_jax.models.attention import FixedAttentionCache
from gdn_jax.models.config import LatentAttentionConfig, SigmoidRouting
from gdn_jax.models.experts import Experts
from gdn_jax.models.inference.dense import DenseRow, DenseRows
from gdn_jax.models.inference.experts import ExpertRow
from gdn_jax.models.inference.latent import LatentRows
from gdn_jax.models.inference.part import Call
from gdn_jax.models.inference.program import ROWS, for_decoding
from gdn_jax.models.latent import LatentAttention
from gdn_jax.models.presets import PRESETS
from gdn_jax.parts import kernels
from gdn_jax.serving.call import interpreted
from pallas_kernels.rows import delta_layer, dense_stream
from pallas_kernels.rows import delta_plan as token_plan


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A layer whose token of one row may be one kernel."""

    layer: type
    sizes: dict


KDA = Mixed(
    KimiDeltaAttention,
    dict(gate="lower_bound", gate_rank=None, output_gate_rank=None),
)
GDN = Mixed(
    GatedDeltaNet,
    dict(num_v_heads=4, expand_v=1.0, conv_bias=True, allow_neg_eigval=True),
)


def layer_of_one_product(small, mixed: Mixed, hidden: int, parts: int, heads: int, sums: float):
    """A token of a layer in a copy for one row is that of the plain layer after the norm. Returns its kernels."""
    # Another epsilon than the norm before it has.
    draw, sizes = draws(1), mixed.sizes | dict(num_heads=heads, head_dim=64, norm_eps=0.1)
    x, y = draw(1, 1, hidden), draw(parts, 1, hidden)
    plain, layer = (
        mixed.layer(hidden, **sizes, implementation=name, rngs=nnx.Rngs(0)) for name in ("chunked", None)
    )
    cache = RecurrentCache(draw(1, layer.conv_dim, 3), draw(1, layer.num_v_heads, 64, 64))
    norm = RMSNorm(hidden, implementation="chunked")
    want = from_stream(plain)(norm, x, jnp.sum(y, axis=0)[None], cache=cache)
    layer = ROWS[mixed.layer](layer, Call(1, from_stream=True))
    with interpreted(INTERPRET):
        after, (out, behind) = from_stream(layer)(norm, x, y, cache=cache)
    got = after, (whole(out, x), behind)
    for expected, result in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        close(expected, result, "token", sums=sums)
    return small


@pytest.mark.slow
def test_a_layer_of_one_product(small):
    """Where one kernel has no whole shares: XLA's product, the convolution, the rule, and the heads' product."""
    calls = layer_of_one_product(small, KDA, 256, 1, 4, row_kernels.IN_TURN)
    assert calls == {"heads_product": 1}


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [KDA, GDN], ids=["channels", "heads"])
def test_a_layer_in_one_kernel(small, monkeypatch, mixed):
    """Four CTAs to a head of k, and a stream in parts."""
    monkeypatch.setattr(delta_layer, "FEWEST_CTAS", 1)
    monkeypatch.setattr(token_plan, "most_ctas", lambda: 8)
    assert layer_of_one_product(small, mixed, 512, 2, 2, 2 * row_kernels.IN_TURN) == {"delta_layer": 1}


@pytest.mark.parametrize(
    ("layer", "options", "takes"),
    [
        (GatedDeltaNet, {}, True),
        (GatedDeltaNet, dict(use_gate=False), False),
        (GatedDeltaNet, dict(use_short_conv=False), False),
        (GatedDeltaNet, dict(write_start=0.1), False),
        (GatedDeltaNet, dict(rule="delta"), False),
        (KimiDeltaAttention, dict(gate_rank=None, output_gate_rank=None), True),
        (KimiDeltaAttention, {}, False),
        (GatedLinearAttention, dict(gate_rank=None, output_gate_rank=None), False),
    ],
)
def test_layers_that_no_kernel_of_a_token_takes(layer, options, takes):
    """In a copy for one row: those with other projections or another rule than the kernel has."""
    made = layer(8, num_heads=1, head_dim=4, expand_v=1.0, **options, rngs=nnx.Rngs(0))
    assert (ROWS[layer](made, Call(2, True)).gates() is not None) == takes


@pytest.mark.slow
def test_a_layer_of_latents(small):
    """A token of latent attention in a copy for one row is that of the plain layer behind the norm."""
    config = LatentAttentionConfig(8, 64, 64, 16, 256, q_rank=256, rope_theta=1e4, head_gate=True)
    options: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    plain, layer = (LatentAttention(256, config, **options, rngs=nnx.Rngs(0)) for _ in range(2))
    draw, norm = draws(3), RMSNorm(256, dtype=jnp.bfloat16, implementation="chunked")
    plain.implementation = "chunked"
    x, y = draw(1, 1, 256), draw(1, 1, 256)
    k, v = (draw(1, 8, 1, width, dtype="bfloat16") for width in plain.cache_widths)
    cache = FixedAttentionCache(k, v, put([5], jnp.int32))
    _, (o, after) = from_stream(plain)(norm, x, y, cache=cache)
    layer = LatentRows(layer)
    _, (p, new) = from_stream(layer)(norm, x, y, cache=cache)
    assert (small["stream_product"], small["latent_row"]) == (2, 1)
    # The projections, their norms, the turn, the cache, the weights of values, what heads see, gates and the output.
    close(fused_oracle.wide(o), p, "o", 8)
    close(fused_oracle.wide(after.k), new.k, "k", 4)
    close(fused_oracle.wide(after.v), new.v, "v", 4)
    assert new.length == after.length


def test_tokens_of_latents():
    """Several tokens of a copy for one row are turned by their own positions, with a cache before them."""
    config = LatentAttentionConfig(2, 4, 4, 6, 5, q_rank=None, rope_theta=100.0)
    plain, layer = (LatentAttention(16, config, rngs=nnx.Rngs(0)) for _ in range(2))
    layer = LatentRows(layer)
    rng, norm = np.random.default_rng(0), RMSNorm(16)
    x, y = (rng.standard_normal((2, 3, 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, 8, 1, width)).astype(np.float32) for width in plain.cache_widths)

    @jax.jit
    def both(x, y, k, v):
        cache = FixedAttentionCache(k, v, put([4, 1]))
        return [from_stream(part)(norm, x, y, cache=cache) for part in (plain, layer)]

    for want, got in zip(*map(jax.tree.leaves, both(x, y, k, v)), strict=True):
        np.testing.assert_allclose(want, got, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routing", "shared_gate"),
    [(SigmoidRouting(4, 2, 2.5), False), (SigmoidRouting(4, 2, 2.5), True), (None, True)],
    ids=["sigmoids", "sigmoids with a gate", "softmax with a gate"],
)
def test_a_mixture_of_one_row(small, routing, shared_gate):
    """In a copy for one row, with the norm before it: that of the layer without kernels."""
    config = ExpertsConfig(64, 4, 128, 128, shared_gate=shared_gate, routing=routing)
    options: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer, draw, norm = Experts(256, config, **options), draws(2), RMSNorm(256, dtype=jnp.bfloat16)
    x, y = draw(1, 1, 256), draw(1, 1, 256, dtype="bfloat16")
    plain = Experts(256, config, implementation="chunked", **options | {"rngs": nnx.Rngs(0)})
    want = from_stream(plain)(RMSNorm(256, dtype=jnp.bfloat16, implementation="chunked"), x, y)
    layer = ExpertRow.of(layer, Call(1, True))
    got = from_stream(layer)(norm, x, y)
    assert small == {"routed_stream": 1}
    close(want[0], got[0], "stream")
    # The plain form rounds the norm, h, what each expert makes, and both sums.
    close(fused_oracle.wide(want[1]), whole(got[1], x), "y", 6, dtype="bfloat16")


@pytest.mark.slow
def test_a_swiglu_of_one_row(small, monkeypatch):
    """In a copy for one row, with the norm before it: that of the layer without kernels, also of more rows."""
    monkeypatch.setattr(
        dense_stream, "check_supported", lambda *_: None
    )  # its CTAs are fewer than a device has
    options: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    norm = RMSNorm(512, dtype=jnp.bfloat16, implementation="chunked")
    layer = SwiGLU(512, 192, implementation=None, rngs=nnx.Rngs(0), **options)
    plain = SwiGLU(512, 192, implementation="chunked", rngs=nnx.Rngs(0), **options)
    draw = draws(2)
    x, y = draw(1, 1, 512), draw(1, 1, 512, dtype="bfloat16")
    want, row = from_stream(plain)(norm, x, y), DenseRow.of(layer, Call(1, True))
    assert isinstance(row, DenseRow) and isinstance(DenseRow.of(nnx.clone(plain), Call(1, True)), DenseRows)
    got = from_stream(row)(norm, x, y)
    assert small == {"dense_stream": 1}
    close(want[0], got[0], "stream")
    # The plain form rounds the norm, both branches, h and the result.
    close(fused_oracle.wide(want[1]), whole(got[1], x), "y", 6, dtype="bfloat16")
    rows = draw(2, 3, 512, dtype="bfloat16")
    close(fused_oracle.wide(plain(rows)), row(rows), "rows", 6, dtype="bfloat16")


@pytest.mark.slow
def test_kernels_of_a_token_hand_on_their_words():
    """Each kernel of a model's token whose CTAs wait for each other takes the words that the one before has changed,
    also over a layer of attention."""
    config = PRESETS["qwen3.5-0.8b"]
    sizes: dict = dict(num_layers=5, layer_types=config.types[:5], vocab_size=512)
    config = dataclasses.replace(config, **sizes, dtype="bfloat16", weight_dtype="bfloat16")

    def logits(token):
        model = for_decoding(LanguageModel(config, rngs=nnx.Rngs(0)), 1)
        mixers = [block.mixer for block in model.blocks]
        cache = tuple(m.init_cache(1, 8) if m.attends else m.init_cache(1) for m in mixers)
        return model(token, cache=cache)[0]

    with kernels.trusted():
        traced = jax.jit(logits).trace(jax.ShapeDtypeStruct((1, 1), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    words = r"tensor<\d+x32xi32>"
    made = re.findall(rf"(%\d+) = call @\w+\(\) : \(\) -> {words}", text)
    taken, given = [], made
    calls = re.findall(r"(%\d+):\d+ = call @\w+\((.*)\) : \((.*)\) -> \((.*)\)", text)
    for name, operands, *types in calls:
        taking, giving = ([bool(re.fullmatch(words, x)) for x in some.split(", ")] for some in types)
        if any(taking):
            taken.append(operands.split(", ")[taking.index(True)])
            given.append(f"{name}#{giving.index(True)}")
    assert len(taken) == 9 and taken == given[:-1]
