"""The serving kernels without a GPU: right and free of races when interpreted, and refused with a reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pool_steps
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from pool_steps import CASES, DRAFT_CASES, RING_CASES, Case
from tolerances import assert_close

from gdn_jax.checks.accuracy import BOUNDS
from pallas_kernels.decode import ring_flush, ring_step, step, tiles

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


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


def test_pool_of_a_whole_model():
    """The second of three layers, in every kind of pool; the others keep their bits."""
    case, counts = Case("layers", V=32), (0, 3, 15)

    def with_layers(x, names):
        return x | {
            name: jnp.stack([jnp.zeros_like(x[name]), x[name], jnp.ones_like(x[name])], 1) for name in names
        }

    def layer(y):
        assert not np.asarray(y[:, 0]).any() and (np.asarray(y[:, 2]) == 1).all()
        return y[:, 1]

    x = pool_steps.draw(case)
    options = {**case.options, "layer": jnp.int32(1), "interpret": INTERPRET}
    o, pool = step.step(**with_layers(x, ["pool"]), **options)
    pool_steps.assert_right(case, x, o, layer(pool))
    x = pool_steps.draw_ring(case, counts)
    layered = with_layers(x, ["state", "ring_k", "ring_u", "ring_g", "count"])
    o, *pool = ring_step.ring_step(**layered, **options, deferred=True)
    pool_steps.assert_ring_right(case, x, (1, 4, 0), (o, *map(layer, pool)))


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
        ({"pool_dtype": "bfloat16"}, "verified on a GPU for float32 alone"),
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
    got = step.check_supported(x["q"], x["k"], x["v"], x["pool"])
    assert got is None if reason is None else reason in str(got)


@pytest.mark.parametrize(("case", "counts"), RING_CASES, ids=lambda x: getattr(x, "name", ""))
def test_deferred(case, counts):
    x = pool_steps.draw_ring(case, counts)
    results = ring_step.ring_step(**x, **case.options, deferred=True, interpret=INTERPRET)
    after = [0 if n + 1 >= pool_steps.LENGTH else n + 1 for n in counts]
    pool_steps.assert_ring_right(case, x, after, results)


@pytest.mark.parametrize(("case", "counts"), DRAFT_CASES, ids=lambda x: getattr(x, "name", ""))
def test_verify_on_a_ring(case, counts):
    x = pool_steps.draw_ring(case, counts)
    results = ring_step.ring_step(**x, **case.options, deferred=False, interpret=INTERPRET)
    tokens = [case.T] * case.N if x["num_tokens"] is None else x["num_tokens"].tolist()
    after = [n + m for n, m in zip(counts, tokens, strict=True)]
    pool_steps.assert_ring_right(case, x, after, results)


@pytest.mark.parametrize("case", [case for case, _ in RING_CASES], ids=lambda case: case.name)
def test_flush(case):
    """Rings without room for four tokens go, others stay."""
    counts = (12, 13, 16)
    x = pool_steps.draw_ring(case, counts)
    rings = {name: x[name] for name in ("state", "ring_k", "ring_u", "ring_g")}
    before = pool_steps.present(case, *rings.values(), x["count"])
    slots = {name: x[name] for name in ("read_slots", "count")}
    options = {"kv_layout": case.kv_layout, "room": 4}
    state = ring_flush.ring_flush(**rings, **slots, **options, interpret=INTERPRET)
    read = np.asarray(x["read_slots"])
    flushed = [int(slot) for slot, n in zip(read, counts, strict=True) if slot >= 0 and n + 4 > 16]
    assert flushed
    others = np.setdiff1d(np.arange(len(state)), flushed)
    assert (np.asarray(state)[others] == np.asarray(x["state"])[others]).all()
    got = np.asarray(state).astype(np.float64)
    got = got if case.kv_layout else np.swapaxes(got, -1, -2)
    bound = BOUNDS[case.pool_dtype][0]["final_state"]
    assert_close(before[flushed], got[flushed], bound, case.name, axis=1)


@pytest.mark.parametrize(
    ("ring", "change", "reason"),
    [
        ({}, {}, None),
        ({"ring_u": (9, 2, 8, 128)}, {}, "8 tokens"),
        ({"ring_k": (9, 1, 16, 128)}, {"ring_dtype": "float16"}, "float16"),
        ({}, {"pool_dtype": "bfloat16"}, "bfloat16"),
        ({}, {"T": 17}, "17 tokens"),
    ],
)
def test_ring_refusals_say_why(ring, change, reason):
    S, ring_dtype = jax.ShapeDtypeStruct, change.pop("ring_dtype", "bfloat16")
    case = Case("refused", **{"T": 1} | change)
    shapes = {"ring_k": (9, 1, 16, 128), "ring_u": (9, 2, 16, 128)} | ring
    q, v = S((3, case.T, 1, 128), "bfloat16"), S((3, case.T, 2, 128), "bfloat16")
    state = S((9, 2, 128, 128), case.pool_dtype)
    got = ring_step.check_supported(
        q, q, v, state, *(S(shapes[name], ring_dtype) for name in ("ring_k", "ring_u"))
    )
    assert got is None if reason is None else reason in str(got)
