"""The serving kernels on a GPU of compute capability 9.0, through the public calls: values, the bits of all other
slots, batches, large pools, long runs, no copies.

The matrices are those of FlashInfer's tests of decode and of drafts, and of tpu-inference's tests of drafts.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pool_steps
import pytest
from jax import lax
from jax.sharding import NamedSharding
from meshes import mesh_of, spec
from pool_steps import CASES, DRAFT_CASES, LENGTH, RING_CASES, TOKENS, TREES, Case
from tolerances import assert_close, rms_ratio

from gdn_jax import serving
from gdn_jax.bench.collectives import traffic
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import BOUNDS

pytestmark = pytest.mark.gpu

KERNELS = {"implementation": "mosaic_gpu"}
HEADS = (16, 16, 32)
MORE_HEADS = (16, 16, 64)


def named(case: Case) -> Case:
    layout = "kv" if case.kv_layout else "vk"
    elsewhere = "-elsewhere" * case.elsewhere
    name = f"{case.N}x{case.T}-{case.heads[-1]}-{layout}-{case.pool_dtype}{elsewhere}"
    return dataclasses.replace(case, name=name)


BATCHES = tuple(
    named(Case("", N, heads=HEADS, kv_layout=kv, pool_dtype=dtype, padding=N > 1, elsewhere=N in (16, 127)))
    for kv, dtype, sizes in (
        (True, "float32", (1, 4, 16, 32, 127, 512)),
        (False, "bfloat16", (1, 4, 16, 32, 127, 512)),
        (False, "float32", (127,)),
        (True, "bfloat16", (127,)),
    )
    for N in sizes
)
DRAFTS = tuple(
    named(Case("", N, T, heads, kv_layout=kv, pool_dtype=dtype))
    for T, N, heads, kv, dtype in (
        (2, 256, HEADS, False, "bfloat16"),
        (4, 64, HEADS, True, "float32"),
        (8, 32, HEADS, False, "bfloat16"),
        (2, 16, MORE_HEADS, True, "bfloat16"),
        (4, 128, MORE_HEADS, False, "bfloat16"),
        (8, 16, MORE_HEADS, False, "float32"),
        (16, 4, HEADS, True, "float32"),
    )
)
TREE_BATCHES = tuple(
    Case(
        f"tree-{N}-{'kv' if kv else 'vk'}-{dtype}",
        N,
        7,
        HEADS,
        kv_layout=kv,
        pool_dtype=dtype,
        uneven=True,
        parents=tuple((*tree, 2, 2) for tree in TREES),
    )
    for N, kv, dtype in (
        (64, True, "float32"),
        (64, True, "bfloat16"),
        (16, False, "float32"),
        (64, False, "bfloat16"),
    )
)
UNEVEN = (
    Case("uneven-5-3-1", 3, 5, (2, 2, 4), padding=False, lengths=(5, 3, 1), offsets=(2, 0, 4)),
    Case(
        "uneven-5-1-3-2-4", 5, 5, (2, 2, 4), padding=False, lengths=(5, 1, 3, 2, 4), offsets=(0, 1, 2, 3, 4)
    ),
)
WIDTHS = (
    Case("K256-V256-kv", K=256, V=256),
    Case("K256-V256-vk", K=256, V=256, kv_layout=False, pool_dtype="bfloat16"),
    Case("K256-V256-kv-bfloat16", K=256, V=256, pool_dtype="bfloat16"),
    Case("K256-V256-tokens", T=4, K=256, V=256),
    Case("K256-V256-tokens-bfloat16", T=4, K=256, V=256, pool_dtype="bfloat16"),
    Case("tree-K256-V256-kv", T=5, K=256, V=256, parents=TREES),
    Case("tree-K256-V256-kv-bfloat16", T=5, K=256, V=256, pool_dtype="bfloat16", parents=TREES),
    Case("K64-V128-kv", K=64, V=128, pool_dtype="bfloat16"),
    Case("K96-V192-vk", K=96, V=192, kv_layout=False),
)


def on_device(shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def some_rows(case: Case, x: dict, o, pool) -> tuple[Case, dict, np.ndarray, np.ndarray]:
    """Twelve rows of a case and its results, with the slots that they name, which are numbered anew."""
    rows = np.unique(np.linspace(0, case.N - 1, 12).astype(int))
    read, write = (np.asarray(x[name])[rows] for name in ("read_slots", "write_slots"))
    slots = np.unique(np.concatenate([read, write.ravel()]))
    slots = slots[(slots >= 0) & (slots < len(pool))]

    def renumbered(numbers):
        return jnp.asarray(np.where(np.isin(numbers, slots), np.searchsorted(slots, numbers), -1))

    by_row = {name: x[name][rows] for name in TOKENS}
    by_row |= {name: x[name][rows] for name in ("num_tokens", "parents") if x.get(name) is not None}
    at = {"read_slots": renumbered(read), "write_slots": renumbered(write), "pool": x["pool"][slots]}
    return dataclasses.replace(case, N=len(rows)), x | by_row | at, o[rows], pool[slots]


def assert_others_keep_their_bits(case: Case, x: dict, pool) -> None:
    read, write = np.asarray(x["read_slots"]), np.asarray(x["write_slots"])
    written = write[(read >= 0) & (read < len(pool))]
    kept = np.setdiff1d(np.arange(len(pool)), written)
    bits = {2: jnp.uint16, 4: jnp.uint32}[pool.dtype.itemsize]
    before, after = (lax.bitcast_convert_type(y[kept], bits) for y in (x["pool"], pool))
    assert bool((before == after).all()), f"{case.name}: another slot changed"


def run(case: Case, x: dict, implementation: str = "mosaic_gpu"):
    return jax.jit(partial(pool_steps.serve, case, implementation=implementation))(x)


@pytest.mark.parametrize("case", CASES + UNEVEN + WIDTHS, ids=lambda case: case.name)
def test_small(case):
    x = pool_steps.draw(case)
    pool_steps.assert_right(case, x, *run(case, x))


@pytest.mark.parametrize("case", BATCHES + DRAFTS + TREE_BATCHES, ids=lambda case: case.name)
def test_batches(case):
    x = pool_steps.draw(case, on_device)
    o, pool = run(case, x)
    assert_others_keep_their_bits(case, x, pool)
    pool_steps.assert_right(*some_rows(case, x, o, pool))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_every_row_is_that_of_plain_jax(elsewhere):
    """All of a batch, also where some requests write what others read."""
    case = Case("all", 127, heads=HEADS, elsewhere=elsewhere)
    x = pool_steps.draw(case, on_device)
    if elsewhere:
        x["write_slots"] = jnp.roll(x["read_slots"], 5)[:, None]
    bounds = BOUNDS[case.dtype][0]["o"], BOUNDS[case.pool_dtype][0]["final_state"]
    for want, y, bound in zip(run(case, x, "xla"), run(case, x), bounds, strict=True):
        # Both may be off from the truth by the bound.
        assert_close(np.asarray(want).astype(np.float32), np.asarray(y), 2 * bound, case.name)


def test_padding_batch_leaves_the_pool():
    case = Case("all-padding", 64, heads=HEADS)
    x = pool_steps.draw(case, on_device)
    x["read_slots"] = jnp.full(64, -1, jnp.int32)
    o, pool = run(case, x)
    assert not o.any() and bool((pool == x["pool"]).all())


def test_raw_gates_of_other_dtypes():
    """dt_bias in bfloat16 beside A_log in float32, and the other way round."""
    case = Case("gates", heads=(2, 2, 4), padding=False)
    for name in ("A_log", "dt_bias"):
        x = pool_steps.draw(case)
        x[name] = x[name].astype(jnp.bfloat16)
        pool_steps.assert_right(case, x, *run(case, x))


@pytest.mark.parametrize(("case", "counts"), RING_CASES, ids=lambda x: getattr(x, "name", ""))
def test_deferred(case, counts):
    x = pool_steps.draw_ring(case, counts)
    before = pool_steps.ring_pool(case, x)
    o, pool = jax.jit(partial(pool_steps.serve_ring, case, **KERNELS))(x, before)
    after = [0 if n + 1 >= LENGTH else n + 1 for n in counts]
    pool_steps.assert_ring_right(case, x, after, (o, *pool[:4]))
    starts = [-1 if m == 0 else n for n, m in zip(counts, after, strict=True)]
    pool_steps.assert_cursors(x, before, pool, after, starts)


@pytest.mark.parametrize(("kv_layout", "pool_dtype"), [(True, "float32"), (False, "bfloat16")])
def test_rings_that_are_written_where_others_are_read(kv_layout, pool_dtype):
    case = Case("forks", N=5, heads=HEADS, kv_layout=kv_layout, pool_dtype=pool_dtype, padding=False)

    @jax.jit
    def call(x, pool, write):
        return pool_steps.serve_ring(case, x, pool, write_slots=write, **KERNELS)

    pool_steps.assert_forks_are_right(case, call)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("kv_layout", "T"), [(True, 1), (False, 1), (True, 4), (False, 3)])
def test_states_in_eight_bits_beside_a_ring(kv_layout, T, dtype):
    case = Case("codes", T=T, heads=HEADS, kv_layout=kv_layout, pool_dtype=dtype)
    pool_steps.assert_codes_are_right(case, jax.jit(partial(pool_steps.serve_ring, case, **KERNELS)))


@pytest.mark.parametrize(("case", "counts"), DRAFT_CASES, ids=lambda x: getattr(x, "name", ""))
def test_verify_on_a_ring(case, counts):
    x = pool_steps.draw_ring(case, counts)
    before = pool_steps.ring_pool(case, x, rejected=2)
    o, pool = jax.jit(partial(pool_steps.serve_ring, case, **KERNELS))(x, before)
    starts = [0 if n + case.T > LENGTH else n for n in counts]
    tokens = [case.T] * case.N if x["num_tokens"] is None else x["num_tokens"].tolist()
    after = [n + m for n, m in zip(starts, tokens, strict=True)]
    pool_steps.assert_ring_right(case, x, after, (o, *pool[:4]))
    pool_steps.assert_cursors(x, before, pool, after, starts)


def test_trees_on_a_ring():
    pool_steps.assert_trees_on_a_ring_are_right(lambda call, x, pool: jax.jit(call)(x, pool), steps=6)


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize(
    ("kv_layout", "pool_dtype"), [(True, "float32"), (False, "bfloat16"), (True, "bfloat16")]
)
def test_a_ring_over_many_tokens(kv_layout, pool_dtype, T):
    """Forty tokens of a batch of 32, four of which are compared with float64; of four drafts all are accepted."""
    N, steps = 32, 40 // T
    case = Case("ring", N, T, HEADS, kv_layout=kv_layout, pool_dtype=pool_dtype, padding=False, slots=40)
    x = pool_steps.draw(dataclasses.replace(case, N=N * steps * T, T=1), on_device)
    states = x["pool"]
    tokens = [x[name].reshape(steps, N, T, *x[name].shape[2:]) for name in TOKENS]
    gates = {name: x[name] for name in ("A_log", "dt_bias")} | KERNELS
    gates |= {"state_layout": "kv" if kv_layout else "vk"}
    slots = jnp.arange(N, dtype=jnp.int32)

    def step(pool, token):
        if T == 1:
            o, pool = serving.decode(*(y[:, 0] for y in token), pool, read_slots=slots, **gates)
            return pool, o[:, None]
        accepted = jnp.full(N, T, jnp.int32)
        o, pool = serving.verify(*token, pool, state_slots=slots, num_accepted_tokens=accepted, **gates)
        return pool, o

    ring = serving.make_ring_pool(states, num_key_heads=HEADS[1], state_layout=gates["state_layout"])
    o = np.asarray(jax.jit(partial(lax.scan, step))(ring, tokens)[1])  # [steps, N, T, HV, V]
    rows = [0, 1, 17, N - 1]
    o = np.moveaxis(o[:, rows], 0, 1).reshape(4, steps * T, *o.shape[3:])
    f64 = [
        np.moveaxis(np.asarray(y[:, jnp.array(rows)]), 0, 1)
        .astype(np.float64)
        .reshape(4, steps * T, *y.shape[3:])
        for y in tokens
    ]
    assert_close(
        in_float64(x, f64, np.asarray(states[jnp.array(rows)]), kv_layout), o, BOUNDS["bfloat16"][0]["o"]
    )


def in_float64(x: dict, tokens: list[np.ndarray], states: np.ndarray, kv_layout: bool = True) -> np.ndarray:
    """Outputs of q, k, v, a, b [N, T, ..] from states [N, ..]."""
    A_log, dt_bias = (np.asarray(x[name]).astype(np.float64) for name in ("A_log", "dt_bias"))
    q, k, v, a, b = tokens
    g, beta = -np.exp(A_log) * np.logaddexp(0, a + dt_bias), 1 / (1 + np.exp(-b))
    layout = "kv" if kv_layout else "vk"
    states = states.astype(np.float64)
    return oracle.forward(q, k, v, g, beta, use_qk_l2norm=True, initial_state=states, state_layout=layout)[0]


@pytest.mark.parametrize(
    ("pool_dtype", "kv_layout"), [("float32", True), ("bfloat16", True), ("bfloat16", False)]
)
def test_bits_do_not_depend_on_the_batch(pool_dtype, kv_layout):
    """A request alone, and among 64; and the same call twice."""
    case = Case("batch", N=64, heads=HEADS, pool_dtype=pool_dtype, kv_layout=kv_layout, padding=False)
    x = pool_steps.draw(case, on_device)
    o, pool = run(case, x)
    again = run(case, x)
    assert bool((o == again[0]).all()) and bool((pool == again[1]).all())
    by_row = (*TOKENS, "read_slots", "write_slots")
    alone = {name: y[5:6] if name in by_row else y for name, y in x.items()}
    one_o, one_pool = run(dataclasses.replace(case, N=1), alone)
    slot = int(x["read_slots"][5])
    assert bool((o[5] == one_o[0]).all()) and bool((pool[slot] == one_pool[slot]).all())


@pytest.mark.alone
def test_slots_past_32_bits():
    """A pool of 8.8 GB, of which the last slot is read and written, and the one before is written."""
    case = Case("large", N=1, heads=(1, 1, 4), padding=False)
    x = pool_steps.draw(case)
    pool = x.pop("pool")
    slot, slots = int(x["read_slots"][0]), 33_600
    large = jnp.zeros((slots, *pool.shape[1:]), pool.dtype).at[slots - 1].set(pool[slot])
    expected_o, expected = pool_steps.truth(case, x | {"pool": pool})
    for write in (slots - 1, slots - 2):
        at = {"read_slots": jnp.array([slots - 1], jnp.int32), "write_slots": jnp.array([[write]], jnp.int32)}
        o, new = run(dataclasses.replace(case, elsewhere=write != slots - 1), x | at | {"pool": large})
        assert rms_ratio(expected_o, np.asarray(o)) < 5e-3
        assert rms_ratio(expected[slot], np.asarray(new[write])) < 1e-5
        assert not new[: slots - 2].any()


@pytest.mark.alone
@pytest.mark.parametrize("T", [1, 4])
def test_rings_past_32_bits(T, slots=33_600):
    """The last slot of a pool whose states are 8.8 GB has the bits that it has in a small pool. Its ring is full."""
    case = Case("large ring", N=1, T=T, heads=(1, 1, 4), padding=False)
    x = pool_steps.draw_ring(case, [15])
    small, slot = pool_steps.ring_pool(case, x), int(x["read_slots"][0])
    run = jax.jit(partial(pool_steps.serve_ring, case, **KERNELS))
    want_o, want = run(x, small)
    large = jax.tree.map(
        lambda y: jnp.zeros((slots, *y.shape[1:]), y.dtype).at[slots - 1].set(y[slot]), small
    )
    o, new = run(x | {"read_slots": jnp.full(1, slots - 1, jnp.int32)}, large)
    assert not new.state[:-1].any()
    for y, expected in zip(
        (o, *(y[-1] for y in new[:5])), (want_o, *(y[slot] for y in want[:5])), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("deferred", [False, True])
def test_ten_thousand_tokens(deferred):
    """Every token's state is the kernel's own."""
    T = 10_000
    case = Case("long", N=T, slots=T, heads=(1, 1, 2), K=64, V=64, padding=False, gate_shift=-8.0)
    x = pool_steps.draw(case, on_device)
    pool, tokens = x["pool"][:2], [x[name] for name in TOKENS]
    start = serving.make_ring_pool(pool, num_key_heads=1) if deferred else pool
    options = {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "read_slots": jnp.zeros(1, jnp.int32)} | KERNELS

    def token(pool, token):
        o, pool = serving.decode(*token, pool, **options)
        return pool, o

    o = np.asarray(jax.jit(partial(lax.scan, token))(start, tokens)[1])[:, 0]
    f64 = [np.swapaxes(np.asarray(y).astype(np.float64), 0, 1) for y in tokens]
    expected = in_float64(x, f64, np.asarray(pool[:1]))[0]
    assert max(rms_ratio(e, y.astype(np.float64)) for e, y in zip(expected, o, strict=True)) < 2e-2


def assert_nothing_is_copied(f, pool, x: dict) -> None:
    memory = jax.jit(f, donate_argnums=0).lower(pool, x).compile().memory_analysis()
    sizes = [y.nbytes for y in jax.tree.leaves(pool)]
    assert memory.alias_size_in_bytes >= sum(sizes), "the pool is not given away"
    assert memory.temp_size_in_bytes < sizes[0] / 8, f"{memory.temp_size_in_bytes} bytes beside {sizes}"


def test_a_given_pool_is_not_copied():
    """In one call, with slots of its own to write, over the steps of a loop, with drafts and trees, and on a ring."""

    def once(pool, x, case):
        return pool_steps.serve(case, x | {"pool": pool}, **KERNELS)

    def many(pool, x, case):
        return lax.fori_loop(0, 3, lambda _, carry: once(carry[1], x, case), once(pool, x, case))

    plain = Case("in-place", N=4, heads=HEADS, slots=160)
    changes = ({"elsewhere": True}, {"T": 4}, {"T": 5, "parents": TREES})
    elsewhere, drafts, trees = (dataclasses.replace(plain, **change) for change in changes)
    for f, case in ((once, plain), (once, elsewhere), (many, plain), (once, drafts), (once, trees)):
        x = pool_steps.draw(case, on_device)
        pool = x.pop("pool")
        assert_nothing_is_copied(partial(f, case=case), pool, x)
    for case, more in ((plain, {}), (drafts, {}), (plain, {"write_slots": jnp.arange(4)})):
        x = pool_steps.draw_ring(case, (0, 3, 15, 14))
        ring, call = pool_steps.ring_pool(case, x), partial(pool_steps.serve_ring, case, **more, **KERNELS)
        x = {name: y for name, y in x.items() if name not in ("state", "ring_k", "ring_u", "ring_g")}
        assert_nothing_is_copied(lambda pool, x, call=call: call(x, pool), ring, x)


@pytest.mark.parametrize("HV, more_slots", [(8, 0), (16, 96), (32, 96)])
@pytest.mark.parametrize("every", [64, 128])
def test_prompts(HV, more_slots, every):
    """Prefill over a pool, compact and with slots to spare, with checkpoints, beside the plain form: FlashInfer's
    matrix. One prompt is empty, one is padding, and the last tokens are nobody's."""
    T, D, lengths = 600, 128, (70, 0, 257, 128, 65)
    rng, N = np.random.default_rng(HV), 5
    keys = [jax.random.normal(jax.random.key(i), (1, T, HV // 2, D), jnp.bfloat16) for i in range(2)]
    v = jax.random.normal(jax.random.key(2), (1, T, HV, D), jnp.bfloat16)
    g, beta = (
        -jnp.abs(jnp.asarray(rng.normal(size=(1, T, HV)))) / 8,
        jnp.asarray(rng.uniform(size=(1, T, HV))),
    )
    pool = on_device((3 * N + more_slots, HV, D, D))
    slots = rng.permutation(len(pool)).astype(np.int32)
    read, keep = slots[:N].copy(), slots[N : 3 * N].reshape(N, 2)
    read[3] = -1
    cu = np.cumsum((0, *lengths)).astype(np.int32)

    def prefill(implementation):
        x = (*keys, v, g.astype(jnp.float32), beta.astype(jnp.float32))
        options = dict(checkpoint_every=every, checkpoint_slots=keep, use_qk_l2norm=True)
        return serving.prefill(
            *x, cu, jnp.array(pool), read_slots=read, implementation=implementation, **options
        )

    (o, new), (want_o, want) = prefill("mosaic_gpu"), prefill("chunked")
    bound = BOUNDS["bfloat16"][0]
    padding = np.r_[cu[3] : cu[4], cu[-1] : T]
    assert not np.asarray(o)[:, padding].any()
    real = np.setdiff1d(np.arange(T), padding)
    # Both may be off from the truth by the bound.
    assert_close(*(np.asarray(y)[:, real].astype(np.float32) for y in (want_o, o)), 2 * bound["o"], "o", 2)
    changed = np.flatnonzero(np.asarray((want != pool).any((1, 2, 3))))
    assert len(changed) == 3 + sum(min(2, n // every) for n in (70, 257, 65))
    assert_close(np.asarray(want)[changed], np.asarray(new)[changed], 2 * bound["final_state"], "states", 1)
    kept = np.setdiff1d(np.arange(len(pool)), changed)
    assert bool((new[kept] == pool[kept]).all()), "another slot changed"


@pytest.mark.alone
def test_heads_over_devices():
    """Every device serves its heads of a pool: the bits of one device, and nothing is sent or copied."""
    mesh = mesh_of((2,), ("head",))

    def lie(name, y):
        axis = {"A_log": 0, "dt_bias": 0, "pool": 1, "state": 1, "ring_k": 1, "ring_u": 1, "ring_g": 1}
        axis |= dict.fromkeys(TOKENS, 2)
        where = spec(*(None,) * axis[name], "head") if name in axis else spec()
        return jax.device_put(y, NamedSharding(mesh, where))

    def check(f, x):
        placed = {name: y if y is None else lie(name, y) for name, y in x.items()}
        compiled = jax.jit(f).lower(placed).compile()
        assert not traffic(compiled.as_text()).count
        for y, want in zip(jax.tree.leaves(compiled(placed)), jax.tree.leaves(jax.jit(f)(x)), strict=True):
            np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, np.float32))

    for case in (
        Case("one", heads=HEADS),
        Case("elsewhere", heads=HEADS, elsewhere=True),
        Case("some", T=4, heads=HEADS),
        Case("trees", T=5, heads=HEADS, parents=TREES),
    ):
        check(partial(pool_steps.serve, case, **KERNELS), pool_steps.draw(case))
    for case in (Case("ring", heads=HEADS), Case("drafts on a ring", T=4, heads=HEADS)):
        x = pool_steps.draw_ring(case, (0, 3, 15))

        def on_ring(x, case=case):
            return pool_steps.serve_ring(case, x, pool_steps.ring_pool(case, x), **KERNELS)

        check(on_ring, x)  # what lies behind a ring's tokens is not a number, in the same places
