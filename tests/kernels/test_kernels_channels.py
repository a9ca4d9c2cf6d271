"""The kernels with a decay of each channel without a GPU: right and free of races, interpreted; what is refused; the
derivative over them."""

import functools

import channel_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_kernels import wide
from device_arrays import put
from harness import tiers, truth
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import STATES, bound, worst_ratio

from gdn_jax import delta_rule
from gdn_jax.checks import cases
from gdn_jax.rule import plain, seam
from pallas_kernels.chunks.pairs import Config, Pairs, channel_pairs
from pallas_kernels.device import launch
from pallas_kernels.forward import channel_rule

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
SMALL = Config(1, ctas=1)
"""The interpreter takes a thread for every warpgroup."""


def pairs_of(g, T, *, K=64, HO=1, erases=False, normalize=False, seed=0):
    """`channel_pairs` of one row with random keys of one head, and those keys, erase keys and strengths."""
    rng = np.random.default_rng(seed)
    q, k = (channel_kernels.unit(rng, 1, T, 1, K) for _ in range(2))
    e = k * channel_kernels.unit(rng, 1, T, HO, K) * K**0.5 if erases else None
    beta = rng.uniform(0, 1, (1, HO, -(-T // 64) * 64)).astype(np.float32)
    beta[..., T:] = 0
    stretch = 4 if normalize else 1
    bf16 = [None if y is None else put(y * stretch, jnp.bfloat16) for y in (q, k, e)]
    q8, k8, e8, g8 = (
        None if y is None else jnp.pad(y, ((0, 0), (0, -T % 8), (0, 0), (0, 0))) for y in (*bf16, put(g))
    )
    options = dict(scale=0.1, normalize=normalize, config=SMALL, interpret=INTERPRET)
    pairs = channel_pairs(q8, k8, g8, put(beta), e8, **options)
    return pairs, q, k, k if e is None else np.asarray(bf16[2], np.float64), beta


@pytest.mark.parametrize(
    ("gate", "options"),
    [
        pytest.param("kinds", dict(T=100), id="kinds"),
        pytest.param("mild", dict(T=72, K=128), id="K128", marks=pytest.mark.crossed),
        pytest.param("kinds", dict(T=64, HO=2, erases=True), id="erase", marks=pytest.mark.slow),
        pytest.param("zero", dict(T=64, normalize=True), id="normalised", marks=pytest.mark.crossed),
    ],
)
def test_pairs(gate, options):
    T, K, HO = options["T"], options.get("K", 64), options.get("HO", 1)
    g = channel_kernels.gates(gate, 1, (1, T, HO, K))
    pairs, q, k, e, beta = pairs_of(g, **options)
    for chunk in range(-(-T // 64)):
        for head in range(HO):
            tokens = slice(64 * chunk, 64 * chunk + 64)

            of_e = head if options.get("erases") else 0
            rows = (x[0, tokens, h].astype(np.float64) for x, h in ((q, 0), (k, 0), (e, of_e), (g, head)))
            rows = (np.pad(x, ((0, 64 - len(x)), (0, 0))) for x in rows)
            expected = channel_kernels.products_of_a_chunk(*rows, beta[0, head, tokens], 0.1)
            for name, want in expected.items():
                got = np.asarray(getattr(pairs, name)[chunk, head], np.float64)
                assert worst_ratio(want, got, None) < (1e-5 if name == "gl" else 3e-3), name


@pytest.mark.slow
def test_no_gate_reaches_back():
    """Bit for bit: what tokens up to t leave is the same with other gates behind them, whatever those are. Each t has
    a chunk of its own."""
    last = (0, 7, 15, 31, 44)
    T = 64 * len(last)
    g = channel_kernels.gates("kinds", 1, (1, T, 1, 64))
    other = g.copy()
    for chunk, t in enumerate(last):
        behind = channel_kernels.gates("kinds", 2 + t, (1, 63 - t, 1, 64))
        other[:, 64 * chunk + t + 1 : 64 * (chunk + 1)] = behind
    (first, *_), (second, *_) = pairs_of(g, T), pairs_of(other, T)
    for chunk, t in enumerate(last):
        one, two = (jax.tree.map(lambda y, chunk=chunk: y[chunk], x) for x in (first, second))
        for name in ("t", "p", "kg", "qg"):
            a, b = (getattr(x, name)[:, : t + 1] for x in (one, two))
            assert channel_kernels.same_bits(a, b), (t, name)
        assert not channel_kernels.same_bits(one, two)


FORWARD = {
    "packed": (
        wide("channel-packed", "kinds", T=140, heads=(1, 1, 1), K=64, V=64, lengths=(5, 70, 0, 33)),
        dict(state_warpgroups=1, segment_chunks=0),
    ),
    "two warpgroups": (
        wide("channel-two", T=130, heads=(1, 1, 1)),
        dict(state_warpgroups=2, segment_chunks=0),
    ),
    "segments": (
        wide("channel-segments", "mixed", T=190, heads=(1, 1, 1), K=64, V=64, state_layout="vk"),
        dict(state_warpgroups=1, segment_chunks=1),
    ),
    "packed segments": (
        wide("channel-packed-segments", T=200, heads=(1, 1, 1), K=64, V=64, lengths=(150, 0, 33)),
        dict(state_warpgroups=1, segment_chunks=1),
    ),
    "erase and write": (
        wide("channel-erase", T=70, heads=(1, 1, 1), K=60, V=50, erase="channel", write="channel"),
        dict(state_warpgroups=1, segment_chunks=0),
    ),
    "segment ids": (
        wide("channel-ids", "kinds", T=100, heads=(1, 1, 1), K=64, V=64, segments=((70, 30),)),
        dict(state_warpgroups=1, segment_chunks=0),
    ),
}


@pytest.mark.parametrize(
    "name",
    tiers(FORWARD, (), ("packed segments", "erase and write", "two warpgroups")),
)
def test_forward(name, monkeypatch):
    case, config = FORWARD[name]
    run = functools.partial(
        channel_rule.forward, config=channel_rule.Config(pairs=SMALL, **config), interpret=INTERPRET
    )
    monkeypatch.setattr(channel_rule, "forward", run)
    x = cases.inputs(case, "bfloat16")
    call, given = channel_kernels.call(case, x)
    outputs, expected = call.kernels.forward(call, given)[:2], truth(case.rule_options, x)
    for key, got in zip(STATES, outputs, strict=True):
        assert worst_ratio(expected[key], np.asarray(got, np.float64), None) < bound(key, "bfloat16"), key


@pytest.mark.slow
@pytest.mark.parametrize("erase", [None, pytest.param("channel", marks=pytest.mark.crossed)])
def test_the_derivative_is_that_of_the_plain_form(erase, monkeypatch):
    """Where those of the backward cannot run, whatever the forward's leave; beta, and strengths apart."""
    case = wide("channel-derivative", T=6, K=8, V=8, erase=erase, write=erase)
    x = cases.inputs(case)
    call, given = channel_kernels.call(case, x)
    shapes = jax.eval_shape(lambda x: plain.rule(call, x, 1.0), given)
    nothing = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)
    monkeypatch.setattr(seam, "_forward", lambda call: lambda call, x: nothing)
    strengths = dict(erase=given.erase, write=given.write) if erase else dict(beta=given.erase)

    def loss(rule, arguments):
        o, state = rule(arguments)
        return (o * x.do).sum() + (state * x.dh_T).sum()

    def plain_form(arguments):
        return delta_rule(**arguments, implementation="chunked")

    def kernels(arguments):
        strengths = arguments.get("beta", arguments.get("erase")), arguments.get("write")
        return seam.rule(call, given._replace(**arrays(arguments, strengths)))

    def arrays(arguments, strengths):
        kept = {name: y for name, y in arguments.items() if name not in ("beta", "erase", "write")}
        return kept | dict(zip(("erase", "write"), strengths, strict=True))

    arguments = dict(
        q=given.q, k=given.k, v=given.v, g=given.g, initial_state=given.initial_state, **strengths
    )
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, rule)))(arguments) for rule in (kernels, plain_form)
    )
    for name, y in want.items():
        assert np.abs(y).max() > 0, name
        np.testing.assert_allclose(got[name], y, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_public_call_lowers_with_its_gradient(monkeypatch):
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    S, f32 = jax.ShapeDtypeStruct, jnp.float32
    tokens, strength = S((1, 256, 2, 64), jnp.bfloat16), S((1, 256, 2), f32)

    def loss(q, k, v, g, beta):
        o, state = delta_rule(q, k, v, g, beta, use_qk_l2norm=True)
        return (o.astype(f32) ** 2).sum() + state.sum()

    gradients = jax.jit(jax.grad(loss, range(5)))
    lowered = gradients.trace(*(tokens,) * 3, S((1, 256, 2, 64), f32), strength).lower(
        lowering_platforms=("cuda",)
    )
    text = lowered.as_text()
    for kernel in ("pairs", "outputs", "chains", "gradients"):
        assert f"channel_{kernel}" in text, kernel


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(K=256), "K = 256"),
        (dict(dtype="float32"), "q, k and v are float32"),
        (dict(chunk_size=32), "chunk_size is 32"),
    ],
)
def test_refusals(change, reason, monkeypatch):
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    K, dtype = change.get("K", 64), change.get("dtype", "bfloat16")
    q = jnp.zeros((1, 8, 1, K), dtype)
    call = functools.partial(
        delta_rule, q, q, q, jnp.zeros((1, 8, 1, K)), chunk_size=change.get("chunk_size", 64)
    )
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu': {reason}"):
        call(implementation="mosaic_gpu")
    monkeypatch.delattr(seam, "rule")
    assert jax.eval_shape(call)[0].shape == q.shape  # unasked, the plain form runs


def test_results_have_the_names_of_the_reference():
    g = np.zeros((64, 8))
    one = channel_kernels.products_of_a_chunk(g, g, g, g, np.ones(64), 1.0)
    assert set(one) == set(Pairs._fields)
