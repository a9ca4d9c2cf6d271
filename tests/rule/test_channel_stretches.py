"""What the rule with a decay of each channel holds in memory, and long rows that a GPU computes in stretches."""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import eqns
from tolerances import assert_close

from gdn_jax import delta_rule
from gdn_jax.checks import cases
from gdn_jax.rule import channels
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
    monkeypatch.setattr(channels, "_GPU_STRETCH", tokens_times_heads)


def strengths(x):
    """Erase and write as the form takes them, with an axis of channels."""
    apart = (x.beta, x.beta) if x.erase is None else (x.erase, x.write)
    return tuple(y if y.ndim == 4 else y[..., None] for y in apart)


def in_stretches(case, x, monkeypatch):
    """The form with its derivative in stretches of three chunks of 16 tokens, as a function of the values, whose
    results have the names and the layout of `harness.evaluate`."""
    on_gpu(monkeypatch, 3 * 16 * case.HO)
    scale = case.K**-0.5 if case.scale is None else case.scale
    rule = functools.partial(
        channels.chunked_rule,
        scale=scale,
        cu_seqlens=None if x.cu_seqlens is None else jnp.asarray(x.cu_seqlens),
        chunk_size=16,
    )

    def turned(state):
        return state if case.state_layout == "kv" else np.swapaxes(state, -1, -2)

    @jax.jit
    def both(primals, cotangents):
        outputs, vjp = jax.vjp(rule, *primals)
        return outputs, vjp(cotangents)

    def run(x):
        primals = x.q, x.k, x.v, x.g, *strengths(x), x.initial_state
        (o, final), (*gradients, derase, dwrite, dh_0) = both(primals, (x.do, turned(x.dh_T)))
        names = dict(zip(("dq", "dk", "dv", "dg"), gradients, strict=True), o=o, final_state=turned(final))
        if dh_0 is not None:
            names["dh_0"] = turned(dh_0)
        if x.erase is None:
            return names | dict(dbeta=(derase + dwrite)[..., 0])
        return names | dict(derase=derase, dwrite=dwrite)

    return run


@pytest.mark.crossed
def test_stretches_on_a_gpu(monkeypatch):
    """Two stretches of three chunks, the last one padded: the bits of the whole row, and gradients as exact."""
    case = cases.CASES["K64-chunk-16"]
    x = cases.inputs(case)
    whole = harness.evaluate("chunked", case.options, x)
    got = in_stretches(case, x, monkeypatch)(x)
    assert channels.stretch_of(65, 16, 2, on_gpu=channels._GPU_STRETCH) == (48, 16)
    for name in ("o", "final_state"):
        np.testing.assert_array_equal(got[name], whole[name])
    harness.check(case, x, "float32", got)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lanes"),
    [pytest.param("channels-packed", 2, marks=pytest.mark.crossed), ("packed-vk-erase-a-channel", 1)],
)
def test_stretches_of_packed_rows_on_a_gpu(name, lanes, monkeypatch):
    """Three chunks at a time, with sequences over the borders of stretches and lanes: as the whole row, and a NaN
    stays in its sequence."""
    case = dataclasses.replace(cases.CASES[name], chunk_size=16)
    x = cases.inputs(case)
    whole, run = harness.evaluate("chunked", case.options, x), in_stretches(case, x, monkeypatch)
    monkeypatch.setattr(rows, "num_lanes", lambda *_: lanes)
    first = run(x)
    for key, y in first.items():
        assert_close(np.asarray(whole[key], np.float64), np.asarray(y), 2e-6, key)

    longest, v = int(np.argmax(np.diff(x.cu_seqlens))), x.v.copy()
    mine = np.arange(*x.cu_seqlens[longest : longest + 2])
    v[:, mine[0]] = np.nan
    spoilt = run(x._replace(v=v))
    assert np.isnan(spoilt["o"][:, mine]).any()
    for key, y in first.items():
        axis, of_victim = (0, longest) if key in ("final_state", "dh_0") else (1, mine)
        np.testing.assert_array_equal(np.delete(y, of_victim, axis), np.delete(spoilt[key], of_victim, axis))


@pytest.mark.slow
def test_final_states_of_packed_stretches_are_not_rounded(monkeypatch):
    """In bfloat16 too, where a GPU keeps the states between chunks in that dtype."""
    case = cases.CASES["channels-packed"]
    x = cases.inputs(case, "bfloat16")
    primals = x.q, x.k, x.v, x.g, *strengths(x), x.initial_state
    rule = functools.partial(
        channels.chunked_rule, scale=1.0, cu_seqlens=jnp.asarray(x.cu_seqlens), chunk_size=16
    )
    _, whole = jax.jit(rule)(*primals)
    on_gpu(monkeypatch, 3 * 16 * case.HO)
    _, final = jax.jit(functools.partial(rule))(*primals)
    assert_close(np.asarray(whole, np.float64), np.asarray(final), 2e-6, "final_state", 1)
