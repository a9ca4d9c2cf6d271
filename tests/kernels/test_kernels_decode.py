"""The serving kernels without a GPU, through the public calls: right and free of races when interpreted, in place
when lowered, and refused with a reason."""

import dataclasses
import re
from functools import partial

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pool_steps
import pytest
from device_arrays import put
from pool_steps import CASES, TREES, Case
from tolerances import assert_close

from gdn_jax import serving
from gdn_jax.checks.accuracy import BOUNDS
from pallas_kernels.decode import (
    cta,
    step,
)
from pallas_kernels.device import launch
from pallas_kernels.device.gates import softplus

KERNELS = {"implementation": "mosaic_gpu"}


QUICK = ("plain", "vk", "float16-null-slot", "heads", "saturated-gate")


@pytest.mark.parametrize(
    "case",
    harness.tiers(CASES, QUICK, ("tree-uneven", "tokens-uneven", "tree-kv-bfloat16", "tree-vk")),
)
@pytest.mark.usefixtures("interpreted_calls")
def test_step(case):
    """Near the oracle, and near plain JAX in every slot: what one leaves alone, the other does."""
    x = pool_steps.draw(case)
    o, pool = pool_steps.serve(case, x, **KERNELS)
    pool_steps.assert_right(case, x, o, pool)
    plain = jax.jit(partial(pool_steps.serve, case, implementation="xla"))(x)
    bounds = BOUNDS[case.dtype][0]["o"], BOUNDS[case.pool_dtype][0]["final_state"]
    for name, y, like, bound in zip(("o", "pool"), (o, pool), plain, bounds, strict=True):
        assert y.dtype == like.dtype
        assert_close(np.asarray(like).astype(np.float64), np.asarray(y), bound, f"{case.name} {name}")


@pytest.mark.parametrize(
    ("K", "V", "pool_dtype", "kv_layout", "block"),
    [
        (128, 128, "float32", True, 64),
        (128, 128, "bfloat16", True, 128),
        (128, 128, "float32", False, 32),
        (128, 128, "bfloat16", False, 32),
        (128, 192, "bfloat16", True, 64),
        (96, 96, "float32", True, 32),
        (256, 256, "bfloat16", True, 64),
        (256, 256, "float32", True, 64),
    ],
)
def test_default_tiles(K, V, pool_dtype, kv_layout, block):
    """The sizes that were fastest, as far as they divide V and registers hold them; the cases above run with them."""
    config = step.Config.default(K, V, pool_dtype, kv_layout)
    is_half = pool_dtype == "bfloat16"
    ahead = 132 * {(True, True): 2, (True, False): 1, (False, True): 8, (False, False): 0}[kv_layout, is_half]
    wide = kv_layout and is_half
    assert config == step.Config(block, across=wide, narrow=wide, ahead=ahead)
    assert step.Config.default(K, V, pool_dtype, kv_layout, 4) == step.Config(block)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted_calls")
def test_several_tiles_of_a_head(monkeypatch):
    """One after the other by a warpgroup: as a tile to each, also where a request is padding."""
    case = Case("turns", N=3, K=32, V=128, pool_dtype="bfloat16", kv_layout=False)
    x, results = pool_steps.draw(case), []
    for turns in ({}, {2: 0}, {4: 0}):
        monkeypatch.setattr(cta, "TURNS", turns)
        results.append(pool_steps.serve(case, x, **KERNELS))
    pool_steps.assert_right(case, x, *results[0])
    for other in results[1:]:
        for y, z in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(z, np.float32))


def test_tiles_of_many_heads():
    """Few heads leave a tile to each warpgroup; V gives as many as divide."""
    config = step.Config.default(128, 128, "bfloat16", False)
    turns = [config.for_heads(heads, 128).turns for heads in (32, 63, 64, 255, 256, 1 << 14)]
    assert turns == [1, 1, 2, 2, 4, 4]
    assert config.for_heads(1 << 14, 192).turns == 2 and config.for_heads(1 << 14, 96) == config


@pytest.mark.parametrize(
    ("pool_dtype", "kv_layout"), [("float32", True), ("bfloat16", True), ("bfloat16", False)]
)
@pytest.mark.usefixtures("interpreted_calls")
def test_tiles_are_brought_near(monkeypatch, pool_dtype, kv_layout):
    """There are more warpgroups than run at once, as on an H200 with many states; some of them are padding."""
    monkeypatch.setattr(cta, "num_sms", lambda: 1)
    case = Case("ahead", N=4, K=32, V=64, pool_dtype=pool_dtype, kv_layout=kv_layout)
    x = pool_steps.draw(case)
    pool_steps.assert_right(case, x, *pool_steps.serve(case, x, **KERNELS))


@pytest.mark.usefixtures("interpreted_calls")
def test_requests_that_write_where_others_read():
    """A request that is forked, and a slot that goes on while another request takes its place: all is read first."""
    case = Case("crossed", N=4, K=32, V=32, slots=9, elsewhere=True, padding=False)
    x = pool_steps.draw(case)
    x |= {
        "read_slots": put([3, 3, 5, 0], jnp.int32),
        "write_slots": put([[5], [3], [0], [-1]], jnp.int32),
    }
    pool_steps.assert_right(case, x, *pool_steps.serve(case, x, **KERNELS))


@pytest.mark.usefixtures("interpreted_calls")
def test_one_token_of_a_tree():
    """It follows no other."""
    case = Case("one-of-a-tree", T=1, K=32, V=32)
    x = pool_steps.draw(case)
    tokens, gates = [x[name] for name in pool_steps.TOKENS], {name: x[name] for name in ("A_log", "dt_bias")}
    spans = {"state_slots": x["write_slots"], "num_accepted_tokens": x["num_accepted_tokens"]}
    parents = jnp.full((case.N, 1), -1)
    o, pool = serving.verify(*tokens, x["pool"], **gates, **spans, parents=parents, **KERNELS)
    pool_steps.assert_right(case, x | {"read_slots": x["write_slots"][:, 0]}, o, pool)


@pytest.mark.usefixtures("interpreted_calls")
def test_padding_batch_leaves_the_pool():
    """Slot numbers of any dtype, of which not one is in the pool."""
    case = Case("all-padding", K=32, V=32)
    x = pool_steps.draw(case)
    for numbers in (jnp.full(3, -1, jnp.int8), jnp.full(3, -1, jnp.uint32), put([9, -5, 2**31 - 1])):
        o, pool = pool_steps.serve(case, x | {"read_slots": numbers}, **KERNELS)
        assert not np.asarray(o).any()
        assert (np.asarray(pool) == np.asarray(x["pool"])).all()


@pytest.mark.usefixtures("interpreted_calls")
@pytest.mark.slow
def test_pool_of_a_whole_model():
    """The second of three layers, in every kind of pool; the others keep their bits."""
    plain = Case("layers", K=32, V=32)

    def with_layers(pool):
        return jax.tree.map(lambda y: jnp.stack([jnp.zeros_like(y), y, jnp.ones_like(y)], 1), pool)

    def layer(y):
        assert not np.asarray(y[:, 0]).any() and (np.asarray(y[:, 2]) == 1).all()
        return y[:, 1]

    options = {"layer": put(1, "int32")} | KERNELS
    for change in ({}, {"elsewhere": True}, {"T": 2}):
        case = dataclasses.replace(plain, **change)
        x = pool_steps.draw(case)
        o, pool = pool_steps.serve(case, x | {"pool": with_layers(x["pool"])}, **options)
        pool_steps.assert_right(case, x, o, layer(pool))
    case = dataclasses.replace(plain, T=2)
    x = pool_steps.draw_ring(case, (0, 3, 15))
    o, pool = pool_steps.serve_ring(case, x, with_layers(pool_steps.ring_pool(case, x)), **options)
    pool_steps.assert_ring_right(case, x, (2, 5, 2), (o, *map(layer, pool[:4])))
    np.testing.assert_array_equal(layer(pool.cursors)[x["read_slots"]][::2, :, 0], np.full((2, 2), 2))


def test_slow_gates_keep_their_digits():
    """softplus of -12 is 6.1e-6: in float32, log(1 + 6.1e-6) is off by a hundredth of it."""
    x = np.linspace(-40, 40, 801, dtype=np.float32)
    got = np.asarray(softplus(put(x)))
    np.testing.assert_allclose(got, np.logaddexp(0, x.astype(np.float64)), rtol=1e-6)


def in_place(f, pool, *arguments) -> str:
    """f(pool, *arguments), lowered for a GPU with the pool given away, of which nothing is copied: every array of its
    shapes is an argument, what a kernel or XLA writes in place, or a view of one."""
    text = jax.jit(f, donate_argnums=0).trace(pool, *arguments).lower(lowering_platforms=("cuda",)).as_text()
    arrays = [y for y in jax.tree.leaves(pool) if y.ndim > 2]
    signature = text[text.index("@main") : text.index("{\n", text.index("@main"))]
    assert len(re.findall("tf.aliasing_output", signature)) == len(jax.tree.leaves(pool)), "not given away"
    for y in arrays:
        views = {y.shape, (y.shape[0] * y.shape[1], *y.shape[2:])}
        types = ["tensor<" + "x".join(map(str, shape)) + "x" for shape in views]
        for line in text.splitlines():
            operation = re.match(r" *%[\w:]+ = \"?([\w.]+)", line)
            results = line.rpartition("->" if "->" in line else ":")[2]
            if operation and any(name in results for name in types):
                assert operation[1] in IN_PLACE, line
    return text


IN_PLACE = ("stablehlo.custom_call", "stablehlo.reshape", "stablehlo.scatter", "stablehlo.case", "call")


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_pools_are_updated_in_place():
    """Plain, with slots of its own to write, of a whole model, drafts, and on a ring."""
    cases = (
        Case("in-place"),
        Case("elsewhere", elsewhere=True),
        Case("drafts", T=4, uneven=True),
        Case("trees", T=5, parents=TREES),
    )
    for case in cases:
        x = pool_steps.draw(case)
        pool = x.pop("pool")
        text = in_place(
            lambda pool, x, case=case: pool_steps.serve(case, x | {"pool": pool}, **KERNELS), pool, x
        )
        assert text.count("#stablehlo.output_operand_alias<") == (2 if case.elsewhere else 1)
    case = Case("layers")
    x = pool_steps.draw(case)
    pool = jnp.stack([x.pop("pool")] * 2, 1)
    in_place(lambda pool, x: pool_steps.serve(case, x | {"pool": pool}, layer=1, **KERNELS), pool, x)
    elsewhere = {"write_slots": jnp.arange(3)}
    for case, more in (
        (Case("ring"), {}),
        (Case("ring-elsewhere"), elsewhere),
        (Case("ring-drafts", T=4, uneven=True), {}),
    ):
        x = pool_steps.draw_ring(case, (0, 3, 15))
        pool, call = pool_steps.ring_pool(case, x), partial(pool_steps.serve_ring, case, **more, **KERNELS)
        text = in_place(lambda pool, x, call=call: call(x, pool), pool, x)
        assert text.count("#stablehlo.output_operand_alias<") == 5


@pytest.mark.usefixtures("hopper")
def test_kernels_run_unasked():
    """Where they can run; a call that they cannot take is plain JAX."""
    for change, runs in (({}, True), ({"K": 48}, False), ({"pool_dtype": "float16"}, False)):
        case = Case("unasked", **change)
        lowered = jax.jit(partial(pool_steps.serve, case)).trace(pool_steps.draw(case))
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert ("mosaic_gpu" in text) == runs


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"pool_dtype": "float16"}, "float16"),
        ({"pool_dtype": "bfloat16"}, None),
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


@pytest.mark.usefixtures("hopper")
def test_public_refusals_say_why():
    case = Case("refused", K=32, V=32)
    x = pool_steps.draw_ring(case, (0, 3, 15))
    ring = pool_steps.ring_pool(case, x)
    with pytest.raises(NotImplementedError, match="a tree of 33 drafts"):
        many = dataclasses.replace(case, T=33, parents=(tuple(range(-1, 32)),))
        pool_steps.serve(many, pool_steps.draw(many), **KERNELS)
    with pytest.raises(NotImplementedError, match="a tree of drafts on a ring: the states are float32"):
        many = dataclasses.replace(case, T=5, parents=(tuple(range(-1, 4)),))
        trees = ring._replace(parents=jnp.zeros((len(ring.state), 16), int))
        pool_steps.serve_ring(many, pool_steps.draw_ring(many, (0, 3, 15)), trees, **KERNELS)


def test_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "device_reason", lambda *_: "there is no GPU")
    case = Case("cpu", K=32, V=32)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu': there is no GPU"):
        pool_steps.serve(case, pool_steps.draw(case), **KERNELS)
