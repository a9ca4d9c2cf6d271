"""Gated DeltaProduct: several steps of the gated delta rule for every token."""

import functools

import jax
import numpy as np
import pytest
from tolerances import assert_close, bound

from gdn_jax import gated_delta_product, gated_delta_rule


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_product_of_several_steps(n):
    """DeltaProduct against the recurrence written out; with one step the bits of the gated delta rule."""
    rng = np.random.default_rng(n)
    B, T, H, K, V = 1, 37, 2, 8, 4
    q = rng.standard_normal((B, T, H, K)).astype(np.float32)
    k = rng.standard_normal((B, T, n, H, K)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((B, T, n, H, V)).astype(np.float32)
    g = -rng.random((B, T, H)).astype(np.float32)
    beta = 2 * rng.random((B, T, n, H)).astype(np.float32)
    o, state = jax.jit(gated_delta_product)(q, k, v, g, beta)
    S, expected = np.zeros((H, K, V)), []
    for t in range(T):
        S = np.exp(g[0, t].astype(np.float64))[:, None, None] * S
        for i in range(n):
            u = beta[0, t, i][:, None] * (v[0, t, i] - np.einsum("hk,hkv->hv", k[0, t, i], S))
            S = S + k[0, t, i][:, :, None] * u[:, None, :]
        expected.append(K**-0.5 * np.einsum("hk,hkv->hv", q[0, t], S))
    assert_close(np.array(expected)[None], np.asarray(o), bound("o", "float32"))
    assert_close(S[None], np.asarray(state), bound("final_state", "float32"))
    if n == 1:
        plain = jax.jit(gated_delta_rule)(q, k[:, :, 0], v[:, :, 0], g, beta[:, :, 0])
        np.testing.assert_array_equal(o, plain[0])
        np.testing.assert_array_equal(state, plain[1])


def test_packed_products_and_segments():
    """Borders count tokens, whatever the number of steps."""
    rng = np.random.default_rng(0)
    shape = (1, 20, 2, 1)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 20, 1, 4), (*shape, 4), (*shape, 3)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    expected = np.zeros((1, 20, 1, 3))
    for t in range(20):
        if t in (0, 7):
            S = np.zeros((4, 3))
        for k_i, v_i in zip(k[0, t, :, 0].astype(np.float64), v[0, t, :, 0], strict=True):
            S = S + np.outer(k_i, v_i - k_i @ S)
        expected[0, t, 0] = q[0, t, 0] @ S / 2
    rule = jax.jit(functools.partial(gated_delta_product, implementation="recurrent"))
    packed, _ = rule(q, k, v, cu_seqlens=np.array([0, 7, 20]))
    segments, _ = rule(q, k, v, segment_ids=np.repeat([[0, 1]], [7, 13], 1))
    for got in (packed, segments):
        assert_close(expected, np.asarray(got), bound("o", "float32"))


def test_products_of_narrow_offsets(no_type_checks):
    """Offsets times the steps of a token are no numbers of 8 bits."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((1, 100, 1, 3), *[(1, 100, 3, 1, 3)] * 2)
    )
    rule = functools.partial(gated_delta_product, use_qk_l2norm=True, implementation="recurrent")
    traced, offsets = jax.jit(rule), np.array([0, 40, 100])
    expected = traced(q, k, v, cu_seqlens=offsets.astype(np.int32))
    for found in (
        traced(q, k, v, cu_seqlens=offsets.astype(np.int8)),
        traced(q, k, v, cu_seqlens=offsets.astype(np.uint8)),
        jax.jit(lambda *x: rule(*x, cu_seqlens=offsets.astype(np.int8)))(q, k, v),
    ):
        jax.tree.map(np.testing.assert_array_equal, expected, found)
