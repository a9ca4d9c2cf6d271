"""Memory and size of a language model's program: one loop over its blocks, what remat keeps, a narrow stream."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import KERNELS, eqns
from small_models import (
    BF16,
    SIZES,
    Shift,
    call,
    continued,
    loss_of,
    make,
    operations,
    rounding_bounds,
    tokens,
)
from tolerances import assert_close

from gdn_jax.bench import step as step_bench
from gdn_jax.models import Block, LanguageModel, ModelConfig


def deep(**options):
    """A model of three blocks, split."""
    init = (
        nnx.initializers.lecun_normal()
    )  # the default divides by the depth: an order of blocks would not show
    config = ModelConfig(**{**SIZES, "num_layers": 3, **options})
    return nnx.split(LanguageModel(config, out_kernel_init=init, rngs=nnx.Rngs(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat, masked",
    [
        ("rule", True),
        *(pytest.param(*values, marks=pytest.mark.crossed) for values in (("none", True), ("full", False))),
    ],
)
def test_a_scan_over_blocks_changes_nothing(remat, masked):
    row, results = jax.device_put(tokens(2, 16)), []
    mask = jax.device_put(np.arange(16) < np.array([[16], [10]]))
    options = (
        {"mask": mask, "segment_ids": jax.device_put(np.arange(32).reshape(2, 16) // 6)} if masked else {}
    )
    for scan in (False, True):
        graphdef, params = deep(scan_layers=scan, num_layers=2, remat=remat, implementation="chunked")
        f = jax.jit(jax.value_and_grad(loss_of(graphdef, row, **options)))
        results.append(jax.tree.leaves(f(params)))
    jax.tree.map(assert_close, *results, jax.tree.leaves(rounding_bounds(f, params, passes=2)))


@pytest.mark.crossed
def test_other_derivatives_of_a_scan_over_blocks():
    """Forward mode, forward over reverse, and gradients side by side."""
    row, results = jax.device_put(tokens(2, 5)), []
    for scan in (False, True):
        graphdef, params = deep(scan_layers=scan, num_layers=2)
        loss = loss_of(graphdef, row)

        @jax.jit
        def derivatives(params, loss=loss):
            direction = jax.tree.map(jnp.cos, params)
            both = jax.tree.map(lambda x, d: jnp.stack([x, x + 0.1 * d]), params, direction)
            return (
                jax.jvp(loss, (params,), (direction,)),
                jax.jvp(jax.grad(loss), (params,), (direction,))[1],
                jax.vmap(jax.grad(loss))(both),
            )

        results.append(jax.tree.leaves(derivatives(params)))
    jax.tree.map(assert_close, *results, jax.tree.leaves(rounding_bounds(derivatives, params, passes=4)))


@pytest.mark.slow
def test_a_deeper_model_is_no_larger_a_program():
    """Weights come in and gradients go out one by one, which costs a few operations each."""
    row = jax.device_put(tokens(2, 32))

    def program(num_layers, **options):
        graphdef, params = nnx.split(
            nnx.eval_shape(lambda: make(num_layers=num_layers, implementation="chunked", **options))
        )
        return operations(jax.grad(loss_of(graphdef, row)), params)

    shallow, deep, unrolled = program(8, scan_layers=True), program(16, scan_layers=True), program(8)
    assert shallow["dot_general"] == deep["dot_general"] < unrolled["dot_general"] / 7
    assert deep["slice"] == shallow["slice"]  # slices at known places: XLA compiles each
    assert sum(deep.values()) < 2 * sum(shallow.values()) < sum(unrolled.values())


@pytest.mark.slow
def test_blocks_that_differ_are_not_scanned():
    row = tokens(2, 8)
    shifted = make(scan_layers=True)
    shifted.blocks[1] = Block(shifted.config, Shift(), rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=r"scan_layers: expected blocks that .*, got blocks that differ"):
        call(shifted, row)
    stateful = make(scan_layers=True)
    stateful.blocks[1].seen = stateful.blocks[0].seen = nnx.BatchStat(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"scan_layers: .* got a block with state next to its parameters"):
        call(stateful, row)


@pytest.mark.slow
def test_a_scanned_model_generates():
    """With a cache the blocks are walked one by one: the weights are not copied for every token, and nothing is
    computed again for a gradient."""
    prompt = tokens(3, 7)
    scanned = make(scan_layers=True, remat="full")
    np.testing.assert_array_equal(continued(scanned, prompt, 9), continued(make(), prompt, 9))


@pytest.mark.slow
def test_what_remat_keeps():
    """Bytes between the passes, and those of a compiled gradient, from below and from above: of two blocks, and what
    a third one adds. XLA plans memory before LLVM comes in: with all optimisations the bytes are the same."""
    B, T, D, HO, K = 2, 256, 64, 2, 32
    row = jax.device_put(tokens(B, T))

    def bytes_of(num_layers, remat):
        """Bytes that the passes hand over, that a compiled gradient needs, and of the weights but for the embedding,
        of which no derivative reads a number."""
        sizes = {"hidden_size": D, "num_layers": num_layers, "num_heads": HO, "head_dim": K, "expand_v": 1.0}
        config = ModelConfig(vocab_size=31, **sizes, implementation="chunked", remat=remat)
        graphdef, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
        loss = loss_of(graphdef, row)
        arrays = jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params))
        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        kept, weights = (
            sum(x.size * x.dtype.itemsize for x in xs) for xs in (arrays, jax.tree.leaves(params))
        )
        return kept, compiled.memory_analysis().temp_size_in_bytes, weights - 31 * D * 4

    two = {remat: bytes_of(2, remat) for remat in ("none", "rule", "full")}
    more = {remat: np.subtract(bytes_of(3, remat), two[remat]) for remat in ("rule", "full")}
    stream = B * T * D * 4
    chunk = 32  # of the chunked form on a CPU; a block keeps a matrix [chunk, chunk] and a state for each
    residuals = B * HO * (T // chunk) * (chunk * chunk + K * K) * 4
    kept, temporaries, weights = ({remat: x[i] for remat, x in two.items()} for i in range(3))
    # A block has two inputs, the stream and what is added to it; the first block has one.
    least = weights["full"] + 3 * stream
    assert least <= kept["full"] <= least + 4 * stream  # the last norm and the logits keep theirs
    assert more["full"][0] == more["full"][2] + 2 * stream
    for kept_by_rule, blocks in ((kept["rule"] - kept["full"], 2), (more["rule"][0] - more["full"][0], 1)):
        assert blocks * residuals <= kept_by_rule <= 1.5 * blocks * residuals
    assert kept["none"] > 8 * kept["rule"]
    # Memory is fullest in the backward pass of one block, which holds its own residuals under either remat: what
    # differs by a block is what each of the others keeps.
    assert 0.8 * residuals <= more["rule"][1] - more["full"][1] <= 1.5 * residuals
    assert 3 * stream <= temporaries["full"] <= 0.7 * temporaries["none"]


@pytest.mark.parametrize(
    "B, T",
    [pytest.param(1, 4096, marks=pytest.mark.slow), pytest.param(64, 256, marks=pytest.mark.slow)],
    ids=["cut into segments", "whole sequences"],
)
def test_remat_rule_runs_no_kernel_twice(B, T, monkeypatch):
    """None of the rule's kernels. Those around it run again. The program on a GPU, traced only."""
    from pallas_kernels.device import launch

    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    row = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def program(remat):
        sizes = {"vocab_size": 31, "hidden_size": 64, "num_heads": 2, "head_dim": 32, "expand_v": 1.0}
        config = ModelConfig(
            **sizes, num_layers=1, dtype="bfloat16", implementation="mosaic_gpu", remat=remat
        )
        graphdef, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
        traced = jax.make_jaxpr(jax.grad(lambda params, row: loss_of(graphdef, row)(params)))(params, row)
        found = [eqn for eqn in eqns(traced.jaxpr) if eqn.primitive.name in KERNELS]
        kernels = collections.Counter(eqn.params["name"].startswith(step_bench.RULE) for eqn in found)
        products = sum(eqn.primitive.name == "dot_general" for eqn in eqns(traced.jaxpr))
        return kernels[True], kernels[False], products

    plain, kept, again = (np.array(program(remat)) for remat in ("none", "rule", "full"))
    assert 0 < plain[0] == kept[0] < again[0]
    assert np.all(plain[1:] < kept[1:]) and np.all(kept[1:] == again[1:])  # projections, convolution, norms


@pytest.mark.slow
def test_residual_stream_in_bfloat16():
    """The stream between the blocks has the asked dtype; the float32 logits stay near those of a float32 stream."""
    row, results = jax.device_put(tokens(2, 9)), {}
    for dtype in ("float32", "bfloat16"):
        model = make(residual_dtype=dtype, scan_layers=True)
        results[dtype] = call(model, row)[0]
        graphdef, params = nnx.split(model)
        program = jax.make_jaxpr(loss_of(graphdef, row))(params)
        streams = [eqn.outvars[0].aval for eqn in eqns(program.jaxpr) if eqn.primitive.name == "scan"]
        assert [x.dtype for x in streams if x.shape == (2, 9, SIZES["hidden_size"])] == [jnp.dtype(dtype)]
    want, got = results.values()
    assert got.dtype == np.float32 and np.any(want != got)
    assert_close(want, got, BF16)
