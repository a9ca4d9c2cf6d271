"""Meshes of CPU devices, arrays that lie on them, and stand-ins for the kernels that XLA compiles for a CPU."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.shapes import RuleArrays
from pallas_kernels.backward import rule as backward_rule
from pallas_kernels.device import launch
from pallas_kernels.forward import rule as forward_rule
from pallas_kernels.work.residuals import Residuals, Segments, Transition
from pallas_kernels.work.tables import row_items

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind=AUTO) -> Mesh:
    """A mesh of the first devices."""
    devices = first_devices(int(np.prod(shape)))
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def first_devices(number: int) -> list[jax.Device]:
    """The first devices; skips the test where there are fewer."""
    if jax.device_count() < number:
        pytest.skip(f"needs {number} devices, JAX sees {jax.device_count()}")
    return jax.devices()[:number]


def mesh_from(text: str) -> tuple[MeshShape, Mesh]:
    """The shape of a mesh, as in "data=2,head=4", and the mesh of the first devices."""
    shape = MeshShape.parse(text)
    return shape, shape.make(first_devices(shape.size))


def place(mesh: Mesh, arrays, specs):
    """The arrays on the mesh; None stays."""
    return tuple(
        None if x is None else jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(arrays, specs, strict=True)
    )


@contextlib.contextmanager
def partitioner(shardy: bool):
    """Compiles by Shardy, or by GSPMD before it."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def value_and_gradients(f):
    """A compiled function from primals and cotangents to outputs and gradients."""

    @jax.jit
    def run(primals, cotangents):
        outputs, vjp = jax.vjp(f, *primals)
        return outputs, vjp(cotangents)

    return run


def _local(x: RuleArrays, scale, state_layout: str):
    """Any function that treats rows and heads by themselves as the rule does; of small integers it is exact."""
    HO, dtype = x.g.shape[2], jnp.float32
    q, k, v = (jnp.repeat(y.astype(dtype), HO // y.shape[2], 2) for y in (x.q, x.k, x.v))
    ids = 0 if x.segment_ids is None else x.segment_ids[..., None, None]
    o = jnp.cumsum(x.g[..., None] * v, 1) + scale * (q * k).sum(-1, keepdims=True) * x.beta[..., None] + ids
    written = jnp.einsum("bthk,bthv->bhkv", k, v)
    return o.astype(x.v.dtype), x.initial_state + (
        written if state_layout == "kv" else jnp.swapaxes(written, 2, 3)
    )


def _stamps(x: RuleArrays, h_0) -> tuple[jax.Array, jax.Array]:
    """Numbers that only the right shard of the arguments has: [B, HO, T64] and [B, HO, K, V]."""
    T = x.k.shape[1]
    gates = jnp.swapaxes(x.g + x.beta, 1, 2)
    per_state = gates.sum(-1)[..., None, None] + (0 if h_0 is None else h_0)
    return jnp.pad(gates, ((0, 0), (0, 0), (0, -T % 64))), jnp.broadcast_to(per_state, h_0.shape)


@pytest.fixture
def stand_ins(monkeypatch):
    """In the places of both kernels a simple function, with residuals of their shapes that are checked on return.

    Rows of few heads are cut into segments of one chunk, unless the caller has decided.
    """

    def forward(x, *, scale, use_qk_l2norm, state_layout, config):
        del use_qk_l2norm
        o, final = _local(x, scale, state_layout)
        (B, T), k = x.k.shape[:2], x.k
        few = x.cu_seqlens is None and B * x.g.shape[2] <= 4 and T > 64
        segment_chunks = (
            (1 if few else None) if config.segment_chunks is None else config.segment_chunks or None
        )
        gates, states = _stamps(x, x.initial_state)
        segments = None
        if segment_chunks:
            items = row_items(B, T, segment_chunks)
            per_row = items.split.num_items // B
            starts = jnp.repeat(states, per_row, 0)
            segments = Segments(starts, Transition(starts[..., 0], starts.astype(k.dtype)), items)
        t = jnp.broadcast_to(gates[..., None], (*gates.shape, 64)).astype(k.dtype)
        return o, final, Residuals(gates, gates, t, segments)

    def backward(x, residuals, cotangents, *, scale, state_layout):
        k = x.k
        gates, states = _stamps(x, x.initial_state)
        right = jnp.all(residuals.g2_cum == gates) & jnp.all(residuals.t[..., 5] == gates.astype(k.dtype))
        if residuals.segments is not None:
            items = residuals.segments.items.split.num_items
            right = right & jnp.all(residuals.segments.starts == jnp.repeat(states, items // k.shape[0], 0))
        _, vjp = jax.vjp(lambda *p: _local(RuleArrays(*p, *x[6:]), scale, state_layout), *x[:6])
        gradients = vjp(tuple(cotangents))
        return backward_rule.Cotangents(*(jnp.where(right, y, jnp.nan).astype(y.dtype) for y in gradients))

    monkeypatch.setattr(forward_rule, "forward", forward)
    monkeypatch.setattr(backward_rule, "backward", backward)
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    jax.clear_caches()  # of what was traced with other kernels
    yield
    jax.clear_caches()


def spec(*entries) -> PartitionSpec:
    """A PartitionSpec."""
    return PartitionSpec(*entries)


EIGHT = ("d", "e")


PLACEMENTS = {
    "rows": (spec(EIGHT), spec(EIGHT)),
    "heads": (spec(None, None, EIGHT), spec(None, EIGHT)),
    "rows and heads": (spec("d", None, "e"), spec("d", "e")),
}
"""Name -> where tokens and states lie on a mesh of 2 x 4 devices."""

kinds = pytest.mark.parametrize(
    "kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.crossed)], ids=["automatic", "explicit"]
)


partitioners = pytest.mark.parametrize(
    "shardy", [True, pytest.param(False, marks=pytest.mark.crossed)], ids=["shardy", "gspmd"]
)
