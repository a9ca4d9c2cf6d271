"""The family's rule over split tokens and on meshes: as on one device."""

import jax
import numpy as np
import pytest
from device_arrays import put
from harness import tiers
from meshes import EXPLICIT, mesh_from, mesh_of, place, spec, value_and_gradients
from tolerances import assert_close, bound, head_axis

from gdn_jax import delta_rule
from gdn_jax.checks import family_cases, family_oracle
from gdn_jax.checks.cases import Case
from gdn_jax.parallel import context, token_shards

TOKENS, WHOLE = spec(None, "context"), spec()
SMALL = dict(heads=(1, 1, 2), K=6, V=4, chunk_size=16)
PRIMALS = ("q", "k", "v", "g", "beta", "erase", "write", "initial_state")
APART = dict(erase="channel", write="channel")
CASES = {
    # Sequences that are empty, of one token, end at a border, span three devices; padding behind them.
    "packed": (8, dict(T=64, B=1, lengths=(5, 0, 1, 2, 8, 25, 0, 13, 1, 0)), dict(gate="kinds", **APART), "states"),
    "whole rows": (4, dict(T=40, B=2, state_layout="vk", use_qk_l2norm=True), dict(gate="mixed"), "states"),
    "whole rows, five devices": (5, dict(T=20, B=1), dict(gate="some -inf", erase="head", write="channel"), "states"),
    "gate of a head": (3, dict(T=30, B=1), dict(gate=None, erase="channel", write="head"), "states"),
    "segments": (8, dict(T=64, B=2, segments=((3, 5, 1, 33, 6, 16), (8, 8, 7, 1, 40))), dict(gate="kinds"), "states"),
    "no gate, segments": (4, dict(T=32, B=1, g=None, segments=((1, 22, 9),)), dict(gate=None, **APART), "states"),
    "by heads": (4, dict(T=32, heads=(4, 4, 8), segments=((3, 29), (8, 24))), dict(gate="kinds", **APART), "heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", tiers(CASES, (), ("packed", "segments", "by heads")))
def test_split_tokens(name):
    """Outputs, final states and all gradients against float64 on one device."""
    devices, options, recipe, by = CASES[name]
    call = Case(f"context {name}", **{**SMALL, **options})
    x = family_cases.inputs(family_cases.FamilyCase(call, **recipe))
    rule = dict(scale=call.scale, use_qk_l2norm=call.use_qk_l2norm, state_layout=call.state_layout)
    given = tuple(name for name in PRIMALS if getattr(x, name) is not None)

    def local(arrays, sequences):
        options = rule | dict(chunk_size=call.chunk_size, axis_name="context", by=by)
        return context.delta_rule(**arrays, **sequences, **options)

    known = dict(cu_seqlens=x.cu_seqlens, segment_ids=x.segment_ids)
    sequences = {name: put(y) for name, y in known.items() if y is not None}
    specs = (
        {name: WHOLE if name == "initial_state" else TOKENS for name in given},
        {name: TOKENS if name == "segment_ids" else WHOLE for name in sequences},
    )
    f = jax.shard_map(
        local, mesh=mesh_of((devices,), ("context",)), in_specs=specs, out_specs=(TOKENS, WHOLE)
    )
    primals = {name: put(getattr(x, name)) for name in given}
    outputs, (gradients,) = value_and_gradients(lambda arrays: f(arrays, sequences))(
        (primals,), (x.do, x.dh_T)
    )
    expected = family_oracle.evaluate(**x.arguments, **rule, do=x.do, dh_T=x.dh_T)
    got = dict(zip(("o", "final_state"), outputs, strict=True))
    got |= {"dh_0" if name == "initial_state" else f"d{name}": y for name, y in gradients.items()}
    for key, y in got.items():
        name = {"derase": "dbeta", "dwrite": "dbeta"}.get(key, key)
        assert_close(expected[key], y, bound(name, "float32"), key, head_axis(key))


@pytest.mark.slow
def test_what_a_model_calls():
    """Rows, heads and tokens over a mesh of a model, under plain jit."""
    call = Case("mesh", T=32, B=2, heads=(2, 2, 2), K=6, V=4)
    x = family_cases.inputs(family_cases.FamilyCase(call, "mixed", "channel", "channel"))
    arguments = [put(y) for y in (x.q, x.k, x.v, x.g)]
    apart = dict(erase=put(x.erase), write=put(x.write))
    want = delta_rule(*arguments, **apart)
    _, mesh = mesh_from("data=2,head=2,context=2")
    with jax.set_mesh(mesh):
        got = jax.jit(token_shards.delta_rule_on_mesh)(*arguments, **apart)
    for one, other in zip(want, got, strict=True):
        assert_close(np.asarray(one), np.asarray(other), 1e-5)


@pytest.mark.slow
def test_explicit_axes():
    """Rows and heads on explicit axes of a mesh: results lie as the arguments do."""
    call = Case("explicit", T=32, B=2, heads=(2, 2, 2), K=6, V=4)
    x = family_cases.inputs(family_cases.FamilyCase(call, "mixed", "channel", "channel"))
    arrays = [put(y) for y in (x.q, x.k, x.v, x.g, x.erase, x.write)]

    def rule(q, k, v, g, erase, write):
        return delta_rule(q, k, v, g, erase=erase, write=write)

    want = rule(*arrays)
    mesh, lies = mesh_of((2, 2), ("rows", "heads"), EXPLICIT), spec("rows", None, "heads")
    with jax.set_mesh(mesh):
        o, state = jax.jit(rule)(*place(mesh, arrays, [lies] * 6))
    assert tuple(o.sharding.spec)[:3] == ("rows", None, "heads")
    assert tuple(state.sharding.spec)[:2] == ("rows", "heads")
    for one, other in zip(want, (o, state), strict=True):
        assert_close(np.asarray(one), np.asarray(other), 1e-6)
