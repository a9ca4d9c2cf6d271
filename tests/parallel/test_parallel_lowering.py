"""Kernels under plain jit on a mesh, traced and lowered: which run on the shards, and how many a deep model has."""

import contextlib
import importlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from device_arrays import put
from flax import nnx
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from meshes import (
    PLACEMENTS,
    kinds,
    mesh_of,
    partitioners,
    place,
    spec,
    value_and_gradients,
)

import gdn_jax
from gdn_jax.bench.collectives import traffic
from gdn_jax.checks import cases
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.parallel import sharding
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parts.channel_gates import channel_gates
from gdn_jax.parts.norms import add_norm, gated_norm
from gdn_jax.parts.short_conv import short_conv
from gdn_jax.parts.swiglu import swiglu
from pallas_kernels.device import launch as device_launch
from pallas_kernels.layer import weight_gradient

KERNEL_MODULES = (
    "chunks.gates", "chunks.inverse", "chunks.segment_states", "forward.outputs", "forward.transitions",
    "backward.chain", "backward.gradients", "layer.short_conv", "layer.norm", "layer.gated_norm", "layer.swiglu",
    "layer.tiles", "layer.embedding",
    "layer.expert_product", "rows.expert_swiglu", "rows.expert_tiles", "rows.attention_rows",
    "layer.channel_gates", "layer.logit_cotangents", "chunks.pairs", "forward.channel_outputs",
    "forward.channel_transitions", "backward.channel_gradients", "ampere.prepare", "ampere.walk", "ampere.gradients",
    "ampere.channel_prepare", "ampere.channel_gradients",
)  # fmt: skip


LOWERED = Counter()
"""Kernels by name, as often as `no_launch` has lowered them."""


LAUNCH = Primitive("launch")


LAUNCH.multiple_results = True


LAUNCH.def_abstract_eval(lambda *inputs, name, outputs: [ShapedArray(*y) for y in outputs])


def lower_launch(context, *inputs, name, outputs):
    """Every output is the sum of all inputs."""
    LOWERED[name] += 1

    def run(*inputs):
        total = sum(jnp.sum(x.astype(jnp.float32)) for x in inputs)
        return [jnp.full(shape, total, dtype) for shape, dtype in outputs]

    return mlir.lower_fun(run, multiple_results=True)(context, *inputs)


mlir.register_lowering(LAUNCH, lower_launch)


@pytest.fixture
def no_launch(monkeypatch):
    """Kernels that write the sum of all they read everywhere: all around them runs as on a GPU."""

    def launch(name, body, *, inputs, outputs, updated=None, **rest):
        updated = updated or {}
        parts = inputs | updated, outputs | {k: x for k, x in updated.items() if x is not None}
        given, results = ({k: x for k, x in part.items() if x is not None} for part in parts)
        shapes = tuple((tuple(y.shape), jnp.dtype(y.dtype)) for y in results.values())
        arrays = LAUNCH.bind(*given.values(), name=name, outputs=shapes)
        varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in given.values()))
        return dict(zip(results, jax.lax.pcast(arrays, tuple(varying), to="varying"), strict=True))

    for module in KERNEL_MODULES:
        monkeypatch.setattr(importlib.import_module(f"pallas_kernels.{module}"), "launch", launch)
    monkeypatch.setattr(device_launch, "device_reason", lambda *_: None)
    jax.clear_caches()  # of what was traced with other kernels
    yield
    jax.clear_caches()


@pytest.mark.slow
@partitioners
@pytest.mark.parametrize(
    ("kernels", "options", "placement"),
    [
        ("mosaic_gpu", dict(T=4096, B=8, heads=(8, 8, 16)), "rows"),  # cut into segments
        ("mosaic_gpu", dict(T=4096, B=8, heads=(8, 8, 16)), "rows and heads"),
        ("mosaic_gpu", dict(T=200, B=8, heads=(8, 8, 8)), "heads"),
        ("mosaic_gpu", dict(T=8192, B=1, heads=(8, 8, 8), lengths=(100, 412, 188, 3396)), "heads"),
        ("mosaic_gpu", dict(T=512, B=1, heads=(8, 8, 8), lengths=(256, 256)), "heads"),  # run as a batch
        ("mosaic_gpu", dict(T=4096, B=8, heads=(8, 8, 16), channels=True), "rows and heads"),
        pytest.param(
            *("mosaic_gpu", dict(T=8192, B=1, heads=(8, 8, 8), lengths=(100, 3396), channels=True), "heads"),
            marks=pytest.mark.slow,
        ),
        ("mosaic_mma", dict(T=4096, B=8, heads=(8, 8, 16)), "rows and heads"),  # cut into segments
        ("mosaic_mma", dict(T=512, B=1, heads=(8, 8, 8), lengths=(256, 256)), "heads"),
        ("mosaic_mma", dict(T=4096, B=8, heads=(8, 8, 16), channels=True), "rows and heads"),
        pytest.param(
            *("mosaic_mma", dict(T=500, B=1, heads=(8, 8, 8), lengths=(200, 256)), "heads"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda x: (
        x
        if isinstance(x, str)
        else "x".join(f"{n}" for n in (x["B"], x["T"], *("channels",) * ("channels" in x)))
    ),
)
@pytest.mark.usefixtures("no_launch")
def test_real_compositions_run_on_the_shards(kernels, options, placement, shardy):
    """The compositions of the real kernels on shapes of the shards, with the residuals that they keep."""
    options = dict(options)
    rule, channels = gdn_jax.gated_delta_rule, ()
    if options.pop("channels", False):  # a decay of each
        rule, channels = gdn_jax.delta_rule, (64,)
    case = cases.Case("real", K=64, V=64, **options)
    T, B, (Hq, Hk, HV) = case.T, case.B, case.heads
    N = len(case.lengths) if case.lengths else B
    cu = put(np.cumsum((0, *case.lengths)), jnp.int32) if case.lengths else None
    mesh, (tokens, states) = mesh_of((2, 4), ("d", "e")), PLACEMENTS[placement]

    def array(shape, dtype, where):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    q, k, v = (array((B, T, H, 64), jnp.bfloat16, tokens) for H in (Hq, Hk, HV))
    g, beta = (array((B, T, HV, *widths), jnp.float32, tokens) for widths in (channels, ()))
    state = array((N, HV, 64, 64), jnp.float32, states)

    def call(*a):
        rest = dict(initial_state=a[5], cu_seqlens=cu, use_qk_l2norm=True)
        return rule(*a[:5], **rest, implementation=kernels)

    with meshes.partitioner(shardy):
        compiled = value_and_gradients(call).lower((q, k, v, g, beta, state), (v, state)).compile()
    assert not traffic(compiled.as_text()).count
    assert all(x.spec != spec() for x in jax.tree.leaves(compiled.output_shardings))


def gradients_on(text, **sizes):
    """The compiled text of a model's gradients on a mesh of eight devices, with all kernels."""
    sizes = dict(vocab_size=64, hidden_size=256, intermediate_size=256, expand_v=1.0) | sizes
    shape = MeshShape.parse(text)
    mesh = shape.make(mesh_of((8,), ("all",)).devices.tolist())

    def lie(where, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, where))

    config = ModelConfig(**sizes, dtype="bfloat16", implementation="mosaic_gpu")
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, tokens):
        return nnx.merge(graphdef, params, rest).hidden_states(tokens)[0].astype(jnp.float32).sum()

    params = jax.tree.map(lambda x, where: lie(where, x), params, sharding.parameter_specs(params, shape))
    tokens = lie(spec("data", "context"), jax.ShapeDtypeStruct((8, 256 * shape.context), jnp.int32))
    jax.clear_caches()
    LOWERED.clear()
    with contextlib.nullcontext() if text == "data=8" else jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss)).lower(params, rest, tokens)
        # Of a mesh that is set nothing is left to ask while XLA compiles.
        assert ("@CustomSPMDPartitioning" in program.as_text()) == (text == "data=8")
        return program.compile(compiler_options={"xla_backend_optimization_level": 0}).as_text()


@pytest.mark.parametrize(
    ("text", "heads", "width"),
    [
        pytest.param("data=8", 4, 64, marks=pytest.mark.crossed),
        pytest.param("data=8", 8, 128, marks=pytest.mark.crossed),
        ("data=2,head=2,context=2,sharded", 4, 64),
    ],
    ids=["jit", "one operation", "all axes"],
)
@pytest.mark.usefixtures("no_launch")
@pytest.mark.slow
def test_a_deep_model_lowers_no_more_kernels(text, heads, width):
    """On the shards of a mesh, by plain jit and with all axes: layers share what is lowered, forward and backward,
    also where each is one operation."""

    def lowered(layers):
        program = gradients_on(text, num_layers=layers, num_heads=heads, head_dim=width)
        if text == "data=8":
            assert traffic(program).count == {"all-reduce": 1}
        return dict(LOWERED)

    two = lowered(2)
    assert len(two) >= 13 and two == lowered(3)


@pytest.mark.slow
@pytest.mark.usefixtures("no_launch")
def test_no_tokens_are_gathered():
    """By a model whose tokens are over devices and whose heads are not: it sends the convolution's last tokens, the
    gradients of weights, and for the rule states or, of rows as short as these, tokens of some heads."""
    program = gradients_on("data=2,context=4", num_layers=2, num_heads=8, head_dim=128)
    assert {*traffic(program).count} == {"all-reduce", "all-to-all", "collective-permute"}


def fused_part(name):
    """A fused part of arrays [B, T, ..] and of weights, those arrays, and how many of them are split."""
    rng = np.random.default_rng(0)
    x, y = (put(rng.standard_normal((8, 64, 1024)), jnp.bfloat16) for _ in range(2))
    heads, vector, many = x.reshape(8, 64, 8, 128), jnp.ones(1024), x.reshape(8, 1024, 64)
    return {
        "convolution": (lambda x, w: short_conv(x, w, heads=4, width=64)[:3], (x, jnp.ones((1024, 4))), 1),
        "norm": (lambda x, y, w: add_norm(x, y, w), (x, y, vector), 2),
        "gated norm": (lambda o, z, w: gated_norm(o, z, w), (heads, heads, vector[:128]), 2),
        "its projection": (gated_norm, (heads, heads, vector[:128], jnp.ones((1024, 16))), 2),
        "gates of channels": (channel_gates, (heads, jnp.ones(8), jnp.ones((8, 128))), 1),
        "SwiGLU": (swiglu, (x, jnp.ones((1024, 64)), jnp.ones((1024, 64)), jnp.ones((64, 16))), 1),
        "SwiGLU of many rows": (swiglu, (many, *(jnp.ones((64, 64)),) * 3), 1),
    }[name]


@pytest.mark.slow
@kinds
@pytest.mark.parametrize(
    "name",
    [
        "convolution",
        "norm",
        "gated norm",
        "its projection",
        "gates of channels",
        "SwiGLU",
        "SwiGLU of many rows",
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_fused_parts_run_on_the_shards(kind, name, monkeypatch):
    """Forward and backward; alone the gradients of weights are summed over the rows. Those of a SwiGLU of many rows
    are made by a kernel, as those of still more are."""
    monkeypatch.setattr(weight_gradient, "num_parts", lambda T, M, N: 2)
    mesh = mesh_of((8,), ("d",), kind)
    f, arrays, split = fused_part(name)
    primals = place(mesh, arrays, [spec("d") if i < split else spec() for i in range(len(arrays))])
    shapes = jax.eval_shape(f, *arrays)
    cotangents = jax.tree.map(lambda x: place(mesh, [jnp.ones(x.shape, x.dtype)], [spec("d")])[0], shapes)
    compiled = value_and_gradients(f).lower(primals, cotangents).compile()
    assert traffic(compiled.as_text()).count == {"all-reduce": 1}
    results = jax.tree.leaves(compiled(primals, cotangents))
    assert all(y.sharding.spec[0] == "d" for y in results[: split - len(arrays)])


@pytest.mark.parametrize(
    ("name", "result"),
    [("gated norm", spec(None, None, "d")), ("its projection", spec())],
)
@pytest.mark.usefixtures("no_launch")
def test_fused_parts_run_on_parts_of_the_heads(name, result):
    """The gradient of the norm's weight and the projected result are sums over heads."""
    mesh = mesh_of((8,), ("d",))
    f, arrays, split = fused_part(name)
    weights = [spec("d") if x.ndim == 2 else spec() for x in arrays[split:]]
    primals = place(mesh, arrays, [spec(None, None, "d")] * split + weights)
    shape = jax.eval_shape(f, *arrays)
    (cotangent,) = place(mesh, [jnp.ones(shape.shape, shape.dtype)], [result])
    compiled = value_and_gradients(f).lower(primals, cotangent).compile()
    assert set(traffic(compiled.as_text()).count) == {"all-reduce"}


def test_the_kernels_lower_for_a_gpu_mesh(monkeypatch):
    """It is one operation that XLA splits, once forward and once backward."""
    monkeypatch.setattr(device_launch, "device_reason", lambda *_: None)
    mesh = mesh_of((8,), ("d",))
    rows = NamedSharding(mesh, spec("d"))
    v = jax.ShapeDtypeStruct((8, 256, 2, 64), jnp.bfloat16, sharding=rows)
    g = jax.ShapeDtypeStruct((8, 256, 2), jnp.float32, sharding=rows)

    def loss(q, k, v, g, beta):
        return (
            gdn_jax.gated_delta_rule(q, k, v, g, beta, implementation="mosaic_gpu")[0]
            .astype(jnp.float32)
            .sum()
        )

    lowered = (
        jax.jit(jax.grad(loss, (0, 1, 2, 3, 4))).trace(v, v, v, g, g).lower(lowering_platforms=("cuda",))
    )
    text = lowered.as_text()
    assert len(re.findall("@CustomSPMDPartitioning", text)) == 2
    assert "mosaic_gpu" not in text, "the kernels wait for the partitioner"
