"""The Pallas kernels on a GPU of compute capability 9.0: the case table, repeats, garbage next to the data."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import assert_close, tolerance

from pallas_kernels import gdn

pytestmark = pytest.mark.gpu

WIDE = (
    cases.Case("wide", T=2048, B=1, heads=(1, 1, 2), K=128, V=128),
    cases.Case(
        "wide-packed", T=1500, B=1, heads=(1, 1, 2), K=128, V=128, lengths=(0, 1, 64, 300, 0, 640, 63, 129)
    ),
    cases.Case("K192-V192", T=300, B=1, heads=(1, 1, 1), K=192, V=192),
)
CONFIGS = (
    gdn.Config(),
    gdn.Config(state_warpgroups=2, segment_chunks=0),
    gdn.Config(state_warpgroups=1, segment_chunks=0, qk_in_inverse=False),
    gdn.Config(segment_chunks=4),
)


def call(case: cases.Case, config: gdn.Config | None = None):
    """The forward of a case as a compiled function of its array arguments."""
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    options["scale"] = case.K**-0.5 if case.scale is None else case.scale

    @jax.jit
    def run(arrays, cu_seqlens, segment_ids):
        packing = dict(cu_seqlens=cu_seqlens, segment_ids=segment_ids)
        return gdn.forward(*arrays, **packing, **options, config=config)[:2]

    return run


def check(case: cases.Case, dtype: str, config: gdn.Config | None = None):
    """Both outputs against the oracle."""
    x = cases.inputs(case, dtype)
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    o, final = oracle.forward(**x.arguments, **options)
    got_o, got_final = call(case, config)(x[:6], x.cu_seqlens, x.segment_ids)
    assert_close(o, np.asarray(got_o), tolerance("o", dtype), "o", 2)
    assert_close(final, np.asarray(got_final), tolerance("final_state", dtype), "final state", 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name) for c in cases.TABLE if c.chunk_size == 64 and not c.ill_conditioned]
)
def test_case_table(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in WIDE[:2]])
def test_configurations(case, config):
    check(case, "bfloat16", config)


def test_wide_keys():
    check(WIDE[2], "bfloat16")


def test_a_thousand_repeats_are_equal():
    for config in (CONFIGS[1], CONFIGS[3]):
        x = cases.inputs(WIDE[0], "bfloat16")
        arguments = jax.device_put((x[:6], x.cu_seqlens, x.segment_ids))
        run = call(WIDE[0], config)
        first = run(*arguments)
        different = jnp.int32(0)
        for _ in range(1000):
            again = run(*arguments)
            different += sum(jnp.any(a != b) for a, b in zip(first, again, strict=True))
        assert int(different) == 0


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in WIDE[:2]])
def test_garbage_next_door_does_not_leak(case):
    """NaN in the padding past cu[-1], and in memory that the outputs are allocated from."""
    x = cases.inputs(case, "bfloat16")
    arrays = [jnp.asarray(y) for y in x[:6]]
    run = call(case)
    expected = run(arrays, x.cu_seqlens, None)
    if x.cu_seqlens is not None:
        end = int(x.cu_seqlens[-1])
        arrays[:5] = [y.at[:, end:].set(jnp.nan) for y in arrays[:5]]
    poison = jnp.full((256, 1024, 1024), jnp.nan)
    poison.block_until_ready()
    del poison  # the allocator hands this memory out next
    for a, b in zip(expected, run(arrays, x.cu_seqlens, None), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
