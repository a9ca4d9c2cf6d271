"""Operations on sharded arrays under plain jit: every device works on its own shards, and nothing is sent."""

import contextlib
import dataclasses
import functools
import importlib
import re
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from collectives import traffic
from flax import nnx
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from meshes import AUTO, EXPLICIT, mesh_of, place, spec, value_and_gradients
from tolerances import GRADIENTS, STATES, assert_close, head_axis, tolerance

import gdn_jax
from gdn_jax.checks import cases
from gdn_jax.fused.channel_gates import channel_gates
from gdn_jax.fused.norms import add_norm, gated_norm
from gdn_jax.fused.short_conv import short_conv
from gdn_jax.fused.swiglu import swiglu
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.parallel import sharding
from gdn_jax.parallel.mesh import MeshShape
from pallas_kernels.ampere import rule as mma_rule
from pallas_kernels.device import launch as device_launch
from pallas_kernels.layer import weight_gradient

stand_ins = meshes.stand_ins
kinds = pytest.mark.parametrize(
    "kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)], ids=["automatic", "explicit"]
)
partitioners = pytest.mark.parametrize("shardy", [True, False], ids=["shardy", "gspmd"])
ON_SHARDS = {
    "plain-rows": ("plain", "rows"),
    "few keys-heads": ("few keys", "heads"),
    "few keys-rows and heads": ("few keys", "rows and heads"),
    "packed-heads": ("packed", "heads"),
    "segments-rows and heads": ("segments", "rows and heads"),
}
"""Case and placement."""

EIGHT = ("d", "e")
PLACEMENTS = {
    "rows": (spec(EIGHT), spec(EIGHT)),
    "heads": (spec(None, None, EIGHT), spec(None, EIGHT)),
    "rows and heads": (spec("d", None, "e"), spec("d", "e")),
}
"""Name -> where tokens and states lie on a mesh of 2 x 4 devices."""

CASES = {
    "plain": cases.Case("plain", T=70, B=8, heads=(8, 8, 8), K=8, V=8, use_qk_l2norm=True),
    "few keys": cases.Case("few", T=70, B=8, heads=(8, 8, 16), K=8, V=8, state_layout="vk"),
    "packed": cases.Case("packed", T=70, B=1, heads=(8, 8, 8), K=8, V=8, lengths=(30, 0, 20)),
    "segments": cases.Case("segments", T=40, B=8, heads=(16, 8, 8), K=8, V=8, segments=((13, 20, 7),) * 8),
}


def run(implementation, case, x, mesh, placement=None, **options):
    """Outputs and gradients of arguments that lie so on a mesh, by name; and what was sent."""
    tokens, states = placement or (spec(), spec())

    cu = None if x.cu_seqlens is None else jnp.asarray(x.cu_seqlens)

    def call(*primals):
        known = dict(initial_state=primals[5], cu_seqlens=cu, segment_ids=ids)
        return gdn_jax.gated_delta_rule(
            *primals[:5], **known, **case.rule_options, **options, implementation=implementation
        )

    ids = None if x.segment_ids is None else place(mesh, [x.segment_ids], [spec(*tokens[:1])])[0]
    primals = place(mesh, x[:6], (tokens,) * 5 + (states,))
    cotangents = place(mesh, (x.do, x.dh_T), (tokens, states))
    compiled = value_and_gradients(call).lower(primals, cotangents).compile()
    outputs, gradients = compiled(primals, cotangents)
    return dict(zip(STATES + GRADIENTS, (*outputs, *gradients), strict=True)), traffic(compiled.as_text())


@functools.cache
def on_one_device(implementation, name, **options):
    """Outputs and gradients of a case of CASES on a mesh of one device, compiled once for all meshes beside it."""
    got, _ = run(implementation, CASES[name], cases.inputs(CASES[name]), mesh_of((1,), ("one",)), **options)
    return jax.device_get(got)


def integers(case):
    """Inputs of a case with small integers in the places of its numbers."""
    x, rng = cases.inputs(case, "bfloat16"), np.random.default_rng(0)
    numbers = [rng.integers(1, 4, y.shape).astype(y.dtype) for y in (*x[:6], x.do, x.dh_T)]
    return x._replace(**dict(zip((*x._fields[:6], "do", "dh_T"), numbers, strict=True)))


@functools.cache
def stand_ins_on_one_device(name):
    """The same for stand-ins of the kernels on integers, while a test has them in the kernels' places."""
    case = dataclasses.replace(CASES[name], use_qk_l2norm=False, scale=1.0)
    mesh = mesh_of((1,), ("one",))
    got, _ = run("mosaic_gpu", case, integers(case), mesh)
    return jax.device_get(got)


def check_same(got, expected, dtype="float32"):
    """Compares every output and gradient, within what the same sums in another order may differ by."""
    for name, y in got.items():
        assert_close(np.asarray(expected[name], np.float64), y, tolerance(name, dtype), name, head_axis(name))


FEW, PACKED = ("few keys", "rows and heads"), ("packed", "heads")
SLOW_FORMS = (
    ("chunked", "segments", "rows", AUTO),
    ("chunked", *PACKED, AUTO),
    ("recurrent", *PACKED, AUTO),
    ("chunked", *FEW, EXPLICIT),
)
CROSSED_FORMS = (
    ("chunked", "plain", "rows", AUTO),
    ("recurrent", "plain", "rows", AUTO),
    ("recurrent", "few keys", "heads", AUTO),
    ("chunked", "plain", "rows", EXPLICIT),
    ("chunked", "segments", "rows", EXPLICIT),
    ("chunked", *PACKED, EXPLICIT),
    ("recurrent", *PACKED, EXPLICIT),
)


@pytest.mark.parametrize(
    ("implementation", "name", "placement", "kind"),
    [
        ("chunked", *FEW, AUTO),
        *(pytest.param(*values, marks=pytest.mark.slow) for values in SLOW_FORMS),
        *(pytest.param(*values, marks=pytest.mark.crossed) for values in CROSSED_FORMS),
    ],
)
def test_plain_forms_run_on_the_shards(implementation, name, placement, kind):
    case = CASES[name]
    x = cases.inputs(case)
    mesh = mesh_of((2, 4), ("d", "e"), kind)
    got, sent = run(implementation, case, x, mesh, PLACEMENTS[placement], chunk_size=16)
    assert not sent.count, sent.count
    check_same(got, on_one_device(implementation, name, chunk_size=16))


@pytest.mark.parametrize(
    ("name", "placement", "shardy"),
    [
        *(pytest.param(*values, True, id=f"{name}-shardy") for name, values in ON_SHARDS.items()),
        *(
            pytest.param(
                *values, False, id=f"{name}-gspmd", marks=() if name == "packed-heads" else pytest.mark.slow
            )
            for name, values in ON_SHARDS.items()
        ),
    ],
)
@pytest.mark.usefixtures("stand_ins")
def test_kernels_run_on_the_shards(name, placement, shardy):
    """The seam, with stand-ins for the kernels: forward, what it saves, and backward; all bits of one device."""
    case = dataclasses.replace(CASES[name], use_qk_l2norm=False, scale=1.0)
    x = integers(case)
    with meshes.partitioner(shardy):
        got, sent = run("mosaic_gpu", case, x, mesh_of((2, 4), ("d", "e")), PLACEMENTS[placement])
    alone = stand_ins_on_one_device(name)
    assert not sent.count, sent.count
    for key, y in got.items():
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(alone[key], np.float32), key)
        axes = "d" if placement == "rows and heads" else EIGHT
        assert axes in y.sharding.spec, (key, y.sharding)


@pytest.mark.usefixtures("stand_ins")
def test_kernels_run_on_the_shards_of_explicit_axes():
    case = CASES["few keys"]
    x = cases.inputs(case, "bfloat16")
    mesh = mesh_of((2, 4), ("d", "e"), EXPLICIT)
    got, sent = run("mosaic_gpu", case, x, mesh, PLACEMENTS["rows and heads"])
    alone, _ = run("mosaic_gpu", case, x, mesh_of((1,), ("one",)))
    assert not sent.count, sent.count
    check_same(got, alone, "bfloat16")


@partitioners
@pytest.mark.usefixtures("stand_ins")
def test_heads_that_do_not_divide_are_gathered(shardy):
    """Four keys for eight devices: shards of four parts at most, and the results are right."""
    case = cases.Case("uneven", T=20, B=1, heads=(8, 4, 8), K=8, V=8)
    x = cases.inputs(case, "bfloat16")
    mesh = mesh_of((8,), ("d",))

    def call(q, k, v, g, beta, h):
        return gdn_jax.gated_delta_rule(q, k, v, g, beta, initial_state=h, implementation="mosaic_gpu")

    over, states = spec(None, None, "d"), spec(None, "d")
    primals = place(mesh, x[:6], (over, spec(), over, over, over, states))
    cotangents = place(mesh, (x.do, x.dh_T), (over, states))
    with meshes.partitioner(shardy):
        compiled = value_and_gradients(call).lower(primals, cotangents).compile()
    outputs, gradients = compiled(primals, cotangents)
    expected, _ = run("mosaic_gpu", case, x, mesh_of((1,), ("one",)))
    assert set(traffic(compiled.as_text()).count) <= {"all-gather", "all-to-all", "collective-permute"}
    check_same(dict(zip(STATES + GRADIENTS, (*outputs, *gradients), strict=True)), expected, "bfloat16")


@pytest.mark.usefixtures("stand_ins")
def test_a_mesh_that_tracing_does_not_see():
    """Shardings given to jit for arrays that have none; and rows under vmap, where the kernels run unsplit."""
    case = CASES["plain"]
    x = cases.inputs(case, "bfloat16")
    mesh = mesh_of((8,), ("d",))
    start = jnp.asarray(x.initial_state)

    def call(*tokens):
        return gdn_jax.gated_delta_rule(*tokens, implementation="mosaic_gpu", initial_state=start)[0]

    rows = NamedSharding(mesh, spec("d"))
    shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in x[:5]]
    compiled = jax.jit(call, in_shardings=rows, out_shardings=rows).lower(*shapes).compile()
    assert not traffic(compiled.as_text()).count
    twice = [np.stack([y, y]) for y in x[:5]]
    o = jax.jit(jax.vmap(call))(*twice)
    np.testing.assert_array_equal(np.asarray(o[1], np.float32), np.asarray(jax.jit(call)(*x[:5]), np.float32))


@pytest.mark.usefixtures("stand_ins")
@kinds
def test_debug_checks_tell_what_is_gathered(kind):
    x = cases.inputs(CASES["plain"], "bfloat16")
    mesh = mesh_of((2, 4), ("d", "e"), kind)
    start = jnp.asarray(x.initial_state)

    def call(*tokens):
        return gdn_jax.gated_delta_rule(*tokens, implementation="mosaic_gpu", initial_state=start)

    def messages(*specs):
        # Traced again: the checks are part of what is traced.
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            jax.jit(lambda *a: call(*a)).lower(*place(mesh, x[:5], specs)).compile()
        return [str(w.message) for w in told if "gathered" in str(w.message)]

    gdn_jax.debug_checks(True)
    try:
        assert not messages(*(spec("d", None, "e"),) * 5)
        told = messages(*(spec("d", None, "e"),) * 3, spec("d"), spec(None, "d"))
    finally:
        gdn_jax.debug_checks(False)
    assert told == ["beta: its tokens lie on mesh axes d, which cannot be split; it is gathered"]
    assert not messages(*(spec(None, "d"),) * 5), "the checks are off"


KERNEL_MODULES = (
    "chunks.gates", "chunks.inverse", "chunks.segment_states", "forward.outputs", "forward.transitions",
    "backward.chain", "backward.gradients", "layer.short_conv", "layer.norm", "layer.gated_norm", "layer.swiglu",
    "layer.swiglu_product", "layer.swiglu_cotangents", "layer.weight_gradient", "layer.embedding",
    "layer.expert_product", "layer.channel_gates",
    "layer.cross_entropy", "layer.logit_cotangents", "chunks.pairs", "forward.channel_outputs",
    "forward.channel_transitions", "backward.channel_gradients", "ampere.prepare", "ampere.walk", "ampere.gradients",
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
    monkeypatch.setattr(device_launch, "device_reason", lambda: None)
    monkeypatch.setattr(mma_rule, "device_reason", lambda: None)
    jax.clear_caches()  # of what was traced with other kernels
    yield
    jax.clear_caches()


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
    cu = jnp.asarray(np.cumsum((0, *case.lengths)), jnp.int32) if case.lengths else None
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


@pytest.mark.parametrize(
    ("text", "heads", "width"),
    [
        pytest.param("data=8", 4, 64, marks=pytest.mark.crossed),
        ("data=8", 8, 128),
        ("data=2,head=2,context=2,sharded", 4, 64),
    ],
    ids=["jit", "one operation", "all axes"],
)
@pytest.mark.usefixtures("no_launch")
@pytest.mark.slow
def test_a_deep_model_lowers_no_more_kernels(text, heads, width):
    """On the shards of a mesh, by plain jit and with all axes: layers share what is lowered, forward and backward,
    also where each is one operation."""
    sizes = dict(vocab_size=64, hidden_size=256, intermediate_size=256, expand_v=1.0)
    sizes |= dict(num_heads=heads, head_dim=width)
    shape = MeshShape.parse(text)
    mesh = shape.make(mesh_of((8,), ("all",)).devices.tolist())

    def lie(where, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, where))

    def lowered(layers):
        config = ModelConfig(**sizes, num_layers=layers, dtype="bfloat16", implementation="mosaic_gpu")
        model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, rest, tokens):
            return nnx.merge(graphdef, params, rest).hidden_states(tokens)[0].astype(jnp.float32).sum()

        params = jax.tree.map(lambda x, where: lie(where, x), params, sharding.parameter_specs(params, shape))
        tokens = lie(spec("data", "context"), jax.ShapeDtypeStruct((8, 256), jnp.int32))
        jax.clear_caches()
        LOWERED.clear()
        with contextlib.nullcontext() if text == "data=8" else jax.set_mesh(mesh):
            program = jax.jit(jax.grad(loss)).lower(params, rest, tokens)
            program = program.compile(compiler_options={"xla_backend_optimization_level": 0})
        if text == "data=8":
            assert traffic(program.as_text()).count == {"all-reduce": 1}
        return dict(LOWERED)

    two = lowered(2)
    assert len(two) >= 13 and two == lowered(3)


def fused_part(name):
    """A fused part of arrays [B, T, ..] and of weights, those arrays, and how many of them are split."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((8, 64, 1024)), jnp.bfloat16) for _ in range(2))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.crossed)], ids=["automatic", "explicit"]
)
def test_other_operations_run_on_the_shards(kind):
    """chunk_states, a step, and the plain convolution with a state and with segments."""
    x = cases.inputs(CASES["few keys"])
    mesh = mesh_of((2, 4), ("d", "e"), kind)
    tokens, one, states = spec("d", None, "e"), spec("d", "e"), spec("d", "e")
    placed = place(mesh, x[:6], (tokens,) * 5 + (states,))
    step = place(mesh, [y[:, 0] for y in x[:5]], (one,) * 5)
    ids = np.arange(70)[None] // np.arange(1, 9)[:, None]
    rng = np.random.default_rng(0)
    conv = [rng.standard_normal(s).astype(np.float32) for s in ((8, 70, 16), (16, 4), (8, 16, 3))]
    conv_placed = place(mesh, (*conv, ids), (tokens, spec("e"), states, spec("d")))

    def calls(x, step, x_conv, weight, state, ids):
        return (
            gdn_jax.chunk_states(*x[1:5], initial_state=x[5], state_layout="vk"),
            gdn_jax.gated_delta_step(*step, x[5], state_layout="vk"),
            gdn_jax.causal_conv1d(x_conv, weight, initial_state=state),
            gdn_jax.causal_conv1d(x_conv, weight, segment_ids=ids),
        )

    compiled = jax.jit(calls).lower(placed, step, *conv_placed).compile()
    assert not traffic(compiled.as_text()).count
    expected = jax.jit(calls)(x[:6], [y[:, 0] for y in x[:5]], *conv, ids)
    for got, want in zip(
        jax.tree.leaves(compiled(placed, step, *conv_placed)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
        assert got.sharding.spec[0] == "d"


def test_the_kernels_lower_for_a_gpu_mesh(monkeypatch):
    """It is one operation that XLA splits, once forward and once backward."""
    monkeypatch.setattr(device_launch, "device_reason", lambda: None)
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
