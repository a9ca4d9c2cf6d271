"""Operations on sharded arrays under plain jit: every device works on its own shards, and nothing is sent."""

import dataclasses
import functools
import warnings

import jax
import meshes
import numpy as np
import pytest
from device_arrays import put
from jax.sharding import NamedSharding
from meshes import (
    AUTO,
    EIGHT,
    EXPLICIT,
    PLACEMENTS,
    kinds,
    mesh_of,
    partitioners,
    place,
    spec,
    value_and_gradients,
)
from tolerances import GRADIENTS, STATES, STRENGTHS, assert_close, head_axis, tolerance

import gdn_jax
from gdn_jax.bench.collectives import traffic
from gdn_jax.checks import cases
from gdn_jax.checks.check import rule
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.partitioning import expected_shards, on_shards
from gdn_jax.training.placement import Placement

stand_ins = meshes.stand_ins


ON_SHARDS = {
    "plain-rows": ("plain", "rows"),
    "few keys-heads": ("few keys", "heads"),
    "few keys-rows and heads": ("few keys", "rows and heads"),
    "packed-heads": ("packed", "heads"),
    "segments-rows and heads": ("segments", "rows and heads"),
}
"""Case and placement."""


CASES = {
    "plain": cases.Case("plain", T=70, B=8, heads=(8, 8, 8), K=8, V=8, use_qk_l2norm=True),
    "few keys": cases.Case("few", T=70, B=8, heads=(8, 8, 16), K=8, V=8, state_layout="vk"),
    "packed": cases.Case("packed", T=70, B=1, heads=(8, 8, 8), K=8, V=8, lengths=(30, 0, 20)),
    "segments": cases.Case("segments", T=40, B=8, heads=(16, 8, 8), K=8, V=8, segments=((13, 20, 7),) * 8),
    "channels": cases.Case("channels", T=40, B=2, heads=(4, 4, 4), K=8, V=8, channel_g="mixed"),
    "apart": cases.Case(
        "apart", T=32, B=2, heads=(4, 4, 4), K=6, V=4, channel_g="mixed", erase="channel", write="channel"
    ),
}


def run(implementation, case, x, mesh, placement=None, **options):
    """Outputs and gradients of arguments that lie so on a mesh, by name; and what was sent."""
    tokens, states = placement or (spec(), spec())

    cu = None if x.cu_seqlens is None else put(x.cu_seqlens)

    def call(*primals):
        known = dict(cu_seqlens=cu, segment_ids=ids, implementation=implementation)
        return rule(primals, **known, **case.rule_options, **options)

    ids = None if x.segment_ids is None else place(mesh, [x.segment_ids], [spec(*tokens[:1])])[0]
    primals = x.primals
    primals = place(mesh, primals, ((tokens,) * 5 + (states, tokens, tokens))[: len(primals)])
    cotangents = place(mesh, (x.do, x.dh_T), (tokens, states))
    compiled = value_and_gradients(call).lower(primals, cotangents).compile()
    results = zip(STATES + GRADIENTS + STRENGTHS, sum(compiled(primals, cotangents), ()), strict=False)
    return {name: y for name, y in results if y is not None}, traffic(compiled.as_text())


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
    ("chunked", "channels", "rows and heads", AUTO),
    ("chunked", "apart", "rows and heads", EXPLICIT),
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
    if placement == "rows and heads":
        assert tuple(got["o"].sharding.spec)[:3] == ("d", None, "e")
        assert tuple(got["final_state"].sharding.spec)[:2] == ("d", "e")


@pytest.mark.parametrize(
    ("name", "placement", "shardy"),
    [
        *(pytest.param(*values, True, id=f"{name}-shardy") for name, values in ON_SHARDS.items()),
        *(
            pytest.param(
                *values,
                False,
                id=f"{name}-gspmd",
                marks=() if name == "packed-heads" else pytest.mark.crossed,
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
    start = put(x.initial_state)

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
    start = put(x.initial_state)

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


def test_a_run_on_one_of_several_devices_is_not_split():
    """Under its placement the same kernels are chosen as where there is one device."""
    x = jax.ShapeDtypeStruct((8, 4), np.float32)
    found = []
    jax.jit(lambda x: found.append(expected_shards(x))).lower(x)
    with Placement().active():
        jax.jit(lambda x: found.append(expected_shards(x))).lower(x)
    assert found == [1, None]


def scaled_and_summed(scale, x, w):
    """An operation over rows, tokens and heads, and a sum over rows and tokens for each head."""
    y = scale * x * w
    return y, y.sum((0, 1)), x[..., ::-1]


@pytest.mark.parametrize("rows", [4, 3])
def test_the_axes_of_a_mesh_that_is_set(rows):
    """Each name lies over its axis as far as that divides, sums are over all shards, and XLA is asked nothing."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-8, 8, s).astype(np.float32) for s in ((rows, 6, 4, 3), (4, 1)))  # sums are exact
    mesh = MeshShape.parse("data=2,head=2,context=2").make(jax.devices())
    places = [spec("data" if rows % 2 == 0 else None, "context", "head"), spec("head")]

    @jax.jit
    def call(x, w):
        names = ("b t h .", "h .")
        results = ("b t h .", "h . +b +t", "b t h .")
        return on_shards(
            scaled_and_summed, 2.0, (x, w), names, lambda _: results, {"b": rows, "t": 6, "h": 4}
        )

    with jax.set_mesh(mesh):
        args = place(mesh, (x, w), places)
        lowered = call.lower(*args)
        assert "@CustomSPMDPartitioning" not in lowered.as_text()
        compiled = lowered.compile()
        assert traffic(compiled.as_text()).count == {"all-reduce": 1}
        got = compiled(*args)
        together = jax.jit(jax.vmap(call))(np.stack([x, 2 * x]), np.stack([w, w]))
    assert [y.sharding.spec for y in got] == [places[0], places[1], places[0]]
    for y, both, want in zip(got, together, scaled_and_summed(2.0, x, w), strict=True):
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(both, np.stack([want, 2 * want]))
