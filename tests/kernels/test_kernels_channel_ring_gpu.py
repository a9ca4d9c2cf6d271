"""Rings with a decay of each channel on a GPU of compute capability 9.0: a period of tokens, drafts, repeats."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels_channel_ring import assert_alike, draw

from gdn_jax import serving

pytestmark = pytest.mark.gpu

N, POOL = 24, 40
SIZES = (16, 16, 32, 128, 128)
COUNTS = (np.arange(POOL) % 16).astype(np.int32)
READ = np.where(np.arange(N) == 5, -1, np.random.default_rng(0).permutation(POOL)[:N]).astype(np.int32)
STATES = [
    pytest.param(dtype, layout, apart, id=f"{dtype}-{layout}-{'apart' if apart else 'beta'}")
    for dtype in ("float32", "bfloat16")
    for layout in ("kv", "vk")
    for apart in (False, True)
]


def compiled(f, by, **options):
    """A call on a copy of a ring."""
    static = dict(implementation=by, state_layout=options.pop("state_layout"))
    static |= {name: options.pop(name) for name in ("lower_bound",) if name in options}
    program = jax.jit(partial(f, **static))
    return lambda tokens, ring: program(*tokens, jax.tree.map(jnp.array, ring), **options)


@pytest.mark.parametrize(("dtype", "layout", "apart"), STATES)
def test_a_period(dtype, layout, apart):
    """Every ring is filled once: outputs and present states of plain JAX after each of 16 tokens, and repeats."""
    token, gates, ring = draw(0, dtype, layout, apart, sizes=SIZES, N=N, counts=COUNTS)
    options = gates | dict(read_slots=READ, state_layout=layout)
    kernel, plain = (compiled(serving.decode, by, **options) for by in ("mosaic_gpu", "xla"))
    for _ in range(16):
        want, got = plain(token, ring), kernel(token, ring)
        assert_alike(want, got, ring, layout, READ)
        ring = got[1]
    again = kernel(token, ring)
    for _ in range(20):
        for x, y in zip(*map(jax.tree.leaves, (again, kernel(token, ring))), strict=True):
            x, y = (np.asarray(z).view(np.uint8) for z in (x, y))  # entries behind a ring's tokens are NaN
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("T", [4, 6])
@pytest.mark.parametrize(("dtype", "layout", "apart"), STATES)
def test_drafts(dtype, layout, apart, T):
    """Drafts of which some find no room, and of which some requests have fewer."""
    tokens, gates, ring = draw(T, dtype, layout, apart, sizes=SIZES, N=N, counts=COUNTS)
    spans = dict(state_slots=READ, num_accepted_tokens=(1 + np.arange(N) % 2).astype(np.int32))
    spans |= dict(num_tokens=np.where(np.arange(N) % 5 == 1, 2, T).astype(np.int32))
    options = gates | spans | dict(state_layout=layout)
    kernel, plain = (compiled(serving.verify, by, **options) for by in ("mosaic_gpu", "xla"))
    assert_alike(plain(tokens, ring), kernel(tokens, ring), ring, layout, READ)
