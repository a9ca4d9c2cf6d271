"""Ctrl-C as a wish that a program grants when it is ready."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130
"""Exit status of a program stopped by Ctrl-C."""


@contextlib.contextmanager
def listen() -> Iterator[threading.Event]:
    """Gives an event that the first Ctrl-C (or SIGTERM) sets. The second Ctrl-C interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
