"""The backward kernels on a GPU of compute capability 9.0: the case table, after the forward kernels; repeats."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import GRADIENTS, assert_close, head_axis, tolerance

from gdn_jax import gates
from pallas_kernels import backward, gdn
from pallas_kernels.gradients import BETA_FLOOR

pytestmark = pytest.mark.gpu

WIDE = dict(B=1, heads=(1, 1, 2), K=128, V=128)
CASES = (cases.Case("wide", T=2048, **WIDE),)


def call(case: cases.Case, config: backward.Config | None = None):
    """Forward and backward of a case as a compiled function of its arrays and cotangents."""
    options = {name: x for name, x in case.options.items() if name not in ("chunk_size", "use_qk_l2norm")}
    options["scale"] = case.K**-0.5 if case.scale is None else case.scale

    @jax.jit
    def run(arrays, cu_seqlens, segment_ids, do, dh_T):
        q, k, v, g, beta, state = arrays
        options.update(cu_seqlens=cu_seqlens, segment_ids=segment_ids)
        inverse_of_norm = lambda x: x  # noqa: E731
        if case.use_qk_l2norm:
            (q, k), inverse_of_norm = jax.vjp(lambda q, k: (gates.l2norm(q), gates.l2norm(k)), q, k)
        beta = None if beta is None else jnp.maximum(beta, BETA_FLOOR)
        arrays = (q, k, v, g, beta, state)
        residuals = gdn.forward(*arrays, **options)[2]
        out = backward.backward(*arrays, residuals, do, dh_T, config=config, **options)
        dq, dk = inverse_of_norm((out.dq, out.dk))
        return out._replace(dq=dq, dk=dk)

    return run


def check(case: cases.Case, config: backward.Config | None = None):
    """Every gradient against the oracle."""
    x = cases.inputs(case, "bfloat16")
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    expected = oracle.gradients(**x.arguments, do=x.do, dh_T=x.dh_T, **options)
    got = call(case, config)(x[:6], x.cu_seqlens, x.segment_ids, x.do, x.dh_T)
    for name, e, y in zip(GRADIENTS, expected, got, strict=True):
        assert (e is None) == (y is None)
        if e is not None:
            assert_close(e, np.asarray(y), tolerance(name, "bfloat16", case, x), name, head_axis(name))


TABLE = [c for c in cases.TABLE if c.chunk_size == 64 and not c.ill_conditioned and c.K <= 128]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in TABLE])
def test_case_table(case):
    check(case)


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_configurations(case, warpgroups):
    check(case, backward.Config(state_warpgroups=warpgroups))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_repeats_are_equal(case):
    x = cases.inputs(case, "bfloat16")
    arguments = jax.device_put((x[:6], x.cu_seqlens, x.segment_ids, x.do, x.dh_T))
    run = call(case)
    first, different = run(*arguments), jnp.int32(0)
    for _ in range(1000):
        again = run(*arguments)
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
        different += sum(jnp.any(a != b) for a, b in pairs)
    assert int(different) == 0
