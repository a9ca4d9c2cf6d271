"""A donated pool is changed in place: no program of serving needs room for a copy of it, or of a ring in it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from serving_cases import HK, K, draw, draw_pool, one

from gdn_jax import serving

X = draw(2, 4)
SLOTS = np.array([300, 7])
# So many that what a call needs for its own two requests is a small part of the smallest array of the pool.
MANY = 4096


def tokens():
    return tuple(map(put, X.tokens))


def prefill(pool, **options):
    q, k, v, a, b = (x.reshape(1, 8, *x.shape[2:]) for x in tokens())
    offsets = np.array([0, 3, 8])
    return serving.prefill(
        q, k, v, -jnp.abs(a), jax.nn.sigmoid(b), offsets, pool, read_slots=SLOTS, **options
    )


def verify(pool, slots, **options):
    accepted = np.array([1, 3])
    return serving.verify(
        *tokens(), pool, **X.gates, state_slots=slots, num_accepted_tokens=accepted, **options
    )


CALLS = {
    "decode": lambda pool: serving.decode(*one(X), pool, **X.gates, read_slots=SLOTS),
    "decode elsewhere": lambda pool: serving.decode(
        *one(X), pool, **X.gates, read_slots=SLOTS, write_slots=SLOTS[::-1].copy()
    ),
    "prefill": prefill,
    "prefill with checkpoints": lambda pool: prefill(
        pool, checkpoint_every=64, checkpoint_slots=np.array([[1], [2]])
    ),
    "copy": lambda pool: serving.copy_slots(pool, SLOTS, SLOTS + 1),
}
WITHOUT_A_RING = {"verify": lambda pool: verify(pool, np.arange(8).reshape(2, 4))}
FOR_TREES = {"verify": lambda pool: verify(pool, SLOTS, parents=np.array([[-1, 0, 0, 2], [-1, -1, 1, 1]]))}
WITH_A_RING = {
    "verify": lambda pool: verify(pool, SLOTS),
    "flush": lambda pool: serving.flush(pool, SLOTS),
    "accept": lambda pool: serving.accept(pool, SLOTS, np.array([1, 2])),
}


def of_channels(call, x, pool, **where):
    """A call of tokens with a decay and an erase strength of each channel."""
    q, k, v, a, b = x
    gates = X.gates | {"dt_bias": jnp.repeat(X.gates["dt_bias"][:, None], K, 1)}
    a, strengths = (jnp.repeat(y[..., None], K, -1) for y in (a, b))
    return call(q, k, v, a, strengths, pool, w=b, **gates, **where)


SPANS = dict(state_slots=SLOTS, num_accepted_tokens=np.array([1, 3]))
DECODE_CHANNELS = {"decode": lambda pool: of_channels(serving.decode, one(X), pool, read_slots=SLOTS)}
VERIFY_CHANNELS = {"verify": lambda pool: of_channels(serving.verify, tokens(), pool, **SPANS)}
KINDS = {
    "pool": CALLS | WITHOUT_A_RING,
    "ring": CALLS | WITH_A_RING,
    "ring for trees": FOR_TREES,
    "pool, gates of channels": DECODE_CHANNELS,
    "ring, gates of channels": DECODE_CHANNELS | VERIFY_CHANNELS,
}


def cases():
    """Kinds of pools and calls; those that take long to compile are slow tests."""
    for kind, calls in KINDS.items():
        for name in calls:
            slow = "checkpoints" in name or (kind, name) == ("ring", "prefill") or "channels" in kind
            yield pytest.param(kind, name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", list(cases()))
def test_nothing_is_copied(kind, name):
    pool = jax.tree.map(lambda x: jax.ShapeDtypeStruct((MANY, *x.shape[1:]), x.dtype), put(draw_pool(1)))
    if "ring" in kind:
        options = dict(trees="trees" in kind, channels="channels" in kind)
        make = partial(serving.make_ring_pool, num_key_heads=HK, **options)
        pool = jax.eval_shape(make, pool)
    memory = jax.jit(KINDS[kind][name], donate_argnums=0).lower(pool).compile().memory_analysis()
    sizes = [np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pool)]
    assert memory.alias_size_in_bytes == sum(sizes), "the pool is not donated"
    # Cursors and parents are smaller than what is worked out on the way.
    smallest = min(
        np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pool) if x.dtype == np.float32
    )
    assert memory.temp_size_in_bytes < smallest / 2, f"{memory.temp_size_in_bytes} bytes, arrays of {sizes}"
