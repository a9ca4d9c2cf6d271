"""The backward kernels with a decay of each channel without a GPU: every gradient is right and free of races,
interpreted, and they lower."""

import itertools
from typing import Any

import channel_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_kernels import wide
from device_arrays import put
from harness import truth
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_segments import segments_of
from tolerances import bound, worst_ratio

from gdn_jax.checks import cases
from gdn_jax.gates import l2norm
from gdn_jax.rule import seam
from gdn_jax.rule.call import Call
from gdn_jax.rule.kernels.channels import prepared
from gdn_jax.shapes import Dims
from pallas_kernels.backward import channel_gradients_work as work
from pallas_kernels.backward import channel_rule as backward
from pallas_kernels.backward.rule import OutputCotangents
from pallas_kernels.chunks.channel_arrays import ChannelArrays, ChannelResiduals
from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.device.layouts import CHUNK, GRANULE, round_up
from pallas_kernels.forward import channel_rule

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
SMALL = work.Config(1, 2, ctas=1)
"""The interpreter takes a thread for every warpgroup."""


def residuals_of(call: Call, x: Any, segment_chunks: int | None = None) -> ChannelResiduals:
    """Residuals as the forward hands them over, pair by pair and token by token in float64, rounded at the end."""
    a, dims = prepared(call, x._replace(q=l2norm(x.q), k=l2norm(x.k)))
    T, HO, K, V = dims.T, dims.HO, round_up(dims.K, GRANULE), round_up(dims.V, GRANULE)

    def rows(y, width):
        y = np.repeat(np.asarray(y[0], np.float64), HO // y.shape[2], axis=1)
        return np.pad(y, ((0, -T % CHUNK), (0, 0), (0, width - y.shape[2])))

    q, k, g, v = rows(a.q, K), rows(a.k, K), rows(a.g, K), rows(a.v, V)
    e = k if a.e is None else rows(a.e, K)
    beta = np.ones((T, HO)) if a.beta is None else np.asarray(a.beta[0], np.float64)
    beta = np.pad(beta, ((0, -T % CHUNK), (0, 0)))
    if x.segment_ids is not None:
        g[1:T][np.diff(np.asarray(x.segment_ids[0])) != 0] = -np.inf
    borders = [0, T] if x.cu_seqlens is None else [int(n) for n in np.append(x.cu_seqlens, T)]
    visits = [
        (max(begin, start), min(end, start + CHUNK), start)
        for begin, end in itertools.pairwise(borders)
        for start in range(begin // CHUNK * CHUNK, end, CHUNK)
        if end > begin
    ]
    count = len(visits) if x.cu_seqlens is None else -(-T // CHUNK) + len(borders) - 2
    made: dict[str, list] = {name: [] for name in Pairs._fields}
    for begin, end, start in [*visits, *[(0, 0, 0)] * (count - len(visits))]:
        own = (np.arange(start, start + CHUNK) >= begin) & (np.arange(start, start + CHUNK) < end)
        tokens = slice(start, start + CHUNK)
        heads = []
        for head in range(HO):
            y = [np.where(own[:, None], z[tokens, head], 0) for z in (q, k, e, g)]
            strengths = np.where(own, beta[tokens, head], 0)
            heads.append(channel_kernels.products_of_a_chunk(*y, strengths, call.scale))
        for name, values in made.items():
            values.append([y[name] for y in heads])
    dtypes = dict.fromkeys(Pairs._fields, x.k.dtype) | {"gl": jnp.float32}
    pairs = Pairs(**{name: put(np.array(y)).astype(dtypes[name]) for name, y in made.items()})
    segments = None
    if segment_chunks:
        h_0 = x.initial_state
        h_0 = h_0 if h_0 is None or call.state_layout == "kv" else np.swapaxes(h_0, 2, 3)
        tokens = tuple(y[None, :T] for y in (k, e, v, np.exp(g), beta))
        segments = jax.tree.map(put, segments_of(tokens, h_0, x.cu_seqlens, segment_chunks, x.k.dtype))
    return ChannelResiduals(pairs, put(beta.T[None], jnp.float32), segments)


CASES = {
    "packed": (wide("back-packed", "kinds", T=72, heads=(1, 1, 1), K=60, V=50, lengths=(5, 0, 62)), None),
    "erase and write": (
        wide("back-erase", "mixed", T=20, heads=(1, 1, 2), K=64, V=64, erase="channel", write="channel"),
        None,
    ),
    "segments": (
        wide("back-segments", "mixed", T=66, heads=(1, 1, 1), K=60, V=50, state_layout="vk"),
        1,
    ),
    "segment ids": (
        wide("back-ids", "mixed", T=20, heads=(1, 1, 1), K=64, V=64, segments=((7, 1, 12),)),
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "erase and write" else pytest.mark.slow) for name in CASES],
)
def test_gradients(name, monkeypatch):
    """The arguments' gradients against the oracle's, through the function that the derivative will be."""
    case, segment_chunks = CASES[name]
    x = cases.inputs(case, "bfloat16")
    call, given = channel_kernels.call(case, x)
    config = backward.Config(bool(segment_chunks), 1, gradients=SMALL)
    run = backward.backward
    monkeypatch.setattr(
        backward, "backward", lambda *a, **kw: run(*a, **kw, config=config, interpret=INTERPRET)
    )
    residuals = residuals_of(call, given, segment_chunks)
    (got,) = seam._rule_bwd(call, (given, residuals), (put(x.do), put(x.dh_T)))
    expected = truth(case.rule_options, x)
    names = dict(q="dq", k="dk", v="dv", g="dg", erase="derase", write="dwrite", initial_state="dh_0")
    if call.is_beta:
        names["erase"] = "dbeta"
    for argument, key in names.items():
        y = getattr(got, argument)
        assert (y is None) == (expected[key] is None), key
        if y is not None:
            assert y.dtype == getattr(given, argument).dtype, key
            assert worst_ratio(expected[key], np.asarray(y, np.float64), None) < bound(key, "bfloat16"), key


def test_one_known_sequence_is_cut_as_the_forward_cut_it():
    """The forward takes packed sequences of equal lengths as rows, a single one too."""
    S, dims = jax.ShapeDtypeStruct, Dims(1, 200, 1, 1, 1, 1, 1, 64, 64)
    tokens, gates, state = S((1, 200, 1, 64), jnp.bfloat16), S((1, 200, 1, 64), jnp.float32), (1, 1, 64, 64)

    def both(token, g, h):
        x = ChannelArrays(token, token, None, token, g, None, h, np.array([0, 200]), None)
        config = channel_rule.Config(segment_chunks=2)
        residuals = channel_rule.forward(x, dims, config=config, scale=0.1)[2]
        config, cotangents = backward.Config(segments=True), OutputCotangents(token, h)
        return backward.backward(x, dims, residuals, cotangents, config=config, scale=0.1)

    out = jax.eval_shape(both, tokens, gates, S(state, jnp.float32))
    assert (out.dq.shape, out.dg.shape, out.dh_0.shape) == (tokens.shape, gates.shape, state)


def test_cotangents_have_the_shapes_of_the_arguments():
    """Of strengths apart too, for which values are made for every output head."""
    case = next(case for case in cases.CHANNELS if case.name == "seven-tokens")
    x = cases.inputs(case, "bfloat16")
    call, given = channel_kernels.call(case, x)

    def both(given, do, dh_T):
        arrays, dims = prepared(call, given)
        residuals = channel_rule.forward(arrays, dims, scale=call.scale)[2]
        return seam._rule_bwd(call, (given, residuals), (do, dh_T))[0]

    out = jax.eval_shape(both, given, put(x.do), put(x.dh_T))
    assert [(y.shape, y.dtype) for y in out[:7]] == [(y.shape, y.dtype) for y in given[:7]]


def test_refusals():
    assert backward.check_supported(jnp.bfloat16) is None
    assert "q, k and v are float16" in str(backward.check_supported(jnp.float16))
