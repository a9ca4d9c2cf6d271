"""Compiles the kernels of a call side by side, while they are lowered, so that a first call takes less time.

XLA compiles the kernels of a program one after another, when all of it is lowered. `ahead` has a call traced twice
instead. The first time every kernel only says what it is. Then the kernels are lowered, each into a module of its own
and the last one first, because the last ones take longest to compile. As soon as one is lowered a thread compiles it,
as a program by itself. The second time the call is traced with these modules. XLA then finds every kernel compiled:
Mosaic GPU keeps the compiled kernels of a process by their contents, and the contents are the same bytes.

The program and what it computes are the same as without this. A kernel that fails to compile here is compiled with
the program, which then says what is wrong with it.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.custom_batching import custom_vmap

MIN_CPUS = 4
"""Fewer processors have no time for compilations beside what lowers: a kernel might then be compiled twice."""

MAX_THREADS = 8
"""Compilations at a time: more than a call has kernels to wait for."""

_lowering = ThreadPoolExecutor(1, "gdn-lower")
"""Lowers one kernel at a time, outside the mesh and the other contexts of whoever traces the call."""

_compiling = ThreadPoolExecutor(MAX_THREADS, "gdn-compile")

_running: set[Future] = set()
"""Compilations that have not ended."""


@dataclasses.dataclass(frozen=True)
class _Found:
    """A kernel of a call: the function that starts it, and the shapes of its arguments."""

    kernel: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass
class _Plan:
    """What is known of the kernels of the call that is traced, by what tells them apart."""

    found: dict[Hashable, _Found] = dataclasses.field(default_factory=dict)
    lowered: dict[Hashable, export.Exported] | None = None
    """None while the call is traced for the first time."""


_plan: ContextVar[_Plan | None] = ContextVar("kernels_ahead", default=None)


def pays() -> bool:
    """Whether kernels are compiled ahead in this process.

    With several devices XLA's partitioner has a call traced as a whole too, whose kernels never run. Where compiled
    programs are kept on disk, a program found there needs none of its kernels compiled.
    """
    if jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir:
        return False
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return jax.default_backend() == "gpu" and jax.device_count() == 1 and cpus >= MIN_CPUS


def ahead(run: Callable[..., Any]) -> Callable[..., Any]:
    """run(static, *args), with its kernels compiled ahead where that pays, also where the call is only traced.

    Args:
      run: a function that JAX traces, of a static argument and pytrees of arrays.
    """

    @functools.wraps(run)
    def traced(static: Any, *args: Any) -> Any:
        if not pays() or _plan.get() is not None or not any(map(_is_traced, jax.tree.leaves(args))):
            return run(static, *args)
        plan = _Plan()
        with _planned(plan):
            jax.eval_shape(functools.partial(run, static), *args)
            plan.lowered = _lowered(plan.found)
            return run(static, *args)

    return traced


def call(
    identity: Hashable,
    kernel: Callable[..., Sequence[jax.Array]],
    args: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
) -> Sequence[jax.Array]:
    """kernel(*args), or arrays of the same shapes while a call is traced to find its kernels.

    Args:
      identity: two kernels of a call with the same one are the same.
      args: arrays, or references: a kernel with one of these is lowered with the program.
      results: shapes and dtypes of what the kernel gives.
    """
    plan = _plan.get()
    if plan is None or not all(isinstance(x, jax.Array) for x in args):
        return kernel(*args)
    if plan.lowered is None:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args)
        plan.found.setdefault(identity, _Found(kernel, shapes))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in results)
    module = plan.lowered.get(identity)
    return kernel(*args) if module is None else _call(module, kernel, args)


@contextmanager
def _planned(plan: _Plan) -> Iterator[None]:
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _lowered(found: dict[Hashable, _Found]) -> dict[Hashable, export.Exported]:
    """The kernels' modules; their compilation has been started."""
    modules: dict[Hashable, export.Exported] = {}
    for identity, kernel in reversed(found.items()):
        module = _lowering.submit(_lower, kernel).result()
        modules[identity] = _Module.of(module)
        future = _compiling.submit(_compile, module, kernel.shapes)
        _running.add(future)
        future.add_done_callback(_running.discard)
    return modules


def _lower(found: _Found) -> export.Exported:
    return export.export(jax.jit(found.kernel), platforms=("cuda",))(*found.shapes)


def _compile(module: export.Exported, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Compiles the module as a program by itself. What is kept of it is Mosaic GPU's kernel."""
    jax.jit(module.call).lower(*shapes).compile()


class _Module(export.Exported):
    """A kernel's module, which a program takes over when that is lowered: the time to wait for what is compiled.

    Had XLA come to a kernel before that, it would have compiled it once more.
    """

    @classmethod
    def of(cls, module: export.Exported) -> "_Module":
        """The same module."""
        return cls(**{field.name: getattr(module, field.name) for field in dataclasses.fields(module)})

    def mlir_module(self, *args: Any, **options: Any) -> Any:
        """The module."""
        wait(tuple(_running))
        return super().mlir_module(*args, **options)


def _call(module: export.Exported, kernel: Callable[..., Any], args: Sequence[jax.Array]) -> Any:
    """module.call(*args). Under vmap it is the kernel, which is lowered for its new shapes with the program."""

    @custom_vmap
    def one(*args):
        return module.call(*args)

    @one.def_vmap
    def _(axis_size, batched, *args):
        in_axes = tuple(0 if b else None for b in batched)
        results = jax.vmap(kernel, in_axes, axis_size=axis_size)(*args)
        return results, jax.tree.map(lambda _: True, results)

    return one(*args)
