"""The serving kernels without a GPU: right and free of races when interpreted, and refused with a reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pool_steps
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from pool_steps import Case

from pallas_kernels.decode import step, tiles

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

CASES = (
    Case("plain"),
    Case("vk", kv_layout=False, pool_dtype="bfloat16"),
    Case("kv-bfloat16", pool_dtype="bfloat16", elsewhere=True),
    Case("float32-in-no-norm", dtype="float32", use_qk_l2norm=False, K=64, V=32, kv_layout=False),
    Case("float16-null-slot", dtype="float16", null_slot=0, allow_neg_eigval=True, K=96, V=96),
    Case("heads", N=2, heads=(1, 2, 4), K=32, V=32, padding=False),
    Case("tokens", T=4, V=64),
    Case("tokens-uneven", N=4, T=3, V=32, uneven=True, kv_layout=False, pool_dtype="bfloat16"),
    Case("saturated-gate", V=32, gate_shift=200.0),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_step(case):
    x = pool_steps.draw(case)
    pool_steps.assert_right(case, x, *step.step(**x, **case.options, interpret=INTERPRET))


def test_padding_batch_leaves_the_pool():
    case = Case("all-padding", V=32)
    x = pool_steps.draw(case)
    x["read_slots"] = jnp.full_like(x["read_slots"], -1)
    o, pool = step.step(**x, **case.options, interpret=INTERPRET)
    assert not np.asarray(o).any()
    assert (np.asarray(pool) == np.asarray(x["pool"])).all()


def test_slow_gates_keep_their_digits():
    """softplus of -12 is 6.1e-6: in float32, log(1 + 6.1e-6) is off by a hundredth of it."""
    x = np.linspace(-40, 40, 801, dtype=np.float32)
    got = np.maximum(x, 0) + np.asarray(tiles._log1p(jnp.exp(-jnp.abs(x))))
    np.testing.assert_allclose(got, np.logaddexp(0, x.astype(np.float64)), rtol=1e-6)


def test_pool_is_updated_in_place():
    """The kernel's pool is the caller's, if that gives it away: no copy is left for XLA to make."""
    case = Case("in-place", V=32)
    x = pool_steps.draw(case)
    run = jax.jit(lambda pool, x: step.step(**(x | {"pool": pool}), **case.options), donate_argnums=0)
    text = run.trace(x.pop("pool"), x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias<") == 1
    assert "stablehlo.copy" not in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"pool_dtype": "float16"}, "float16"),
        ({"K": 48}, "K = 48"),
        ({"K": 288}, "K = 288"),
        ({"V": 20}, "V = 20"),
        ({"heads": (2, 2, 3)}, "3 value heads"),
        ({"N": 0, "padding": False}, "no requests"),
    ],
)
def test_refusals_say_why(change, reason):
    case = Case("refused", **change)
    x = pool_steps.draw(case)
    got = step.check_supported(x["q"], x["k"], x["v"], x["pool"], case.kv_layout)
    assert got is None if reason is None else reason in str(got)
