"""Ctrl-C: a wish that a program grants when it is ready, and that is answered at once.

Python calls the handler of a signal between two steps of the interpreter, so not while XLA compiles, which may take
minutes. What must not wait for that is done by a thread, which the system wakes (`signal.set_wakeup_fd`).
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130
"""Exit status of a program stopped by Ctrl-C."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SOON = 0.2
"""Seconds in which a program may end what it is at before it tells what it waits for."""
_PATIENCE = 1.0
"""Seconds in which it may end by itself after the second Ctrl-C, before the process is ended."""


@contextlib.contextmanager
def listen(then: str | Callable[[], str]) -> Iterator[threading.Event]:
    """Gives an event that the first Ctrl-C (or SIGTERM) sets. The second Ctrl-C interrupts at once.

    Args:
      then: what the program does before it ends, as it is told after the first Ctrl-C; a function is called then.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    with answered(then):
        old = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            yield asked
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def answered(then: str | Callable[[], str]) -> Iterator[None]:
    """Tells after Ctrl-C what the program waits for, also while it computes; the second one ends the process.

    The handlers of the signals stay, and have a moment to end it in order.

    Args:
      then: what it waits for; a function is called at that time, in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = threading.Event()
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    thread = threading.Thread(target=_answer, args=(waking, then, over), daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.close(woken)
        thread.join()
        os.close(waking)


def _answer(waking: int, then: str | Callable[[], str], over: threading.Event) -> None:
    """Answers the signals whose numbers come out of a pipe, until it is closed.

    Args:
      waking: the pipe.
      then: what is told after the first signal.
      over: is set when nothing is waited for any more.
    """
    wishes = 0
    while number := os.read(waking, 1):
        if number[0] not in _SIGNALS:
            continue
        wishes += 1
        if wishes == 1 and not over.wait(_SOON):
            doing = then if isinstance(then, str) else then()
            print(f"gdn: {doing}; Ctrl-C again to leave at once", file=sys.stderr, flush=True)
        elif wishes > 1 and not over.wait(_PATIENCE):
            _leave()


def _leave() -> None:
    """Ends the process while its main thread computes: files are whole at any time, and locks end with it."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        os.write(sys.__stdout__.fileno(), b"\x1b[?25h\n")  # the cursor, which a bar has hidden
    print("gdn: interrupted", file=sys.__stderr__, flush=True)
    os._exit(INTERRUPTED)
