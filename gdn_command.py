"""The `gdn` command as it is installed: Ctrl-C is one line from the start, while packages are still being imported.

It lies beside the packages because importing anything inside `gdn_jax` imports JAX first.
"""

import os
import signal
import sys
from typing import Any


def main() -> int:
    """Runs the command line of this process; see `gdn_jax.cli`."""
    before = signal.signal(signal.SIGINT, _leave)
    from gdn_jax import cli

    return cli.main(begins=lambda: signal.signal(signal.SIGINT, before))


def _leave(number: int, frame: Any) -> None:
    """Ends the process at once: nothing has begun, and an exception may get lost in what imports call back."""
    print("gdn: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
