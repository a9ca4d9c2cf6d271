"""The measuring loop: times of a call by the clock, or on a GPU by its kernels.

The time of a call on a GPU is the span on the device from the first kernel's start to the last one's end, as one CUDA
graph, so that no gaps come from the host. Replays of a CUDA graph measure the same for other libraries.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from gdn_jax.bench import profiles

GRAPH_OPTIONS = {
    "xla_gpu_graph_min_graph_size": 1,  # by default fewer than five launches are not made a graph
    "xla_enable_command_buffers_during_profiling": True,  # by default a profile is of launches one by one
}
"""Compiler options under which a function runs as one CUDA graph, also while it is profiled."""

WARM_UP = 3
"""Calls, at least, before the first timed one."""


class Timing(NamedTuple):
    """Milliseconds of a call over several measurements: their median, and the fastest to the slowest.

    kernels: name and median milliseconds of each kernel of a call, in order of their start.
    """

    ms: float
    fastest: float
    slowest: float
    kernels: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, times: list[float], kernels: tuple[tuple[str, float], ...] = ()) -> "Timing":
        """The timing of measurements in milliseconds."""
        return cls(float(np.median(times)), min(times), max(times), kernels)

    def over(self, parts: int) -> "Timing":
        """The timing of one of `parts` equal parts of a call."""
        return Timing(self.ms / parts, self.fastest / parts, self.slowest / parts, self.kernels)


def measure(call: Callable[[], Any], repeats: int, calls: int = 1, kernels: str | None = None) -> Timing:
    """Times calls: on a GPU single ones by their kernels, elsewhere `calls` in a row by the clock."""
    return by_device(call, repeats, kernels) if on_gpu() else by_clock(call, repeats, calls)


def going_on(program: Callable[..., Any], state: Any, *args: Any) -> Callable[[], Any]:
    """A call of program(state, *args) -> (state, results) that begins with the state that the call before left."""

    def once() -> Any:
        nonlocal state
        state, results = program(state, *args)
        return state, results

    return once


def in_a_row(call: Callable[[], Any], calls: int) -> None:
    """Calls that follow one another without a pause; returns when their results are on the device."""
    for _ in range(calls - 1):
        call()
    jax.block_until_ready(call())


def by_clock(
    call: Callable[[], Any], repeats: int, calls: int = 1, prepare: Callable[[], None] = lambda: None
) -> Timing:
    """Times calls by the clock, until their results are on the device.

    Args:
      repeats: measurements.
      calls: calls of a measurement, which follow one another without a pause.
      prepare: is called before every measurement, which does not count it.
    """
    times, warm_up = [], -(-WARM_UP // calls)
    for _ in range(warm_up + repeats):
        prepare()
        started = time.perf_counter()
        in_a_row(call, calls)
        times.append((time.perf_counter() - started) / calls * 1e3)
    return Timing.of(times[warm_up:])


def by_device(call: Callable[[], Any], repeats: int, kernels: str | None = None) -> Timing:
    """Times calls on a GPU from a profile.

    Args:
      kernels: the beginning of a kernel's name. The time is then the sum of all such kernels of a call instead of the
        span from its first kernel to its last.

    Raises:
      ValueError: the calls do not run the same kernels.
    """
    for _ in range(WARM_UP):
        jax.block_until_ready(call())
    found = profiles.kernels(profiles.profile(lambda: jax.block_until_ready(call()), repeats))
    if kernels is not None:
        found = [kernel for kernel in found if kernel.name.startswith(kernels)]
    groups = profiles.by_call(found, repeats)
    each = np.array([[kernel.ms for kernel in group] for group in groups])
    names = (kernel.name for kernel in groups[0])
    spans = [(max(kernel.end_ns for kernel in group) - group[0].start_ns) / 1e6 for group in groups]
    times = spans if kernels is None else each.sum(1).tolist()
    return Timing.of(times, tuple(zip(names, np.median(each, 0).tolist(), strict=True)))


def on_gpu() -> bool:
    """Whether JAX's default device is a GPU."""
    return jax.default_backend() == "gpu"


def compiled(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """A function compiled for its arguments, as one CUDA graph on a GPU; donate: arguments that it overwrites."""
    options = GRAPH_OPTIONS if on_gpu() else {}
    return jax.jit(function, donate_argnums=donate).lower(*args).compile(compiler_options=options)


def temporary_gib(program: Any) -> float | None:
    """Temporary memory of a compiled program by the compiler's own account; None where it gives none."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes / 2**30 if memory else None
