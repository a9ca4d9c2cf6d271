"""Rows whose tokens are split over devices: the rule and the convolution as on one device, and what is sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from harness import tiers
from meshes import mesh_from, mesh_of, spec, value_and_gradients
from tolerances import GRADIENTS, STATES, STRENGTHS, assert_close, head_axis, tolerance

import gdn_jax
from gdn_jax.bench.collectives import traffic
from gdn_jax.checks import cases, oracle
from gdn_jax.parallel import context, exchange, token_shards
from gdn_jax.parallel.borders import Borders
from gdn_jax.shapes import Dims
from pallas_kernels.device import launch as device_launch
from pallas_kernels.device.needs import Needs

TOKENS, WHOLE = spec(None, "context"), spec()
SMALL = dict(heads=(1, 1, 2), K=6, V=4, chunk_size=16)
BOTH = dict(erase="channel", write="channel")


def on_mesh(mesh, case, x, implementation="chunked", by="states"):
    """The rule of tokens that are split over a mesh of one axis."""

    options = dict(axis_name="context", implementation=implementation, by=by, **case.options)

    def local(primals, cu, ids):
        q, k, v, g, beta, state, *apart = primals
        known = dict(initial_state=state, cu_seqlens=cu, segment_ids=ids, **options)
        if case.channel_g is None and not apart:
            return context.gated_delta_rule(q, k, v, g, beta, **known)
        return context.delta_rule(q, k, v, g, beta, *apart, **known)

    cu, ids = (None if y is None else put(y) for y in (x.cu_seqlens, x.segment_ids))

    def call(*primals):
        specs = ((TOKENS,) * 5 + (WHOLE, TOKENS, TOKENS))[: len(primals)], WHOLE, TOKENS
        f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(TOKENS, WHOLE))
        return f(primals, cu, ids)

    return call


CASES = {
    "one token a device": (8, dict(T=8, B=2)),
    "whole rows, two devices": (2, dict(T=34, B=2)),
    "whole rows, three devices": (3, dict(T=30, B=1)),
    "whole rows, four devices": (4, dict(T=40, B=1, state_layout="vk", use_qk_l2norm=True)),
    "whole rows, five devices": (5, dict(T=20, B=1)),
    "whole rows, six devices": (6, dict(T=30, B=1)),
    "whole rows, seven devices": (7, dict(T=28, B=1, heads=(2, 1, 1), initial_state=False)),
    "whole rows, eight devices": (8, dict(T=80, B=1)),
    "no gates": (4, dict(T=16, B=1, g=None, beta=None)),
    # Segment borders within devices, at their borders, one token from them; one segment over four devices.
    "segments": (8, dict(T=64, B=2, segments=((3, 5, 1, 33, 6, 16), (8, 8, 7, 1, 40)))),
    "segments, no gates": (4, dict(T=32, B=1, g=None, segments=((1, 22, 9),))),
    # Sequences that are empty, of one token, end at a border, span three devices; padding behind them.
    "packed": (8, dict(T=64, B=1, lengths=(5, 0, 1, 2, 8, 25, 0, 13, 1, 0))),
    "packed, one over all": (4, dict(T=32, B=1, lengths=(32,), state_layout="vk")),
    "packed, most of it padding": (4, dict(T=32, B=1, lengths=(3, 4), initial_state=False)),
    "channels, packed": (
        8,
        dict(T=64, B=1, lengths=(5, 0, 1, 2, 8, 25, 0, 13, 1, 0), channel_g="kinds", **BOTH),
    ),
    "channels, whole rows": (4, dict(T=40, B=2, channel_g="mixed", state_layout="vk", use_qk_l2norm=True)),
    "channels, five devices": (5, dict(T=20, B=1, channel_g="some -inf", erase="head", write="channel")),
    "apart, gate of a head": (3, dict(T=30, B=1, erase="channel", write="head")),
    "channels, segments": (
        8,
        dict(T=64, B=2, segments=((3, 5, 1, 33, 6, 16), (8, 8, 7, 1, 40)), channel_g="kinds"),
    ),
    "apart, no gate, segments": (4, dict(T=32, B=1, g=None, segments=((1, 22, 9),), **BOTH)),
}
CROSSED = {f"whole rows, {number} devices" for number in ("two", "three", "five", "six", "eight")} | {
    "segments, no gates", "packed, one over all", "channels, whole rows", "channels, five devices",
    "apart, gate of a head", "apart, no gate, segments",
}  # fmt: skip
"""Numbers of devices whose exchange has as many steps as that of four, of seven and of the packed rows, or fewer;
absent gates of segments, which rows have; one sequence, which is a row; other gates with options that heads have."""


@pytest.mark.parametrize("name", tiers(CASES, ("segments",), CASES.keys() - CROSSED))
def test_rule(name):
    """Outputs, final states and all gradients against float64 on one device."""
    devices, options = CASES[name]
    case = cases.Case(f"context {name}", **{**SMALL, **options})
    check_rule(devices, case, "chunked")


EXCHANGES = {
    "one token a device": (2, dict(T=2, B=1, g=None, beta=None)),
    "whole rows": (4, dict(T=32, B=2, state_layout="vk", use_qk_l2norm=True)),
    "no gates, no state": (8, dict(T=16, B=1, g=None, beta=None, initial_state=False)),
    "segments": (4, dict(T=32, B=2, segments=((3, 5, 1, 17, 6), (8, 8, 7, 9)))),
    "packed": (8, dict(T=64, B=1, lengths=(5, 0, 1, 2, 8, 25, 0, 13, 1, 0))),
    "channels": (
        4,
        dict(T=32, heads=(4, 4, 8), segments=((3, 29), (8, 24)), channel_g="kinds", **BOTH),
    ),
}


@pytest.mark.parametrize(
    "name", tiers(EXCHANGES, ("one token a device",), ("packed", "no gates, no state", "channels"))
)
def test_rule_by_heads(name):
    """All tokens of some heads on every device."""
    devices, options = EXCHANGES[name]
    case = cases.Case(f"exchange {name}", **{**SMALL, "heads": (8, 8, 16), **options})
    check_rule(devices, case, "chunked", by="heads")


def test_what_is_handed_over():
    """States where they travel in few steps or shards are long, or where heads do not divide; else heads."""
    dims = Dims(B=1, T=1024, N=1, Hq=16, Hk=16, HV=32, HO=32, K=128, V=128)
    assert exchange.sent_bytes(dims, 2, 4) == 2 * 1024 * (2 * 96 * 128 + 8 * 32) * 3 // 4
    assert exchange.pays(dims, 2, 4) and exchange.pays(dims, 2, 16)
    assert not exchange.pays(dims, 2, 2), "there is no step to save"
    assert not exchange.pays(dims._replace(T=2048), 2, 4)
    assert not exchange.pays(dims, 2, 32) and not exchange.pays(dims, 2, 3), "16 heads"

    def sent(T, by):
        case = cases.Case("exchange sent", B=1, T=T, heads=(4, 4, 8), K=8, V=4, chunk_size=16)
        x = cases.inputs(case)
        call = on_mesh(mesh_of((4,), ("context",)), case, x, "recurrent", by)
        f = value_and_gradients(lambda *p: call(*p, x.initial_state)[0].astype(jnp.float32))
        return traffic(f.lower(x[:5], put(x.do)).compile().as_text())

    # All that has one dtype at once, here q, k, v and the gates, and o; and their cotangents.
    got = sent(32, None)
    assert got.count == {"all-to-all": 4}, got.count
    case_dims = Dims(B=1, T=8, N=1, Hq=4, Hk=4, HV=8, HO=8, K=8, V=4)
    assert got.total == exchange.sent_bytes(case_dims, 4, 4)
    assert set(sent(32, "states").count) == {"collective-permute"}


def check_rule(devices, case, implementation, by="states"):
    """One case against the oracle."""
    x = cases.inputs(case)
    call = on_mesh(mesh_of((devices,), ("context",)), case, x, implementation, by)
    results = value_and_gradients(call)(x.primals, (x.do, x.dh_T))
    expected = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    for key, y in zip(STATES + GRADIENTS + STRENGTHS, sum(results, ()), strict=False):
        if y is not None:
            assert_close(expected[key], y, tolerance(key, "float32"), key, head_axis(key))


@pytest.mark.parametrize("name", tiers(("packed", "segments"), ()))
def test_rule_by_the_recurrence(name):
    devices, options = CASES[name]
    check_rule(devices, cases.Case(f"context {name}", **{**SMALL, **options}), "recurrent")


@pytest.mark.crossed
def test_a_scale_that_is_an_array():
    """An array of a scale has a gradient."""
    case = cases.Case("context scale", T=16, B=1, **SMALL)
    x = cases.inputs(case)
    mesh = mesh_of((4,), ("context",))

    def local(q, k, v, scale):
        return context.gated_delta_rule(q, k, v, axis_name="context", scale=scale)[0]

    f = jax.shard_map(local, mesh=mesh, in_specs=(TOKENS,) * 3 + (WHOLE,), out_specs=TOKENS)
    got = value_and_gradients(f)((*x[:3], put(0.3, "float32")), put(x.do))
    f = lambda q, k, v, scale: gdn_jax.gated_delta_rule(q, k, v, scale=scale)[0]  # noqa: E731
    expected = value_and_gradients(f)((*x[:3], put(0.3, "float32")), put(x.do))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_what_a_model_calls():
    """Rows, heads and tokens over a mesh of a model, under plain jit."""
    x = cases.inputs(cases.Case("mesh", T=32, B=2, heads=(2, 2, 2), K=6, V=4, channel_g="mixed", **BOTH))
    arguments = [put(y) for y in (x.q, x.k, x.v, x.g)]
    apart = dict(erase=put(x.erase), write=put(x.write))
    want = gdn_jax.delta_rule(*arguments, **apart)
    _, mesh = mesh_from("data=2,head=2,context=2")
    with jax.set_mesh(mesh):
        got = jax.jit(token_shards.delta_rule_on_mesh)(*arguments, **apart)
    for one, other in zip(want, got, strict=True):
        assert_close(np.asarray(one), np.asarray(other), 1e-5)


@functools.cache
def sent_by(devices, T):
    """Returns what a device sends for a forward and a backward whose final state nobody reads."""
    case = cases.Case("context sent", B=1, T=T, heads=(1, 1, 2), K=8, V=4, chunk_size=16)
    x = cases.inputs(case)
    call = on_mesh(mesh_of((devices,), ("context",)), case, x, "recurrent")

    def loss(*primals):
        return call(*primals, x.initial_state)[0].astype(jnp.float32)

    f = value_and_gradients(loss)
    return traffic(f.lower(x[:5], put(x.do)).compile().as_text())


@pytest.mark.slow
def test_what_is_sent_grows_with_the_logarithm_of_the_devices():
    """Each way one state, and for n devices ceil(log2(n - 1)) states and one map less: no more for longer rows."""
    state, map_ = 2 * 8 * 4 * 4, 2 * 8 * 8 * 4
    for devices, steps in ((2, 0), (4, 2), (8, 3)):
        expected = 2 * ((1 + steps) * state + max(0, steps - 1) * map_)
        sent = sent_by(devices, 64)
        assert set(sent.count) == {"collective-permute"}, sent.count
        assert sent.total == expected, devices
    assert sent_by(4, 256).sent == sent_by(4, 64).sent


def borders_of(cu, T, devices):
    """Returns what `Borders.of_packed` finds on each device, as rows of numbers."""
    mesh = mesh_of((devices,), ("context",))

    def local(cu):
        return jax.tree.map(lambda y: jnp.asarray(y)[None], Borders.of_packed(cu, T, "context"))

    f = jax.shard_map(local, mesh=mesh, in_specs=WHOLE, out_specs=spec("context"))
    return [np.asarray(y).astype(int).tolist() for y in jax.jit(f)(put(cu))]


def test_borders_of_packed_sequences():
    """Sequences [0, 3), empty, [3, 14), [14, 16) and padding on five devices of four tokens."""
    first, last, enters, leaves, passes = borders_of([0, 3, 3, 14, 16], 4, 5)
    assert enters == [0, 1, 1, 1, 0] and leaves == [1, 1, 1, 0, 0] and passes == [0, 1, 1, 0, 0]
    assert [n for n, e in zip(first, enters, strict=True) if e] == [2, 2, 2]
    assert [n for n, e in zip(last, leaves, strict=True) if e] == [2, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(chunk_size=17), "chunk_size: expected one of"),
        (
            dict(by="heads"),
            "by: expected 'states', for 1 heads.* cannot be split over 2 devices; got 'heads'",
        ),
        (dict(by="tokens"), "by: expected 'states' or 'heads', got 'tokens'"),
    ],
)
def test_arguments_are_checked(options, message):
    mesh = mesh_of((2,), ("context",))

    def f(q, k, v):
        return context.gated_delta_rule(q, k, v, axis_name="context", **options)[0]

    x = np.ones((1, 4, 1, 2), np.float32)
    with pytest.raises(ValueError, match=message):
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS))(x, x, x)


def test_kernels_that_hand_over_no_states(monkeypatch):
    """By name they are refused; unasked the chunked form runs where a device has no others. Kernels without a
    derivative hand over none."""
    mesh = mesh_of((2,), ("context",))

    def traced(dtype, g=None, **how):
        x = jnp.ones((1, 128, 2, 64), dtype)

        def f(x, g):
            return context.delta_rule(x, x, x, g, axis_name="context", by="states", **how)[0]

        return str(jax.make_jaxpr(jax.shard_map(f, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS))(x, g))

    channels = jnp.zeros((1, 128, 2, 64))
    monkeypatch.setattr(device_launch, "device_reason", lambda *_: None)
    assert "mpmd_map" in traced(jnp.bfloat16, channels) and "mpmd_map" not in traced(jnp.float16, channels)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu': states are handed over by 'chunked', 'recu"):
        traced(jnp.float16, channels, implementation="mosaic_gpu")
    lacks = lambda needs, *_: None if needs == Needs.MMA else "it has no wgmma"  # noqa: E731
    monkeypatch.setattr(device_launch, "device_reason", lacks)
    with pytest.raises(
        NotImplementedError, match="'mosaic_mma': states are handed over by 'mosaic_gpu', 'chunked'"
    ):
        traced(jnp.bfloat16, implementation="mosaic_mma")
    assert "mpmd_map" not in traced(jnp.bfloat16)
