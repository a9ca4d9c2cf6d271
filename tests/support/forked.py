"""Commands of `gdn` in processes of their own, which are forked after the imports and so begin at once.

A process that imports all that `gdn train` needs spends three seconds of a processor on it. Here one process does so,
asks for no device and starts no thread, and then forks every process that a test needs.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

PARENT = """
import json, os, sys
import jax, matplotlib.pyplot, optax, orbax.checkpoint, rich.console, tyro
import gdn_jax.sweeps.sweep, gdn_jax.training.train
from gdn_jax.commands import cli

assert len(os.listdir("/proc/self/task")) == 1, "a child has one thread of its parent"
while line := sys.stdin.readline():
    running = []
    for words, environment, code, output in json.loads(line):
        if child := os.fork():
            running.append(child)
            continue
        told = os.open(output, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(told, stream)
        os.environ.update(environment)
        for name, value in environment.items():
            if name.lower() in jax.config.values:  # which were read when JAX was imported
                jax.config.update(name.lower(), int(value) if value.isdigit() else value)
        exec(code, {})
        sys.exit(cli.main(words))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in running]
    print(json.dumps(codes), flush=True)
"""


class Child(NamedTuple):
    """A command of `gdn` in a process."""

    words: list[str]
    """Of the command line, after `gdn`."""
    output: Path
    """A file for what it prints, also on stderr."""
    environment: Mapping[str, str] = MappingProxyType({})
    """Beside that of the tests."""
    code: str = ""
    """Python, runs before the command."""


@functools.cache
def _parent() -> subprocess.Popen:
    """Ends with the tests, which close its pipe."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", PARENT], env=environment, **pipes)


def run(*children: Child) -> tuple[list[int], list[str]]:
    """Runs commands at the same time; returns their exit codes, negative ones of signals, and what they printed."""
    parent = _parent()
    print(
        json.dumps([[c.words, dict(c.environment), c.code, str(c.output)] for c in children]),
        file=parent.stdin,
        flush=True,
    )
    codes = json.loads(parent.stdout.readline())
    return codes, [child.output.read_text() for child in children]
