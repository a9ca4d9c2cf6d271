"""Erase-then-Delta Attention against its recurrence in float64, and against the rules that it contains."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, bound

from gdn_jax import delta_rule, erase_then_delta_rule, erase_then_delta_step


def sample(B=1, T=37, H=2, HV=4, K=8, V=6, channels=True, seed=0):
    """q, k, v, g, beta, erase_key, erase_strength; keys of unit length."""
    rng = np.random.default_rng(seed)
    q, k, e = (rng.standard_normal((B, T, H, K)) for _ in range(3))
    q, k, e = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k, e))
    g = -2 * rng.random((B, T, HV, K) if channels else (B, T, HV))
    beta, gamma = rng.random((2, B, T, HV))
    return tuple(x.astype(np.float32) for x in (q, k, rng.standard_normal((B, T, HV, V)), g, beta, e, gamma))


def recurrence(q, k, v, g, beta, e, gamma, S=None, starts=(0,)):
    """Outputs and the last state, in float64, of rows in which memory begins anew at some tokens."""
    q, k, v, g, beta, e, gamma = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, e, gamma))
    (B, T, HV, V), K, R = v.shape, k.shape[-1], v.shape[2] // k.shape[2]
    q, k, e = (np.repeat(x, R, axis=2) for x in (q, k, e))
    g = g if g.ndim == 4 else g[..., None]
    S, o = np.zeros((B, HV, K, V)) if S is None else np.asarray(S, np.float64), []
    for t in range(T):
        S = (S * 0 if t in starts and t else S) * np.exp(g[:, t])[..., None]
        S = (
            S
            - gamma[:, t][..., None, None]
            * e[:, t][..., None]
            * np.einsum("bhk,bhkv->bhv", e[:, t], S)[:, :, None]
        )
        u = beta[:, t][..., None] * (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t][..., None] * u[:, :, None]
        o.append(np.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
    return np.stack(o, 1), S


@pytest.mark.parametrize("implementation", ["chunked", pytest.param("recurrent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("channels", [True, False], ids=["channels", "heads"])
def test_against_float64(channels, implementation):
    """Grouped heads, an initial state, its gradients' shapes and finiteness; a row in two calls is the row."""
    x = sample(channels=channels)
    start = np.random.default_rng(1).standard_normal((1, 4, 8, 6)).astype(np.float32)
    rule = functools.partial(erase_then_delta_rule, chunk_size=16, implementation=implementation)

    @jax.jit
    def run(x, start):
        (o, S), pull = jax.vjp(lambda *x: rule(*x, initial_state=start), *x)
        first, middle = rule(*(y[:, :20] for y in x), initial_state=start)
        rest, last = rule(*(y[:, 20:] for y in x), initial_state=middle)
        return o, S, pull((o, S)), jnp.concatenate([first, rest], 1), last

    o, S, gradients, pieces, last = run(x, start)
    want, state = recurrence(*x, S=start)
    for got in (o, pieces):
        assert_close(want, np.asarray(got), bound("o", "float32"))
    for got in (S, last):
        assert_close(state, np.asarray(got), bound("final_state", "float32"))
    for dx, y in zip(gradients, x, strict=True):
        assert dx.shape == y.shape and np.isfinite(dx).all() and np.abs(dx).max() > 0


def test_gradients_are_those_of_differences():
    """A directional derivative of every argument, by float64 differences of the recurrence."""
    x = sample(T=9, H=1, HV=2)
    rng = np.random.default_rng(2)
    do, dS = rng.standard_normal((1, 9, 2, 6)), rng.standard_normal((1, 2, 8, 6))
    directions = [rng.standard_normal(y.shape) for y in x]

    def value(*x):
        o, S = recurrence(*x)
        return (o * do).sum() + (S * dS).sum()

    @jax.jit
    def gradients(*x):
        return jax.vjp(erase_then_delta_rule, *x)[1]((do.astype(np.float32), dS.astype(np.float32)))

    found, wide = gradients(*x), [y.astype(np.float64) for y in x]
    for i, (dx, direction) in enumerate(zip(found, directions, strict=True)):

        def moved(step, i=i, direction=direction):
            return value(*(y + step * direction if i == j else y for j, y in enumerate(wide)))

        # Gradients are float32: roundings of 6e-8 of some hundred terms of size 1, in 9 tokens one after another. The
        # differences are wrong by the step's square, 1e-10, and by 1e-16 of the value over the step.
        expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
        assert abs((np.asarray(dx, np.float64) * direction).sum() - expected) < 1e-4 * max(
            1, abs(expected)
        ), i


def test_the_rules_inside():
    """Without an erase strength it is Kimi Delta Attention; two erasures at k are one of the closed form; a step at a
    time is the row; packed rows and segments begin anew; q, k and e come to unit length."""
    q, k, v, g, beta, e, gamma = x = sample()
    ids = np.repeat([[0, 1]], [15, 22], 1)
    long = [y * s for y, s in zip((q, k, e), (3, 0.5, 2), strict=True)]

    @jax.jit
    def run(x, long):
        q, k, v, g, beta, e, gamma = x
        rule = functools.partial(erase_then_delta_rule, chunk_size=16)
        normalised = rule(long[0], long[1], v, g, beta, long[2], gamma, use_qk_l2norm=True)
        packed = rule(*x, cu_seqlens=np.array([0, 15, 37]))
        kda = rule(q, k, v, g, beta, e, jnp.zeros_like(gamma)), delta_rule(q, k, v, g, beta, chunk_size=16)

        def step(S, x):
            o, S = erase_then_delta_step(*x, S)
            return S, o

        S, o = jax.lax.scan(step, jnp.zeros((1, 4, 8, 6)), tuple(jnp.swapaxes(y, 0, 1) for y in x))
        return (
            kda,
            rule(q, k, v, g, beta, None, gamma),
            (jnp.swapaxes(o, 0, 1), S),
            packed,
            rule(*x, segment_ids=jnp.asarray(ids)),
            normalised,
        )

    (ours, kda), same, steps, packed, segments, normalised = run(x, long)
    for a, b in zip(kda, ours, strict=True):
        assert_close(np.asarray(a, np.float64), np.asarray(b), bound("o", "float32"))
    want, state = recurrence(*x)
    for o, S in (steps, normalised):
        assert_close(want, np.asarray(o), bound("o", "float32"))
        assert_close(state, np.asarray(S), bound("final_state", "float32"))
    assert_close(recurrence(q, k, v, g, beta, k, gamma)[0], np.asarray(same[0]), bound("o", "float32"))
    anew = recurrence(*x, starts=(0, 15))[0]
    for got in (packed[0], segments[0]):
        assert_close(anew, np.asarray(got), bound("o", "float32"))
    # (I - beta k k^T)(I - gamma k k^T) = I - (beta + gamma - beta gamma) k k^T, with beta k v^T written.
    total = beta + gamma - beta * gamma
    closed = jax.jit(functools.partial(delta_rule, chunk_size=16))(q, k, v, g, erase=total, write=beta)
    assert_close(np.asarray(closed[0], np.float64), np.asarray(same[0]), bound("o", "float32"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("erase_key", np.zeros((1, 37, 4, 8), np.float32), r"erase_key: expected .*1, 37, 2, 8"),
        ("erase_strength", np.zeros((1, 37, 2), np.float32), r"erase_strength: expected .*1, 37, 4"),
        ("g", np.zeros((1, 37, 4, 5), np.float32), "g: expected"),
        (
            "erase_key",
            np.zeros((1, 37, 2, 8), np.float16),
            "erase_key: expected k's dtype float32, got float16",
        ),
        ("erase_strength", np.zeros((1, 37, 4), np.int32), "erase_strength: expected dtype float16"),
    ],
)
def test_what_does_not_fit(name, value, said, no_type_checks):
    names = ("q", "k", "v", "g", "beta", "erase_key", "erase_strength")
    with pytest.raises(ValueError, match=said):
        erase_then_delta_rule(**(dict(zip(names, sample(), strict=True)) | {name: value}))
