"""A SwiGLU on a mesh whose head axis splits the columns of its branches, beside one device."""

import jax
import numpy as np
from fused_harness import SWIGLU_NAMES, close, draws
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_from

from gdn_jax.bench.collectives import traffic
from gdn_jax.parallel import head_shards
from gdn_jax.parallel.mesh import CONTEXT, DATA, HEAD
from gdn_jax.parts import products
from gdn_jax.parts.products import PRODUCTS, counting
from gdn_jax.parts.swiglu import swiglu


def test_a_swiglu_on_parts_of_its_columns():
    """Nothing is gathered: result and cotangent of x are summed over heads, those of weights over rows and tokens."""
    mesh, draw = mesh_from("data=2,head=2,context=2")[1], draws(0)
    x, dy = draw(2, 8, 12), draw(2, 8, 10)
    weights = [draw(*shape, scale=shape[0] ** -0.5) for shape in ((12, 16), (12, 16), (16, 10))]

    def run(f):
        def call(x, weights, dy):
            y, vjp = jax.vjp(f, x, *weights)
            return y, *vjp(dy)

        return jax.jit(call)

    tokens, columns = PartitionSpec(DATA, CONTEXT), PartitionSpec(None, HEAD)
    specs = tokens, [columns, columns, PartitionSpec(HEAD)], tokens
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        placed = jax.device_put((x, weights, dy), shardings)
        compiled = run(head_shards.swiglu_on_mesh).lower(*placed).compile()
        got = compiled(*placed)
    assert set(traffic(compiled.as_text()).count) == {"all-reduce"}
    for name, a, b in zip(SWIGLU_NAMES, run(swiglu)(x, weights, dy), got, strict=True):
        close(np.asarray(a, np.float64), b, name)


def test_numbers_that_saturate_are_counted_on_a_mesh(monkeypatch):
    """Those of all devices: a number of x on each device of the head axis, one of h or of a cotangent once."""
    monkeypatch.setattr(products, "ROOM", 0)
    mesh, draw = mesh_from("data=2,head=2,context=2")[1], draws(0)
    x = draw(2, 64, 12, dtype="bfloat16")
    weights = [draw(*shape, dtype="bfloat16") for shape in ((12, 16), (12, 16), (16, 10))]

    @jax.jit
    @jax.grad
    def count(zero, x, *weights):
        with counting(zero):
            y = head_shards.swiglu_on_mesh(x, *weights, product=PRODUCTS["float8"])
        return y.astype("float32").sum()

    counts = []
    for sample in (1024, 4):  # all tokens of a device, then some of them
        monkeypatch.setattr(products, "SAMPLE", sample)
        jax.clear_caches()
        with jax.set_mesh(mesh):
            counts.append(float(count(np.float32(0), x, *weights)))
    assert counts[0] == 0 < counts[1]
