"""Time of one call of a compiled function: on a GPU from the profiler, elsewhere by the clock.

On a GPU that is the span on the device from the first kernel's start to the last one's end, as one CUDA graph, so
that no gaps come from the host: what replays of a CUDA graph measure for other libraries. Elsewhere it is the mean of
several calls in a row, each with the state that the last one left, so that none can be dropped or overlapped.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

GRAPH_OPTIONS = {
    "xla_gpu_graph_min_graph_size": 1,  # by default fewer than five launches are not made a graph
    "xla_enable_command_buffers_during_profiling": True,  # by default a profile is of launches one by one
}
"""Compiler options under which a function runs as one CUDA graph, also while it is profiled."""

WARM_UP = 3
"""Calls before the first timed one."""


class Timing(NamedTuple):
    """Milliseconds of one call over several; kernels: median milliseconds of each, in order of their start."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    kernels: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, times: list[float], kernels: tuple[tuple[str, float], ...] = ()) -> "Timing":
        """From the milliseconds of every call."""
        return cls(float(np.median(times)), min(times), max(times), kernels)


class Program(NamedTuple):
    """A compiled step(state, *args) -> (results, new state), and what its first call gave and cost.

    first_s: tracing, compilation and the first run; temporary_mib: by the compiler's own account.
    """

    step: Callable
    run: Callable
    results: Any
    first_s: float
    temporary_mib: float


def compile_step(step: Callable, state: jax.Array, *args: Any) -> Program:
    """Compiles a step for its arguments and calls it once."""
    options = GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
    started = time.perf_counter()
    run = jax.jit(step).lower(state, *args).compile(compiler_options=options)
    results = jax.block_until_ready(run(state, *args))
    first_s = time.perf_counter() - started
    memory = run.memory_analysis()
    return Program(step, run, results, first_s, memory.temp_size_in_bytes / 2**20 if memory else float("nan"))


def measure(program: Program, state: jax.Array, *args: Any, calls: int, repeats: int) -> Timing:
    """Times a program on the arguments that it was compiled for.

    Args:
      calls: chained calls of one timed run; on a GPU every run is a single call.
      repeats: timed runs.
    """
    if jax.default_backend() == "gpu":
        return device_timing(_profile(program.run, (state, *args), repeats), repeats)
    return _chained(program.step, state, args, calls, repeats)


def of_calls(once: Callable[[], None], repeats: int) -> Timing:
    """Timing of once(), which returns when the device is done: on a GPU by its kernels, else by the clock."""
    for _ in range(WARM_UP):
        once()
    if jax.default_backend() == "gpu":
        return device_timing(profile(once, repeats), repeats)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        once()
        times.append((time.perf_counter() - started) * 1e3)
    return Timing.of(times)


class Kernel(NamedTuple):
    """One run of a kernel on a GPU."""

    start_ns: float
    end_ns: float
    name: str


def kernels(profile: ProfileData, device: int | None = None) -> list[Kernel]:
    """Kernels of a profile in the order of their start.

    Args:
      device: number of the GPU, None for all.
    """
    return sorted(
        Kernel(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        if "GPU" in plane.name and (device is None or plane.name.endswith(f":{device}"))
        for line in plane.lines
        if line.name.startswith("Stream")  # the other lines group the same kernels by operation
        for event in line.events
    )


class KernelTime(NamedTuple):
    """What the runs of one kernel take together in a call; launches may be a mean."""

    name: str
    launches: float
    ms: float


def by_kernel(found: list[Kernel], calls: int) -> list[KernelTime]:
    """Milliseconds of a call by kernel, the longest first, and last the time between kernels when none ran.

    Kernels that run at the same time count each by themselves. A collective's time holds its wait for other devices.

    Args:
      found: kernels of one device in the order of their start, of equal calls that follow one another.
      calls: how many.
    """
    times: dict[str, float] = {}
    launches: Counter[str] = Counter()
    idle, busy_until = 0.0, found[0].start_ns if found else 0.0
    for kernel in found:
        times[kernel.name] = times.get(kernel.name, 0.0) + kernel.end_ns - kernel.start_ns
        launches[kernel.name] += 1
        idle += max(kernel.start_ns - busy_until, 0.0)
        busy_until = max(busy_until, kernel.end_ns)
    rows = [KernelTime(name, launches[name] / calls, ns / calls / 1e6) for name, ns in times.items()]
    return [*sorted(rows, key=lambda row: -row.ms), KernelTime("between kernels", 0, idle / calls / 1e6)]


def device_timing(profile: ProfileData, calls: int) -> Timing:
    """Timing of `calls` equal calls, none of which overlaps another, from a profile of nothing else.

    Raises:
      ValueError: the profile does not show the same kernels for every call.
    """
    found = kernels(profile)
    if not found or len(found) % calls:
        raise ValueError(
            f"profile of {calls} equal calls: expected as many kernels in each, got {len(found)} in all"
        )
    size = len(found) // calls
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    names = [Counter(kernel.name for kernel in group) for group in groups]
    if any(other != names[0] for other in names):
        raise ValueError(f"profile of {calls} equal calls: expected the same kernels in each, got {names}")
    spans = [(max(kernel.end_ns for kernel in group) - group[0].start_ns) / 1e6 for group in groups]
    each = tuple(
        (same[0].name, float(np.median([kernel.end_ns - kernel.start_ns for kernel in same])) / 1e6)
        for same in zip(*groups, strict=True)
    )
    return Timing.of(spans, each)


def _profile(run: Callable, args: tuple, calls: int) -> ProfileData:
    """Profile of some calls, each of which ends before the next begins."""
    for _ in range(WARM_UP):
        jax.block_until_ready(run(*args))
    return profile(lambda: jax.block_until_ready(run(*args)), calls)


def profile(run: Callable[[], Any], calls: int) -> ProfileData:
    """Profile of the device while run() is called some times."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(calls):
                run()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        return ProfileData.from_file(str(path))


def _chained(step: Callable, state: jax.Array, args: tuple, calls: int, repeats: int) -> Timing:
    def chained(state, *args):
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state, *args)[0])

        def call(_, carry):
            results, new = step(carry[1], *args)
            # The next state is the call's own, pulled to the first one's size so that it never grows.
            return results, (state + new / (1 + jnp.abs(new))).astype(state.dtype)

        return jax.lax.fori_loop(0, calls, call, (results, state))

    run = jax.jit(chained).lower(state, *args).compile()
    times = []
    for i in range(WARM_UP + repeats):
        started = time.perf_counter()
        jax.block_until_ready(run(state, *args))
        if i >= WARM_UP:
            times.append((time.perf_counter() - started) / calls * 1e3)
    return Timing.of(times)
