"""Prefill over a pool: packed prompts, pieces, checkpoints, new requests, the two passes from packed qkv."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import serving_cases
from device_arrays import put
from serving_cases import (
    HK,
    HV,
    K,
    V,
    assert_same_bits,
    compiled,
    draw,
    draw_pool,
    log_decay,
    write_strength,
)
from tolerances import assert_close, tolerance

from gdn_jax import serving
from gdn_jax.checks import oracle
from gdn_jax.serving import slots

BF16 = ml_dtypes.bfloat16
BOUND = tolerance("o", "float32")
LENGTHS = (70, 0, 129, 1, 64)
CU = np.cumsum([0, *LENGTHS]).astype(np.int32)
T = 270  # six tokens of padding
READ = np.array([3, 1, 7, 0, 5])


@functools.cache
def tokens(dtype="float32", seed=0):
    """q, k, v, g, beta of one packed row."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal((1, T, *shape)).astype(np.float32)

    q, k, v = normal(HK, K), normal(HK, K), normal(HV, V)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -np.abs(normal(HV)) / 8
    beta = 1 / (1 + np.exp(-normal(HV)))
    dtype = BF16 if dtype == "bfloat16" else dtype
    return (*(y.astype(dtype) for y in (q, k, v)), g, beta)


def expected(x, initial, cu=CU, **options):
    return oracle.forward(*x, initial_state=initial, cu_seqlens=cu, **options)


@pytest.mark.parametrize(
    "dtype, pool_dtype, state_layout",
    [
        ("float32", np.float32, "kv"),
        pytest.param("float32", np.float32, "vk", marks=pytest.mark.slow),
        pytest.param("bfloat16", BF16, "kv", marks=pytest.mark.slow),
        ("bfloat16", BF16, "vk"),
    ],
)
def test_prefill(dtype, pool_dtype, state_layout):
    """Continued and new requests, one of them padding, one without tokens, some written elsewhere."""
    x, pool = tokens(dtype), draw_pool(9, dtype=pool_dtype, state_layout=state_layout)
    pool[5] = np.nan  # of the request that was here before
    read = np.array([3, 1, -1, 0, 5])
    write = np.array([3, 2, 8, -1, 5])
    starts = np.array([True, True, True, True, False])
    o, new = compiled(serving.prefill, state_layout=state_layout)(
        *x, put(CU), pool, read_slots=read, write_slots=write, has_initial_state=starts
    )
    initial = np.where(starts[:, None, None, None], pool[read], 0)
    want_o, want = expected(x, initial, state_layout=state_layout)
    o, new = np.asarray(o), np.asarray(new)
    padding = np.r_[CU[2] : CU[3], CU[-1] : T]
    real = np.setdiff1d(np.arange(T), padding)
    assert o.dtype == x[2].dtype and new.dtype == pool_dtype
    assert_close(want_o[:, real], o[:, real], tolerance("o", dtype), "o", 2)
    assert not o[:, padding].any()
    assert_close(want[[0, 4]], new[[3, 5]], tolerance("final_state", dtype), "states", 1)
    assert_same_bits(pool[1], new[2], "a sequence without tokens has its state copied")
    others = [0, 1, 4, 6, 7, 8]
    assert_same_bits(pool[others], new[others])


def test_unsigned_slots_and_a_null_slot():
    """Slot 0 is kept free: a prompt there is padding, as is one at -1, which an unsigned number may stand for."""
    x, pool = tokens(), draw_pool(9)
    read = np.array([3, 1, 7, 0, -1]).astype(np.uint32)
    o, new = compiled(serving.prefill, null_slot=0)(*x, CU.astype(np.int64), pool, read_slots=read)
    want_o, want = expected(x, pool[READ])
    o, new = np.asarray(o), np.asarray(new)
    assert_close(want_o[:, : CU[3]], o[:, : CU[3]], BOUND, "o", 2)
    assert not o[:, CU[3] :].any()
    assert_close(want[:3], new[[3, 1, 7]], BOUND, "states", 1)
    others = [0, 2, 4, 5, 6, 8]
    assert_same_bits(pool[others], new[others])


def test_whose_tokens_are_real(monkeypatch):
    """Found by comparing with all offsets, and with many prompts by a search."""
    at = slots.Address.of(np.array([3, 5, -1, 0, 2]), jnp.zeros(9))
    want = np.repeat([True, False, True, False], [CU[2], CU[3] - CU[2], CU[5] - CU[3], T - CU[5]])
    np.testing.assert_array_equal(slots.is_real(jnp.asarray(CU), at, T), want)
    monkeypatch.setattr(slots, "FEW_PAIRS", len(CU) * T - 1)
    np.testing.assert_array_equal(slots.is_real(jnp.asarray(CU), at, T), want)


@pytest.mark.slow
def test_drafts_after_a_prompt():
    """A prompt of 64 tokens leaves one state, from which a step of drafts goes on."""
    x, pool = draw(2, 67, seed=3), draw_pool(9)
    g, beta = log_decay(x).astype(np.float32), write_strength(x).astype(np.float32)
    row = [y[:, :64].reshape(1, 128, *y.shape[2:]) for y in (x.q, x.k, x.v, g, beta)]
    state_slots = np.array([[4, 1, 2], [7, 8, 3]])
    prompts = compiled(serving.prefill, use_qk_l2norm=True)
    _, pool_after = prompts(*row, np.array([0, 64, 128]), pool, read_slots=state_slots[:, 0])
    rest = x.at(slice(None), slice(64, None))
    o, new = compiled(serving.verify)(
        *rest.tokens, pool_after, **x.gates, state_slots=state_slots, num_accepted_tokens=np.ones(2, int)
    )
    want_o, want = serving_cases.expected(x, pool[[4, 7]])
    assert_close(want_o[:, 64:], np.asarray(o), BOUND, "o", 2)
    assert_close(want, np.asarray(new)[[2, 3]], BOUND, "states", 1)


def test_a_sequence_without_tokens_keeps_its_bits():
    x, pool = tokens(), draw_pool(9, dtype=BF16)
    _, new = compiled(serving.prefill)(*x, jnp.zeros(6, jnp.int32), pool, read_slots=READ)
    assert_same_bits(pool, new)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}])
def test_no_tokens(options):
    x, pool = [y[:, :0] for y in tokens()], draw_pool(9)
    o, new = compiled(serving.prefill, **options)(*x, jnp.zeros(6, jnp.int32), pool, read_slots=READ)
    assert o.shape[1] == 0
    assert_same_bits(pool, new)


@pytest.mark.parametrize("cuts", [(0,), (69, 70), (1, 64, 200)])
def test_pieces(cuts):
    """A prompt in pieces, cut anywhere in the row, equals the whole."""
    x, pool = tokens(), draw_pool(9)
    want_o, want = expected(x, pool[READ])
    outputs = []
    for start, stop in zip((0, *cuts), (*cuts, T), strict=True):
        piece = tuple(
            np.pad(y[:, start:stop], [(0, 0), (0, T - stop + start)] + [(0, 0)] * (y.ndim - 2)) for y in x
        )
        cu = put(np.clip(CU, start, stop) - start)
        o, pool = compiled(serving.prefill)(*piece, cu, pool, read_slots=READ)
        outputs.append(np.asarray(o)[:, : stop - start])
    assert_close(want_o, np.concatenate(outputs, 1), BOUND, "o", 2)
    assert_close(want, np.asarray(pool)[READ], BOUND, "states", 1)


@pytest.mark.parametrize("kind", [pytest.param("pool", marks=pytest.mark.slow), "ring", "batch_invariant"])
def test_checkpoints(kind):
    """The state after every 64 tokens, where the sequence reaches so far: the last one is that of its end."""
    x, pool = tokens(), draw_pool(20)
    keep = np.array([[8, 9], [10, 11], [12, 13], [14, 15], [16, 17]])
    used = serving.make_ring_pool(put(pool), num_key_heads=HK) if kind == "ring" else pool
    options = dict(checkpoint_every=64, batch_invariant=kind == "batch_invariant")
    _, new = compiled(serving.prefill, **options)(*x, CU, used, read_slots=READ, checkpoint_slots=put(keep))
    new = np.asarray(new.state if kind == "ring" else new)
    written = {}
    for n, length in enumerate(LENGTHS):
        for m in range(2):
            if 64 * (m + 1) <= length:
                cu = np.array([0, 64 * (m + 1)])
                part = tuple(y[:, CU[n] : CU[n] + cu[1]] for y in x)
                written[keep[n, m]] = expected(part, pool[READ[n]][None], cu)[1][0]
    assert sorted(written) == [8, 12, 13, 16]
    for slot, state in written.items():
        assert_close(state, new[slot], BOUND, f"slot {slot}", 0)
    others = np.setdiff1d(np.arange(8, 20), sorted(written))
    assert_same_bits(pool[others], new[others])
    assert_same_bits(new[5], new[16], "a checkpoint at the end is the final state")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, pytest.param(np.uint32, marks=pytest.mark.slow)])
def test_checkpoints_of_narrow_offsets(dtype):
    """Numbers of chunks are counted in int32, whatever the dtype of the offsets."""
    x, pool = tokens(), draw_pool(20)
    row, keep = tuple(y[:, :127] for y in x), np.array([[8], [9]])
    C = 128 if dtype == np.int8 else 64  # more than int8 holds
    call = compiled(serving.prefill, checkpoint_every=C, chunk_size=C)
    at = dict(read_slots=READ[:2], checkpoint_slots=keep)
    cu = np.array([0, 50, 127])
    want, got = (call(*row, put(cu.astype(kind)), pool, **at) for kind in (np.int32, dtype))
    for a, b in zip(want, got, strict=True):
        assert_same_bits(a, b)


@pytest.mark.slow
def test_a_ring_is_empty_afterwards():
    """Prefill goes on from the present state of a ring that decode has filled in part, and leaves none of it."""
    x, pool = tokens(), draw_pool(9)
    ring = serving.make_ring_pool(put(pool), num_key_heads=HK, length=4, dtype=np.float32)
    few = draw(5, 2)
    for t in range(2):
        _, ring = compiled(serving.decode)(*(y[:, t] for y in few.tokens), ring, **few.gates, read_slots=READ)
    present = compiled(serving.snapshot)(ring, READ)
    o, new = compiled(serving.prefill)(*x, CU, ring, read_slots=READ)
    want_o, want = expected(x, np.asarray(present))
    assert_close(want_o, o, BOUND, "o", 2)
    assert_close(want, np.asarray(new.state)[READ], BOUND, "states", 1)
    assert not np.asarray(new.count).any()


@pytest.mark.slow
@pytest.mark.usefixtures("compile_as_users_do")
def test_batch_invariance():
    """A prompt's bits are those that it has alone, and in pieces that end on the grid of 64 tokens."""
    x, pool = tokens(), draw_pool(9)
    call = compiled(serving.prefill, batch_invariant=True)
    o, new = call(*x, CU, pool, read_slots=READ)
    want_o, want = expected(x, pool[READ])
    assert_close(want_o, o, BOUND, "o", 2)
    assert_close(want, np.asarray(new)[READ], BOUND, "states", 1)

    def some(start, length, pad):
        return tuple(
            np.pad(y[:, start : start + length], [(0, 0), (0, pad)] + [(0, 0)] * (y.ndim - 2)) for y in x
        )

    n = 2  # 129 tokens
    alone_o, alone = call(*some(CU[n], 129, 0), np.array([0, 129]), pool, read_slots=READ[[n]])
    assert_same_bits(np.asarray(o)[:, CU[n] : CU[n + 1]], alone_o)
    assert_same_bits(new[READ[n]], alone[READ[n]])
    pieces, begun = [], pool
    for start, length in ((0, 64), (64, 65)):
        piece = some(CU[n] + start, length, 129 - length)
        part, begun = call(*piece, np.array([0, length]), begun, read_slots=READ[[n]])
        pieces.append(np.asarray(part)[:, :length])
    assert_same_bits(alone_o, np.concatenate(pieces, 1))
    assert_same_bits(new[READ[n]], begun[READ[n]])


@pytest.mark.slow
def test_two_passes_from_packed_qkv():
    """Convolution over a pool, then the rule from packed channels and linear decay, over slots, with bfloat16 pools
    beside float32 tokens; what comes out equals the plain operations one after the other."""
    rng = np.random.default_rng(0)
    D, W = 2 * HK * K + HV * V, 4
    x = rng.standard_normal((1, T, D)).astype(np.float32)
    weight = put(rng.standard_normal((D, W)), jnp.float32) / 2
    g, beta = tokens()[3:]
    conv_pool = draw_pool(9, HV=1, widths=(D, W - 1), dtype=BF16)[:, 0]
    pool = draw_pool(9, dtype=BF16)

    @jax.jit
    def two_passes(x, conv_pool, pool):
        y, conv_pool = serving.causal_conv1d(x, CU, conv_pool, weight, read_slots=READ)
        o, pool = serving.prefill_packed(y[0], jnp.exp(g[0]), put(beta[0]), CU, pool, read_slots=READ)
        return y, o, conv_pool, pool

    y, o, conv_pool, new = two_passes(x, conv_pool, pool)
    q, k, v = np.split(np.asarray(y), [HK * K, 2 * HK * K], -1)
    row = (q.reshape(1, T, HK, K), k.reshape(1, T, HK, K), v.reshape(1, T, HV, V), g, beta)
    want_o, want = expected(row, pool[READ], use_qk_l2norm=True)
    assert o.shape == (T, HV * V) and o.dtype == np.float32
    assert_close(want_o.reshape(T, -1), o, BOUND)
    assert_close(want, np.asarray(new)[READ], 5e-3, "states", 1)
    last = x[0, CU[3] - W + 1 : CU[3]].T
    np.testing.assert_array_equal(conv_pool[READ[2]], last.astype(BF16))
