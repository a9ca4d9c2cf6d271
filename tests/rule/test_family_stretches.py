"""What the family's rule holds in memory, and long rows that a GPU computes in stretches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_harness import CASES, evaluate
from programs import eqns
from tolerances import assert_close, bound, head_axis

from gdn_jax import delta_rule
from gdn_jax.checks import family_cases, family_oracle
from gdn_jax.rule import channels as chunked
from gdn_jax.rule.chunks import rows


@pytest.mark.parametrize("stretch", [None, 64], ids=["whole", "stretches"])
def test_no_array_holds_two_tokens_and_a_channel(stretch, monkeypatch):
    """Nowhere in the program, forward and backward, is there an array [.., C, C, K] of a whole row; nor, in a long
    row on a GPU, an operand of a product of the whole row."""
    S, C, H, K = jax.ShapeDtypeStruct, 64, 2, 48
    T = 256 if stretch is None else 320  # JAX keeps what it has traced, for a shape
    tokens = S((1, T, H, K), jnp.float32)
    if stretch is not None:
        on_gpu(monkeypatch, stretch * H)

    def loss(q, k, v, g, beta):
        o, state = delta_rule(q, k, v, g, beta, implementation="chunked")
        return o.sum() + state.sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3, 4)))(*[tokens] * 4, S((1, T, H), jnp.float32)).jaxpr
    looped = [eqn for x in eqns(jaxpr) if x.primitive.name == "scan" for eqn in eqns(x.params["jaxpr"].jaxpr)]
    assert _largest(eqns(jaxpr)) <= 4 * T * H * K < T * H * C * K
    products = any(eqn.primitive.name == "dot_general" for eqn in eqns(jaxpr, closed=("scan",)))
    if stretch is None:
        assert products
    else:
        assert not products and _largest(looped) <= 4 * stretch * H * K


def _largest(equations) -> int:
    """Numbers of the largest array that any of the equations makes; a loop's are those of its body."""
    shapes = (v.aval.shape for eqn in equations for v in eqn.outvars if eqn.primitive.name != "scan")
    return max(int(np.prod(shape, dtype=np.int64)) for shape in shapes)


def on_gpu(monkeypatch, tokens_times_heads: int) -> None:
    """Rows are computed in stretches of so many tokens times heads, as long ones are on a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(chunked, "_GPU_STRETCH", tokens_times_heads)


@pytest.mark.crossed
def test_stretches_on_a_gpu(monkeypatch):
    """Two stretches of three chunks, the last one padded: the bits of the whole row, and gradients as exact."""
    case = CASES["K64-chunk-16"]
    x, whole = family_cases.inputs(case), evaluate(case, family_cases.inputs(case), "chunked")
    strengths = x.beta[..., None], x.beta[..., None]
    primals = x.q, x.k, x.v, x.g, *strengths, x.initial_state
    rule = functools.partial(chunked.chunked_rule, scale=64**-0.5, cu_seqlens=None, chunk_size=16)

    @jax.jit
    def both(primals):
        outputs, vjp = jax.vjp(rule, *primals)
        return outputs, vjp((x.do, x.dh_T))

    on_gpu(monkeypatch, 3 * 16 * 2)
    assert chunked.stretch_of(65, 16, 2, on_gpu=chunked._GPU_STRETCH) == (48, 16)
    (o, final), (dq, dk, dv, dg, derase, dwrite, dh_0) = both(primals)
    np.testing.assert_array_equal(o, whole["o"])
    np.testing.assert_array_equal(final, whole["final_state"])
    got = dict(dq=dq, dk=dk, dv=dv, dg=dg, dbeta=(derase + dwrite)[..., 0], dh_0=dh_0)
    expected = family_oracle.evaluate(**x.arguments, do=x.do, dh_T=x.dh_T)
    for name, y in got.items():
        assert_close(expected[name], np.asarray(y), bound(name, "float32"), name, head_axis(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lanes"),
    [pytest.param("packed", 2, marks=pytest.mark.crossed), ("packed-vk-erase-a-channel", 1)],
)
def test_stretches_of_packed_rows_on_a_gpu(name, lanes, monkeypatch):
    """Three chunks at a time, with sequences over the borders of stretches and lanes: as the whole row, and a NaN
    stays in its sequence."""
    case = CASES[name]
    x, whole = family_cases.inputs(case), evaluate(case, family_cases.inputs(case), "chunked")
    erase, write = (x.beta[..., None],) * 2 if x.erase is None else (x.erase, x.write)
    scale = case.call.K**-0.5 if case.call.scale is None else case.call.scale
    rule = functools.partial(
        chunked.chunked_rule, scale=scale, cu_seqlens=jnp.asarray(x.cu_seqlens), chunk_size=16
    )
    dh_T = x.dh_T if case.call.state_layout == "kv" else np.swapaxes(x.dh_T, -1, -2)

    @jax.jit
    def both(primals):
        outputs, vjp = jax.vjp(rule, *primals)
        return outputs, vjp((x.do, dh_T))

    on_gpu(monkeypatch, 3 * 16 * case.call.HO)
    monkeypatch.setattr(rows, "num_lanes", lambda *_: lanes)
    first = (o, final), gradients = both((x.q, x.k, x.v, x.g, erase, write, x.initial_state))
    got = dict(zip(("dq", "dk", "dv", "dg", "derase", "dwrite", "dh_0"), gradients, strict=True))
    if x.erase is None:
        got["dbeta"] = (got.pop("derase") + got.pop("dwrite"))[..., 0]
    if x.initial_state is None:
        assert got.pop("dh_0") is None
    final = final if case.call.state_layout == "kv" else np.swapaxes(final, -1, -2)
    for key, y in dict(o=o, final_state=final, **got).items():
        assert_close(np.asarray(whole[key], np.float64), np.asarray(y), 2e-6, key)

    longest, v = int(np.argmax(np.diff(x.cu_seqlens))), x.v.copy()
    mine = np.arange(*x.cu_seqlens[longest : longest + 2])
    v[:, mine[0]] = np.nan
    spoilt = both((x.q, x.k, v, x.g, erase, write, x.initial_state))
    assert np.isnan(spoilt[0][0][:, mine]).any()
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(spoilt), strict=True):
        axis, of_victim = (1, mine) if a.shape[1] == case.call.T else (0, longest)
        np.testing.assert_array_equal(np.delete(a, of_victim, axis), np.delete(b, of_victim, axis))


@pytest.mark.slow
def test_final_states_of_packed_stretches_are_not_rounded(monkeypatch):
    """In bfloat16 too, where a GPU keeps the states between chunks in that dtype."""
    case = CASES["packed"]
    x = family_cases.inputs(case, "bfloat16")
    primals = x.q, x.k, x.v, x.g, x.beta[..., None], x.beta[..., None], x.initial_state
    rule = functools.partial(
        chunked.chunked_rule, scale=1.0, cu_seqlens=jnp.asarray(x.cu_seqlens), chunk_size=16
    )
    _, whole = jax.jit(rule)(*primals)
    on_gpu(monkeypatch, 3 * 16 * case.call.HO)
    _, final = jax.jit(functools.partial(rule))(*primals)
    assert_close(np.asarray(whole, np.float64), np.asarray(final), 2e-6, "final_state", 1)
