"""The short convolution of a layer on meshes that split heads and tokens: by its kernels, with stand-ins for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_from

from gdn_jax.bench.collectives import traffic
from gdn_jax.parallel import head_shards
from gdn_jax.parallel.mesh import CONTEXT, DATA, MeshShape
from gdn_jax.parts.conv import causal_conv1d
from gdn_jax.parts.short_conv import short_conv as fused_short_conv
from gdn_jax.parts.short_conv import split_normalized
from pallas_kernels.device import launch
from pallas_kernels.layer import short_conv as kernel

B, HEADS, WIDTH, HV = 2, 8, 32, 16
D = (2 * HEADS + HV) * WIDTH


@pytest.fixture
def stand_ins(monkeypatch):
    """In the places of the kernels what they compute, in plain JAX; which of them were traced."""
    traced = []

    def plain(x, weight, fresh, heads, width, normalize):
        ids = None if fresh is None else jnp.cumsum(fresh, 1)
        return split_normalized(causal_conv1d(x, weight, segment_ids=ids)[0], heads, width, normalize)

    def forward(x, weight, fresh, *, heads, width, normalize):
        assert kernel.check_supported(x, weight, heads, width) is None
        traced.append("forward")
        return plain(x, weight, fresh, heads, width, normalize)

    def backward(x, weight, fresh, dq, dk, dv, dothers=None, *, normalize):
        assert dothers is None
        traced.append("backward")
        heads, width = dq.shape[2:]
        _, vjp = jax.vjp(lambda x, w: plain(x, w, fresh, heads, width, normalize), x, weight)
        dx, dweight = vjp((dq, dk, dv))
        return dx, dweight.astype(jnp.float32)

    monkeypatch.setattr(kernel, "short_conv", forward)
    monkeypatch.setattr(kernel, "short_conv_backward", backward)
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    jax.clear_caches()
    yield traced
    jax.clear_caches()


def draws(T, segments):
    """x, filters, cotangents of q, k and v, and segments that change within devices, at borders and next to them."""
    rng = np.random.default_rng(0)
    shapes = (B, T, D), (D, 4), (B, T, HEADS, WIDTH), (B, T, HEADS, WIDTH), (B, T, HV * WIDTH)
    x, weight, *cotangents = (rng.standard_normal(shape) for shape in shapes)
    x, *cotangents = (put(y, jnp.float16) for y in (x, *cotangents))
    starts = ((5, 8, 15, 16, 17, 26), (1, 2, 9, 10, 11, 24))
    ids = [np.searchsorted(row, np.arange(T), side="right") for row in starts]
    return x, put(weight, jnp.float32), tuple(cotangents), put(ids) if segments else None


def results(call, x, weight, cotangents, ids, where=lambda y: y):
    """q, k and v, gradients of x and the filters, and the compiled program."""

    @jax.jit
    def run(x, weight, cotangents, ids):
        out, vjp = jax.vjp(lambda x, w: call(x, w, segment_ids=ids, heads=HEADS, width=WIDTH)[:3], x, weight)
        return *out, *vjp(cotangents)

    args = where(x), weight, jax.tree.map(where, cotangents), None if ids is None else where(ids)
    compiled = run.lower(*args).compile()
    return compiled(*args), compiled.as_text()


@functools.cache
def on_one_device(segments):
    """The results of plain JAX, compiled once for all meshes beside it."""
    call = functools.partial(fused_short_conv, implementation="chunked")
    return jax.device_get(results(call, *draws(32, segments))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("context=4", True),
        pytest.param("context=2", False, marks=pytest.mark.slow),
        pytest.param("head=2", True, marks=pytest.mark.slow),
        ("data=2,head=2,context=2", False),
        pytest.param("data=2,head=2,context=2", True, marks=pytest.mark.slow),
    ],
)
def test_kernels_on_a_mesh(stand_ins, text, segments):
    """The same q, k, v and gradients as on one device; what crosses a border is W - 1 tokens, each way."""
    shape, mesh = mesh_from(text)
    given = draws(32, segments)
    expected = on_one_device(segments)
    assert not stand_ins
    tokens = NamedSharding(mesh, PartitionSpec(DATA, CONTEXT))
    with jax.set_mesh(mesh):
        got, program = results(
            head_shards.short_conv_on_mesh, *given, where=lambda y: jax.device_put(y, tokens)
        )
    assert set(stand_ins) == {"forward", "backward"}
    for y, want in zip(got, expected, strict=True):
        y, want = (np.asarray(z, np.float64) for z in (y, want))
        assert np.abs(y - want).max() <= 2e-3 * np.abs(want).max()
    if shape.head == 1 and not segments:
        count = traffic(program).count
        assert count["collective-permute"] == 2 and set(count) <= {"collective-permute", "all-reduce"}, count


def test_layers_share_what_is_traced(stand_ins):
    """Calls of the same shapes are traced once, in whichever function of the model."""
    mesh = MeshShape(context=2).make(jax.devices()[:2])
    x, weight, _, _ = draws(32, False)

    def layers(x, weight):
        for scale in (1.0, 2.0, 3.0):
            q, k, v, _ = head_shards.short_conv_on_mesh(scale * x, weight, heads=HEADS, width=WIDTH)
            x = jnp.concatenate([y.reshape(*x.shape[:2], -1) for y in (q, k, v)], -1)
        return jnp.sum(x.astype(jnp.float32))

    with jax.set_mesh(mesh):
        jax.jit(jax.grad(layers)).trace(x, weight)
    assert sorted(stand_ins) == ["backward", "forward", "forward"], (
        "two for the value and what is kept beside it"
    )
