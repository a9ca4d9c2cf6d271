"""Kernels that a profile of the device shows."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData


class Kernel(NamedTuple):
    """One run of a kernel on a GPU."""

    start_ns: float
    end_ns: float
    name: str

    @property
    def ms(self) -> float:
        """Milliseconds from its start to its end."""
        return (self.end_ns - self.start_ns) / 1e6


class KernelTime(NamedTuple):
    """Milliseconds of all runs of one kernel in a call; launches may be a mean."""

    name: str
    launches: float
    ms: float


def profile(run: Callable[[], Any], calls: int) -> ProfileData:
    """Profile of the device during `calls` calls of run()."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(calls):
                run()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        return ProfileData.from_file(str(path))


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


def by_call(found: list[Kernel], calls: int) -> list[list[Kernel]]:
    """Kernels of each of `calls` equal calls, none of which overlaps another.

    Raises:
      ValueError: the calls do not have the same kernels.
    """
    if not found or len(found) % calls:
        raise ValueError(
            f"profile of {calls} equal calls: expected as many kernels in each, got {len(found)} in all"
        )
    size = len(found) // calls
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    names = [Counter(kernel.name for kernel in group) for group in groups]
    if any(other != names[0] for other in names):
        raise ValueError(f"profile of {calls} equal calls: expected the same kernels in each, got {names}")
    return groups


def busy_ms(found: list[Kernel], pause_ns: float) -> float:
    """Milliseconds from the first kernel to the last, without pauses of pause_ns or more in which none ran.

    Args:
      found: kernels of one device in the order of their start.
      pause_ns: shorter pauses are those between the kernels of one program.
    """
    busy, until = 0.0, found[0].start_ns
    for kernel in found:
        pause = kernel.start_ns - until
        busy += max(kernel.end_ns - until, 0.0) - (pause if pause >= pause_ns else 0.0)
        until = max(until, kernel.end_ns)
    return busy / 1e6


def by_kernel(found: list[Kernel], calls: int) -> list[KernelTime]:
    """Milliseconds of a call by kernel, the longest first, and last the time between kernels when none ran.

    Kernels that run at the same time count each by themselves. A collective's time holds its wait for other devices.

    Args:
      found: kernels of one device in the order of their start, of equal calls that follow one another.
      calls: how many.
    """
    times: dict[str, float] = defaultdict(float)
    launches = Counter(kernel.name for kernel in found)
    idle, busy_until = 0.0, found[0].start_ns if found else 0.0
    for kernel in found:
        times[kernel.name] += kernel.ms
        idle += max(kernel.start_ns - busy_until, 0.0)
        busy_until = max(busy_until, kernel.end_ns)
    rows = [KernelTime(name, launches[name] / calls, ms / calls) for name, ms in times.items()]
    return [*sorted(rows, key=lambda row: -row.ms), KernelTime("between kernels", 0, idle / calls / 1e6)]
