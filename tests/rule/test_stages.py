"""The stages of the chunked form, each against its own formula in NumPy float64, and the chunk states as a result."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle

EXACT = tolerance("o", "float32")
SHAPES = [(16, ()), (64, (3,)), (128, (2, 1, 2)), (5, (2,))]


def stage_inputs(C, leading, K=12, V=20, dtype=np.float32):
    rng = np.random.default_rng(C)
    k = rng.standard_normal((*leading, C, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -rng.exponential(0.3, (*leading, C))
    beta = rng.random((*leading, C))
    q, v = rng.standard_normal((*leading, C, K)), rng.standard_normal((*leading, C, V))
    h = rng.standard_normal((*leading, K, V))
    return tuple(x.astype(dtype) for x in (q, k, v, g, beta, h))


def in_float64(q, k, v, g, beta, h):
    """Every stage by its definition."""
    q, k, v, g, beta, h = (x.astype(np.float64) for x in (q, k, v, g, beta, h))
    C, t = g.shape[-1], np.matrix_transpose
    G = np.cumsum(g, -1)
    between = np.tril(np.exp(np.minimum(G[..., :, None] - G[..., None, :], 0)))
    L = np.tril(beta[..., None] * (k @ t(k)) * between, -1)
    A = np.linalg.inv(np.eye(C) + L)
    w = A @ (beta[..., None] * np.exp(G)[..., None] * k)
    u = A @ (beta[..., None] * v)
    v_new = u - w @ h
    o = 0.3 * (np.exp(G)[..., None] * (q @ h) + (q @ t(k) * between) @ v_new)
    gates = dict(
        G=G, between=between, total=np.exp(G[..., -1]), from_start=np.exp(G), to_end=between[..., -1, :]
    )
    return gates | dict(kkt=L, A=A, w=w, u=u, v_new=v_new, o=o)


@jax.jit
def all_stages(q, k, v, g, beta, h, v_new):
    decay = gdn_jax.chunk_cumsum(g)
    kkt = gdn_jax.kkt(k, decay, beta)
    A = gdn_jax.solve_tril(kkt)
    w, u = gdn_jax.wy(A, k, v, decay, beta)
    o = gdn_jax.chunk_output(q, k, v_new, h, decay, 0.3)
    gates = dict(G=decay.g_cum, between=decay.between(), total=decay.total())
    return gates | dict(from_start=decay.from_start(), to_end=decay.to_end(), kkt=kkt, A=A, w=w, u=u, o=o)


@pytest.mark.parametrize("C, leading", SHAPES)
def test_stages(C, leading):
    """Any chunk size and any leading axes."""
    x = stage_inputs(C, leading)
    expected = in_float64(*x)
    got = all_stages(*x, expected["v_new"].astype(np.float32))
    for name, y in got.items():
        assert_close(expected[name], y, EXACT, name)
    assert not np.triu(np.asarray(got["kkt"])).any(), "kkt is strictly lower triangular"


def test_stages_in_double_precision():
    """float64 in, float64 out: no product falls back to float32."""
    x = stage_inputs(64, (2,), dtype=np.float64)
    expected = in_float64(*x)
    with jax.enable_x64(True):
        got = all_stages(*x, expected["v_new"])
    for name, y in got.items():
        assert y.dtype == np.float64, name
        assert_close(expected[name], y, tolerance("o", "float64"), name)


def test_decays_between_weak_gates_after_strong_ones():
    """exp(G_i - G_j) where |G| is over 1000 and the difference 1e-3: a float32 sum would be off by 6e-5."""
    g = np.full(64, -1e-3, np.float32)
    g[:48] = -25
    G = np.cumsum(g.astype(np.float64))
    expected = np.exp(G[60] - G[50])
    got = np.asarray(jax.jit(lambda g: gdn_jax.chunk_cumsum(g).between())(g))
    assert_close(expected, got[60, 50], 2 * 2.0**-24)


def test_decays_across_resets():
    """g = -inf cuts the chunk: zero across, the usual decay on either side, no NaN and no NaN in the derivative."""
    g = np.full(8, -0.5, np.float32)
    g[[2, 5]] = -np.inf
    expected = np.zeros((8, 8))
    for i in range(8):
        for j in range(i + 1):
            expected[i, j] = np.exp(g[j + 1 : i + 1].astype(np.float64).sum())

    def between(g):
        return gdn_jax.chunk_cumsum(g).between()

    got, derivative = jax.device_get(
        jax.jit(lambda g: (between(g), jax.grad(lambda g: between(g).sum())(g)))(g)
    )
    assert_close(expected, got, EXACT)
    assert np.isfinite(derivative).all() and derivative[2] == derivative[5] == 0


@pytest.mark.parametrize("C", [16, 64])
def test_solve_tril_of_correlated_keys(C):
    """All keys equal: powers of kkt reach 1e17 for 64 tokens, substitution does not notice."""
    solve_tril = jax.jit(gdn_jax.solve_tril)
    for beta in (0.835, 1.0, 2.0):
        L = np.tril(np.full((C, C), beta), -1)
        A = np.asarray(solve_tril(L.astype(np.float32)))
        residual = (np.eye(C) + L) @ A.astype(np.float64) - np.eye(C)
        assert np.abs(residual).max() <= C * 2.0**-24 * beta * np.abs(A).max()


def test_solve_tril_derivative():
    """dA = -A dkkt A, forward and reverse, in float64 against a complex step, which has no error but rounding."""
    rng = np.random.default_rng(0)
    L, direction, weight = (np.tril(rng.standard_normal((6, 6)), -1) for _ in range(3))
    weight = rng.standard_normal((6, 6))

    expected = np.linalg.inv(np.eye(6) + L + 1e-30j * direction).imag / 1e-30
    with jax.enable_x64(True):

        @jax.jit
        def both(L, direction):
            _, tangent = jax.jvp(gdn_jax.solve_tril, (L,), (direction,))
            return tangent, jax.grad(lambda L: (gdn_jax.solve_tril(L) * weight).sum())(L)

        tangent, gradient = jax.device_get(both(L, direction))
    # Either factor A has an error of up to |A| |I + kkt| |A| u, see tolerances.tolerance.
    A = np.linalg.inv(np.eye(6) + L)
    bound = 2 * np.abs(np.abs(A) @ np.abs(np.eye(6) + L)).sum(1).max() * 2.0**-53
    assert_close(expected, tangent, bound)
    assert_close((expected * weight).sum(), (gradient * direction).sum(), bound)


STATES = {
    "slow-decay": cases.CASES["slow-decay"],
    "grouped": cases.CASES["queries-fewer-than-keys-chunk-16"],
    "reset": cases.CASES["reset-at-some-tokens"],
    "vk": cases.Case("states-vk", T=70, heads=(2, 2, 2), state_layout="vk"),
    "no-state": cases.Case("states-alone", T=70, initial_state=False),
    "segments": cases.Case("states-segments", T=70, segments=((10, 40, 20), (16, 54)), chunk_size=16),
    "normalised": cases.Case("states-norm", T=40, use_qk_l2norm=True, keys="any", chunk_size=16),
    "channels": cases.Case("states-channels", T=40, channel_g="mixed", chunk_size=16),
    "apart": cases.Case(
        "states-apart",
        **dict(T=40, channel_g="mixed", erase="channel", write="head"),
        **dict(use_qk_l2norm=True, keys="any", chunk_size=16),
    ),
}


def states_call(case, segment_ids):
    def call(k, v, g, beta, initial_state, *apart):
        options = dict(state_layout=case.state_layout, chunk_size=case.chunk_size, segment_ids=segment_ids)
        options.update(use_k_l2norm=case.use_qk_l2norm, initial_state=initial_state)
        if case.channel_g is None:
            return gdn_jax.chunk_states(k, v, g, beta, **options)
        options |= dict(zip(("erase", "write"), apart, strict=False))
        return gdn_jax.delta_chunk_states(k, v, g, beta, **options)

    return call


def before_chunks(case, x):
    """(first n C tokens as arguments of the oracle) for each chunk n."""
    for start in range(0, case.T, case.chunk_size):
        cut = {name: y[:, :start] for name, y in x.arguments.items() if name != "initial_state"}
        yield start, x.arguments | cut


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", harness.tiers(STATES, ("slow-decay", "reset"), ("segments", "normalised", "vk", "apart"))
)
def test_chunk_states(name):
    """h at the start of chunk n is the final state of the tokens before it, and so are its gradients."""
    case = STATES[name]
    x = cases.inputs(case)
    primals = jax.device_put(x.primals[1:])
    options = dict(state_layout=case.state_layout, use_qk_l2norm=case.use_qk_l2norm)
    expected = [oracle.forward(**before, **options)[1] for _, before in before_chunks(case, x)]
    expected = np.stack(expected, 1)
    dh = np.random.default_rng(1).standard_normal(expected.shape).astype(np.float32)

    @jax.jit
    def value_and_gradients(primals, dh):
        segment_ids = None if x.segment_ids is None else jnp.asarray(x.segment_ids)
        h, vjp = jax.vjp(states_call(case, segment_ids), *primals)
        return h, vjp(dh)

    h, gradients = value_and_gradients(primals, dh)
    assert h.dtype == jnp.float32
    assert_close(expected, h, tolerance("final_state", "float32"), "h", 2)

    names = ("dk", "dv", "dg", "dbeta", "dh_0", "derase", "dwrite")
    totals = {
        name: np.zeros(y.shape)
        for name, y in zip(names, primals, strict=False)
        if y is not None and name != "dh_0"
    }
    dh_0 = 0
    for n, (start, before) in enumerate(before_chunks(case, x)):
        part = oracle.gradients(**before, **options, do=None, dh_T=dh[:, n])
        for output in totals:
            totals[output][:, :start] += getattr(part, output)
        dh_0 = dh_0 if part.dh_0 is None else dh_0 + part.dh_0
    for output, got in zip(names, gradients, strict=False):
        if got is not None:
            reference = dh_0 if output == "dh_0" else totals[output]
            assert_close(reference, got, tolerance(output, "float32"), output)


def test_chunk_states_of_packed_sequences():
    """With cu_seqlens the chunks are those of packing.packed_chunks, sequence after sequence."""
    case = cases.CASES["packed"]
    x = cases.inputs(case)
    k, v, g, beta, h_0 = (jax.device_put(y) for y in x[1:6])
    cu = jax.device_put(x.cu_seqlens)
    h = np.asarray(jax.jit(gdn_jax.chunk_states)(k, v, g, beta, initial_state=h_0, cu_seqlens=cu))
    chunk = 0
    for n, length in enumerate(case.lengths):
        for start in range(0, length, case.chunk_size):
            s = slice(x.cu_seqlens[n], x.cu_seqlens[n] + start)
            before = {name: getattr(x, name)[:, s] for name in ("q", "k", "v", "g", "beta")}
            _, state = oracle.forward(**before, initial_state=x.initial_state[n : n + 1])
            assert_close(
                state[0], h[0, chunk], tolerance("final_state", "float32"), f"sequence {n} at {start}", 0
            )
            chunk += 1
