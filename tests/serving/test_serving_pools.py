"""A new kind of pool is a class: 8-bit states with a scale for each head, by the public calls.

It is also a kind of checkpoints for rings. The package's own 8-bit states, with a scale for each row, are in
`test_serving_bytes.py`.
"""

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from harness import tiers
from serving_cases import HK, HV, K, V, assert_same_bits, draw, draw_pool, one

from gdn_jax import serving
from gdn_jax.serving import slots
from gdn_jax.serving.pools import Pool


class ByteStates(NamedTuple):
    codes: Any
    scale: Any


class BytePool(Pool, of=ByteStates):
    names: ClassVar[Any] = ByteStates("h . .", "h . .")

    @property
    def states(self):
        return self.arrays.codes

    def check(self, dims, layer):
        assert self.states.dtype.itemsize == 1

    def check_dtype(self, name):
        assert self.states.dtype.itemsize == 1

    def take(self, at):
        codes, scale = slots.take(self.arrays, at)
        return codes.astype(jnp.float32) * scale

    def put(self, at, states):
        scale = jnp.max(jnp.abs(states), (-2, -1), keepdims=True) / 127
        codes = jnp.round(states / jnp.where(scale == 0, 1, scale))
        return self.holding(slots.put(self.arrays, at, ByteStates(codes, scale)))


READ, WRITE = np.array([3, -1, 0]), np.array([3, 1, 6])
SPANS = dict(state_slots=np.array([[3, 4], [-1, -1], [0, 5]]), num_accepted_tokens=np.array([1, 1, 1]))


@pytest.fixture
def start(no_type_checks):
    """A pool whose states are whole numbers of steps."""
    scale = np.full((8, HV, 1, 1), 0.25, np.float32)
    return ByteStates(np.clip(np.round(draw_pool(8) * 40), -127, 127).astype(np.int8), scale)


def served(call, start):
    """Outputs and the states that are left, of a pool of bytes and of the same states in float32."""
    states = start.codes * start.scale
    (o, new), (want_o, want) = (call(put(states) if x is states else x) for x in (start, states))
    return (o, np.asarray(new.codes * new.scale)), (np.asarray(want_o), np.asarray(want)), states


CALLS = {
    "decode": lambda x, pool: serving.decode(*one(x), pool, **x.gates, read_slots=READ, write_slots=WRITE),
    "verify": lambda x, pool: serving.verify(*map(put, x.tokens), pool, **x.gates, **SPANS),
    "prefill": lambda x, pool: serving.prefill(
        *(put(y).reshape(1, 6, *y.shape[2:]) for y in x.tokens[:3]),
        None,
        None,
        np.array([0, 2, 4, 6]),
        pool,
        read_slots=READ,
        write_slots=WRITE,
        scale=0.1,
        use_qk_l2norm=True,
    ),
    "packed": lambda x, pool: serving.decode_packed(
        jnp.concatenate([y.reshape(3, -1) for y in one(x)[:3]], -1),
        *one(x)[3:],
        pool,
        **x.gates,
        read_slots=READ,
    ),
}


@pytest.mark.parametrize("name", tiers(CALLS, {*CALLS} - {"prefill"}))
def test_a_pool_of_bytes(name, start):
    """The same outputs, from the same states; new states are rounded to a step of their head."""
    x = draw(3, 2, heads=(HK, HV), widths=(K, V))
    (o, new), (want_o, want), before = served(lambda pool: CALLS[name](x, pool), start)
    assert_same_bits(want_o, o)
    changed = (new != before).any((1, 2, 3))
    assert changed.any() and (changed == (want != before).any((1, 2, 3))).all()
    step = np.abs(want).max((-2, -1), keepdims=True) / 127
    assert (np.abs(new - want)[changed] <= 0.51 * np.broadcast_to(step, want.shape)[changed]).all()
    assert_same_bits(before[~changed], new[~changed])


@pytest.mark.slow
def test_codes_may_be_floats(start):
    """Floats of 8 bits, which JAX promotes with nothing."""
    x, scale = draw(3, 2, heads=(HK, HV), widths=(K, V)), start.scale
    codes = jnp.clip(start.codes, -8, 8).astype(jnp.float8_e4m3fn)
    states = codes.astype(jnp.float32) * scale
    for name in ("decode", "prefill"):
        (o, new), (want_o, _) = (
            CALLS[name](x, pool) for pool in (ByteStates(codes + 0, put(scale)), states + 0)
        )
        assert_same_bits(want_o, o)
        assert new.codes.dtype == jnp.float8_e4m3fn and (new.codes != codes).any()


@pytest.mark.slow
def test_beside_a_ring(start):
    """Outputs of a ring on the same states in float32; a flush rounds the states, and a token does not."""
    x, T = draw(3, 4, heads=(HK, HV), widths=(K, V)), 3
    pools = start, put(start.codes * start.scale)
    ring, want = (serving.make_ring_pool(y, num_key_heads=HK, length=T, dtype=np.float32) for y in pools)
    for t in range(T):
        (o, ring), (want_o, want) = (
            serving.decode(*one(x, t), y, **x.gates, read_slots=READ) for y in (ring, want)
        )
        np.testing.assert_allclose(want_o, o, atol=1e-6)
        assert (t + 1 == T) == (np.asarray(ring.state.codes) != start.codes).any()
    new, step = ring.state.codes * ring.state.scale, np.abs(want.state).max((-2, -1), keepdims=True) / 127
    assert (np.abs(new - want.state) <= 0.51 * step).all()
    with pytest.raises(NotImplementedError, match="'mosaic_gpu': no kernel reads a BytePool beside a ring"):
        serving.decode(*one(x), ring, **x.gates, read_slots=READ, implementation="mosaic_gpu")


def test_no_kernel_takes_it(start):
    x = draw(3, 1)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu': no kernel reads a BytePool"):
        serving.decode(*one(x), start, **x.gates, read_slots=READ, implementation="mosaic_gpu")
