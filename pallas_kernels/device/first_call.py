"""The first call of a program with kernels is short because three things that JAX does slowly are done here.

Its compiler compiles kernels one after another, each where the program calls it first, and none of XLA's own in the
meantime: both set options of LLVM, which a process has once. What the process has compiled before it takes as it is,
by a hash of the kernel's code. So each kernel is compiled in a thread of its own from the moment that it is lowered.

While a kernel is lowered JAX starts ptxas to ask for its version, 10 ms at every branch and integer division. Here it
asks once.

JAX 0.11 writes into a kernel's code how many kernels the process has lowered before it, so that a kernel of two
programs has two hashes and is compiled twice, and JAX's compilation cache finds a program only in a process that
lowers in the same order. Here the number is left out, as JAX 0.12 does.

JAX has no public switch for these. `tests/kernels/test_first_call.py` fails where a version of JAX has moved them.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import core, fragmented_array
from jax.sharding import SingleDeviceSharding

AT_ONCE = 32
"""Kernels that are compiled at the same time, at most."""


@functools.cache
def prepare() -> None:
    """Prepares JAX, once in a process, before it lowers a kernel."""
    core.KNOWN_KERNELS = _Lowered(core.KNOWN_KERNELS)
    bindings = getattr(fragmented_array.mgpu_lib, "_mosaic_gpu_ext", None)
    if bindings is not None:  # without a plugin for GPUs there are none, and no ptxas is asked
        bindings._get_ptxas_isa_version = functools.cache(bindings._get_ptxas_isa_version)
    if jax.__version_info__ < (0, 12):
        core._mosaic_gpu_lowering_rule = _without_number(core._mosaic_gpu_lowering_rule)


def _without_number(rule: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's rule for the call of a lowered kernel, whose code keeps no number.

    The number is part of a name for files that the compiler writes on request. Without one it makes its own.
    """

    @functools.wraps(rule)
    def call(*args: Any, module: Any, **options: Any) -> Any:
        attributes = module.operation.attributes
        if "mosaic_gpu.dump_basename" in attributes:
            del attributes["mosaic_gpu.dump_basename"]
        return rule(*args, module=module, **options)

    return call


class _Lowered(dict[bytes, bytes]):
    """JAX's table of the kernels that it has lowered, their code by its hash, in which new ones are compiled."""

    def __setitem__(self, key: bytes, code: bytes) -> None:
        super().__setitem__(key, code)
        if jax.default_backend() == "gpu":
            _threads().submit(compile_kernel, key, code)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kernels")


def compile_kernel(key: bytes, code: bytes) -> None:
    """Compiles a lowered kernel for this process.

    The program around it is one call that never runs: its arguments are not the kernel's. An error is left to the
    program that calls the kernel, whose compilation ends with it too.
    """
    where = SingleDeviceSharding(jax.local_devices()[0])
    array = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=where)
    call = jax.ffi.ffi_call("mosaic_gpu_v2", array)
    program = jax.jit(lambda x: call(x, kernel_hash=key, module=code, use_custom_barrier=False))
    program.lower(array).compile()
