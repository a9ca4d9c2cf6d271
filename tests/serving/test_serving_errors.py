"""Refusals of the serving operations: shapes always, values where they are known or while debug checks are on."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from serving_cases import HK, HV, K, V, draw, draw_pool, fresh

import gdn_jax
from gdn_jax import serving

X = draw(3, 2)
TOKENS = dict(zip("qkvab", map(put, X.tokens), strict=True))
POOL = draw_pool(8)
SLOTS = np.array([2, 0, 5])
SPANS = np.array([[0, 1], [2, 3], [-1, -1]])
SIZES = jax.eval_shape(functools.partial(serving.make_ring_pool, num_key_heads=HK, length=4), POOL)
RING = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), SIZES)._replace(state=POOL)


def decode(**change):
    arguments = (
        {name: x[:, 0] for name, x in TOKENS.items()} | X.gates | dict(pool=POOL, read_slots=SLOTS) | change
    )
    return serving.decode(**(arguments | {"pool": fresh(arguments["pool"])}))


def channels(**change):
    """`decode` with a decay of each channel."""
    x = draw(3, 1, gates="KDA").at(slice(None), 0)
    arguments = (
        dict(zip("qkvab", x.tokens, strict=True)) | x.gates | dict(pool=POOL, read_slots=SLOTS) | change
    )
    return serving.decode(**(arguments | {"pool": fresh(arguments["pool"])}))


def verify(**change):
    spans = dict(state_slots=SPANS, num_accepted_tokens=np.array([1, 2, 1]))
    arguments = TOKENS | X.gates | dict(pool=POOL) | spans | change
    return serving.verify(**(arguments | {"pool": fresh(arguments["pool"])}))


def prefill(**change):
    row = {name: x.reshape(1, 6, *x.shape[2:]) for name, x in TOKENS.items()}
    arguments = dict(q=row["q"], k=row["k"], v=row["v"], g=-jnp.abs(row["a"]), beta=None, pool=POOL)
    arguments |= dict(cu_seqlens=np.array([0, 1, 4, 6]), read_slots=SLOTS) | change
    return serving.prefill(**(arguments | {"pool": fresh(arguments["pool"])}))


def packed(channels):
    qkv, gate = jnp.zeros((6, channels)), jnp.ones((6, HV))
    return serving.prefill_packed(qkv, gate, gate, np.array([0, 6]), fresh(POOL), read_slots=SLOTS[:1])


def conv(**change):
    arguments = dict(
        x=jnp.zeros((3, 5)), pool=jnp.zeros((8, 5, 3)), weight=jnp.zeros((5, 4)), read_slots=SLOTS
    )
    return serving.causal_conv1d_update(**(arguments | change))


SHAPES = {
    "q without heads": (decode, dict(q=jnp.zeros((3, K))), "q: expected shape [B, heads, width]"),
    "no a": (decode, dict(a=None), "a: expected an array [B, HO], got NoneType"),
    "a of other heads": (decode, dict(a=jnp.zeros((3, 2))), "a: expected shape [B, HO] = [3, 4], got [3, 2]"),
    "A_log": (decode, dict(A_log=jnp.zeros(1)), "A_log: expected shape [HO] = [4], got [1]"),
    "integer b": (decode, dict(b=jnp.zeros((3, HV), int)), "b: expected dtype"),
    "pool of other widths": (
        decode,
        dict(pool=draw_pool(8, widths=(V, K))),
        f"pool: expected shape [slots, HO, K, V] = [?, 4, {K}, {V}], got [8, 4, {V}, {K}]",
    ),
    "pool in the other layout": (decode, dict(state_layout="vk"), "pool: expected shape [slots, HO, V, K]"),
    "integer pool": (decode, dict(pool=POOL.astype(int)), "pool: expected dtype"),
    "pool of layers": (decode, dict(pool=POOL[:, None]), "pool: expected shape [slots, HO, K, V]"),
    "layer without layers": (decode, dict(layer=0), "pool: expected shape [slots, layers, HO, K, V]"),
    "layer outside": (decode, dict(pool=POOL[:, None], layer=1), "layer: expected 0 to 0, got 1"),
    "too few slots": (decode, dict(read_slots=SLOTS[:2]), "read_slots: expected shape [B] = [3], got [2]"),
    "floating slots": (decode, dict(read_slots=jnp.zeros(3)), "read_slots: expected an integer dtype, got float32"),
    "write slots": (decode, dict(write_slots=SLOTS[:1]), "write_slots: expected shape [B] = [3], got [1]"),
    "layout": (decode, dict(state_layout="vv"), "state_layout: expected one of 'kv', 'vk', got 'vv'"),
    "scale": (decode, dict(scale="1"), "scale: expected a number, got '1'"),
    "implementation": (decode, dict(implementation="triton"), "implementation: expected one of"),
    "ring of other heads": (
        decode,
        dict(pool=RING._replace(k=RING.k[:, :1])),
        f"pool.k: expected shape [slots, Hk, L, K] = [8, 2, 4, {K}]",
    ),
    "ring without cursors": (
        decode,
        dict(pool=RING._replace(cursors=RING.cursors[:, :1])),
        "pool.cursors: expected shape",
    ),
    "a of other channels": (
        channels,
        dict(a=np.zeros((3, HV, 3), np.float32)),
        "a: expected shape [B, HO, K] = [3, 4, 8], got [3, 4, 3]",
    ),
    "w of other channels": (
        channels,
        dict(w=np.zeros((3, HV, K), np.float32)),
        "w: expected shape [B, HO, V] = [3, 4, 6]",
    ),
    "no w": (
        channels,
        dict(b=np.zeros((3, HV, K), np.float32)),
        "w: expected an array, since b has a number for each key channel",
    ),
    "bias of other channels": (
        channels,
        dict(dt_bias=np.zeros((HV, 3), np.float32)),
        "dt_bias: expected shape [HO, K] = [4, 8]",
    ),
    "rates beside channels": (channels, dict(A_log=np.zeros(3, np.float32)), "A_log: expected shape [HO] = [4]"),
    "lower bound": (channels, dict(lower_bound=1.0), "lower_bound: expected a number below 0 or None, got 1.0"),
    "ring of heads": (
        channels,
        dict(pool=RING),
        "pool: expected a ring for gates of each channel, or erase and write apart, see make_ring_pool, got one for "
        "one gate a head",
    ),
    "ring of channels": (
        lambda: decode(pool=serving.make_ring_pool(put(POOL), num_key_heads=HK, channels=True)),
        {},
        "pool: expected a ring for one gate a head, see make_ring_pool, got one for gates of each channel",
    ),
    "slots of one token": (verify, dict(state_slots=SLOTS), "state_slots: expected shape [N, T] = [3, 2], got [3]"),
    "slots of a ring": (verify, dict(pool=RING), "state_slots: expected shape [N] = [3], got [3, 2]"),
    "accepted": (verify, dict(num_accepted_tokens=SPANS), "num_accepted_tokens: expected shape [N] = [3]"),
    "number of tokens": (verify, dict(num_tokens=jnp.ones(3)), "num_tokens: expected an integer dtype"),
    "parents": (verify, dict(parents=SLOTS), "parents: expected shape [N, T] = [3, 2], got [3]"),
    "ring too short": (
        verify,
        dict(pool=jax.tree.map(lambda x: x, RING)._replace(
            k=RING.k[:, :, :1], u=RING.u[:, :, :1], g=RING.g[:, :, :1]
        ), state_slots=SLOTS),
        "q: expected at most 1 tokens, the length of the ring, got 2",
    ),
    "tree on a ring of chains": (
        verify,
        dict(pool=RING, state_slots=SLOTS, parents=np.array([[-1, 0]] * 3)),
        "parents: expected a ring that is made for trees",
    ),
    "starts": (prefill, dict(has_initial_state=np.ones(2, bool)), "has_initial_state: expected shape [N] = [3]"),
    "starts as numbers": (prefill, dict(has_initial_state=np.ones(3, int)), "has_initial_state: expected dtype bool"),
    "offsets": (prefill, dict(cu_seqlens=None), "cu_seqlens: expected an array [N + 1], got NoneType"),
    "sequences": (prefill, dict(read_slots=SLOTS[:2]), "read_slots: expected shape [N] = [3], got [2]"),
    "no cu_seqlens": (prefill, dict(cu_seqlens=np.array([0])), "cu_seqlens: expected at least two entries"),
    "checkpoints": (prefill, dict(checkpoint_every=64), "checkpoint_slots: expected together with checkpoint_every"),
    "checkpoint grid": (
        prefill,
        dict(checkpoint_every=96, checkpoint_slots=SPANS),
        "checkpoint_every: expected a multiple of 64, got 96",
    ),
    "checkpoint grid of long chunks": (
        prefill,
        dict(chunk_size=128, checkpoint_every=64, checkpoint_slots=SPANS),
        "checkpoint_every: expected a multiple of 128, got 64",
    ),
    "channels": (lambda: packed(2 * HK * K + HV * V + 1), {}, "qkv: expected 2 Hk K + HV V channels"),
    "conv pool": (conv, dict(pool=jnp.zeros((8, 5, 4))), "pool: expected shape [slots, D, W - 1] = [?, 5, 3]"),
    "conv weight": (conv, dict(weight=jnp.zeros((4, 4))), "weight: expected shape [D, W] = [5, ?], got [4, 4]"),
    "filter too wide": (
        conv,
        dict(weight=jnp.zeros((5, 5)), pool=jnp.zeros((8, 5, 4))),
        "weight: expected width W = 2 to 4, got 5",
    ),
    "rings of length 0": (
        lambda: serving.make_ring_pool(put(POOL), num_key_heads=2, length=0),
        {},
        "length: expected at least 1, got 0",
    ),
    "layer in words": (decode, dict(pool=POOL[:, None], layer="0"), "layer: expected 0 to 0, got '0'"),
    "layer as a flag": (decode, dict(pool=POOL[:, None], layer=False), "layer: expected 0 to 0, got False"),
    "fractional layer": (decode, dict(pool=POOL[:, None], layer=0.0), "layer: expected 0 to 0, got 0.0"),
    "layers": (decode, dict(pool=POOL[:, None], layer=SLOTS), "layer: expected shape [] = [], got [3]"),
    "negative layer": (decode, dict(pool=POOL[:, None], layer=np.int32(-1)), "layer: expected 0 to 0, got -1"),
    "null slot in words": (decode, dict(null_slot="0"), "null_slot: expected -1 to 7, got '0'"),
    "null slot as a flag": (decode, dict(null_slot=True), "null_slot: expected -1 to 7, got True"),
    "null slot below": (verify, dict(null_slot=-5), "null_slot: expected -1 to 7, got -5"),
    "null slot beyond": (conv, dict(null_slot=8), "null_slot: expected -1 to 7, got 8"),
    "norm in words": (decode, dict(use_qk_l2norm="no"), "use_qk_l2norm: expected True or False, got 'no'"),
    "norm as an array": (prefill, dict(use_qk_l2norm=SLOTS), "use_qk_l2norm: expected True or False, got ndarray"),
    "eigenvalues as a number": (verify, dict(allow_neg_eigval=1), "allow_neg_eigval: expected True or False, got 1"),
    "invariance as a number": (prefill, dict(batch_invariant=1), "batch_invariant: expected True or False, got 1"),
    "scale beyond": (decode, dict(scale=10**400), "scale: expected a number that a float holds"),
    "complex scale": (decode, dict(scale=np.complex64(2 + 5j)), "scale: expected a number, got"),
    "chunk size": (prefill, dict(chunk_size=5, batch_invariant=True), "chunk_size: expected one of 16, 32, 64, 128"),
    "no chunk size": (
        prefill,
        dict(chunk_size=0, checkpoint_every=64, checkpoint_slots=SPANS),
        "chunk_size: expected one of 16, 32, 64, 128",
    ),
    "fractional checkpoints": (
        prefill,
        dict(checkpoint_every=64.0, checkpoint_slots=SPANS),
        "checkpoint_every: expected at least 1, got 64.0",
    ),
    "rings of integers": (
        lambda: serving.make_ring_pool(put(POOL), num_key_heads=2, dtype=jnp.int32),
        {},
        "dtype: expected a floating dtype",
    ),
    "rings of no dtype": (
        lambda: serving.make_ring_pool(put(POOL), num_key_heads=2, dtype="x"),
        {},
        "dtype: expected a floating dtype, got 'x'",
    ),
    "integer states": (
        lambda: serving.make_ring_pool(jnp.zeros((2, 2, 3, 3), int), num_key_heads=2),
        {},
        "states: expected dtype float16",
    ),
    "no states": (
        lambda: serving.make_ring_pool([], num_key_heads=2),
        {},
        "states: expected a floating array, got list",
    ),
    "fractional length": (
        lambda: serving.make_ring_pool(put(POOL), num_key_heads=2, length=1.5),
        {},
        "length: expected at least 1, got 1.5",
    ),
    "accept without a ring": (
        lambda: serving.accept(POOL, SLOTS, SLOTS),
        {},
        "pool: expected a RingPool, see make_ring_pool, got ndarray",
    ),
    "flush without a ring": (lambda: serving.flush(POOL, SLOTS), {}, "pool: expected a RingPool"),
    "snapshot of a layer": (lambda: serving.snapshot(RING, SLOTS, layer=0), {}, "pool.state: expected shape"),
    "copy in a number": (
        lambda: serving.copy_slots(1.0, SLOTS, SLOTS),
        {},
        "pool: expected arrays [slots, ...], got float",
    ),
    "key heads": (
        lambda: serving.make_ring_pool(put(POOL), num_key_heads=3),
        {},
        "num_key_heads: expected a divisor of HO = 4, got 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("no_type_checks")
def test_shapes(name):
    call, change, message = SHAPES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**change)


@pytest.mark.parametrize("call", [decode, verify])
def test_kernels_that_cannot_run_are_refused_with_the_reason(call):
    with pytest.raises(
        NotImplementedError, match=r"implementation 'mosaic_gpu': K = 8, V = 6; the kernel takes"
    ):
        call(implementation="mosaic_gpu")


@pytest.mark.parametrize("tokens", ["prompts", "drafts"])
def test_there_is_no_kernel_for_the_convolution_of_prompts_and_drafts(tokens):
    arrays = dict(x=jnp.zeros((1, 6, 5)), pool=jnp.zeros((8, 5, 3)), weight=jnp.zeros((5, 4)))
    if tokens == "prompts":
        call, where = serving.causal_conv1d, dict(cu_seqlens=np.array([0, 6]), read_slots=SLOTS[:1])
    else:
        where = dict(state_slots=np.arange(6)[None], num_accepted_tokens=np.ones(1, int))
        call = serving.causal_conv1d_verify
    with pytest.raises(NotImplementedError, match="implementation 'mosaic_gpu': there is no kernel"):
        call(**arrays, **where, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="implementation: expected one of"):
        call(**arrays, **where, implementation="chunked")


VALUES = {
    "slot outside": (
        decode,
        dict(read_slots=[0, 1, 8]),
        "read_slots: expected slots from 0 to 7, or -1 .*, got 8",
    ),
    "slot below -1": (
        decode,
        dict(read_slots=[0, -2, 1]),
        "read_slots: expected slots from 0 to 7, .*, got -2",
    ),
    "slot twice": (
        decode,
        dict(read_slots=[3, -1, 3]),
        "read_slots: expected no slot twice, got 3 more than once",
    ),
    "written twice": (decode, dict(write_slots=[1, 4, 4]), "write_slots: expected no slot twice, got 4"),
    "state twice": (
        verify,
        dict(state_slots=[[0, 1], [2, 0], [-1, -1]]),
        "state_slots: expected no slot twice, got 0",
    ),
    "accepted none": (
        verify,
        dict(num_accepted_tokens=[1, 0, 1]),
        "num_accepted_tokens: expected 1 to 2, got 0",
    ),
    "accepted too many": (
        verify,
        dict(num_accepted_tokens=[1, 3, 1]),
        "num_accepted_tokens: expected 1 to 2, got 3",
    ),
    "too many tokens": (verify, dict(num_tokens=[1, 3, 1]), "num_tokens: expected 0 to 2, got 3"),
    "parent after child": (
        verify,
        dict(parents=[[-1, 0], [-1, 1], [0, 0]]),
        "parents: expected an earlier token",
    ),
    "lengths for offsets": (
        prefill,
        dict(cu_seqlens=[1, 3, 1, 1]),
        "cu_seqlens: expected ascending values from 0",
    ),
    "checkpoint over a state": (
        prefill,
        dict(checkpoint_every=64, checkpoint_slots=[[6], [0], [7]]),
        "checkpoint_slots: expected slots without a final state, got 0",
    ),
    "checkpoint over a state elsewhere": (
        prefill,
        dict(write_slots=[1, 3, 4], checkpoint_every=64, checkpoint_slots=[[6], [3], [7]]),
        "checkpoint_slots: expected slots without a final state, got 3",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_known_values(name):
    """NumPy arrays are looked at before the call, always."""
    call, change, message = VALUES[name]
    with pytest.raises(ValueError, match=message):
        call(**{key: np.array(x) if isinstance(x, list) else x for key, x in change.items()})


@pytest.fixture
def debug_checks():
    gdn_jax.debug_checks(True)
    yield
    gdn_jax.debug_checks(False)


@pytest.mark.parametrize("name", VALUES)
def test_values_in_debug(name, debug_checks):
    """JAX arrays while the program runs: the error that JAX raises carries our text."""
    call, change, message = VALUES[name]
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(
            call(**{key: put(x) if isinstance(x, list) else x for key, x in change.items()})
        )
        jax.effects_barrier()


def test_values_in_debug_under_jit(debug_checks):
    run = jax.jit(lambda slots: decode(read_slots=slots))
    jax.block_until_ready(run(put([0, 1, -1])))
    jax.effects_barrier()
    with pytest.raises(Exception, match="read_slots: expected no slot twice"):
        jax.block_until_ready(run(put([1, 1, 2])))
        jax.effects_barrier()


@pytest.mark.parametrize("name", VALUES)
def test_values_are_not_looked_at_by_default(name):
    """The program has no callback that could look at them, and has one while debug checks are on."""
    call, change, _ = VALUES[name]

    def looks() -> bool:
        arguments = {key: put(x) if isinstance(x, list) else x for key, x in change.items()}
        given = {key: x for key, x in arguments.items() if isinstance(x, jax.Array)}
        return "callback" in str(jax.make_jaxpr(lambda given: call(**arguments | given))(given))

    assert not looks()
    gdn_jax.debug_checks(True)
    try:
        assert looks()
    finally:
        gdn_jax.debug_checks(False)


def test_copies_and_stored_rows():
    with pytest.raises(ValueError, match="to_slots: expected no slot twice, got 1"):
        serving.copy_slots(fresh(POOL), np.array([2, 3]), np.array([1, 1]))
    with pytest.raises(ValueError, match="slots: expected slots from 0 to 7"):
        serving.take_slots(fresh(POOL), np.array([9]))
    row = serving.take_slots(fresh(POOL), np.array([1]))
    for rows, message in (
        (row, r"rows: expected shape \[N, ...\] = \[3, 4, 8, 6\], got \[1, 4, 8, 6\]"),
        (row[0], r"rows: expected shape"),
        ({"a": row}, "rows: expected the pool's tree"),
        (np.zeros(POOL[SLOTS].shape, np.int32), "rows: expected the pool's dtype float32, got int32"),
    ):
        with pytest.raises(ValueError, match=message):
            serving.put_slots(fresh(POOL), SLOTS, rows)
    states = put(POOL)
    eight_bits, floats = (
        serving.make_ring_pool(serving.make_byte_states(states, dtype=dtype), num_key_heads=1)
        for dtype in ("int8", "float8_e4m3fn")
    )
    with pytest.raises(
        ValueError, match=r"rows\.state\.codes: expected the pool's dtype int8, got float8_e4m3fn"
    ):
        serving.put_slots(eight_bits, SLOTS, jax.tree.map(lambda x: x[SLOTS], floats))
    with pytest.raises(ValueError, match=r"rows\['h'\]: expected shape"):
        serving.put_slots({"h": fresh(POOL)}, SLOTS, {"h": row})
    with pytest.raises(ValueError, match="null_slot: expected -1 to 7, got 8"):
        serving.copy_slots(fresh(POOL), SLOTS, SLOTS, null_slot=8)
    with pytest.raises(ValueError, match="pool: expected arrays with one number of slots, got"):
        serving.take_slots((fresh(POOL), fresh(POOL[:3])), np.array([1]))
