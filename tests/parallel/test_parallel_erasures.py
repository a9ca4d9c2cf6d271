"""`erase_then_delta_rule` on meshes: rows, heads and tokens over devices, as on one device."""

import erasures
import jax
import numpy as np
import pytest
from meshes import AUTO, EXPLICIT, PLACEMENTS, mesh_from, mesh_of, place, spec, value_and_gradients
from tolerances import assert_close, head_axis, tolerance

from gdn_jax import erase_then_delta_rule
from gdn_jax.bench.collectives import traffic
from gdn_jax.checks import cases
from gdn_jax.parallel import context, token_shards

SMALL = dict(K=6, V=4, chunk_size=16, channel_g="mixed")
TOKENS, WHOLE = spec(None, "context"), spec()
OUTPUTS = ("o", "final_state")


def check(x, outputs, gradients):
    """Outputs and gradients against float64."""
    names = (*OUTPUTS, *(f"d{name}" for name in erasures.NAMES))
    expected = x.expected()
    for name, got in zip(names, (*outputs, *gradients), strict=True):
        of = {"dinitial_state": "dh_0"}.get(name, name)
        if got is not None:
            assert_close(expected[name], np.asarray(got), tolerance(of, "float32"), name, head_axis(of))


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        ("rows and heads", AUTO),
        pytest.param("rows and heads", EXPLICIT, marks=pytest.mark.slow),
        pytest.param("heads", AUTO, marks=pytest.mark.crossed),
    ],
    ids=["rows and heads", "explicit", "heads"],
)
def test_on_the_shards(placement, kind):
    """Every device works on its own rows and heads, and nothing is sent."""
    segments = ((3, 17), (12, 8)) if kind == EXPLICIT else None
    case = cases.Case("erasure shards", T=20, B=2, heads=(8, 8, 16), segments=segments, **SMALL)
    x = erasures.inputs(case)
    mesh = mesh_of((2, 4), ("d", "e"), kind)
    tokens, states = PLACEMENTS[placement]
    primals = place(mesh, x.primals, (*[tokens] * 7, states))
    cotangents = place(mesh, (x.x.do, x.x.dh_T), (tokens, states))
    (ids,) = place(mesh, [x.x.segment_ids], [spec(*tokens[:1])])

    def call(*primals):
        *arrays, state = primals
        options = dict(segment_ids=ids, chunk_size=16, implementation="chunked")
        return erase_then_delta_rule(*arrays, initial_state=state, **options)

    program = value_and_gradients(call).lower(primals, cotangents).compile()
    assert not traffic(program.as_text()).count
    check(x, *program(primals, cotangents))


CONTEXT = {
    "rows": dict(T=24, B=2, heads=(1, 1, 2), state_layout="vk", use_qk_l2norm=True),
    "packed": dict(T=32, B=1, heads=(1, 1, 2), lengths=(5, 0, 1, 2, 17)),
    "segments": dict(T=24, B=2, heads=(1, 1, 2), segments=((3, 14, 7), (6, 6, 12))),
    "heads": dict(T=16, B=1, heads=(4, 4, 8)),
}


@pytest.mark.parametrize(
    "name",
    ["packed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rows", "segments", "heads"))],
)
def test_over_tokens(name):
    """Four devices have a quarter of a row's tokens each, and hand over states, or tokens for heads."""
    x = erasures.inputs(cases.Case(f"erasure context {name}", **SMALL | CONTEXT[name]))
    options = dict(axis_name="context", by="heads" if name == "heads" else "states", implementation="chunked")

    def local(primals, cu, ids):
        *arrays, state = primals
        packing = dict(cu_seqlens=cu, segment_ids=ids)
        return context.erase_then_delta_rule(
            *arrays, initial_state=state, **packing, **x.case.options, **options
        )

    @jax.jit
    def run(primals, packing, cotangents):
        def call(*primals):
            specs = ((TOKENS,) * 7 + (WHOLE,), WHOLE, TOKENS)
            mesh = mesh_of((4,), ("context",))
            split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(TOKENS, WHOLE))
            return split(primals, packing["cu_seqlens"], packing["segment_ids"])

        outputs, pull = jax.vjp(call, *primals)
        return outputs, pull(cotangents)

    check(x, *run(x.primals, x.packing, (x.x.do, x.x.dh_T)))


@pytest.mark.slow
def test_what_a_model_calls():
    """Rows, heads and tokens over a mesh of a model, under plain jit."""
    x = erasures.inputs(cases.Case("erasure mesh", T=24, B=2, heads=(2, 2, 2), initial_state=False, **SMALL))
    _, mesh = mesh_from("data=2,head=2,context=2")
    with jax.set_mesh(mesh):
        got = jax.jit(token_shards.erase_then_delta_on_mesh)(*x.primals[:-1])
    for name, y in zip(OUTPUTS, got, strict=True):
        assert_close(x.expected()[name], np.asarray(y), tolerance(name, "float32"), name)
