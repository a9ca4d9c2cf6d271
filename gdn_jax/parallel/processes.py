"""Several processes of one program, on one machine or on many."""

import os
import sys
from typing import NoReturn

import jax
import numpy as np

HEARTBEAT_SECONDS = 20
"""A process that is silent for so long counts as dead, and the others end."""

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join() -> str | None:
    """Joins the other processes of this run, where the environment says that there are some.

    Under SLURM, where a job has more than one task, JAX finds all it needs. Elsewhere each process is given
    JAX_COORDINATOR_ADDRESS, the host and port of the first one, JAX_NUM_PROCESSES, and its number in JAX_PROCESS_ID.
    To be called before anything asks for devices.

    Returns:
      The host of the first process, where it was given.

    Raises:
      ValueError: some of these variables are set, but not all, or the numbers are none.
    """
    given = {name: os.environ.get(name, "") for name in _VARIABLES}
    if any(given.values()):
        missing = [name for name, value in given.items() if not value]
        if missing:
            raise ValueError(
                f"{missing[0]}: expected a value with {', '.join(n for n in given if given[n])}, got none"
            )
        address, number, index = given.values()
        if not (number.isdigit() and index.isdigit() and int(index) < int(number)):
            raise ValueError(
                f"JAX_PROCESS_ID: expected a number below JAX_NUM_PROCESSES, got {index} of {number}"
            )
        options = dict(coordinator_address=address, num_processes=int(number), process_id=int(index))
        jax.distributed.initialize(**options, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        return address.rpartition(":")[0]
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    return None


def leave(status: int) -> NoReturn:
    """Ends this process at once. The ordinary end waits for the other processes, also for one that has died.

    Args:
      status: of the process, 0 where all went well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_first() -> bool:
    """Tells whether this process is the first one, which writes the files that only one may write."""
    return jax.process_index() == 0


def wait(name: str) -> None:
    """Returns when all processes have come to the point of this name.

    Args:
      name: the same in every process.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Tells for each flag whether it is set in any process; all processes get the same answer.

    Args:
      flags: of this process; every process passes the same number.
    """
    if jax.process_count() == 1:
        return flags
    from jax.experimental import multihost_utils

    return tuple(bool(x) for x in multihost_utils.process_allgather(np.array(flags)).any(0))
