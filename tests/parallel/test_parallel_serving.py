"""Serving with heads over the devices of a mesh, under plain jit: nothing is sent, and pools stay where they lie."""

import warnings
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from device_arrays import put
from jax import export
from jax.sharding import NamedSharding
from meshes import AUTO, EXPLICIT, mesh_of, spec
from serving_cases import draw, draw_pool

import gdn_jax
from gdn_jax import partitioning, serving
from gdn_jax.bench.collectives import traffic
from gdn_jax.serving import shards
from gdn_jax.serving.call import At, Call
from gdn_jax.serving.deferred_pool import DeferredPool
from gdn_jax.serving.states import StatePool
from gdn_jax.serving.tokens import Raw
from gdn_jax.serving.windows import WindowPool
from pallas_kernels.device import launch

SETTINGS = {"shardy": (AUTO, True), "gspmd": (AUTO, False), "explicit": (EXPLICIT, True)}
slow = pytest.mark.slow
settings = pytest.mark.parametrize(
    "setting",
    ["shardy", *(pytest.param(name, marks=pytest.mark.crossed) for name in ("gspmd", "explicit"))],
)
partitioners = pytest.mark.parametrize(
    "shardy", [True, pytest.param(False, marks=pytest.mark.crossed)], ids=["shardy", "gspmd"]
)

READ, WRITE = np.array([3, -1, 5]), np.array([5, 1, 3])
ACCEPTED = dict(num_accepted_tokens=np.array([1, 3, 2]))
SPANS = ACCEPTED | dict(state_slots=np.arange(9).reshape(3, 3))
ON_RING = ACCEPTED | dict(state_slots=READ, num_tokens=np.array([3, 3, 1]))
TREE = np.array([[-1, 0, 0], [-1, -1, 1], [-1, 0, 1]])

HEADS = {"tokens": 2, "gates": 0, "pool": 1, "ring": 1, "trees": 1, "channels": 1, "windows": 1, "filter": 0}
"""The axis of the heads, or of channels, in every array that has one."""


def arrays(heads=(8, 16), width=8, length=4) -> dict:
    """Arguments of the calls; a ring holds two tokens of each of its slots."""
    rng, size = np.random.default_rng(0), (width, width)
    x = draw(3, 3, heads=heads, widths=size)
    pool = put(draw_pool(14, HV=heads[1], widths=size))
    ring = serving.make_ring_pool(pool, num_key_heads=heads[0], length=length, trees=True)
    held = {name: put(rng.normal(size=y.shape), y.dtype) for name, y in ring._asdict().items() if y.ndim > 2}
    ring = ring._replace(**held | dict(g=-abs(held["g"]), cursors=ring.cursors + np.array([2, 1], np.int32)))
    conv = {"channels": (3, 24), "windows": (14, 24, 3), "filter": (24, 4)}
    return {
        "tokens": tuple(map(put, x.tokens)),
        "gates": x.gates,
        "pool": pool,
        "ring": ring._replace(parents=None),
        "trees": ring._replace(parents=put(rng.integers(-1, 1, ring.parents.shape), jnp.int32)),
    } | {name: put(rng.normal(size=shape), jnp.float32) for name, shape in conv.items()}


def lie(mesh, name: str, array, axes="d"):
    """The array as it lies on the mesh, its heads over these axes; a ring's parents lie everywhere."""
    whole = name in ("ring", "trees") and array.ndim < 3
    where = spec() if whole else spec(*(None,) * HEADS[name], axes)
    return jax.device_put(array, NamedSharding(mesh, where))


def place(mesh, x: dict, axes="d") -> dict:
    return {name: jax.tree.map(lambda y: lie(mesh, name, y, axes), tree) for name, tree in x.items()}  # noqa: B023


def decode(x, pool, implementation=None, **options):
    token = [y[:, 0] for y in x["tokens"]]
    return serving.decode(
        *token, pool, **x["gates"], read_slots=READ, implementation=implementation, **options
    )


def verify(x, pool, implementation=None, **options):
    return serving.verify(*x["tokens"], pool, **x["gates"], implementation=implementation, **options)


def prefill(x, pool, dtype=jnp.float32, **options):
    q, k, v, a, b = (y.reshape(1, 9, *y.shape[2:]) for y in x["tokens"])
    tokens = *(y.astype(dtype) for y in (q, k, v)), -jnp.abs(a), jax.nn.sigmoid(b)
    return serving.prefill(*tokens, np.array([0, 5, 5, 8]), pool, read_slots=READ, **options)


KERNELS = {
    "decode": lambda x: decode(x, x["pool"], "mosaic_gpu"),
    "decode elsewhere": lambda x: decode(x, x["pool"], "mosaic_gpu", write_slots=WRITE),
    "verify": lambda x: verify(x, x["pool"], "mosaic_gpu", **SPANS),
    "decode on a ring": lambda x: decode(x, x["ring"], "mosaic_gpu"),
    "verify on a ring": lambda x: verify(x, x["ring"], "mosaic_gpu", **ON_RING),
    "prefill": lambda x: prefill(x, x["pool"], jnp.bfloat16, implementation="mosaic_gpu"),
    "convolution": lambda x: serving.causal_conv1d_update(
        x["channels"], x["windows"], x["filter"], read_slots=READ, implementation="mosaic_gpu"
    ),
}
RINGS = {
    "decode": lambda x: decode(x, x["ring"]),
    "verify": lambda x: verify(x, x["ring"], **ON_RING),
    "flush": lambda x: serving.flush(x["ring"], READ),
    "snapshot": lambda x: serving.snapshot(x["ring"], READ),
}
TREES = {
    "verify": lambda x: verify(x, x["trees"], parents=TREE, **ON_RING),
    "accept": lambda x: serving.accept(x["trees"], READ, np.array([1, 2, 1])),
}
CONVOLUTIONS = {
    "a token": lambda x: serving.causal_conv1d_update(
        x["channels"], x["windows"], x["filter"], read_slots=READ, write_slots=WRITE
    ),
    "drafts": lambda x: serving.causal_conv1d_verify(
        jnp.stack([x["channels"]] * 3, 1), x["windows"], x["filter"], **SPANS
    ),
}
PLAIN = {
    "decode": lambda x: decode(x, x["pool"], batch_invariant=True),
    "verify": lambda x: verify(x, x["pool"], **SPANS),
    "prefill": lambda x: prefill(x, x["pool"], chunk_size=16),
    "slots": lambda x: serving.put_slots(x["ring"], WRITE, serving.take_slots(x["ring"], READ)),
}


@pytest.fixture
def plain_kernels(monkeypatch):
    """In the kernels' places the plain forms of what they do."""
    monkeypatch.setattr(shards, "CHANNELS", 3)
    for plain in (StatePool, DeferredPool, WindowPool):

        def reason(self, tokens, where) -> None:
            """They run every call."""

        stand_in = type(f"Opaque{plain.__name__}", (plain,), {"is_opaque": True, "reason": reason})
        monkeypatch.setattr(plain, "by_kernels", lambda pool, kind=stand_in: kind(*vars(pool).values()))
    jax.clear_caches()  # of what was traced with the kernels
    yield
    jax.clear_caches()


ON_ONE_DEVICE = {}
"""Results of `check_calls` on one device, by the calls: compiled once for all settings."""


def check_calls(calls, setting):
    """Nothing is sent, results lie as their arguments do, and are those of one device."""
    kind, shardy = SETTINGS[setting]
    x, mesh = arrays(), mesh_of((8,), ("d",), kind)
    placed = place(mesh, x)

    def all_of_them(x):
        return {name: call(x) for name, call in calls.items()}

    with meshes.partitioner(shardy):
        compiled = jax.jit(all_of_them).lower(placed).compile()
    assert not traffic(compiled.as_text()).count
    functions = tuple(calls.values())
    if functions not in ON_ONE_DEVICE:
        ON_ONE_DEVICE[functions] = jax.tree.leaves_with_path(jax.device_get(jax.jit(all_of_them)(x)))
    expected = ON_ONE_DEVICE[functions]
    for (path, want), got in zip(expected, jax.tree.leaves(compiled(placed)), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            *(np.asarray(y, np.float32) for y in (got, want)), rtol=1e-5, atol=1e-5, err_msg=name
        )
        assert ("d" in got.sharding.spec) == (not name.endswith(".parents")), name


def pick(calls, *names):
    return {name: calls[name] for name in names}


@pytest.mark.slow
@settings
@pytest.mark.usefixtures("plain_kernels")
def test_kernels_run_on_their_heads(setting):
    check_calls(pick(KERNELS, "decode", "verify", "convolution"), setting)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["shardy", *(pytest.param(name, marks=pytest.mark.crossed) for name in ("gspmd", "explicit"))]
)
@pytest.mark.usefixtures("plain_kernels")
def test_kernels_run_on_their_heads_of_rings(setting):
    check_calls(pick(KERNELS, "decode elsewhere", "decode on a ring", "verify on a ring"), setting)


@pytest.mark.slow
@settings
def test_a_convolution_runs_on_its_channels(setting):
    check_calls(CONVOLUTIONS, setting)


@pytest.mark.slow
@settings
def test_a_ring_is_appended_to_where_it_lies(setting):
    check_calls(pick(RINGS, "decode"), setting)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["shardy", *(pytest.param(s, marks=pytest.mark.crossed) for s in ("gspmd", "explicit"))]
)
@pytest.mark.parametrize(
    "calls", [pick(RINGS, "verify", "flush", "snapshot"), TREES, PLAIN], ids=["rings", "trees", "plain"]
)
def test_every_operation_runs_on_its_heads(calls, setting):
    check_calls(calls, setting)


@pytest.mark.slow
def test_gates_of_channels_lie_with_their_heads():
    """Every device serves its own heads of a pool of states and of a ring."""
    x, pool, slots = draw(3, 1, gates="GDN-2").at(slice(None), 0), put(draw_pool(6)), np.array([3, 0, 4])
    on_heads = NamedSharding(mesh_of((2,), ("heads",)), spec(None, "heads"))
    lying = partial(jax.device_put, device=on_heads)
    for start in (pool, serving.make_ring_pool(pool, num_key_heads=2, length=5, channels=True)):
        want, left = x.call(serving.decode, start, read_slots=slots)
        o, new = x.each(lying).call(serving.decode, lying(start), read_slots=slots)
        for y, z in zip(jax.tree.leaves((want, left)), jax.tree.leaves((o, new)), strict=True):
            np.testing.assert_allclose(
                np.asarray(y, np.float32), np.asarray(z, np.float32), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(("D", "parts"), [(512, 4), (384, 3), (300, None), (100, None)])
def test_channels_are_split_by_whole_blocks(D, parts):
    windows, x = jax.ShapeDtypeStruct((9, D, 3), "float32"), jax.ShapeDtypeStruct((4, D), "float32")
    assert shards._sizes((windows, x), ("s d w", "b d")).get("d") == parts


@partitioners
@pytest.mark.usefixtures("plain_kernels")
def test_a_pool_split_by_slots_is_gathered(shardy):
    """Any request may name any slot. The pool that comes back lies as the one that went in."""
    mesh, x = mesh_of((2,), ("d",)), arrays()
    expected, _ = jax.jit(KERNELS["decode"])(x)
    over_slots = NamedSharding(mesh, spec("d"))

    def call(x):
        o, pool = KERNELS["decode"](x)
        return o, jax.lax.with_sharding_constraint(pool, over_slots)

    placed = place(mesh, x, None) | {"pool": jax.device_put(x["pool"], over_slots)}
    gdn_jax.debug_checks(True)
    try:
        with meshes.partitioner(shardy), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            compiled = jax.jit(call).lower(placed).compile()
    finally:
        gdn_jax.debug_checks(False)
    told = [str(w.message) for w in told if "gathered" in str(w.message)]
    assert told == ["pool: its slots lie on mesh axes d, which cannot be split; it is gathered"]
    o, pool = compiled(placed)
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
    assert traffic(compiled.as_text()).count["all-gather"] and pool.sharding.is_equivalent_to(over_slots, 4)


class Cache(StatePool):
    """States of rows, in place of the kernel that knows where they lie."""

    is_opaque = True

    def decode(self, call, raw, at):
        assert at.are_rows
        return super().decode(call, raw, At(jnp.arange(self.size)))


@settings
def test_rows_of_a_cache_are_split_too(setting):
    """A cache is a pool whose slots are the rows of a call: a device has its heads of its rows, and sends nothing."""
    (kind, shardy), x = SETTINGS[setting], arrays()
    mesh, over_both = mesh_of((2, 4), ("r", "d"), kind), spec("r", "d")
    raw = Raw(*(y[:2, 0] for y in x["tokens"]), w=None, **x["gates"])
    lies = Raw(*[over_both] * 5, w=None, A_log=spec("d"), dt_bias=spec("d"))
    placed = jax.tree.map(lambda y, where: jax.device_put(y, NamedSharding(mesh, where)), raw, lies)
    pool = jax.device_put(x["pool"][:2], NamedSharding(mesh, over_both))

    def run(pool, raw):
        return shards.by_heads((Cache.decode, Call(0.5)), Cache(pool), raw, At(None))

    expected = jax.jit(run)(x["pool"][:2], raw)
    with meshes.partitioner(shardy):
        compiled = jax.jit(run).lower(pool, placed).compile()
    assert not traffic(compiled.as_text()).count
    for got, want in zip(compiled(pool, placed), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert got.addressable_shards[0].data.shape[:2] == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "call"),
    [
        ("pool", KERNELS["decode"]),
        ("windows", CONVOLUTIONS["a token"]),
        pytest.param("ring", RINGS["verify"], marks=pytest.mark.slow),
    ],
    ids=["pool", "windows", "ring"],
)
@pytest.mark.usefixtures("plain_kernels")
def test_a_split_pool_is_not_copied(pool, call):
    """Donated arrays are changed in place, on every device in its own part."""
    mesh, x, slots = mesh_of((8,), ("d",)), arrays(), 4096
    donated = {pool: jax.tree.map(lambda y: jnp.repeat(y[:1], slots, 0), x.pop(pool))}
    donated, rest = place(mesh, donated), place(mesh, x)
    memory = (
        jax.jit(lambda y, x: call(x | y), donate_argnums=0).lower(donated, rest).compile().memory_analysis()
    )
    sizes = [y.addressable_shards[0].data.nbytes for y in jax.tree.leaves(donated)]
    assert memory.alias_size_in_bytes == sum(sizes), "the pool is not donated"
    smallest = min(size for size in sizes if size > 4 * slots)
    assert memory.temp_size_in_bytes < smallest / 2, f"{memory.temp_size_in_bytes} bytes, arrays of {sizes}"


@pytest.mark.slow
def test_the_kernels_are_lowered_for_their_heads(monkeypatch):
    """Every device of a mesh of GPUs runs the real kernels on one key head and two states, changed in place."""
    programs = []

    def lowered(compiled, static, args, mesh):
        """The program of a GPU, for which zeros stand here."""
        shapes = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), args)
        program = export.export(compiled, platforms=("cuda",))(static, *shapes)
        programs.append(program.mlir_module())
        zeros = [partial(jnp.zeros, y.shape, y.dtype) for y in program.out_avals]
        return SimpleNamespace(call=lambda *_: program.out_tree.unflatten([zero() for zero in zeros]))

    monkeypatch.setattr(partitioning, "_lowered", lowered)
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    placed = place(mesh_of((8,), ("d",)), arrays(width=64, length=16))
    calls = pick(KERNELS, "decode", "verify", "decode on a ring", "verify on a ring", "prefill").values()
    compiled = jax.jit(lambda x: [call(x) for call in calls]).lower(placed).compile()
    assert not traffic(compiled.as_text()).count
    found = sorted(
        (text.count("custom_call @mosaic_gpu"), text.count("#stablehlo.output_operand_alias<"))
        for text in programs
    )
    assert found == [(1, 1), (1, 1), (1, 5), (1, 5), (3, 1)], "kernels, and arrays that they change in place"
    assert all(
        "tensor<14x2x64x64xf32>" in text and "tensor<14x16x64x64xf32>" not in text for text in programs
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", pytest.param("verify on a ring", marks=slow), "prefill"])
def test_the_kernels_are_lowered_on_explicit_axes(name, monkeypatch):
    """In place, on the heads of a shard."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    x = place(mesh_of((8,), ("d",), EXPLICIT), arrays(width=64, length=16))
    text = jax.jit(KERNELS[name]).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    counts = text.count("custom_call @mosaic_gpu"), text.count("#stablehlo.output_operand_alias<")
    assert counts == {"decode": (1, 1), "verify on a ring": (1, 5), "prefill": (3, 1)}[name]


@pytest.mark.slow
def test_shards_whose_types_name_mesh_axes(monkeypatch):
    """JAX lets no kernel write into such a pool: a step is plain JAX, or refused; prompts write to the pool behind
    their kernels."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    mesh, over_heads = mesh_of((8,), ("d",)), spec(None, "d")

    def lower(call, check_vma=True):
        def on_pool(pool, x):
            return call(x | {"pool": pool})[1]

        pools = jax.shard_map(
            on_pool, mesh=mesh, in_specs=(over_heads, spec()), out_specs=over_heads, check_vma=check_vma
        )
        x = arrays(heads=(1, 2), width=64)
        pool = jnp.tile(x.pop("pool"), (1, 8, 1, 1))
        text = jax.jit(pools).trace(pool, x).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("custom_call @mosaic_gpu"), text.count("#stablehlo.output_operand_alias<")

    def step(x):
        return decode(x, x["pool"])

    assert lower(step) == (0, 0) and lower(step, check_vma=False) == (1, 1)
    assert lower(KERNELS["prefill"]) == (3, 0) and lower(KERNELS["prefill"], check_vma=False) == (3, 1)
    with pytest.raises(NotImplementedError, match="the kernels need check_vma=False"):
        lower(KERNELS["decode"])
