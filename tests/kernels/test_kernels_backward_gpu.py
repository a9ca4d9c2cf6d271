"""The backward kernels on a GPU of compute capability 9.0: the case table, after the forward kernels; repeats."""

import jax
import jax.numpy as jnp
import missed
import numpy as np
import pytest
from harness import truth
from tolerances import assert_close, head_axis, tolerance

from gdn_jax import gates
from gdn_jax.checks import cases
from gdn_jax.shapes import RuleArrays
from pallas_kernels.backward import rule as backward
from pallas_kernels.forward import rule as forward_rule

pytestmark = pytest.mark.gpu

WIDE = dict(B=1, heads=(1, 1, 2), K=128, V=128)
CASES = (
    cases.Case("wide", T=2048, **WIDE),
    cases.Case("wide-packed", T=1500, lengths=(0, 1, 64, 300, 0, 640, 63, 129), **WIDE),
    cases.Case("narrow", T=700, B=1, heads=(1, 1, 1), K=64, V=64, g="zero", initial_state=False),
    cases.Case("four-tiles", T=300, B=1, heads=(2, 2, 4), K=128, V=256),
    cases.Case("wide-keys", T=300, B=1, heads=(1, 1, 2), K=256, V=128),
    cases.Case("wide-keys-packed", T=400, B=1, heads=(2, 1, 1), K=192, V=64, lengths=(0, 1, 64, 150, 0, 63)),
)
DTYPES = ("bfloat16", "float16")


def call(case: cases.Case, config: backward.Config | None = None, segment_chunks: int | None = None):
    """Forward and backward of a case as a compiled function of its arrays and cotangents."""
    forward_config = forward_rule.Config(segment_chunks=segment_chunks)
    options = {name: x for name, x in case.options.items() if name not in ("chunk_size", "use_qk_l2norm")}
    options["scale"] = case.K**-0.5 if case.scale is None else case.scale

    @jax.jit
    def run(arrays, cu_seqlens, segment_ids, do, dh_T):
        q, k, v, g, beta, state = arrays
        inverse_of_norm = lambda x: x  # noqa: E731
        if case.use_qk_l2norm:
            (q, k), inverse_of_norm = jax.vjp(lambda q, k: (gates.l2norm(q), gates.l2norm(k)), q, k)
        x = RuleArrays(q, k, v, g, beta, state, cu_seqlens, segment_ids)
        residuals = forward_rule.forward(x, config=forward_config, **options)[2]
        cotangents = backward.OutputCotangents(do, dh_T)
        out = backward.backward(x, residuals, cotangents, config=config, **options)
        dq, dk = inverse_of_norm((out.dq, out.dk))
        return out._replace(dq=dq, dk=dk)

    return run


def check(case: cases.Case, dtype: str, config: backward.Config | None = None, segment_chunks=None):
    """Every gradient against the oracle."""
    x = cases.inputs(case, dtype)
    got = call(case, config, segment_chunks)(x[:6], x.cu_seqlens, x.segment_ids, x.do, x.dh_T)
    missed.check(case, dtype, truth(case.options, x), got._asdict())


TABLE = [c for c in cases.TABLE if c.chunk_size == 64 and c.scale != 0]
"""A scale of 0 is applied around the kernels: see the public call."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in TABLE])
def test_case_table(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [None, (0, 1, 64, 300, 0, 130)])
def test_gradient_of_small_strengths(lengths, dtype):
    """One head each with beta = 0, 1e-12, 1e-4 and 1."""
    case = cases.Case("strengths", T=600, B=1, heads=(2, 2, 4), K=128, V=128, beta="by-head", lengths=lengths)
    x = cases.inputs(case, dtype)
    got = call(case)(x[:6], x.cu_seqlens, x.segment_ids, x.do, x.dh_T)
    expected = truth(case.options, x)["dbeta"]
    assert_close(expected, np.asarray(got.dbeta), tolerance("dbeta", dtype), "dbeta", head_axis("dbeta"))
    assert not np.any(np.asarray(got.dv)[:, :, 0])
    assert all(np.isfinite(np.asarray(y).astype(np.float32)).all() for y in got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_configurations(case, warpgroups, dtype):
    check(case, dtype, backward.Config(state_warpgroups=min(warpgroups, case.V // 64)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segment_chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_segments(case, segment_chunks, dtype):
    check(case, dtype, backward.Config(segments=True), segment_chunks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_repeats_are_equal(case, segments, dtype):
    x = cases.inputs(case, dtype)
    arguments = jax.device_put((x[:6], x.cu_seqlens, x.segment_ids, x.do, x.dh_T))
    run = call(case, backward.Config(segments=segments), 3 * segments)
    first, different = run(*arguments), jnp.int32(0)
    for _ in range(1000):
        again = run(*arguments)
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
        different += sum(jnp.any(a != b) for a, b in pairs)
    assert int(different) == 0
