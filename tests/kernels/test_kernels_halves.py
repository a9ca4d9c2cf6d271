"""The kernels with a decay of each channel where tokens are two rows: right and free of races, interpreted."""

import functools

import channel_kernels
import erasures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import bound, worst_ratio

from gdn_jax import erase_then_delta_rule
from gdn_jax.checks import cases
from gdn_jax.rule import seam
from gdn_jax.rule.call import ERASURES, Arrays, Call
from gdn_jax.rule.halves import with_strengths
from gdn_jax.rule.kernels.ampere_channels import AmpereChannels
from gdn_jax.rule.kernels.channels import Channels
from pallas_kernels.ampere import channel_backward as mma_backward
from pallas_kernels.ampere import channel_rule as mma_rule
from pallas_kernels.backward import channel_gradients_work as work
from pallas_kernels.backward import channel_rule as backward
from pallas_kernels.chunks.pairs import Config, channel_pairs
from pallas_kernels.device import launch
from pallas_kernels.forward import channel_rule
from pallas_kernels.work.halves import GROUP

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
SMALL = Config(1, ctas=1)
"""The interpreter takes a thread for every warpgroup."""


def in_time(T: int) -> np.ndarray:
    """The rows of T tokens in the order of time."""
    return np.arange(2 * T).reshape(-1, 2, GROUP).swapaxes(1, 2).reshape(-1)


def rows(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Rows in the order of time from those of both halves [T, ..]."""
    return np.stack([first, second], 1).reshape(-1, *first.shape[1:])


@pytest.mark.parametrize("gate", ["kinds", pytest.param("mild", marks=pytest.mark.slow)])
def test_pairs(gate):
    """Those of rows that follow each other, of which the first ones decay and the second ones are read."""
    T, K, rng = 64, 64, np.random.default_rng(1)
    q, k, e = (channel_kernels.unit(rng, 2, T, 1, K) for _ in range(3))
    g = channel_kernels.gates(gate, 1, (2, T, 1, K))
    beta = rng.uniform(0, 1, (2, 1, 2 * T)).astype(np.float32)
    half = [put(y, jnp.bfloat16) for y in (q, k, e)]
    options = dict(of_halves=True, scale=0.1, config=SMALL, interpret=INTERPRET)
    pairs = channel_pairs(half[0], half[1], put(g), put(beta), half[2], **options)
    for visit in range(4):
        row, tokens = visit // 2, slice(32 * (visit % 2), 32 * (visit % 2) + 32)
        order, nothing = in_time(32), np.zeros((32, K))
        keys = rows(e[row, tokens, 0], k[row, tokens, 0])
        queries, gates = rows(nothing, q[row, tokens, 0]), rows(g[row, tokens, 0], nothing)
        strengths = beta[row, 0, 2 * tokens.start : 2 * tokens.stop][order]
        expected = channel_kernels.products_of_a_chunk(queries, keys, keys, gates, strengths, 0.1)
        for name, want in expected.items():
            got = np.asarray(getattr(pairs, name)[visit, 0], np.float64)
            if name in ("t", "kg", "kr"):
                got = got[order]
            elif name in ("p", "qg"):
                want = want[1::2]  # only second halves are read
            got = got[:, order] if name in ("t", "p") else got
            assert worst_ratio(want, got, None) < (1e-5 if name == "gl" else 3e-3), (visit, name)


CASES = {
    "rows": (dict(T=40, B=2, heads=(1, 1, 2), K=64, V=64), 0),
    "segments": (dict(T=70, B=1, heads=(1, 1, 1), K=60, V=50, state_layout="vk", channel_g="mixed"), 1),
    "packed": (dict(T=40, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(5, 0, 30)), 0),
}


@pytest.mark.parametrize("transform", [lambda f: f, pytest.param(jax.vmap, marks=pytest.mark.slow)])
def test_the_public_call_lowers(transform, monkeypatch):
    """With its gradients, for rows and heads that XLA may split over devices; results have the arguments' shapes."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    B, T, H, HV, K = 2, 100, 2, 4, 64
    S, f32, bf16 = jax.ShapeDtypeStruct, jnp.float32, jnp.bfloat16
    key, value, gate = S((B, T, H, K), bf16), S((B, T, HV, K), bf16), S((B, T, HV), f32)
    x = key, key, value, S((B, T, HV, K), f32), gate, key, gate, S((B, HV, K, K), f32)

    @transform
    def both(x, cotangents):
        def call(*x):
            options = dict(use_qk_l2norm=True, implementation="mosaic_gpu")
            return erase_then_delta_rule(*x[:7], initial_state=x[7], **options)

        outputs, pull_back = jax.vjp(call, *x)
        return outputs, pull_back(cotangents)

    arguments = x, (value, x[7])
    if transform is jax.vmap:
        arguments = jax.tree.map(lambda y: S((3, *y.shape), y.dtype), arguments)
    text = jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 4
    outputs, gradients = jax.eval_shape(both, *arguments)
    results, given = (outputs, gradients), (arguments[1], arguments[0])
    shapes = [[(y.shape, y.dtype) for y in jax.tree.leaves(tree)] for tree in (results, given)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_both_passes(name, monkeypatch):
    """Outputs, states and the gradients of all arguments against the recurrence in float64."""
    options, segment_chunks = CASES[name]
    config = channel_rule.Config(1, segment_chunks, pairs=SMALL)
    back = backward.Config(bool(segment_chunks), 1, gradients=work.Config(1, 2, ctas=1))
    for module, run, chosen in ((channel_rule, "forward", config), (backward, "backward", back)):
        call = functools.partial(getattr(module, run), config=chosen, interpret=INTERPRET)
        monkeypatch.setattr(module, run, call)
    assert_both_passes(Channels(), name, options)


@pytest.mark.slow
def test_both_passes_by_mma(monkeypatch):
    """The same by kernels that get the rows of both halves."""
    for module, run in ((mma_rule, "forward"), (mma_backward, "backward")):
        monkeypatch.setattr(module, run, functools.partial(getattr(module, run), interpret=INTERPRET))
    options = dict(T=40, B=1, heads=(1, 1, 2), K=64, V=64)
    assert_both_passes(AmpereChannels(), "by mma", options)


def assert_both_passes(kernels, name: str, options: dict):
    """Compares a kernel set with the recurrence in float64."""
    x = erasures.inputs(cases.Case(f"halves {name}", **dict(channel_g="kinds") | options), "bfloat16")
    given = jax.tree.map(put, x.x)
    strengths = with_strengths(put(x.strength), given.beta)
    arrays = given.q, given.k, given.v, given.g, strengths, put(x.key), given.initial_state
    arrays = Arrays(*arrays, given.cu_seqlens, given.segment_ids)
    call = Call(False, x.case.state_layout, ERASURES, kernels=kernels, scale=x.case.K**-0.5)
    (o, final), saved = seam._rule_fwd(call, arrays)
    (d,) = seam._rule_bwd(call, saved, (given.do, given.dh_T))
    got = dict(o=o, final_state=final, dq=d.q, dk=d.k, dv=d.v, dg=d.g, dinitial_state=d.initial_state)
    got |= dict(derase_strength=d.erase[..., 0], dbeta=d.erase[..., 1], derase_key=d.write)
    expected = x.expected()
    for key, y in got.items():
        of = {"dinitial_state": "dh_0"}.get(key, key)
        assert worst_ratio(expected[key], np.asarray(y, np.float64), None) < bound(of, "bfloat16"), key
