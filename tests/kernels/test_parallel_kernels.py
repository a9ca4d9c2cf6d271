"""The kernels where tokens of rows are split over devices, without a GPU: they lower, and are right, interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from harness import tiers
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from meshes import mesh_of, spec
from split_rows import check, drawn, drawn_in_halves, in_two_parts, names_of

from gdn_jax.checks import cases
from gdn_jax.parallel import context
from gdn_jax.parallel.borders import Borders
from gdn_jax.rule.call import Arrays
from pallas_kernels.backward import channel_gradients_work, reach
from pallas_kernels.backward import channel_rule as channel_backward
from pallas_kernels.backward import gradients as gradients_kernel
from pallas_kernels.backward import rule as backward_rule
from pallas_kernels.chunks import inverse, pairs
from pallas_kernels.device import launch as device_launch
from pallas_kernels.device.layouts import CHUNK
from pallas_kernels.forward import channel_rule as channel_forward
from pallas_kernels.forward import rule as forward_rule
from pallas_kernels.work.residuals import Segments, Transition
from pallas_kernels.work.tables import packed_items, row_items

TOKENS, WHOLE = spec(None, "context"), spec()
BOTH = dict(erase="channel", write="channel")
TINY = dict(B=1, heads=(1, 1, 1), K=16, V=16)
"""Sizes for the interpreter."""


@pytest.mark.parametrize("kind", tiers(("rows", "packed", "channels", "halves"), (), ("packed", "channels")))
def test_kernels_lower(kind, monkeypatch):
    """For an NVIDIA GPU, forward and backward, with the states between the devices by collective_permute."""
    monkeypatch.setattr(device_launch, "device_reason", lambda *_: None)
    mesh, packed = mesh_of((4,), ("context",)), kind == "packed"
    B, N, T = (1, 3, 512) if packed else (2, 2, 512)

    def array(shape, dtype=jnp.float32, where=TOKENS):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    q = array((B, T, 2, 64), jnp.bfloat16)
    beta, state = array((B, T, 2)), array((N, 2, 64, 64), where=WHOLE)
    g = array((B, T, 2, 64)) if kind in ("channels", "halves") else beta
    cu = array((N + 1,), jnp.int32, WHOLE) if packed else None

    def local(q, k, v, g, beta, state, cu):
        rest = dict(initial_state=state, cu_seqlens=cu, use_qk_l2norm=True)
        rule = context.delta_rule if kind == "channels" else context.gated_delta_rule
        if kind == "halves":
            rule, rest = context.erase_then_delta_rule, rest | dict(erase_key=q, erase_strength=beta)
        return rule(q, k, v, g, beta, axis_name="context", implementation="mosaic_gpu", **rest)

    f = jax.shard_map(local, mesh=mesh, in_specs=(TOKENS,) * 5 + (WHOLE, WHOLE), out_specs=(TOKENS, WHOLE))

    def both(primals, cotangents, cu):
        outputs, vjp = jax.vjp(lambda *p: f(*p, cu), *primals)
        return outputs, vjp(cotangents)

    traced = jax.jit(both).trace((q, q, q, g, beta, state), (q, state), cu)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert text.count("collective_permute") == 2 * 3  # steps each way; the first sends maps too


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels in the interpreter, on segments of one chunk, of few warpgroups, for each takes a thread."""
    of_heads = forward_rule.Config(segment_chunks=1, inverse=inverse.Config(warpgroups=2, ctas=1))
    of_channels = channel_forward.Config(segment_chunks=1, pairs=pairs.Config(1, ctas=1))
    for module, config in ((forward_rule, of_heads), (channel_forward, of_channels)):
        monkeypatch.setattr(module, "prepare_open", functools.partial(module.prepare_open, config=config))

    def small(backward, gradients, *args, config, **options):
        return backward(*args, config=dataclasses.replace(config, gradients=gradients), **options)

    of_heads, of_channels = gradients_kernel.Config(ctas=1), channel_gradients_work.Config(1, 2, ctas=1)
    for module, config in ((backward_rule, of_heads), (channel_backward, of_channels)):
        monkeypatch.setattr(module, "backward", functools.partial(small, module.backward, config))


KINDS = {
    "heads": ({}, False),
    "heads, chains in segments": ({}, True),
    "heads, faint": (dict(g="-20"), False),
    "channels": (dict(channel_g="mixed"), False),
    "channels, chains in segments": (dict(channel_g="mixed"), True),
    "apart": (dict(channel_g="kinds", **BOTH), True),
}
"""Gates of the kernels' cases, and whether the chains of the backward are cut."""


@pytest.fixture
def walked(monkeypatch):
    """A function that cuts chains or leaves them whole; and what was walked over where they are whole."""
    found, run = [], reach.walked_segments

    def noted(*args):
        found.append(run(*args))
        return found[-1]

    def choose(is_cut):
        monkeypatch.setattr(reach, "open_chains", lambda *_: (is_cut, 1))
        monkeypatch.setattr(reach, "walked_segments", noted)
        return found

    return choose


@pytest.mark.parametrize(
    "kind", tiers(KINDS, ("heads, faint",), ("heads", "heads, chains in segments", "channels"))
)
@pytest.mark.usefixtures("interpreted")
def test_kernels_interpreted(kind, walked):
    """Two devices, outside of jit, where the interpreter hangs."""
    options, is_cut = KINDS[kind]
    case, found = cases.Case("context kernels", T=156, **TINY, **options), walked(is_cut)
    x, expected, kernels, tokens = drawn(case, plgpu.InterpretGPUParams())
    got = in_two_parts(kernels, x, tokens)
    check(expected, got)
    assert len(found) == (not is_cut)
    for segments in found:  # two of each row and an empty one
        assert np.asarray(segments)[:, 0].tolist() == [1, "faint" not in kind, "faint" not in kind] * 2


@pytest.mark.parametrize("is_cut", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("interpreted")
def test_halves_interpreted(is_cut, walked):
    """Tokens that are two rows, whose parts on a device end within a chunk."""
    case = cases.Case("context halves", T=76, channel_g="kinds", **TINY)
    walked(is_cut)
    x, expected, kernels, tokens = drawn_in_halves(case, plgpu.InterpretGPUParams())
    check(expected, in_two_parts(kernels, x, tokens))


@pytest.mark.parametrize("kind", tiers(KINDS, (), KINDS.keys() - {"heads", "channels, chains in segments"}))
@pytest.mark.usefixtures("interpreted")
def test_packed_kernels_interpreted(kind, walked):
    """Likewise one device after the other, of sequences of which the second one crosses the border."""
    T, lengths = 78, (20, 65, 71)
    options, is_cut = KINDS[kind]
    case, found = cases.Case("context kernels", T=2 * T, lengths=lengths, **TINY, **options), walked(is_cut)
    x, expected, kernels, tokens = drawn(case, plgpu.InterpretGPUParams())
    state, dh_T = put(x.initial_state), put(x.dh_T)
    zeros = jnp.zeros((1, *state.shape[1:]))
    yes, no, n = put(True), put(False), put(1, "int32")
    cu = [put(np.clip(x.cu_seqlens - d * T, 0, T), jnp.int32) for d in (0, 1)]
    halves = [[y if y is None else y[:, d * T : (d + 1) * T] for y in (*tokens, put(x.do))] for d in (0, 1)]
    locals_ = [Arrays(*half[:6], state, cu[d], None) for d, half in enumerate(halves)]
    borders = [Borders(n, n, no, yes, no), Borders(n, n, yes, no, no)]

    affine, rest = kernels.forward(locals_[0], state, borders[0])
    crossing = affine.e
    (o_0, final_0), saved_0 = rest(state)
    begins = borders[1].put(state, n, zeros, yes)
    _, rest = kernels.forward(locals_[1], begins, borders[1])
    (o_1, final_1), saved_1 = rest(borders[1].put(state, n, crossing, yes))
    here = np.array([1, 0, 0])[:, None, None, None]  # which sequences end on the first device
    de, rest = kernels.backward(saved_1, borders[1], halves[1][6], dh_T * (1 - here))
    gradients_1 = rest(dh_T * (1 - here))
    ends = borders[0].put(dh_T * here, n, zeros, yes)
    _, rest = kernels.backward(saved_0, borders[0], halves[0][6], ends)
    gradients_0 = rest(borders[0].put(dh_T * here, n, de, yes))

    got = {"o": jnp.concatenate([o_0, o_1], 1), "final_state": here * final_0 + (1 - here) * final_1}
    for i, name in enumerate(names_of(case)):
        got[name] = jnp.concatenate([gradients_0[i], gradients_1[i]], 1)
    got["dh_0"] = gradients_0[6] + borders[1].put(gradients_1[6], n, zeros, yes)
    check(expected, got)
    # The second sequence has a segment on the second device, an empty one after it, and enters there.
    if not is_cut:
        assert [int(segments.sum()) for segments in found] == [1 if "faint" in kind else 2, 0]


def maps_of(growth):
    """Maps of segments [items, HO] that rotate, and multiply by two to a power."""
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(64, 64)))[0]
    m_t = np.exp2(growth)[..., None, None] * rotation
    diagonal = np.diagonal(m_t, axis1=-2, axis2=-1)
    return Transition(put(diagonal, "float32"), put(m_t - diagonal[..., None] * np.eye(64), "bfloat16"))


@pytest.mark.parametrize("name", ["rows", "packed"])
def test_segments_that_are_too_faint(name):
    """The maps of last segments are no numbers, and the maps of other sequences do not count."""
    growth = np.array([[-20, 0, -90], [-30, 0, 0], [-23, 1, 0], [-5, 0, 0], [np.nan] * 3], float)
    expected = [
        [1, 1, 1],
        [1, 1, 0],
        [1, 1, 0],
        [0, 1, 0],
        [0, 1, 0],
    ]  # after 0, 20, 50, 73, 78 digits, less three a map
    if name == "rows":
        items, growth = row_items(2, 4 * CHUNK, 1, is_open=True), np.concatenate([growth, 0 * growth])
        expected, sequence = [*expected, *[[1] * 3] * 5], None
    else:
        cu, sequence = put([0, CHUNK, 5 * CHUNK, 6 * CHUNK], "int32"), put(1, "int32")
        items = packed_items(cu, 6 * CHUNK, 1, open_sequence=sequence)
        others = items.split.num_items - 6
        growth = np.concatenate([[[np.nan] * 3], growth, [[np.nan] * 3] * others])
        expected = [[0] * 3, *expected, *[[0] * 3] * others]
    segments = Segments(None, maps_of(growth), items)
    for enters in (True, False):
        got = reach.walked_segments(segments, sequence, put(enters), 2 if name == "rows" else 1)
        np.testing.assert_array_equal(got, np.array(expected) * enters)
