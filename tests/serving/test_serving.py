"""Decode over a pool of states against the oracle: layouts, dtypes, heads, slots read, written and left alone."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from device_arrays import put
from serving_cases import (
    HK,
    K,
    Requests,
    V,
    assert_same_bits,
    compiled,
    draw,
    draw_pool,
    expected,
    fresh,
    one,
    slow,
)
from tolerances import assert_close

from gdn_jax import serving

BF16 = ml_dtypes.bfloat16
# What the specification allows: outputs that leave as bfloat16, states of a bfloat16 pool, states of a float32 pool.
O_BF16, STATE_BF16, STATE_F32 = 1e-2, 5e-3, 1e-5


def o_bound(dtype) -> float:
    return O_BF16 if dtype == BF16 else STATE_F32


@pytest.mark.parametrize(
    "gates, dtype, pool_dtype, state_layout",
    [
        *itertools.product(["heads"], [np.float32, BF16], [np.float32, BF16], ["kv", "vk"]),
        ("KDA bounded", np.float32, np.float32, "kv"),
        slow("KDA", BF16, BF16, "vk"),
        ("GDN-2", np.float32, np.float32, "vk"),
        slow("decay of a head", np.float32, np.float32, "kv"),
    ],
)
def test_decode(gates, dtype, pool_dtype, state_layout):
    """Padding, slots that are read and others that are written: outputs, states, and the bits of all other slots.
    Negative eigenvalues double what is erased, and a write of its own stays below 1."""
    x = draw(6, 1, dtype=dtype, gates=gates)
    pool = draw_pool(11, dtype=pool_dtype, state_layout=state_layout)
    pool[1], pool[8] = np.nan, 3e38
    read = np.array([3, -1, 0, 10, 7, 5], np.int32)
    write = np.array([3, 6, 2, -1, 10, 0], np.int32)
    o, new = x.at(slice(None), 0).call(
        serving.decode, pool, state_layout=state_layout, read_slots=put(read), write_slots=put(write)
    )
    want_o, want = expected(x, pool[read], state_layout=state_layout)
    assert o.dtype == dtype and new.dtype == pool_dtype
    rows = read >= 0
    assert_close(want_o[rows, 0], np.asarray(o)[rows], o_bound(dtype), "o", 1)
    assert not np.asarray(o)[~rows].any()
    stored = rows & (write >= 0)
    new = np.asarray(new)
    bound = STATE_F32 if pool_dtype == np.float32 else STATE_BF16
    assert_close(want[stored], new[write[stored]], bound, "states", 1)
    others = np.setdiff1d(np.arange(11), write[stored])
    assert_same_bits(pool[others], new[others])


@pytest.mark.parametrize(
    "heads, widths, options",
    [
        ((1, 2), (96, 192), {}),
        ((2, 2), (128, 128), {"use_qk_l2norm": False, "scale": 0.0}),
        ((1, 1), (1, 5), {"scale": 2.5, "allow_neg_eigval": True}),
    ],
)
def test_widths_and_options(heads, widths, options):
    x, pool = draw(3, 1, heads=heads, widths=widths), draw_pool(4, HV=heads[1], widths=widths)
    read = np.array([2, 0, 3])
    o, new = serving.decode(*one(x), fresh(pool), **x.gates, read_slots=read, **options)
    want_o, want = expected(x, pool[read], **options)
    assert_close(want_o[:, 0], o, STATE_F32, "o", 1)
    assert_close(want, np.asarray(new)[read], STATE_F32, "states", 1)


def test_more_query_heads_than_value_heads():
    """GQA: states, gates and outputs have the queries' heads."""
    x, pool = draw(2, 1, heads=(2, 4)), draw_pool(3)
    q, k, v, a, b = one(x)
    few = v[:, :2]
    o, new = serving.decode(
        jnp.repeat(q, 2, 1), k, few, a, b, fresh(pool), **x.gates, read_slots=np.array([0, 2])
    )
    same = Requests(np.repeat(x.q, 2, 2), np.repeat(x.k, 2, 2), np.repeat(x.v[:, :, :2], 2, 2), *x[3:])
    want_o, want = expected(same, pool[[0, 2]])
    assert_close(want_o[:, 0], o, STATE_F32, "o", 1)
    assert_close(want, np.asarray(new)[[0, 2]], STATE_F32, "states", 1)


@pytest.mark.parametrize("B", [1, 4, 16, 32, 127, 512])
def test_batches(B):
    """The batches of FlashInfer's tests, bfloat16 throughout, a pool larger than the batch in random order."""
    x, pool = draw(B, 1, B, dtype=BF16), draw_pool(B + 5, dtype=BF16)
    read = np.random.default_rng(B).permutation(B + 5)[:B].astype(np.int32)
    o, new = serving.decode(*one(x), fresh(pool), **x.gates, read_slots=read)
    want_o, want = expected(x, pool[read])
    assert_close(want_o[:, 0], np.asarray(o), O_BF16, "o", 1)
    assert_close(want, np.asarray(new)[read], STATE_BF16, "states", 1)
    others = np.setdiff1d(np.arange(B + 5), read)
    assert_same_bits(pool[others], np.asarray(new)[others])


@pytest.mark.parametrize("padding", [-1, 0])
def test_a_batch_of_padding_leaves_every_bit(padding):
    """With -1, and with a null slot; whatever the tokens and the pool hold."""
    x, pool = draw(4, 1), draw_pool(5)
    pool[0, 0, 0, :2] = [np.nan, -0.0]
    x.v[:] = np.nan
    o, new = compiled(serving.decode, null_slot=0)(
        *one(x), pool, **x.gates, read_slots=np.full(4, padding), write_slots=np.array([1, 2, 3, 4])
    )
    assert not np.asarray(o).any()
    assert_same_bits(pool, new)


def test_a_null_slot_is_not_written():
    x, pool = draw(3, 1), draw_pool(4)
    _, new = compiled(serving.decode, null_slot=2)(
        *one(x), pool, **x.gates, read_slots=np.array([0, 2, 3]), write_slots=np.array([2, 1, 3])
    )
    assert_same_bits(pool[:3], np.asarray(new)[:3])
    assert (np.asarray(new)[3] != pool[3]).any()


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.uint32, np.int64])
def test_slots_of_any_integer_dtype(dtype):
    """An unsigned -1 is padding too."""
    x, pool = draw(2, 1), draw_pool(3)
    slots = np.array([2, -1]).astype(dtype)
    o, new = serving.decode(*one(x), fresh(pool), **x.gates, read_slots=slots)
    want_o, want = expected(x, pool[[2, 0]])
    assert_close(want_o[:1, 0], o[:1], STATE_F32)
    assert_close(want[:1], np.asarray(new)[2:], STATE_F32)
    assert not np.asarray(o[1]).any()
    assert_same_bits(pool[:2], np.asarray(new)[:2])


@pytest.mark.parametrize(
    "dtype, size, slot",
    [(np.int8, 200, 100), (np.uint8, 300, 50), (np.int16, 70000, 3), (np.uint16, 65536, 65535)],
)
def test_more_slots_than_a_narrow_dtype_counts(dtype, size, slot):
    """A pool's size is not compared in the dtype of the slots, in which it is another number."""
    pool, slots = (
        np.random.default_rng(0).standard_normal((size, 2)).astype(np.float32),
        np.array([slot], dtype),
    )
    for numbers in (slots, put(slots)):
        np.testing.assert_array_equal(
            serving.take_slots(pool, numbers, null_slot=size - 1 if slot < size - 1 else 0), pool[[slot]]
        )
        new = serving.put_slots(fresh(pool), numbers, np.ones((1, 2), np.float32))
        np.testing.assert_array_equal(np.flatnonzero((np.asarray(new) != pool).any(1)), [slot])
        copied = serving.copy_slots(fresh(pool), numbers, np.array([1], dtype))
        np.testing.assert_array_equal(copied[1], pool[slot])


@pytest.mark.parametrize("ring", [False, True])
def test_a_pool_of_no_slots_serves_padding(ring):
    x, pool = draw(1, 1), jnp.zeros((0, 4, K, V))
    pool = serving.make_ring_pool(pool, num_key_heads=HK) if ring else pool
    padding = np.array([-1])
    o, _ = compiled(serving.decode)(*one(x), pool, **x.gates, read_slots=padding)
    assert not np.asarray(o).any()
    rows = compiled(serving.take_slots)(pool, padding)
    assert {y.shape[0] for y in jax.tree.leaves(compiled(serving.put_slots)(pool, padding, rows))} == {0}


@pytest.mark.slow
def test_narrow_slots_in_every_operation():
    x, pool = draw(1, 2), draw_pool(200)
    row = (*(y for y in x.tokens[:3]), -np.ones((1, 2, 4), np.float32), None)
    at, one_slot = np.array([[100, 7]], np.int8), np.array([100], np.int8)
    spans = dict(state_slots=at, num_accepted_tokens=np.ones(1, np.int8))
    ring = serving.make_ring_pool(put(pool), num_key_heads=HK, length=150)
    layers = np.repeat(pool[:, None], 130, 1)  # more than int8 counts
    windows = np.random.default_rng(0).standard_normal((200, 5, 3)).astype(np.float32)
    inputs, weight = np.ones((1, 5), np.float32), np.ones((5, 4), np.float32)
    calls = (
        (serving.decode, (*one(x), pool), dict(x.gates, read_slots=one_slot)),
        (serving.verify, (*x.tokens, pool), dict(x.gates, **spans)),
        (serving.verify, (*x.tokens, ring), x.gates | spans | dict(state_slots=one_slot)),
        (serving.prefill, (*row, put([0, 2], jnp.int8), pool), dict(read_slots=one_slot)),
        (serving.causal_conv1d_update, (inputs, windows, weight), dict(read_slots=one_slot)),
        (serving.decode, (*one(x), layers), dict(x.gates, read_slots=one_slot, layer=np.array(2, np.int8))),
    )
    for f, args, options in calls:
        options = {name: put(y) for name, y in options.items()}
        wide = {
            name: y.astype(jnp.int32) if "slots" in name or name == "layer" else y
            for name, y in options.items()
        }
        narrow, (o, new) = compiled(f)(*args, **options), compiled(f)(*args, **wide)
        assert np.asarray(o).any()
        for got, want in zip(jax.tree.leaves(narrow), jax.tree.leaves((o, new)), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f.__name__)


def test_a_slot_outside_the_pool_is_padding():
    """Where nobody looks at values: it reads no other request's state and writes none."""
    x, pool = draw(3, 1), draw_pool(4)
    o, new = compiled(serving.decode)(*one(x), pool, **x.gates, read_slots=put([4, -2, 2**31 - 1]))
    assert not np.asarray(o).any()
    assert_same_bits(pool, new)


def test_a_decay_beyond_every_exponential_is_a_reset():
    """A rate of exp(89) is infinite in float32: the state before leaves no trace, and no NaN."""
    x, pool = draw(2, 1), draw_pool(2)
    x.A_log[:2], x.a[:, :, 1] = [89, 100], 1e4
    o, new = serving.decode(*one(x), fresh(pool), **x.gates, read_slots=np.array([0, 1]))
    want_o, want = expected(x, pool)
    assert_close(want_o[:, 0], o, STATE_F32, "o", 1)
    assert_close(want, new, STATE_F32, "states", 1)


def test_gates_are_not_rounded():
    """bfloat16 inputs, dt_bias too, beside a float32 pool: states have float32's digits, so no gate was rounded."""
    x = draw(4, 1, dtype=BF16)
    x = x._replace(dt_bias=x.dt_bias.astype(BF16))
    pool = draw_pool(4)
    _, new = serving.decode(*one(x), fresh(pool), **x.gates, read_slots=np.arange(4))
    assert_close(expected(x, pool)[1], new, STATE_F32, "states", 1)


def test_equal_channels_are_one_decay_a_head():
    """With one number in all channels the call is that of one decay a head, to 1e-6; packed it has the same bits."""
    x, pool = draw(3, 1), draw_pool(6)
    q, k, v, a, b = one(x)
    common = dict(A_log=put(x.A_log), read_slots=np.array([3, 0, 4]))
    want = serving.decode(q, k, v, a, b, fresh(pool), dt_bias=put(x.dt_bias), **common)
    wide, bias = (jnp.repeat(y[..., None], K, -1) for y in (a, put(x.dt_bias)))
    got = serving.decode(q, k, v, wide, b, fresh(pool), dt_bias=bias, **common)
    for y, z in zip(want, got, strict=True):
        assert_close(np.asarray(y), np.asarray(z), 1e-6)
    qkv = jnp.concatenate([y.reshape(3, -1) for y in (q, k, v)], -1)
    together = serving.decode_packed(qkv, wide, b, fresh(pool), dt_bias=bias, **common)
    for y, z in zip(got, together, strict=True):
        assert_same_bits(y, z)


def test_float16():
    """Converted, not reinterpreted; beside states of another dtype."""
    x, pool = draw(3, 1, dtype=np.float16), draw_pool(3)
    o, new = serving.decode(*one(x), fresh(pool), **x.gates, read_slots=np.arange(3))
    want_o, want = expected(x, pool)
    assert o.dtype == np.float16
    assert_close(want_o[:, 0], o, O_BF16 / 8, "o", 1)
    assert_close(want, new, STATE_F32, "states", 1)


def test_float64():
    with jax.enable_x64(True):
        x = Requests(*(y.astype(np.float64) for y in draw(2, 1)[:7]))
        pool = draw_pool(2).astype(np.float64)
        o, new = serving.decode(*one(x), fresh(pool), **x.gates, read_slots=np.array([1, 0]))
        want_o, want = expected(x, pool[[1, 0]])
        assert_close(want_o[:, 0], o, 1e-14)
        assert_close(want, np.asarray(new)[[1, 0]], 1e-14)


@pytest.mark.parametrize("gates", ["heads", slow("GDN-2")])
def test_a_pool_of_several_layers(gates):
    """A layer's slots are strided in a pool of the whole model; the layer may be known only at run time."""
    x, pools = draw(2, 1, gates=gates), np.stack([draw_pool(4, seed) for seed in range(3)], 1)
    slots, token = np.array([3, 1]), x.at(slice(None), 0)
    for layer in range(3):
        o, new = token.call(serving.decode, pools, read_slots=slots, layer=np.int32(layer))
        want_o, want = token.call(serving.decode, pools[:, layer], read_slots=slots)
        np.testing.assert_array_equal(want_o, o)
        others = np.delete(np.arange(3), layer)
        assert_same_bits(want, np.asarray(new)[:, layer])
        assert_same_bits(pools[:, others], np.asarray(new)[:, others])


def test_the_pool_is_donated():
    """Outside jit the pool's memory goes on in the new pool; what is left of the old one raises."""
    x, pool = draw(2, 1), put(draw_pool(3))
    address = pool.unsafe_buffer_pointer()
    _, new = serving.decode(*one(x), pool, **x.gates, read_slots=np.array([0, 2]))
    assert pool.is_deleted() and new.unsafe_buffer_pointer() == address


def test_outputs_are_not_shared():
    """Two calls give two arrays."""
    x, pool = draw(2, 1), draw_pool(3)
    outputs = [
        serving.decode(*one(x), fresh(pool), **x.gates, read_slots=np.array([0, 2]))[0] for _ in range(2)
    ]
    assert outputs[0].unsafe_buffer_pointer() != outputs[1].unsafe_buffer_pointer()
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("pool_dtype, bound", [(np.float32, 1e-5), (BF16, 2e-2)])
def test_ten_thousand_tokens(pool_dtype, bound):
    """In a row, in one program: no drift. Compared with float64 over the last tokens."""
    T = 10_000
    x = draw(2, T, heads=(1, 2))
    # Rates of 0.05 and steps of exp(-4): without them nothing would be remembered for long.
    x = x._replace(A_log=np.log([0.05, 1.0]).astype(np.float32), dt_bias=np.array([-4, -2], np.float32))
    pool = np.zeros((3, 2, K, V), pool_dtype)

    @jax.jit
    def run(pool, tokens):
        def token(pool, x):
            o, pool = serving.decode(*x, pool, **gates, read_slots=put([2, 0]))
            return pool, o

        return jax.lax.scan(token, pool, tokens)

    gates = x.gates
    _, o = run(pool, jax.tree.map(lambda y: np.moveaxis(y, 1, 0), x.tokens))
    want, _ = expected(x, pool[[2, 0]])
    assert_close(want[:, -500:], np.moveaxis(np.asarray(o), 0, 1)[:, -500:], bound, "o", 2)


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["heads", "GDN-2"])
@pytest.mark.usefixtures("compile_as_users_do")
def test_batch_invariance(gates):
    """A request's bits are the same alone, among others and in another row."""
    x, pool = draw(5, 1, heads=(2, 4), widths=(32, 48), gates=gates), draw_pool(5, widths=(32, 48))
    token, options = x.at(slice(None), 0), dict(batch_invariant=True)
    o, new = token.call(serving.decode, pool, read_slots=np.arange(5), **options)
    for rows in ([3], [4, 1], [2, 3, 0]):
        rows = np.array(rows)
        alone_o, alone = token.at(rows).call(serving.decode, pool, read_slots=rows, **options)
        assert_same_bits(o[rows], alone_o)
        assert_same_bits(np.asarray(new)[rows], np.asarray(alone)[rows])


def test_slots_are_copied():
    """Every slot is read before any is written; in any pytree of pools; the others keep their bits."""
    pool = {"state": draw_pool(5), "conv": draw_pool(5, widths=(3, 2), dtype=BF16)}
    new = compiled(serving.copy_slots)(pool, np.array([0, 3, -1, 2]), np.array([3, 0, 1, -1]))
    for name, x in pool.items():
        assert_same_bits(x[[3, 1, 2, 0, 4]], new[name])


def test_slots_are_kept_elsewhere():
    pool = draw_pool(5)
    rows = serving.take_slots(fresh(pool), np.array([4, -1, 2]))
    np.testing.assert_array_equal(rows[1], 0 * pool[0])
    back = serving.put_slots(jnp.zeros(pool.shape), np.array([0, 1, -1]), rows)
    assert_same_bits(back[0], pool[4])
    assert not np.asarray(back[1:]).any()


def beyond(elements: int) -> None:
    """decode on the last slots of a pool of more than so many numbers."""
    heads, widths = (16, 32), (128, 128)
    slots = elements // (32 * 128 * 128) + 3
    x, state = draw(2, 1, heads=heads, widths=widths), draw_pool(2, HV=32, widths=widths)
    read = np.array([slots - 1, slots - 2])
    pool = serving.put_slots(jnp.zeros((slots, 32, 128, 128), jnp.float32), read, put(state))
    o, pool = serving.decode(*one(x), pool, **x.gates, read_slots=read)
    want_o, want = expected(x, state)
    assert_close(want_o[:, 0], o, STATE_F32)
    assert_close(want, np.asarray(pool[-2:])[::-1], STATE_F32)
    assert not pool[: slots - 2].any()


@pytest.mark.slow
def test_slots_beyond_two_gibibytes():
    beyond(2**31 // 4)


@pytest.mark.gpu
@pytest.mark.alone
def test_slots_beyond_two_to_the_31_numbers():
    beyond(2**31)
