"""The kernels with a decay of each channel on a GPU of compute capability 9.0: the case table, configurations, future
gates, repeats, garbage next to the data."""

import functools

import family_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_kernels import wide
from tolerances import STATES, bound, worst_ratio

from gdn_jax import delta_rule, gated_delta_rule
from gdn_jax.checks import family_cases
from gdn_jax.family import mosaic
from pallas_kernels.forward import channel_rule

pytestmark = pytest.mark.gpu

TABLE = [case for case in family_cases.TABLE if case.call.chunk_size == 64 and case.call.K <= 128]
WIDE = (
    wide("wide-kinds", "kinds", T=2048),
    wide("wide-mixed", "mixed", T=2000, heads=(2, 1, 4)),
    wide("wide-bound", "bound", T=700),
    wide("wide-erase", "mixed", T=700, erase="channel", write="channel"),
    wide("wide-normalised", "kinds", T=700, use_qk_l2norm=True, keys="any"),
    wide("wide-packed", "kinds", T=1500, lengths=(0, 1, 64, 300, 0, 640, 63, 129)),
    wide("wide-equal-lengths", "kinds", T=512, lengths=(128,) * 4),
    wide("wide-V256", "mixed", T=200, V=256),
    wide("wide-K64", "mixed", T=200, K=64),
)
MISSED = {
    ("channels-fast-and-slow", "bfloat16", "final_state"): 5.35e-3,
    ("channels-beta-0-at-some", "bfloat16", "final_state"): 5.19e-3,
    ("no-state-no-strengths", "bfloat16", "o"): 6.15e-3,
    ("write-0", "bfloat16", "o"): 5.19e-3,
    ("erase-and-write-a-channel", "bfloat16", "o"): 5.1e-3,
    ("no-state-no-strengths", "bfloat16", "final_state"): 7.09e-3,
    ("erase-and-write-a-channel", "bfloat16", "final_state"): 5.59e-3,
    ("write-0", "bfloat16", "final_state"): 1.81e-2,  # what is left of a state that is nearly erased
    ("channels-zero", "float16", "final_state"): 6.77e-4,
    ("channels-fast-and-slow", "float16", "final_state"): 7.72e-4,
    ("channels-beta-0-at-some", "float16", "final_state"): 6.93e-4,
    ("no-state-no-strengths", "float16", "final_state"): 1.08e-3,
    ("erase-and-write-a-channel", "float16", "final_state"): 7.8e-4,
    ("write-0", "float16", "final_state"): 2.47e-3,
    ("channels-zero", "float16", "o"): 6.43e-4,
    ("channels-tiny", "float16", "final_state"): 6.42e-4,
    ("channels-fast-and-slow", "float16", "o"): 7.18e-4,
    ("channels-beta-0-at-some", "float16", "o"): 6.35e-4,
    ("no-state-no-strengths", "float16", "o"): 9.14e-4,
    ("write-0", "float16", "o"): 7.54e-4,
    ("erase-and-write-a-channel", "float16", "o"): 7.48e-4,
    ("packed-vk-erase-a-channel", "float16", "o"): 6.41e-4,
}
"""(case, dtype, output): error on an H100, of heads with K = 16. Keys and queries are rounded with their
decays, once more than in the gated delta rule's kernels."""
UNMEASURED = ("channels-beta-up-to-2", "erase-2")
"""Cases that amplify the rounding of operands, as the gated delta rule does with beta = 2. Up to four times the bound
is accepted."""
CEILING = 1.25
"""The factor by which a miss may grow, as in `missed`."""


def parameters(*tuples):
    """Cases as pytest parameters."""
    return [pytest.param(case, id=case.name) for some in tuples for case in some]


def check(case, x, dtype, outputs) -> None:
    """o and the final state against the oracle, over the tensor and per head; all misses are told at once."""
    expected, wrong = family_kernels.truth(case, x), []
    for name, got in zip(STATES, outputs, strict=True):
        got = np.asarray(got, np.float64)
        error = worst_ratio(expected[name], got, {"o": 2, "final_state": 1}[name])
        measured = MISSED.get((case.name, dtype, name))
        allowed = bound(name, dtype) * (4 if case.name in UNMEASURED else 1)
        allowed = allowed if measured is None else CEILING * measured
        if not (np.isfinite(got).all() and error <= allowed):
            wrong.append(f"({case.name!r}, {dtype!r}, {name!r}): {error:.3e}, allowed {allowed:.2e}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", parameters(TABLE, WIDE))
def test_public_call(case, dtype):
    x = family_cases.inputs(case, dtype)
    arguments = {name: jnp.asarray(y) for name, y in x.arguments.items()}
    run = jax.jit(functools.partial(delta_rule, **family_kernels.options(case), implementation="mosaic_gpu"))
    check(case, x, dtype, run(**arguments))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, 4])
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("case", parameters(WIDE[:2], [WIDE[5]]))
def test_configurations(case, warpgroups, chunks, known, monkeypatch):
    if known and case.call.lengths is None:
        pytest.skip("there are no lengths to know")
    config = channel_rule.Config(state_warpgroups=warpgroups, segment_chunks=chunks)
    monkeypatch.setattr(channel_rule, "forward", functools.partial(channel_rule.forward, config=config))
    x = family_cases.inputs(case, "bfloat16")
    call, given = family_kernels.call(case, x, known=known)
    check(case, x, "bfloat16", jax.jit(functools.partial(mosaic._forward, call))(given))


def random_call(T: int, gate: str, heads: int = 4, seed: int = 0):
    """Arguments of `delta_rule` with widths of 128."""
    rng = np.random.default_rng(seed)
    q, k = (jnp.asarray(family_kernels.unit(rng, 1, T, heads, 128), jnp.bfloat16) for _ in range(2))
    v = jnp.asarray(rng.standard_normal((1, T, heads, 128)), jnp.bfloat16)
    g = jnp.asarray(family_kernels.gates(gate, seed, (1, T, heads, 128)))
    beta = jnp.asarray(rng.uniform(0, 1, (1, T, heads)), jnp.float32)
    return q, k, v, g, beta


@functools.cache
def public():
    """The public call, compiled."""
    return jax.jit(functools.partial(delta_rule, implementation="mosaic_gpu"))


@pytest.mark.parametrize("gate", ["kinds", "mixed", "zero"])
def test_no_gate_reaches_back(gate):
    """Bit for bit, at every position of a block of 16."""
    q, k, v, g, beta = random_call(200, gate)
    o, _ = public()(q, k, v, g, beta)
    for t in (*range(64, 80), 0, 31, 127):
        other = g.at[:, t + 1 :].set(family_kernels.gates("kinds", t, (1, 199 - t, 4, 128)))
        assert family_kernels.same_bits(public()(q, k, v, other, beta)[0][:, : t + 1], o[:, : t + 1]), t


@pytest.mark.parametrize("gate", ["kinds", "mixed"])
def test_a_thousand_repeats_have_the_same_bits(gate):
    arguments = random_call(4096, gate)
    first = public()(*arguments)
    different = jnp.zeros((), jnp.int32)
    count = jax.jit(lambda n, a, b: n + ((a[0] != b[0]).any() | (a[1] != b[1]).any()))
    for _ in range(1000):
        different = count(different, first, public()(*arguments))
    assert int(different) == 0


def test_equal_channels_are_the_gated_delta_rule():
    q, k, v, g, beta = random_call(1000, "mild")
    g = jnp.broadcast_to(g[..., :1], g.shape)
    for a, b in zip(public()(q, k, v, g, beta), gated_delta_rule(q, k, v, g[..., 0], beta), strict=True):
        assert worst_ratio(np.asarray(b, np.float64), np.asarray(a, np.float64), None) < 6e-3


def test_slow_channels_over_many_tokens():
    """Against the plain form in float32; whole sequences and segments agree too."""
    q, k, v, g, beta = random_call(32768, "mixed", heads=1)
    wide_args = (y.astype(jnp.float32) for y in (q, k, v))
    expected = jax.jit(functools.partial(delta_rule, implementation="chunked"))(*wide_args, g, beta)
    for got, want in zip(public()(q, k, v, g, beta), expected, strict=True):
        assert worst_ratio(np.asarray(want, np.float64), np.asarray(got, np.float64), None) < 5e-3


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_behind_the_last_sequence(garbage):
    """Tokens of the padding change nothing, whatever they hold."""
    q, k, v, g, beta = random_call(300, "mixed")
    cu = jnp.asarray([0, 5, 130, 261])
    clean = public()(q, k, v, g, beta, cu_seqlens=cu)
    q, k, v, beta = (y.at[:, 261:].set(garbage) for y in (q, k, v, beta))
    got = public()(q, k, v, g.at[:, 261:].set(-np.inf), beta, cu_seqlens=cu)
    assert family_kernels.same_bits(clean, got)
