"""Programs that are lowered one after the other and compiled at the same time."""

import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax


class Program(NamedTuple):
    """A compiled program, and the seconds of tracing and lowering it, and of compiling it next to the others."""

    compiled: Any
    lower_s: float
    compile_s: float


Lowering = tuple[Callable[[], jax.stages.Lowered], dict[str, Any]]
"""A function that traces and lowers, and the options that its program is compiled with."""


def compiled_together[K: Hashable](todo: Mapping[K, Lowering], at_once: int) -> dict[K, Future[Program]]:
    """Compiles programs in threads: XLA does not hold Python's lock. Returns when all are there.

    Args:
      todo: the programs by name.
      at_once: programs at most that are compiled at the same time.

    Returns:
      A future that is done for each name; it holds the program, or what was raised while it was made.
    """
    found: dict[K, Future[Program]] = {}
    with ThreadPoolExecutor(at_once) as threads:
        for name, (lower, options) in todo.items():
            started = time.perf_counter()
            try:
                lowered = lower()
            except Exception as error:  # it belongs to this program: the others may be right
                found[name] = Future()
                found[name].set_exception(error)
                continue
            found[name] = threads.submit(_compiled, lowered, options, time.perf_counter() - started)
    return found


def _compiled(lowered: jax.stages.Lowered, options: dict[str, Any], lower_s: float) -> Program:
    started = time.perf_counter()
    return Program(lowered.compile(options), lower_s, time.perf_counter() - started)
