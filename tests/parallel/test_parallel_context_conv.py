"""The convolution of rows whose tokens are split over devices: as on one device, and what is sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from harness import tiers
from meshes import mesh_of, spec, value_and_gradients

from gdn_jax.bench.collectives import traffic
from gdn_jax.parallel import context_conv
from gdn_jax.parts.conv import causal_conv1d
from gdn_jax.parts.short_conv import split_normalized
from pallas_kernels.layer import short_conv

TOKENS, WHOLE = spec(None, "context"), spec()


CONVOLUTIONS = {
    "two devices": (2, dict(T=8)),
    "eight devices of three tokens": (8, dict(T=24)),
    "two taps": (8, dict(T=8, W=2)),
    "no state, no bias": (4, dict(T=16, state=False, bias=False)),
    "segments": (8, dict(T=24, segments=(3, 8, 9, 13, 14))),
    "segments of one token": (4, dict(T=16, segments=(1, 2, 3, 4, 5, 6, 7))),
    "packed": (8, dict(T=24, lengths=(1, 1, 5, 1, 1, 0, 11, 3))),
    "packed, no state": (8, dict(T=24, lengths=(24,), state=False)),
}


@pytest.mark.parametrize("name", tiers(CONVOLUTIONS, ("two devices", "segments", "packed")))
def test_convolution(name):
    """Outputs, final states and all gradients as on one device."""
    devices, options = CONVOLUTIONS[name]
    check_convolution(devices, **options)


def check_convolution(devices, T, W=4, D=3, state=True, bias=True, segments=None, lengths=None):
    """One convolution on so many devices beside one."""
    rng = np.random.default_rng(0)
    B, N = (1, len(lengths)) if lengths else (2, 2)
    primals = tuple(
        rng.standard_normal(shape).astype(np.float32) if given else None
        for shape, given in (((B, T, D), 1), ((D, W), 1), ((D,), bias), ((N, D, W - 1), state))
    )
    cu = put(np.cumsum((0, *lengths)), jnp.int32) if lengths else None
    ids = None
    if segments:  # every other id is the same: what counts is a change
        numbers = np.searchsorted(np.array(segments), np.arange(T), side="right") % 2
        ids = put(np.broadcast_to(numbers, (B, T)), jnp.int32)

    def whole(x, weight, bias, state):
        return causal_conv1d(x, weight, bias, initial_state=state, cu_seqlens=cu, segment_ids=ids)

    def local(x, weight, bias, state, cu, ids):
        rest = dict(initial_state=state, cu_seqlens=cu, segment_ids=ids)
        return context_conv.causal_conv1d(x, weight, bias, axis_name="context", **rest)

    mesh = mesh_of((devices,), ("context",))
    specs = (TOKENS, WHOLE, WHOLE, WHOLE, WHOLE, TOKENS)
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(TOKENS, WHOLE))
    cotangents = (primals[0], rng.standard_normal((N, D, W - 1)).astype(np.float32))
    expected = value_and_gradients(whole)(primals, cotangents)
    got = value_and_gradients(lambda *p: split(*p, cu, ids))(primals, cotangents)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_a_convolution_whose_kernels_take_whole_rows(packed, monkeypatch):
    """Stand-ins for the kernels in plain JAX: what enters from the device before is not theirs."""
    static = dict(heads=1, width=2, normalize=True)

    def whole(x, weight, ids):
        return split_normalized(causal_conv1d(x, weight, segment_ids=ids)[0], **static)

    def kernel(x, weight, fresh, **_):
        return whole(x, weight, None if fresh is None else jnp.cumsum(fresh, 1))

    def backward(x, weight, fresh, *cotangents, normalize):
        return jax.vjp(lambda *p: kernel(*p, fresh), x, weight)[1](cotangents)

    monkeypatch.setattr(short_conv, "short_conv", kernel)
    monkeypatch.setattr(short_conv, "short_conv_backward", backward)
    rng = np.random.default_rng(3)
    primals = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 12, 8), (8, 4))]
    cotangents = tuple(
        rng.standard_normal((2, 12, *wide)).astype(np.float32) for wide in ((1, 2), (1, 2), (4,))
    )
    ids = put([[1] * 5 + [2] * 7, [1] * 2 + [2] * 4 + [3] * 6]) if packed else None

    def local(x, weight, ids):
        return context_conv.short_conv_by_kernels(x, weight, ids, axis_name="context", **static)

    split = jax.shard_map(
        local, mesh=mesh_of((2,), ("context",)), in_specs=(TOKENS, WHOLE, TOKENS), out_specs=TOKENS
    )
    expected = value_and_gradients(lambda *p: whole(*p, ids))(primals, cotangents)
    got = value_and_gradients(lambda *p: split(*p, ids))(primals, cotangents)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_the_convolution_sends_its_halo_alone():
    """W - 1 tokens each way, whatever the length, where nobody reads the final state."""
    mesh = mesh_of((4,), ("context",))

    def run(T):
        local = lambda x, w: context_conv.causal_conv1d(x, w, axis_name="context")[0]  # noqa: E731
        f = jax.shard_map(local, mesh=mesh, in_specs=(TOKENS, WHOLE), out_specs=TOKENS)
        x, w = np.ones((1, T, 8), np.float32), np.ones((8, 4), np.float32)
        return traffic(value_and_gradients(lambda x: f(x, w)).lower((x,), x).compile().as_text())

    assert run(32).count == {"collective-permute": 2}
    assert run(32).total == run(64).total == 2 * 3 * 8 * 4


def test_too_few_tokens_for_the_convolution():
    mesh = mesh_of((8,), ("context",))
    local = functools.partial(context_conv.causal_conv1d, axis_name="context")
    f = jax.shard_map(local, mesh=mesh, in_specs=(TOKENS, WHOLE), out_specs=(TOKENS, WHOLE))
    with pytest.raises(
        ValueError, match=r"x: expected at least W - 1 = 3 tokens on every device of 'context', got 2"
    ):
        jax.jit(f)(np.ones((1, 16, 2), np.float32), np.ones((2, 4), np.float32))
