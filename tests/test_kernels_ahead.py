"""Kernels that are compiled ahead of the program that they are in: they are the same, and compiled before it is."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.backward import rule as backward_rule
from pallas_kernels.device import ahead
from pallas_kernels.forward import rule as forward_rule
from pallas_kernels.tools.ptxas_report import lower, modules


@pytest.fixture
def started(monkeypatch):
    """Modules in the order in which their compilation, which would need a GPU, is started."""
    for rule, run in ((forward_rule, forward_rule._run), (backward_rule, backward_rule._run_slices)):
        monkeypatch.setattr(rule, "_compiled", jax.jit(ahead.ahead(run), static_argnums=0))
    found = []
    monkeypatch.setattr(ahead, "pays", lambda: True)
    monkeypatch.setattr(ahead, "_compile", lambda module, shapes: found.append(module))
    return found


def arguments():
    """Shapes of q, k, v, g, beta and an initial state."""
    f32, tokens = jnp.float32, jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    gates, state = jax.ShapeDtypeStruct((1, 128, 1), f32), jax.ShapeDtypeStruct((1, 1, 64, 64), f32)
    return tokens, tokens, tokens, gates, gates, state


def forward(*arrays):
    """Outputs, final states and what the backward needs."""
    return forward_rule.forward(*arrays, scale=0.1)


def gradients(*arrays):
    """Of half the sum of squares of the outputs and final states."""
    o, final, residuals = forward(*arrays)
    return backward_rule.backward(*arrays, residuals, o, final, scale=0.1)


def kernels(function) -> list[bytes]:
    """Those of a program of the function, which is traced anew."""
    return modules(lower(lambda *arrays: function(*arrays), arguments()))


def alone(started) -> list[bytes]:
    """The kernel of each module, where the module is a program by itself."""
    return [kernel for module in started for kernel in modules(lower(module.call, module.in_avals))]


def test_the_kernels_of_a_program_are_those_compiled_ahead(started, monkeypatch):
    """Byte for byte, by which XLA finds them compiled, each once, the last ones of forward and of backward first. And
    they are those of a program without."""
    found = kernels(gradients)
    names = b"chunk_gates", b"gated_inverse", b"outputs", b"chains", b"gradients"
    assert all(name in kernel for name, kernel in zip(names, found, strict=True))
    gates, inverse, outputs, chains, sums = found
    assert alone(started) == [outputs, inverse, gates, sums, chains]
    monkeypatch.setattr(forward_rule, "_compiled", jax.jit(forward_rule._run, static_argnums=0))
    monkeypatch.setattr(backward_rule, "_compiled", jax.jit(backward_rule._run_slices, static_argnums=0))
    assert found == kernels(gradients)
    assert len(started) == 5


def test_a_program_is_lowered_when_its_kernels_are_compiled(started, monkeypatch):
    """Or XLA would compile once more what it does not find yet."""
    may_end, ended = threading.Event(), []

    def compile_slowly(module, shapes):
        may_end.wait()
        ended.append(module)

    monkeypatch.setattr(ahead, "_compile", compile_slowly)
    traced = jax.jit(lambda *arrays: forward(*arrays)).trace(*arguments())
    assert not ended
    threading.Timer(0.2, may_end.set).start()
    traced.lower(lowering_platforms=("cuda",))
    assert len(ended) == 3


def test_a_kernel_that_fails_to_compile_ahead_is_left_to_the_program(started, monkeypatch):
    def fail(module, shapes):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(ahead, "_compile", fail)
    assert len(kernels(forward)) == 3


def test_a_kernel_that_cannot_be_lowered_says_so(started, monkeypatch):
    def body(gmem, smem):
        raise ValueError("which is wrong")

    monkeypatch.setattr("pallas_kernels.forward.outputs._body", lambda gmem, smem, **_: body(gmem, smem))
    with pytest.raises(ValueError, match="which is wrong"):
        kernels(forward)
    assert ahead._plan.get() is None


@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_transforms(started, how):
    """Under vmap kernels are lowered with the program, for other shapes."""
    if how == "vmap":
        batched = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arguments()]
        found = modules(lower(lambda *arrays: jax.vmap(forward)(*arrays)[:2], batched))
    else:
        mesh = jax.make_mesh((1,), ("row",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = PartitionSpec("row")
        shard = jax.shard_map(lambda *x: gradients(*x), mesh=mesh, in_specs=rows, out_specs=rows)
        found = modules(lower(lambda *arrays: shard(*arrays), arguments()))
        assert sorted(found) == sorted(alone(started))
    assert len(found) == (3 if how == "vmap" else 5)


@pytest.fixture
def kept_in():
    """Sets where JAX keeps compiled programs; None is nowhere."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda folder: jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_dir", before)


def test_it_needs_one_gpu_and_several_processors_and_no_programs_on_disk(monkeypatch, kept_in, tmp_path):
    kept_in(None)
    assert not ahead.pays()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: set(range(ahead.MIN_CPUS)), raising=False)
    assert ahead.pays()
    kept_in(str(tmp_path))
    assert not ahead.pays()
    kept_in(None)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert not ahead.pays()
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert not ahead.pays()


@pytest.mark.gpu
def test_a_first_call_gives_what_it_gives_without(monkeypatch):
    """Bit for bit, forward and gradients; and by the time that the program is lowered nothing is left to compile."""
    if not ahead.pays():
        pytest.skip("needs one GPU and several processors")
    keys = jax.random.split(jax.random.key(0), 6)
    arrays = [
        0.1 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, arguments(), strict=True)
    ]
    arrays[3] = -jnp.abs(arrays[3])
    results = []
    for switched_on in (True, False):
        monkeypatch.setattr(ahead, "pays", lambda on=switched_on: on)
        jax.clear_caches()
        lowered = jax.jit(lambda *arrays: (forward(*arrays)[:2], gradients(*arrays))).lower(*arrays)
        assert all(future.done() for future in ahead._running)
        results.append(lowered.compile()(*arrays))
    jax.tree.map(np.testing.assert_array_equal, *results)
