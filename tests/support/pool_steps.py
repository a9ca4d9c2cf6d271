"""Cases for the serving kernels: a few tokens of some requests on states in a pool, and the truth in float64.

A case is drawn as the arguments of a kernel, with which the truth is computed too. `serve` and `serve_ring` make the
public call of them.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import put
from tolerances import assert_close

from gdn_jax import serving
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import BOUNDS


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and options of a call."""

    name: str
    N: int = 3
    T: int = 1
    heads: tuple[int, int, int] = (1, 1, 2)
    K: int = 128
    V: int = 128
    kv_layout: bool = True
    dtype: str = "bfloat16"
    pool_dtype: str = "float32"
    ring_dtype: str = "bfloat16"
    padding: bool = True
    """Whether row 1 is padding, and where states are not written to their own slots, one of row 0 is dropped."""
    uneven: bool = False
    """Whether rows have from 0 to T tokens."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each row, if they are given."""
    offsets: tuple[int, ...] | None = None
    """With T > 1, which of its states each row goes on from, if they are given."""
    parents: tuple[tuple[int, ...], ...] | None = None
    """Parents of the first rows' tokens, if they are trees; the rows after these have the same ones again."""
    elsewhere: bool = False
    """Whether states are written to other slots than they are read from."""
    use_qk_l2norm: bool = True
    allow_neg_eigval: bool = False
    null_slot: int | None = None
    gate_shift: float = -3.0
    slots: int | None = None
    """Slots of the pool; three more than are read and written by default."""
    seed: int = 0

    @property
    def options(self) -> dict:
        names = ("kv_layout", "use_qk_l2norm", "allow_neg_eigval", "null_slot")
        return {name: getattr(self, name) for name in names} | {"scale": self.K**-0.5}


def draw(case: Case, draw_pool: Callable[[tuple[int, ...]], jax.Array] | None = None) -> dict:
    """Arguments of a kernel; draw_pool makes the pool of a shape."""
    rng = np.random.default_rng(case.seed)
    N, T, K, V = case.N, case.T, case.K, case.V
    Hq, Hk, HV = case.heads

    def normal(*shape):
        return rng.normal(size=shape).astype(jnp.dtype(case.dtype))

    slots = case.slots or N * (T + 1) + 3
    order = rng.permutation(slots).astype(np.int32)
    read = order[:N].copy()
    if T == 1 and not case.elsewhere:
        write = read[:, None].copy()
    else:
        write = order[N : N * (T + 1)].reshape(N, T).copy()
    if case.padding:
        read[1] = slots + 5 if case.null_slot is None else case.null_slot
        if T > 1 or case.elsewhere:
            write[0, T // 2] = -1
    offsets = np.arange(N) * 3 % T if case.offsets is None else np.array(case.offsets)
    if T > 1:
        write[np.arange(N), offsets] = read
    norm = np.asarray(1 if case.use_qk_l2norm else K**-0.5, case.dtype)
    q, k = normal(N, T, Hq, K) * norm, normal(N, T, Hk, K) * norm
    shape = (slots, HV, K, V) if case.kv_layout else (slots, HV, V, K)
    x = {
        "q": q,
        "k": k,
        "v": normal(N, T, HV, V),
        "a": normal(N, T, HV),
        "b": normal(N, T, HV),
        "pool": draw_pool(shape) if draw_pool else rng.normal(size=shape),
        "A_log": np.log(rng.uniform(0.01, 16, HV)).astype(np.float32),
        "dt_bias": (rng.normal(size=HV) + case.gate_shift).astype(np.float32),
        "read_slots": read,
        "write_slots": write,
        "num_tokens": rng.integers(0, T + 1, N).astype(np.int32) if case.uneven else None,
        "num_accepted_tokens": offsets + 1,
    }
    if case.parents is not None:
        x["parents"] = np.array([case.parents[n % len(case.parents)] for n in range(N)], np.int32)
    if case.lengths is not None:
        x["num_tokens"] = np.array(case.lengths, np.int32)
    x["pool"] = x["pool"].astype(jnp.dtype(case.pool_dtype))
    return jax.device_put(x)


def public_options(case: Case, **more) -> dict:
    """Options of `serving.decode` and `serving.verify`."""
    names = ("use_qk_l2norm", "allow_neg_eigval", "null_slot")
    options = {name: getattr(case, name) for name in names}
    return options | {"state_layout": "kv" if case.kv_layout else "vk"} | more


TOKENS = ("q", "k", "v", "a", "b")


def serve(case: Case, x: dict, **more) -> tuple:
    """o [N, T, HV, V] and the pool, by `serving.decode` where there is one token, else by `serving.verify`."""
    tokens, gates = [x[name] for name in TOKENS], {name: x[name] for name in ("A_log", "dt_bias")}
    options = public_options(case, **gates, **more)
    if case.T > 1:
        spans = {name: x.get(name) for name in ("num_accepted_tokens", "num_tokens", "parents")}
        return serving.verify(*tokens, x["pool"], state_slots=x["write_slots"], **spans, **options)
    write = x["write_slots"][:, 0] if case.elsewhere else None
    tokens = [y[:, 0] for y in tokens]
    o, pool = serving.decode(*tokens, x["pool"], read_slots=x["read_slots"], write_slots=write, **options)
    return o[:, None], pool


def ring_pool(case: Case, x: dict, rejected: int = 0) -> serving.RingPool:
    """The pool of a ring's case, after a call of whose tokens so many are not accepted and one is."""
    count = x["count"]
    numpy = jnp if isinstance(count, jax.core.Tracer) else np
    both = numpy.minimum(count + rejected, LENGTH), numpy.where(count > 0, count - 1, -1)
    cursors = numpy.repeat(numpy.stack(both, -1)[:, None], case.heads[-1], axis=1).astype(np.int32)
    arrays = [x[name] for name in ("state", "ring_k", "ring_u", "ring_g")]
    return serving.RingPool(*arrays, put(cursors))


def serve_ring(case: Case, x: dict, pool: serving.RingPool, **more) -> tuple:
    """o [N, T, HV, V] and the pool, by `serving.decode` or `serving.verify` on a ring."""
    tokens, gates = [x[name] for name in TOKENS], {name: x[name] for name in ("A_log", "dt_bias")}
    options = public_options(case, **gates, **more)
    if case.T > 1:
        spans = dict(state_slots=x["read_slots"], num_tokens=x["num_tokens"], parents=x.get("parents"))
        accepted = x.get("accepted", np.ones(case.N, np.int32))
        return serving.verify(*tokens, pool, **spans, **options, num_accepted_tokens=accepted)
    o, pool = serving.decode(*(y[:, 0] for y in tokens), pool, read_slots=x["read_slots"], **options)
    return o[:, None], pool


def _f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def truth(case: Case, x: dict) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and the pool, in float64."""
    swap = (lambda h: h) if case.kv_layout else (lambda h: np.swapaxes(h, -1, -2))
    g = -np.exp(_f64(x["A_log"])) * np.logaddexp(0, _f64(x["a"]) + _f64(x["dt_bias"]))
    beta = (1 + case.allow_neg_eigval) / (1 + np.exp(-_f64(x["b"])))
    before = _f64(x["pool"])
    o, after = np.zeros(x["v"].shape), before.copy()

    def is_slot(slot):
        return 0 <= slot < len(before) and slot != case.null_slot

    read, write = np.asarray(x["read_slots"]), np.asarray(x["write_slots"])
    num_tokens, parents = (
        None if x.get(name) is None else np.asarray(x[name]) for name in ("num_tokens", "parents")
    )
    tokens = [_f64(x[name]) for name in ("q", "k", "v")]
    for n, slot in enumerate(read):
        if not is_slot(slot):
            continue
        states = {-1: swap(before[slot])[None]}
        for t in range(case.T if num_tokens is None else int(num_tokens[n])):
            token = [y[n, t][None, None] for y in tokens]
            h = states[t - 1 if parents is None else int(parents[n, t])]
            options = dict(scale=case.K**-0.5, use_qk_l2norm=case.use_qk_l2norm, initial_state=h)
            out, h = oracle.forward(*token, g[n, t][None, None], beta[n, t][None, None], **options)
            o[n, t], states[t] = out[0, 0], h
            if is_slot(write[n, t]):
                after[write[n, t]] = swap(h[0])
    return o, after


def assert_right(case: Case, x: dict, o, pool) -> None:
    """Outputs and written states are near the truth; padding gives zeros; every other slot keeps its bits."""
    expected_o, expected_pool = truth(case, x)
    o, pool, before = np.asarray(o), np.asarray(pool), np.asarray(x["pool"])
    written = (expected_pool != _f64(before)).any(axis=(1, 2, 3))
    assert (pool[~written].view(np.uint8) == before[~written].view(np.uint8)).all(), (
        f"{case.name}: another slot changed"
    )
    zero = (expected_o == 0).all(axis=(2, 3))
    assert (o[zero] == 0).all(), f"{case.name}: padding is not 0"
    assert written.any(), f"{case.name}: no state is written"
    assert_close(expected_o[~zero], o[~zero], BOUNDS[case.dtype][0]["o"], f"{case.name} o", axis=1)
    bound = BOUNDS[case.pool_dtype][0]["final_state"]
    assert_close(expected_pool[written], pool[written], bound, f"{case.name} pool", axis=1)


LENGTH = 16
"""Tokens of a ring."""


def draw_ring(case: Case, counts: list[int]) -> dict:
    """Arguments of a kernel whose slots are states and rings; row n has counts[n] tokens in its ring.

    What lies behind a ring's tokens is not a number.
    """
    x = draw(dataclasses.replace(case, padding=False))
    rng = np.random.default_rng(case.seed + 1)
    _, Hk, HV = case.heads
    slots, read = x["pool"].shape[0], np.asarray(x["read_slots"]).copy()
    count = rng.integers(0, LENGTH, slots).astype(np.int32)
    count[read] = counts
    if case.padding:
        read[1] = -1
    k = rng.normal(size=(slots, Hk, LENGTH, case.K))
    k /= np.sqrt((k * k).sum(-1, keepdims=True))
    u = rng.normal(size=(slots, HV, LENGTH, case.V))
    g = -np.abs(rng.normal(size=(slots, HV, LENGTH))) / 8
    left_over = np.arange(LENGTH) >= count[:, None, None]
    k, u = (np.where(left_over[..., None], np.nan, y) for y in (k, u))
    x |= {
        "state": x["pool"],
        "ring_k": k.astype(jnp.dtype(case.ring_dtype)),
        "ring_u": u.astype(jnp.dtype(case.ring_dtype)),
        "ring_g": np.where(left_over, np.nan, g).astype(np.float32),
        "read_slots": read,
        "count": count,
    }
    return jax.device_put({name: y for name, y in x.items() if name not in ("pool", "write_slots")})


def present(case: Case, state, k, u, g, count) -> np.ndarray:
    """The states [slots, HV, K, V] that slots stand for, in float64."""
    state, k, u, g = (_f64(y) for y in (state, k, u, g))
    state = state if case.kv_layout else np.swapaxes(state, -1, -2)
    real = np.arange(LENGTH) < np.asarray(count)[:, None, None]
    k, u = (np.where(real[..., None], y, 0) for y in (k, u))
    g = np.where(real, g, 0)
    since = g.sum(-1, keepdims=True) - np.cumsum(g, -1)
    k = np.repeat(k, u.shape[1] // k.shape[1], axis=1)
    written = np.einsum("shjk,shjv->shkv", k, np.exp(since)[..., None] * u)
    return np.exp(g.sum(-1))[..., None, None] * state + written


def assert_ring_right(case: Case, x: dict, counts_after: list[int], results) -> None:
    """Outputs and what the slots of the call stand for are near the truth; every other slot keeps its bits."""
    o, *after = results
    before = [x[name] for name in ("state", "ring_k", "ring_u", "ring_g")]
    read = np.asarray(x["read_slots"])
    rows = np.flatnonzero(read >= 0)
    count = np.asarray(x["count"]).copy()
    start = present(case, *before, count)
    plain = dataclasses.replace(case, kv_layout=True, null_slot=None)
    last = np.full((case.N, case.T), -1)
    tokens = np.full(case.N, case.T) if x["num_tokens"] is None else np.asarray(x["num_tokens"])
    last[rows[tokens[rows] > 0], tokens[rows[tokens[rows] > 0]] - 1] = read[rows[tokens[rows] > 0]]
    expected_o, expected = truth(plain, x | {"pool": start, "write_slots": last})
    count[read[rows]] = np.asarray(counts_after)[rows]
    got = present(case, *after, count)
    others = np.setdiff1d(np.arange(len(count)), read[rows])
    for old, new in zip(before, after, strict=True):
        old, new = np.asarray(old), np.asarray(new)
        same = old[others].view(np.uint8) == new[others].view(np.uint8)
        assert same.all(), f"{case.name}: another slot changed"
    zero = (expected_o == 0).all(axis=(2, 3))
    o = np.asarray(o)
    assert (o[zero] == 0).all(), f"{case.name}: padding is not 0"
    assert_close(expected_o[~zero], o[~zero], BOUNDS[case.dtype][0]["o"], f"{case.name} o", axis=1)
    bound = BOUNDS["bfloat16"][0]["final_state"]
    assert_close(expected[read[rows]], got[read[rows]], bound, f"{case.name} states", axis=1)


def assert_cursors(x: dict, before: serving.RingPool, after: serving.RingPool, counts, starts) -> None:
    """The cursors of the call's slots are those, in all heads; the others have kept theirs."""
    np.testing.assert_array_equal(
        after.cursors, np.asarray(after.cursors)[..., :1, :].repeat(after.u.shape[-3], -2)
    )
    read = np.asarray(x["read_slots"])
    rows = np.flatnonzero(read >= 0)
    for old, new, numbers in (
        (before.count, after.count, counts),
        (before.before, after.before, starts),
    ):
        want = np.asarray(old).copy()
        want[read[rows]] = np.asarray(numbers)[rows]
        np.testing.assert_array_equal(want, new)


TREES = ((-1, 0, 0, 1, 1), (-1, 0, -1, 2, 1), (-1, -1, -1, 1, 3))
"""Parents: a binary tree, two branches that take turns, three roots."""


def assert_forks_are_right(case: Case, call: Callable[..., tuple]) -> None:
    """Rings written where others are read, by call(x, pool, write_slots) and by plain JAX: a request that is forked,
    with a full ring and in another's place, a state that moves, padding, and a state that is dropped."""
    assert case.N == 5 and not case.padding
    x = draw_ring(case, [15, 0, 3, 7, 14])
    pool, at = ring_pool(case, x), np.asarray(x["read_slots"])
    free = np.setdiff1d(np.arange(len(pool.state)), at)
    x["read_slots"] = jax.device_put(np.array([at[0], at[0], at[2], -1, at[4]], np.int32))
    write = jax.device_put(np.array([at[2], free[0], at[4], free[1], -1], np.int32))
    plain = jax.jit(lambda: serve_ring(case, x, pool, write_slots=write, implementation="xla"))
    (want_o, want), (o, got) = plain(), call(x, pool, write)
    assert_close(_f64(want_o), np.asarray(o), 2 * BOUNDS[case.dtype][0]["o"], f"{case.name} o")
    np.testing.assert_array_equal(want.cursors, got.cursors)
    count, written = np.asarray(want.count), np.asarray(write)[:3]
    assert count[at[2]] == count[free[0]] == 0 and count[at[4]] == 4
    states, expected = (present(case, *y[:4], y.count)[written] for y in (got, want))
    assert_close(expected, states, BOUNDS["bfloat16"][0]["final_state"], f"{case.name} states", axis=1)
    others = np.setdiff1d(np.arange(len(pool.state)), written)
    for before, after in zip(pool[:5], got[:5], strict=True):
        before, after = (np.asarray(y)[others].view(np.uint8) for y in (before, after))
        assert (before == after).all(), f"{case.name}: another slot changed"


def assert_codes_are_right(case: Case, call: Callable[..., tuple]) -> None:
    """Rings beside states in 8 bits, by call(x, pool) and by plain JAX: outputs and states are the same but for the
    rounding of a code. One slot is flushed, all others keep their bits. A row of zeros is one."""
    counts = [15, 0, 3]
    x = draw_ring(dataclasses.replace(case, pool_dtype="float32"), counts)
    state = np.array(x["state"])
    state[:, :, 3] = 0
    x["state"] = jax.jit(partial(serving.make_byte_states, dtype=case.pool_dtype))(state)
    pool = ring_pool(case, x)
    want_o, want = jax.jit(partial(serve_ring, case, implementation="xla"))(x, pool)
    o, got = call(x, pool)
    assert_close(
        np.asarray(want_o).astype(np.float64), np.asarray(o), 2 * BOUNDS[case.dtype][0]["o"], case.name
    )
    np.testing.assert_array_equal(want.cursors, got.cursors)
    flushed = np.asarray(x["read_slots"])[:1]
    for before, after in zip(pool.state, got.state, strict=True):
        before, after = (np.delete(np.asarray(y), flushed, 0).view(np.uint8) for y in (before, after))
        np.testing.assert_array_equal(before, after)
    np.testing.assert_allclose(want.state.scale, got.state.scale, rtol=1e-5)
    assert (np.asarray(got.state.scale) != np.asarray(pool.state.scale))[flushed].any()
    one = {"int8": 1, "float8_e4m3fn": 32}[case.pool_dtype]  # the step between codes, at most
    codes = (np.asarray(y.state.codes)[flushed].astype(np.float32) for y in (want, got))
    difference = np.abs(np.subtract(*codes))
    assert difference.max() <= one and (difference > 0).mean() < 0.01


def assert_trees_on_a_ring_are_right(run: Callable, steps: int, **sizes) -> None:
    """Step after step of trees, of which some tokens are accepted, by run(call, x, pool), beside plain JAX. What
    lies behind the tokens of a ring is not a number."""
    case = Case("trees on a ring", N=3, T=5, pool_dtype="bfloat16", parents=TREES, uneven=True, **sizes)
    first = draw_ring(case, [3, 0, 15])
    start = ring_pool(case, first)
    start = start._replace(parents=jax.device_put(np.full((len(first["state"]), LENGTH), -1, np.int32)))
    plain, kernel = start, start
    on_xla = jax.jit(partial(serve_ring, case, implementation="xla"))
    accepted, rng = jax.device_put(np.ones(case.N, np.int32)), np.random.default_rng(0)
    for i in range(steps):
        x = draw(dataclasses.replace(case, seed=i, padding=False))
        x = {name: y for name, y in x.items() if name not in ("pool", "write_slots", "num_accepted_tokens")}
        x |= {"read_slots": first["read_slots"], "accepted": accepted}
        (want_o, plain), (o, kernel) = (
            on_xla(x, plain),
            run(partial(serve_ring, case, implementation="mosaic_gpu"), x, kernel),
        )
        np.testing.assert_array_equal(plain.cursors, kernel.cursors)
        np.testing.assert_array_equal(plain.parents, kernel.parents)
        assert_close(_f64(want_o), np.asarray(o), 2 * BOUNDS[case.dtype][0]["o"], f"step {i}: o")
        slots = np.asarray(first["read_slots"])[::2]  # row 1 is padding
        states, expected = (present(case, *y[:4], y.count)[slots] for y in (kernel, plain))
        bound = 2 * BOUNDS["bfloat16"][0]["final_state"]
        assert_close(expected, states, bound, f"step {i}: states", axis=1)
        lengths = np.maximum(np.asarray(x["num_tokens"]), 1)
        accepted = jax.device_put(rng.integers(1, lengths + 1).astype(np.int32))


CASES = (
    Case("plain"),
    Case("vk", kv_layout=False, pool_dtype="bfloat16"),
    Case("kv-bfloat16", pool_dtype="bfloat16", elsewhere=True),
    Case("float32-in-no-norm", dtype="float32", use_qk_l2norm=False, K=64, V=32, kv_layout=False),
    Case("float16-null-slot", dtype="float16", null_slot=0, allow_neg_eigval=True, K=96, V=96),
    Case("heads", N=2, heads=(1, 2, 4), K=32, V=32, padding=False),
    Case("tokens", T=4),
    Case("tokens-uneven", N=4, T=3, V=32, uneven=True, kv_layout=False, pool_dtype="bfloat16"),
    Case("tokens-kv-bfloat16", N=2, T=3, K=32, V=256, uneven=True, padding=False, pool_dtype="bfloat16"),
    Case("saturated-gate", V=32, gate_shift=200.0),
    Case("tree", T=5, V=32, parents=TREES),
    Case("tree-uneven", T=5, V=32, uneven=True, kv_layout=False, pool_dtype="bfloat16", parents=TREES),
    Case("tree-kv-bfloat16", T=5, K=32, pool_dtype="bfloat16", parents=TREES[::-1]),
    Case("tree-vk", T=5, K=64, V=32, kv_layout=False, padding=False, parents=TREES[1:]),
)

RING_CASES = (
    (Case("ring"), (0, 3, 15)),
    (Case("ring-vk", kv_layout=False, pool_dtype="bfloat16", K=64, V=32), (7, 3, 15)),
    (Case("ring-kv-bfloat16", pool_dtype="bfloat16", V=64, heads=(1, 1, 1), padding=False), (14, 15, 16)),
    (Case("ring-wide-vk", kv_layout=False, K=256, V=32, heads=(1, 1, 1), padding=False), (15, 2, 15)),
    # A value head in two parts, which one warpgroup takes one after the other.
    (Case("ring-parts", K=32, V=192, heads=(1, 1, 1)), (5, 3, 15)),
    (Case("ring-float32", heads=(1, 1, 1), ring_dtype="float32"), (0, 2, 15)),
    # Its sums take more rows than the tokens that are flushed.
    (Case("ring-narrow", K=32, V=96, heads=(1, 1, 1), ring_dtype="float32"), (15, 2, 0)),
)
"""With the tokens that each row's ring holds."""

DRAFT_CASES = (
    (Case("drafts", T=4, V=32), (0, 3, 12)),
    (Case("drafts-vk", T=4, V=32, kv_layout=False, padding=False), (12, 0, 5)),
    (Case("drafts-no-room", T=2, K=32, V=32, padding=False, heads=(1, 1, 1)), (15, 16, 14)),
    (Case("drafts-uneven", T=3, V=32, uneven=True, seed=1), (13, 16, 6)),
    (Case("drafts-bfloat16", T=4, V=64, pool_dtype="bfloat16"), (13, 3, 15)),
    # More than one call of the kernel has.
    (Case("drafts-many", T=6, K=32, V=32, padding=False), (12, 0, 8)),
    (
        Case("drafts-many-uneven", T=6, K=32, V=32, padding=False, heads=(1, 1, 1), lengths=(5, 2, 4)),
        (12, 0, 8),
    ),
    # By tensor cores, as "drafts-bfloat16" is: more tokens than four, a tile that is not full, two parts of a head.
    (Case("drafts-tensor", T=6, K=64, V=64, uneven=True, pool_dtype="bfloat16", seed=2), (12, 0, 10)),
    (Case("drafts-tensor-16", N=2, T=16, pool_dtype="bfloat16", padding=False, heads=(1, 1, 1)), (0, 15)),
    (Case("drafts-tensor-parts", N=2, T=2, K=64, V=192, pool_dtype="bfloat16", padding=False), (3, 15)),
    (Case("drafts-tensor-reset", T=4, K=64, V=64, pool_dtype="bfloat16", gate_shift=200.0), (3, 2, 15)),
)
