"""What JAX's first call of a program with kernels is spared: `pallas_kernels.device.first_call`."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core, fragmented_array

from gdn_jax import gated_delta_rule, l2norm
from pallas_kernels.device import first_call
from pallas_kernels.tools.calls import CALLS
from pallas_kernels.tools.compiling import _modules


def lower() -> jax.stages.Lowered:
    """Lowers a kernel, though JAX may have done so before."""
    jax.clear_caches()
    return CALLS["gated norm"].lower()


@pytest.fixture
def unprepared(monkeypatch):
    """JAX as it was before its first kernel, which is prepared once more."""
    first_call.prepare()
    monkeypatch.setattr(core, "KNOWN_KERNELS", {})
    return first_call.prepare.__wrapped__


def test_kernels_are_compiled_from_when_they_are_lowered(unprepared, monkeypatch):
    """Each once, by the hash and the code that the program has."""
    unprepared()
    begun = []
    threads = types.SimpleNamespace(submit=lambda *call: begun.append(call))
    monkeypatch.setattr(first_call, "_threads", lambda: threads)
    lower()
    assert begun == []  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    core.KNOWN_KERNELS.clear()
    lowered = [lower(), lower()]
    [(compile_kernel, key, code)] = begun
    assert compile_kernel is first_call.compile_kernel and [code] == _modules(lowered[0])
    assert core.KNOWN_KERNELS == {key: code}


def test_ptxas_is_asked_once(unprepared, monkeypatch):
    """Without this JAX asks at every branch and integer division of every kernel."""
    asked = []
    bindings = types.SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append(None) or 90)
    monkeypatch.setattr(fragmented_array, "mgpu_lib", types.SimpleNamespace(_mosaic_gpu_ext=bindings))
    lower()
    often = len(asked)
    asked.clear()
    unprepared()
    lower()
    assert often > 1 and len(asked) == 1


@pytest.mark.gpu
def test_kernels_compile_by_themselves(unprepared, monkeypatch):
    """All of the rule's, before the program that calls them."""
    unprepared()
    futures, threads = [], first_call._threads()
    keeping = types.SimpleNamespace(submit=lambda *call: futures.append(threads.submit(*call)))
    monkeypatch.setattr(first_call, "_threads", lambda: keeping)
    x = jax.random.normal(jax.random.key(0), (1, 256, 2, 64), jnp.bfloat16)
    g = -jax.nn.softplus(jax.random.normal(jax.random.key(1), (1, 256, 2)))
    rule = partial(gated_delta_rule, implementation="mosaic_gpu")
    lowered = jax.jit(lambda x: rule(x, l2norm(x), x, g, jax.nn.sigmoid(g))[0]).lower(x)
    assert len(futures) == len({*_modules(lowered)}) > 0
    assert [future.exception(60) for future in futures] == [None] * len(futures)
    assert np.isfinite(np.asarray(lowered.compile()(x), np.float32)).all()
