"""Kernels of one row, interpreted: the experts that it is multiplied by, how they are chosen, and its products."""

import dataclasses
import functools
import re

import fused_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_kernels
from device_arrays import put
from flax import nnx
from fused_harness import close, draws
from jax.experimental import pallas as pl
from jax.experimental.pallas.mosaic_gpu import barrier_wait, copy_gmem_to_smem
from layer_kernels import INTERPRET

from gdn_jax.layers import GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention, RecurrentCache
from gdn_jax.layers.blocks import RMSNorm, SwiGLU, from_stream, group_projections, whole
from gdn_jax.models import ExpertsConfig
from gdn_jax.models.attention import FixedAttentionCache
from gdn_jax.models.config import LatentAttentionConfig, SigmoidRouting
from gdn_jax.models.experts import Experts
from gdn_jax.models.inference import program
from gdn_jax.models.inference.dense import DenseRow
from gdn_jax.models.inference.experts import ExpertRows
from gdn_jax.models.inference.latent import LatentRows
from gdn_jax.models.latent import LatentAttention
from gdn_jax.parts import delta_layer as fused_delta_layer
from gdn_jax.parts import dense_stream as dense
from gdn_jax.parts import latent_token
from gdn_jax.parts import routing as plain_routing
from gdn_jax.parts.channel_token import ChannelGates
from gdn_jax.parts.experts import SharedExpert, row_mixture
from gdn_jax.parts.heads_product import heads_product
from gdn_jax.parts.kernels import trusted
from gdn_jax.parts.row_product import stream_product
from gdn_jax.shapes import Choice, Convolution
from pallas_kernels.decode import channel_step, conv_update, step
from pallas_kernels.device.grid_barrier import NAME
from pallas_kernels.device.lanes import load
from pallas_kernels.device.launch import grid_index
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import (
    dense_stream,
    expert_row,
    latent_row,
    routed_stream,
    routing,
    row_choice,
    row_product,
)
from pallas_kernels.token import delta_layer
from pallas_kernels.token import plan as token_plan
from pallas_kernels.token.decays import ChannelDecay, HeadDecay
from pallas_kernels.token.heads import Head, Places, Rule
from pallas_kernels.token.plan import Plan
from pallas_kernels.token.projections import Alone, Projections
from pallas_kernels.token.rooms import APART, LENT, ROWS, STAGES, WARPGROUPS, WIDEST
from pallas_kernels.tools.calls import CALLS

IN_TURN = 4 * 256**0.5 * 2.0**-24
"""Two sums of 256 numbers one behind the other, the norm's and the product's. Errors of 2^-24 of a term add in
squares, and the largest of some thousand results is about four times as far off."""


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        (dict(E=6, D=256, F=128, S=256, k=2), expert_row.Config(5, 3, 8, 3)),
        pytest.param(
            dict(E=5, D=384, F=128, S=128, k=4), expert_row.Config(7, 2, 13, 2), marks=pytest.mark.slow
        ),
    ],
    ids=["sums of several CTAs", "four experts"],
)
def test_a_row_and_its_experts(sizes, config):
    """CTAs go on from one tile of columns to the next, and rings wrap; with a weight of the shared expert."""
    args, want, shared = row_kernels.experts(**sizes)
    got = expert_row.expert_row(*args, put([0.5]), config=config, interpret=INTERPRET)
    assert len(got) > 1
    close(want + 0.5 * shared, jnp.sum(got, axis=0, keepdims=True), "y")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "choice", "config"),
    [
        (dict(E=64, D=256, F=128, S=128, P=2), Choice(4, 4, 2, True, 2.5), (5, 2, 2, 2)),
        pytest.param(
            dict(E=64, D=1024, F=128, S=256, P=3),  # two warpgroups make the row
            Choice(3, 1, 1, False, 1.5),
            (16, 3, 1, 3),
            marks=pytest.mark.crossed,
        ),
    ],
    ids=["of some groups", "of all"],
)
def test_a_stream_chooses_its_experts(sizes, choice, config):
    """Norm, router, choice and experts in one kernel of three stages: rings wrap, and CTAs go on from one tile of
    columns to the next."""
    args, s, want = row_kernels.routed(**sizes, choice=choice)
    options = dict(choice=choice, eps=1e-6, config=routed_stream.Config(*config), interpret=INTERPRET)
    stream, z = routed_stream.routed_stream(*args, **options)
    close(s, stream, "s")
    close(want, jnp.sum(z, axis=0, keepdims=True), "z")


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((256, 300, 2), (9, 8, 2)),  # the last slice and its last tiles begin with rows of those before
        pytest.param(
            (512, 88, 0), (17, 16, 4, 1, 1), marks=pytest.mark.slow
        ),  # a slot each; CTAs without a slice
        pytest.param((1024, 700, 3), (34, 32), marks=pytest.mark.crossed),
    ],
)
def test_a_stream_and_its_swiglu(sizes, config):
    """Sum, norm, branches and projection down in one kernel of two stages; and the plain form for its derivative."""
    args, s, want = row_kernels.dense(*sizes)
    options: dict = dict(eps=1e-6, config=dense_stream.Config(*config), interpret=INTERPRET)
    for stream, z in (
        dense_stream.dense_stream(*args, **options),
        jax.jit(dense._plain, static_argnums=0)(1e-6, *args),
    ):
        close(s, stream, "s")
        close(want, z, "z", 0)


def test_what_a_dense_stream_takes():
    """Multiprocessors of several cards; widths and dtypes that it refuses, by name."""

    def reason(ctas, D=1024, F=3584, dtype="bfloat16"):
        shapes = (1, D), (2 * F, D), (F, D)
        return dense_stream.check_supported(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes), ctas)

    assert [reason(ctas) for ctas in (108, 114, 132, 144, 148)] == [None] * 5
    assert [reason(132, D, F) for D, F in ((2560, 9216), (4096, 12288))] == [None] * 2
    for said, arguments in [
        ("12 multiprocessors", (12,)),
        ("rows of 4096; the kernel takes multiples of 512 up to 3456", (108, 4096)),
        ("rows of 768", (132, 768)),
        ("an inner width of 128; the kernel takes 385 to 15872 on 132", (132, 1024, 128)),
        ("weights of float32", (132, 1024, 3584, "float32")),
    ]:
        assert reason(*arguments).startswith(said)


@pytest.mark.parametrize(
    ("E", "choice"),
    [
        (64, Choice(4, 4, 2, True, 2.446)),
        pytest.param(128, Choice(8, 8, 4, True, 2.5), marks=pytest.mark.slow),
        pytest.param(64, Choice(4, 1, 1, False, 1.0), marks=pytest.mark.slow),
        pytest.param(256, Choice(8, 4, 2, True, 2.446), marks=pytest.mark.slow),
    ],
)
def test_experts_are_chosen_as_by_sorting(E, choice):
    """Also among equal scores, the first first, and NaN before all numbers, in every form; with sums below 0."""
    x, bias = row_kernels.scores(5, E)
    scores = np.array(x)
    scores[3], scores[4, E - 5] = np.nan, np.nan
    x, bias = put(scores), bias - 2
    weights, chosen = routing.choose(x, bias, choice, interpret=INTERPRET)
    by_sorting, by_counting = (
        jax.jit(functools.partial(plain_routing.plain_choose, choice, counts=counts))(x, bias)
        for counts in (False, True)
    )
    of_a_row = jax.jit(lambda x: row_choice._choose(jax.nn.sigmoid(x), jax.nn.sigmoid(x) + bias, choice)[0])
    for places in (by_sorting[1], by_counting[1], [of_a_row(row) for row in x]):
        np.testing.assert_array_equal(chosen, places)
    assert all(len(set(row)) == choice.per_token for row in np.asarray(chosen).tolist())
    np.testing.assert_array_equal(chosen[3], np.arange(choice.per_token))
    assert chosen[4, 0] == E - 5
    np.testing.assert_array_equal(np.isnan(weights), np.isnan(by_sorting[0]))
    close(by_sorting[0][:3], weights[:3], "weights")


@pytest.mark.parametrize(
    ("rows", "dtype"), [(4, "bfloat16"), pytest.param(8, "float32", marks=pytest.mark.slow)]
)
def test_products_of_a_stream(rows, dtype):
    args, s, n, want = row_kernels.stream(512, 40, dtype)
    options = dict(config=row_product.Config(rows, 3), keep=jnp.bfloat16, interpret=INTERPRET)
    got = row_product.stream_product(*args, eps=1e-6, dtype=jnp.float32, **options)
    for name, expected, result, roundings in zip("snp", (s, n, want), got[:3], (0, 1, 0), strict=True):
        close(expected, result, name, roundings)


def test_channels_that_pass_through_a_convolution():
    """The first results of a stream that is added up from parts; the state is that behind the token."""
    C = 136
    (x, _, norm, weight), *_ = row_kernels.stream(256, C + 24, "bfloat16")
    draw = draws(4)
    y, state, filters, bias = draw(3, 256), draw(1, C, 3, dtype="bfloat16"), draw(C, 4), draw(C)
    convolution = Convolution(state, filters, bias)
    options = dict(config=row_product.Config(8, 3, 2), convolution=convolution, interpret=INTERPRET)
    options["ahead"] = filters, weight, draw(3, 5), draw(128)  # a hint, of any shape
    *_, got, after = row_product.stream_product(x, y, norm, weight, eps=1e-6, dtype=jnp.float32, **options)
    _, n = fused_oracle.add_norm(x, jnp.sum(y, axis=0), norm, 1e-6)
    product = n @ fused_oracle.wide(weight).T
    inputs = np.concatenate([fused_oracle.wide(state)[0], product[0, :C, None]], axis=1)
    total = np.sum(inputs * fused_oracle.wide(filters), axis=1) + fused_oracle.wide(bias)
    close(np.concatenate([total * fused_oracle.sigmoid(total), product[0, C:]]), got[0], "y", sums=IN_TURN)
    close(inputs[:, 1:], after[0], "state")


def test_products_of_heads():
    (o, channels, *args), want = row_kernels.heads(4, 128, 256, 24, "sigmoid")
    options = dict(config=row_product.Config(4, 2), dtype=jnp.float32, interpret=INTERPRET)
    z = channels.reshape(-1, 128)
    close(want, row_product.heads_product(o, z, *args, eps=1e-6, activation="sigmoid", **options), "y")


@pytest.mark.slow
@pytest.mark.parametrize(("H", "C"), [(8, 256), pytest.param(16, 512, marks=pytest.mark.crossed)])
def test_latent_attention_of_a_token(H, C):
    """By three CTAs, whose tokens go around their shared memory; with no token before it; and without a slot left."""
    _, static, *_ = row_kernels.latent(H, C, 16, 24, 0)
    places = latent_row.Places(static.pop("kv"), static.pop("gate"))
    call = functools.partial(
        latent_row.latent_row, places=places, config=latent_row.Config(3, 1), interpret=INTERPRET, **static
    )
    for length in (21, 0):
        args, _, y, k_r, c = row_kernels.latent(H, C, 16, 24, length)
        got, k, v, after = call(*args)
        assert after == length + 1
        close(y, got, "y")
        *_, old_k, old_v, _ = args
        for name, new, old, want in (("k", k, old_k, k_r), ("c", v, old_v, c)):
            close(want, new[0, length, 0], name)
            row_kernels.same_bits(new.at[0, length].set(0), old.at[0, length].set(0))
        channels, q, norm, _, *arrays, at = args
        latents = latent_token.Latents(*places, static["scale"], static["eps"], 1e4)

        def plain(q, length=at, others=(norm, *arrays), latents=latents, channels=channels):
            return jnp.sum(latent_token._plain(latents, length, channels, q, *others)[0].astype(jnp.float32))

        assert jnp.isfinite(jax.jit(jax.grad(plain))(q)).all()
    assert jnp.isnan(call(*args[:-1], put([24], jnp.int32))[0]).all()


@pytest.fixture
def small(monkeypatch, interpreted):
    """The kernels of one row by a few CTAs, interpreted; which were called."""
    monkeypatch.setattr(expert_row, "Config", functools.partial(expert_row.Config, 3, 2, 4, 2))
    monkeypatch.setattr(routed_stream.Config, "default", lambda: routed_stream.Config(5, 2, 2, 2))
    monkeypatch.setattr(row_product.Config, "stream", lambda F: row_product.Config(8, 3))
    monkeypatch.setattr(row_product.Config, "heads", lambda: row_product.Config(8, 3))
    monkeypatch.setattr(latent_row.Config, "default", lambda slots: latent_row.Config(2, 2))
    monkeypatch.setattr(dense_stream.Config, "default", lambda: dense_stream.Config(17, 16))
    with trusted():
        yield interpreted


def formulas(
    row, weights, gate_up, shared, scores, stream, heads, router, *, chosen, down, norm, bias, choice
):
    """What the kernels of a row compute, written down once more, in float32; the experts of `routed_stream` are those
    of the row, tiled."""
    args = row, weights, gate_up, shared, scores, stream, heads, router, down
    row, weights, gate_up, shared, scores, stream, heads, router, down = jax.tree.map(
        lambda x: x.astype(jnp.float32), args
    )

    def normalised(x, norm):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * norm

    def chosen_of(scores):
        sigmoids = jax.nn.sigmoid(scores)
        _, places = jax.lax.top_k(sigmoids + bias, choice.per_token)
        w = jnp.take_along_axis(sigmoids, places, axis=1)
        return choice.factor * w / jnp.sum(w, axis=1, keepdims=True), places

    def experts_of(x, weights, chosen, weight):
        gate, up, last = shared
        y = weight * ((jax.nn.silu(x @ gate) * (x @ up)) @ last)
        for w, e in zip(weights[0], chosen[0] % len(down), strict=True):
            a, b = jnp.split(x @ gate_up[e], 2, axis=1)
            y = y + w * ((jax.nn.silu(a) * b) @ down[e])
        return y[0]

    s, added, of_s, matrix = stream
    n = normalised(s + added, of_s)
    o, z, of_o, of_heads = heads
    v = normalised(o, of_o) * jax.nn.silu(z.reshape(-1, o.shape[1])[-len(o) :])
    own = normalised(row + row, norm)
    return (
        experts_of(row, weights, chosen, weights[0, 0]),
        chosen_of(scores)[0],
        experts_of(own, *chosen_of(own @ router.T), 1.0),
        *(n, n @ matrix.T, v.reshape(1, -1) @ of_heads.T),
    )


@pytest.mark.slow
def test_derivatives_are_those_of_plain_forms(small, monkeypatch):
    """The kernels are called once each; gradients are those of formulas of the same operations. The kernel that takes
    longest to interpret has its plain form in its place. Of results in parts nobody reads one."""
    plain = plain_routing._plain_routed
    monkeypatch.setattr(plain_routing, "_routed_by_kernel", lambda static, *args: plain(static, *args[:-1]))
    (row, weights, chosen, gate_up, down, shared), *_ = row_kernels.experts(4, 128, 128, 128, 2)
    scores, bias = row_kernels.scores(2, 64)
    stream, *_ = row_kernels.stream(256, 8, "float32")
    heads, _ = row_kernels.heads(4, 64, 64, 8, "silu")
    choice, router, norm = Choice(4, 1, 1, True, 1.5), draws(1)(64, 128), 1 + 0.5 * draws(2)(128)

    def operations(row, weights, gate_up, shared, scores, stream, heads, router):
        y = row_mixture(row, weights, chosen, gate_up, down, SharedExpert(*shared), weights[0, :1])
        w, _ = plain_routing.choose(scores, bias, choice)
        of_experts = jnp.tile(gate_up, (16, 1, 1)), jnp.tile(down, (16, 1, 1)), SharedExpert(*shared)
        _, routed = plain_routing.routed_stream(row, row, norm, router, bias, *of_experts, choice, eps=1e-6)
        for parts in (y, routed):
            with pytest.raises(TypeError):
                parts[0]
        _, n, p, _ = stream_product(*stream, eps=1e-6, dtype=jnp.float32, keep=jnp.float32)
        return y.sum(), w, routed.sum(), n, p, heads_product(*heads, eps=1e-6, activation="silu")

    args = row, weights, gate_up, shared, scores, stream, heads, router
    known = dict(chosen=np.asarray(chosen), down=down, norm=norm, bias=bias, choice=choice)
    shapes = jax.eval_shape(functools.partial(formulas, **known), *args)
    cotangents = [draws(n)(*x.shape) for n, x in enumerate(shapes)]

    def loss(results):
        pairs = zip(cotangents, results, strict=True)
        return sum(jnp.sum(dy * y.reshape(dy.shape).astype(jnp.float32)) for dy, y in pairs)

    gradients = jax.grad(lambda *args: loss(operations(*args)), argnums=range(8))(*args)
    assert small == dict.fromkeys(("expert_row", "choose", "stream_product", "heads_product"), 1)
    want = jax.jit(jax.grad(lambda *args: loss(formulas(*args, **known)), argnums=range(8)))(*args)
    # Of experts the row, both branches, their product, and what comes back through each are rounded.
    for (path, x), y in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(gradients), strict=True):
        close(fused_oracle.wide(x), y, jax.tree_util.keystr(path), 8, dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A layer whose token of one row may be one kernel, and the kernels that make it otherwise."""

    layer: type
    sizes: dict
    others: tuple


KDA = Mixed(
    KimiDeltaAttention,
    dict(gate="lower_bound", gate_rank=None, output_gate_rank=None),
    ((conv_update, "conv_update"), (channel_step, "channel_step")),
)
GDN = Mixed(
    GatedDeltaNet,
    dict(num_v_heads=4, expand_v=1.0, conv_bias=True, allow_neg_eigval=True),
    ((conv_update, "conv_update"), (step, "step_of_channels")),
)


def layer_of_one_product(small, monkeypatch, mixed: Mixed, hidden: int, parts: int, heads: int, sums: float):
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
    for names in program.GROUPS:
        group_projections(layer, names, layer.head_v_dim if "g_proj" in names else 1)
    for module, name in mixed.others:
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=INTERPRET))
    after, (out, behind) = from_stream(layer)(norm, x, y, cache=cache)
    got = after, (whole(out, x), behind)
    for expected, result in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        close(expected, result, "token", sums=sums)
    return small


@pytest.mark.slow
def test_a_layer_of_one_product(small, monkeypatch):
    """Three kernels, where one has no whole shares."""
    calls = layer_of_one_product(small, monkeypatch, KDA, 256, 1, 4, IN_TURN)
    assert calls == {"stream_product": 1, "heads_product": 1}


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [KDA, GDN], ids=["channels", "heads"])
def test_a_layer_in_one_kernel(small, monkeypatch, mixed):
    """Four CTAs to a head of k, and a stream in parts."""
    monkeypatch.setattr(delta_layer, "FEWEST_CTAS", 1)
    monkeypatch.setattr(token_plan, "most_ctas", lambda: 8)
    assert layer_of_one_product(small, monkeypatch, mixed, 512, 2, 2, 2 * IN_TURN) == {"delta_layer": 1}


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
    assert made.token_gates() is None
    for names in program.GROUPS:
        group_projections(made, names, made.head_v_dim if "g_proj" in names else 1)
    assert (made.token_gates() is not None) == takes


LAYERS = {
    "heads": (row_kernels.HEADS, 1, 1, 512, 4, APART),
    "heads, two of v": (row_kernels.HEADS, 1, 2, 512, 2, APART),
    "heads, turns of two kinds": (row_kernels.HEADS, 1, 1, 512, 8, APART),
    "heads, lent": (row_kernels.HEADS, 1, 1, 512, 4, LENT),
    "heads, lent, wide": (row_kernels.HEADS, 1, 2, 2560, 4, LENT),
    "channels": (row_kernels.CHANNELS, 1, 1, 512, 4, APART),
    "channels, turns of two kinds": (row_kernels.CHANNELS, 1, 1, 512, 8, APART),
    "channels, lent, two of v": (row_kernels.CHANNELS, 1, 2, 512, 2, LENT),
}
"""Name -> a decay, heads of k and of v, width of the stream, CTAs of a head of v, and a room."""


def planned(name: str):
    """Arguments of the kernel with a plan of its own, and what it gives. With two heads of v to one of k there is no
    y, the convolution has a bias, beta is doubled, and matrices are bfloat16."""
    decay, H, HV, D, m, room = LAYERS[name]
    two, K = HV > H, 64
    static = dict(decay=decay, HV=HV, bias=two, doubled=two, dtype="bfloat16" if two else "float32")
    (x, y, layer, gates, options), want = row_kernels.delta_layer(H, K, D, 0 if two else 3, **static)
    rule = Rule(gates.kernel_decay(), gates.allow_neg_eigval, *options[1:])
    plan = Plan(H, HV // H, K, D, D, m, layer.output.dtype, rule.decay, room)
    assert plan.reason() is None
    norm, inputs, convolution, A_log, dt_bias, state, output_norm, output = layer
    arrays = x, None if y is None else y[:, 0], norm, inputs, convolution, state, output_norm, output
    known = dict(A_log=A_log, dt_bias=dt_bias, places=fused_delta_layer._places(layer, gates), rule=rule)
    return functools.partial(delta_layer.delta_layer, *arrays, **known, plan=plan, eps=options.eps), want


@pytest.mark.parametrize("name", harness.tiers(LAYERS, {"heads, lent"}))
def test_a_layer_of_a_token(name):
    """Both stages by themselves, with race detection: every plan gives what float64 formulas give."""
    call, want = planned(name)
    s, parts, *states = call(interpret=INTERPRET)
    results = s, parts.astype(jnp.float32).sum(0)[None], *states
    for part, expected, got, roundings in zip("sycS", want, results, (0, 2, 1, 1), strict=True):
        close(expected, got, part, roundings, 2 * IN_TURN, parts.dtype.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads, lent", "channels, lent, two of v"])
def test_rows_come_to_a_slot_after_its_tiles(name, monkeypatch):
    """The interpreter has W_o elsewhere. With rows of W_in in its place every slot gets its own, without a race."""

    def first(gmem, smem, *, places, plan, eps):
        stage = Projections(gmem, smem, delta_layer._share(plan), places, plan, eps, Device(True))

        class Handed(Alone):
            def ask_rows(self, i):
                rows = pl.ds((stage.wg * STAGES + i) * ROWS, ROWS)
                copy_gmem_to_smem(gmem.weight.at[rows], smem.tiles.at[stage.wg, i], stage._barrier(i))

        stage.run(Handed())
        for slot in range(STAGES):
            barrier_wait(stage._barrier(slot))
            x = load(smem.tiles.at[stage.wg, slot, :, 0], stage.layout)
            rows = (stage.wg * STAGES + slot) * ROWS
            store_any(gmem.handed.at[grid_index(), pl.ds(rows, ROWS)], x)

    call, _ = planned(name)
    weight, plan, launch = call.args[3], call.keywords["plan"], delta_layer.launch
    count = WARPGROUPS * STAGES * ROWS

    def with_rows(name, body, *, outputs, **options):
        if name == "projections":
            handed = jax.ShapeDtypeStruct((plan.ctas, count, WIDEST), weight.dtype)
            outputs = outputs | {"handed": handed}
        results = launch(name, body, outputs=outputs, **options)
        if name == "projections":
            for found in results.pop("handed"):
                np.testing.assert_array_equal(found, weight[:count, :WIDEST])
        return results

    monkeypatch.setattr(delta_layer, "_first", first)
    monkeypatch.setattr(delta_layer, "launch", with_rows)
    call(interpret=INTERPRET)


@pytest.mark.parametrize("decay", [row_kernels.HEADS, row_kernels.CHANNELS], ids=["heads", "channels"])
def test_the_plain_form_of_a_layer(decay):
    """What derivatives of the kernel are taken of."""
    static = dict(decay=decay, HV=4, bias=True, doubled=True, dtype="float32")
    (x, y, layer, *gates), want = row_kernels.delta_layer(2, 8, 32, 3, **static)
    s, parts, *states = jax.jit(functools.partial(fused_delta_layer._plain, tuple(gates)))(x, y, layer)
    for part, expected, got in zip("sycS", want, (s, parts.sum(0), *states), strict=True):
        close(expected, got, part, sums=2 * IN_TURN)


def test_what_a_layer_of_a_token_takes():
    """Reasons name what is refused; released sizes are taken with at least half of the multiprocessors."""

    def reason(H, HV, D, E=None, decay=None, K=128, **others):
        C, like = (2 * H + HV) * K, jax.ShapeDtypeStruct
        places = Places(0, H * K, 2 * H * K, C, C + HV, C + 2 * K)
        convolution = Convolution(like((1, C, 3), jnp.bfloat16), like((C, 4), jnp.bfloat16), None)
        arrays = dict(
            x=like((1, D), jnp.float32),
            weight=like((C + (2 + HV) * K, D), jnp.bfloat16),
            convolution=convolution,
            state=like((1, HV, K, K), jnp.float32),
            output=like((E or D, HV * K), jnp.bfloat16),
            places=places,
        )
        return delta_layer.check_supported(**arrays | others, decay=decay or HeadDecay())

    for sizes in ((8, 8, 1024), (16, 16, 1024), (16, 16, 2048), (16, 32, 2048), (16, 32, 2560)):
        assert reason(*sizes) is None, sizes
    assert reason(16, 16, 1536, decay=ChannelDecay(-5.0)) is None
    assert "multiple of 512" in reason(16, 16, 2304)
    assert "bytes of shared memory" in reason(16, 16, 4096)
    assert "32 CTAs" in reason(2, 2, 1024)
    assert "whole heads" in reason(6, 8, 1024)
    assert "whole shares" in reason(16, 16, 1024, 1020)
    state = jax.ShapeDtypeStruct((1, 30, 96, 192), jnp.float32)
    assert "one row's of 64 or 128" in reason(16, 16, 1024, state=state)


@pytest.mark.parametrize(
    ("step", "missing"),
    [
        ("read", "arrive"),
        ("token", "read, meet"),
        ("write", "meet, token"),
        ("multiply", "ask_rows, token"),
    ],
)
def test_steps_of_a_head_have_an_order(step, missing):
    """A state that is written before all have read it would be a race that no compiler sees."""
    head = object.__new__(Head)
    head._done = set()
    with pytest.raises(AssertionError, match=f"{step} before {missing}"):
        getattr(head, step)(*([jnp.zeros(1)] if step in ("token", "write") else []))


def delta_layer_call(x, y, norm, weight, window, filters, *others):
    """Two layers, which do not depend on each other."""
    state, output_norm, output, A_log, dt_bias = others
    layer = fused_delta_layer.Layer(
        *(norm, weight, Convolution(window, filters, None), A_log, dt_bias, state), output_norm, output
    )
    options = ChannelGates(16, 6144, 8192, -5.0), fused_delta_layer.Options(1e-6, 1e-6, "sigmoid")
    return [fused_delta_layer.delta_layer(x, y, layer, *options) for _ in range(2)]


def routed_stream_call(*args):
    """The same of two mixtures."""
    *args, gate, up, shared_down = args
    options = SharedExpert(gate, up, shared_down), Choice(8, 8, 4, True, 2.5)
    return [plain_routing.routed_stream(*args, *options, eps=1e-6) for _ in range(2)]


def dense_stream_call(*args):
    """The same of two dense halves."""
    return [dense.dense_stream(*args, eps=1e-6) for _ in range(2)]


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        (delta_layer_call, "layer of a token"),
        (routed_stream_call, "experts that a row chooses"),
        (dense_stream_call, "second half of a row"),
    ],
)
def test_no_two_kernels_share_a_barrier(calls, name):
    """In a program of two calls of one size the kernel is there once, and constants with its name twice."""
    traced = jax.jit(lambda *args: calls(*args)).trace(*CALLS[name].positional)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    constants = re.findall(r'dense<"0x([0-9A-F]+)">', text)
    few = re.findall(r"dense<\[([-\d, ]+)\]> : tensor<\d+xi32>", text)
    constants += [np.array(x.split(","), np.int32).tobytes().hex().upper() for x in few]
    found = [x for x in constants if NAME.hex().upper() in x]
    assert len(found) == len(set(found)) == 2
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1


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
    for names in program.GROUPS:
        group_projections(layer, names)
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
    for names in program.GROUPS:
        group_projections(layer, names)
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
    ("shared_gate", "kernels"),
    [(False, ("routed_stream",)), (True, ("stream_product", "choose", "expert_row"))],
    ids=["ungated", "gated"],
)
def test_a_mixture_of_one_row(small, shared_gate, kernels):
    """In a copy for one row, with the norm before it: that of the layer without kernels. Where the shared expert has
    a gate, another kernel chooses."""
    routing = SigmoidRouting(4, 2, 2.5)
    config = ExpertsConfig(64, 4, 128, 128, shared_gate=shared_gate, routing=routing)
    options: dict = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer, draw, norm = Experts(256, config, **options), draws(2), RMSNorm(256, dtype=jnp.bfloat16)
    x, y = draw(1, 1, 256), draw(1, 1, 256, dtype="bfloat16")
    plain = Experts(256, config, implementation="chunked", **options | {"rngs": nnx.Rngs(0)})
    want = from_stream(plain)(RMSNorm(256, dtype=jnp.bfloat16, implementation="chunked"), x, y)
    layer = ExpertRows(layer, 1)
    got = from_stream(layer)(norm, x, y)
    assert small == dict.fromkeys(kernels, 1)
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
    want, row = from_stream(plain)(norm, x, y), DenseRow.of(layer)
    assert row is not None and DenseRow.of(plain) is None
    got = from_stream(row)(norm, x, y)
    assert small == {"dense_stream": 1}
    close(want[0], got[0], "stream")
    # The plain form rounds the norm, both branches, h and the result.
    close(fused_oracle.wide(want[1]), got[1], "y", 6, dtype="bfloat16")
    rows = draw(2, 3, 512, dtype="bfloat16")
    close(fused_oracle.wide(plain(rows)), row(rows), "rows", 6, dtype="bfloat16")
