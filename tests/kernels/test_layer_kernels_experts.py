"""The kernel that multiplies rows by their experts, interpreted, and the mixture that is made with it."""

import functools
from collections import Counter

import fused_oracle
import jax
import jax.numpy as jnp
import layer_kernels
import numpy as np
import pytest
from device_arrays import put
from fused_harness import close, draws
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from layer_kernels import INTERPRET

from gdn_jax.bench.collectives import traffic
from gdn_jax.parts import experts
from pallas_kernels.layer import expert_gradient, expert_product
from pallas_kernels.layer.expert_product import Config
from pallas_kernels.rows import expert_swiglu, expert_tiles

pytestmark = pytest.mark.usefixtures("last_arrivals")


@pytest.mark.parametrize(
    ("config", "swiglu", "dtype"),
    [
        (Config(2, 128, 3, ctas=2), False, "float16"),
        pytest.param(Config(2, 256, 2, ctas=3), True, "bfloat16", marks=pytest.mark.slow),
    ],
    ids=["a ring that wraps", "columns that end in a tile"],
)
def test_rows_times_their_experts(config, swiglu, dtype):
    """Tiles of columns that end beyond the matrix; a tile that is not used is not read, its expert being none."""
    (D, N, E), draw = (256, 384, 4), draws(0)
    x = draw(3 * config.rows, D, dtype=dtype)
    w = draw(E, D, N, dtype=dtype, scale=D**-0.5)
    tiles = put([3, 0, 99], jnp.int32)
    options = dict(config=config, swiglu=swiglu, interpret=INTERPRET)
    y = expert_product.expert_product(x, w, tiles, put([2], jnp.int32), **options)
    assert y.shape == (3 * config.rows, N // 2 if swiglu else N)
    for tile, expert in enumerate((3, 0)):
        rows = slice(tile * config.rows, (tile + 1) * config.rows)
        want = fused_oracle.wide(x[rows]) @ fused_oracle.wide(w[expert])
        if swiglu:
            want = fused_oracle.branches(want[:, : N // 2], want[:, N // 2 :])
        close(want, y[rows], f"tile {tile}")


def small_tiles(monkeypatch):
    calls = layer_kernels.interpret(monkeypatch)
    monkeypatch.setattr(expert_product, "Config", functools.partial(Config, 1, 128, 2, ctas=3))
    few = classmethod(lambda cls, rows, D: cls(rows, 1, stages=4, ctas=3))
    monkeypatch.setattr(expert_swiglu.Config, "default", few)
    monkeypatch.setattr(expert_gradient, "Config", functools.partial(expert_gradient.Config, ctas=3))
    monkeypatch.setattr(experts, "FEW", 8)
    return calls


def arguments(N, E=6, k=2, D=128, F=64):
    draw, random = draws(N), np.random.default_rng(N)
    chosen = np.stack([random.permutation(E - 1)[:k] for _ in range(N)]).astype(np.int32)
    w = [draw(E, *s, dtype="bfloat16", scale=s[0] ** -0.5) for s in ((D, 2 * F), (F, D))]
    return draw(N, D, dtype="bfloat16"), put(np.abs(draw(N, k))), put(chosen), *w


@pytest.mark.parametrize("N", [1, 5, 75])
def test_a_mixture_by_kernels_is_its_definition(N, monkeypatch):
    """One row, few and many; an expert that nobody chooses, and experts whose rows fill no tile. Those of many rows
    fill one and begin another."""
    calls = small_tiles(monkeypatch)
    args = rows, weights, chosen, gate_up, down = arguments(N)
    got = experts.mixture(*args)
    assert calls == ({"expert_tiles": 1, "expert_swiglu": 1} if N <= 8 else {"expert_product": 2})
    x, g, d = (fused_oracle.wide(y) for y in (rows, gate_up, down))
    want = np.zeros((N, 128))
    for n, (es, ws) in enumerate(zip(np.asarray(chosen), np.asarray(weights, np.float64), strict=True)):
        for e, w in zip(es, ws, strict=True):
            a, b = np.split(x[n] @ g[e], 2)
            want[n] += w * (fused_oracle.branches(a, b) @ d[e])
    close(want, got, "y", 2, dtype="bfloat16")  # h is rounded, and what an expert makes of it


def test_few_rows_in_tiles(E=3, size=8, row_of_one=12):
    """An expert whose rows fill a tile and begin another; a row that names an expert twice changes no other row."""
    x = draws(0)(17, 128, dtype="bfloat16")
    chosen = np.array([(0, 1)] * 10 + [(2, 1)] * 7, np.int32)
    chosen[row_of_one] = 2
    options = dict(experts=E, size=size, interpret=INTERPRET)
    tiles, experts_of, counts, used, places = map(
        np.asarray, expert_tiles.expert_tiles(x, put(chosen), **options)
    )
    (used,), numbers = used, [0, 0, 1, 1, 2]
    np.testing.assert_array_equal(experts_of[:used], numbers)
    np.testing.assert_array_equal(counts[:used], [8, 2, 8, 8, 7])
    pairs = [(n, j) for n in range(17) for j in range(2) if (n, j) != (row_of_one, 0)]
    assert len({places[pair] for pair in pairs}) == len(pairs)
    for n, j in pairs:
        tile, place = divmod(places[n, j], size)
        assert experts_of[tile] == chosen[n, j] and place < counts[tile]
        np.testing.assert_array_equal(tiles[places[n, j]], x[n])


@pytest.mark.slow
def test_a_row_of_nan_leaves_other_rows_and_experts_alone(monkeypatch, N=6):
    """Results and gradients of the others keep their bits: those of rows, and those of experts that it has not
    chosen. It is the last one, of which copies fill tiles up."""
    small_tiles(monkeypatch)
    rows, weights, chosen, gate_up, down = arguments(N)
    dy, bad = draws(1)(N, 128), put(np.where(np.arange(N)[:, None] == N - 1, np.nan, rows), rows.dtype)

    def results(rows):
        call = lambda *args: experts.mixture(*args[:2], chosen, *args[2:])  # noqa: E731
        y, pull = jax.vjp(call, rows, weights, gate_up, down)
        drows, dweights, *of_experts = pull(dy)
        others = ~np.isin(np.arange(len(down)), chosen[-1])
        return *(np.asarray(z)[:-1] for z in (y, drows, dweights)), *(
            np.asarray(z)[others] for z in of_experts
        )

    for want, got in zip(results(rows), results(bad), strict=True):
        assert got.size
        np.testing.assert_array_equal(want, got)


@pytest.mark.slow
def test_parts_of_the_experts_add_up(monkeypatch):
    small_tiles(monkeypatch)
    for N in (3, 9):
        args = rows, weights, chosen, gate_up, down = arguments(N)
        whole = experts.mixture(*args)
        halves = [
            experts._by_kernels(
                None, rows, weights, chosen, gate_up[e], down[e], jnp.arange(6, dtype="int32")[e]
            )
            for e in (slice(0, 3), slice(3, 6))
        ]
        np.testing.assert_allclose(halves[0] + halves[1], whole, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("N", [7, 76])  # calls of new shapes, which count
def test_the_derivative_is_that_of_the_dense_form(N, monkeypatch):
    """By kernels, near the float64 derivative of all experts times all rows; 0 for an expert that nobody chooses."""
    calls = small_tiles(monkeypatch)
    rows, weights, chosen, gate_up, down = arguments(N)
    dy = draws(1)(N, 128)
    _, pull = jax.vjp(
        lambda *args: experts.mixture(args[0], args[1], chosen, *args[2:]), rows, weights, gate_up, down
    )
    got = pull(dy)
    forward = {"expert_tiles": 1, "expert_swiglu": 1} if N <= 8 else {"expert_product": 2}
    assert sum((Counter(forward), Counter(expert_product=3)), Counter(expert_gradient=2)) == calls
    want = layer_kernels.dense_gradients(rows, weights, chosen, gate_up, down, dy)
    # Of the cotangents, the branches, what comes back through the projection down, and what becomes of the branches.
    names = ("rows", "weights", "gate_up", "down")
    for name, x, y in zip(names, want, got, strict=True):
        close(x, y, name, 4, dtype="bfloat16")
    assert not got[2][-1].any() and not got[3][-1].any()


def plain_product(x, w, experts, used, *, config, swiglu=False, transpose=False):
    """The kernel's product in plain JAX, which a mesh of CPUs can compute."""
    w = jnp.swapaxes(w, 1, 2) if transpose else w
    x = x.reshape(len(experts), config.rows, -1)
    y = jnp.einsum("trd,tdn->trn", x.astype(jnp.float32), w[experts].astype(jnp.float32))
    if swiglu:
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    return y.reshape(-1, y.shape[-1]).astype(x.dtype)


def plain_gradient(x, dy, first, count, *, rows):
    """The same of the gradient's."""
    tile = jnp.arange(len(x)) // rows
    is_own = (tile >= first[:, None]) & (tile < (first + count)[:, None])
    products = (y.astype(jnp.float32) for y in (is_own, x, dy))
    return jnp.einsum("et,tm,tn->emn", *products).astype(x.dtype)


@pytest.mark.parametrize("N", [pytest.param(8, marks=pytest.mark.crossed), 80])
@pytest.mark.parametrize("split", ["rows", "experts"])
def test_on_a_mesh_devices_have_rows_or_experts(N, split, monkeypatch):
    """Of rows that are split no device has others'; of experts each has its own, and a part of all sums."""
    small_tiles(monkeypatch)
    monkeypatch.setattr(expert_product, "expert_product", plain_product)
    monkeypatch.setattr(expert_tiles, "check_supported", lambda *_: "tiles are not interpreted on a mesh")
    monkeypatch.setattr(expert_gradient, "expert_gradient", plain_gradient)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    args = arguments(N, E=2 * jax.device_count())
    want = jax.jit(experts.plain_mixture)(*args)
    axes = [PartitionSpec("data") if (i < 3) == (split == "rows") else PartitionSpec() for i in range(5)]
    args = [jax.device_put(x, NamedSharding(mesh, axis)) for x, axis in zip(args, axes, strict=True)]
    program = jax.jit(experts.mixture).lower(*args).compile()
    assert traffic(program.as_text()).count == ({} if split == "rows" else {"all-reduce": 1})
    close(fused_oracle.wide(want), program(*args), "y", 3, dtype="bfloat16")

    @jax.jit
    def gradients(rows, weights, chosen, *projections):
        return jax.grad(
            lambda *args: jnp.sum(jnp.sin(experts.mixture(*args[:2], chosen, *args[2:]))), range(4)
        )(rows, weights, *projections)

    alone = gradients(*(put(np.asarray(x)) for x in args))
    # The same sums in another order, rounded, and parts of them are.
    for name, x, y in zip(("rows", "weights", "gate_up", "down"), alone, gradients(*args), strict=True):
        close(fused_oracle.wide(x), y, name, 2, dtype="bfloat16")


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((64, 128, 64), "float32", "x is float32"),
        ((96, 128, 64), "bfloat16", r"experts \[96, 128\]; the kernel takes multiples of 64"),
        ((64, 192, 96), "bfloat16", "experts of 96 inner columns; the kernel takes a multiple of 64"),
    ],
)
def test_what_has_no_kernel_says_so(sizes, dtype, reason, monkeypatch):
    small_tiles(monkeypatch)
    D, F2, F = sizes
    shapes = (5, D), (3, D, F2), (3, F, D)
    args = [jnp.zeros(s, dtype) for s in shapes]
    with pytest.warns(UserWarning, match=reason):
        experts.mixture(
            args[0], jnp.zeros((5, 2)), jnp.zeros((5, 2), int), *args[1:], implementation="mosaic_gpu"
        )
