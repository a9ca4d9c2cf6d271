"""Connections over which the processes of a run notice at once that one of them has died.

Every process holds a connection to the first one. When a process dies its system closes its end, whatever killed it,
and the other end is told so. JAX notices too, but ends the process with a trace of its C++ code.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np

SECONDS = 20.0
"""Time to connect in."""
_FAREWELL = b"."


@contextlib.contextmanager
def held(host: str | None, lost: Callable[[int], None]) -> Iterator[str | None]:
    """Holds the connections of this process while the body runs; does nothing where it is the only one.

    All processes have to call it, and JAX has to know them all. A process that leaves the body by an exception counts
    as one that died.

    Args:
      host: name of the first process' machine; None: as that machine calls itself.
      lost: is called in a thread of its own with the number of a process that has died.

    Yields:
      Why this process could not connect, None if it could. It goes on without: JAX notices a dead process later.

    Raises:
      ValueError: the first process' address is longer than 256 bytes.
    """
    if jax.process_count() == 1:
        yield None
        return
    listener = (
        socket.create_server(("", 0), backlog=jax.process_count()) if jax.process_index() == 0 else None
    )
    address = _from_first((host or socket.getfqdn(), listener.getsockname()[1]) if listener else None)
    connections, problem = {}, None
    try:
        if listener is not None:
            listener.settimeout(SECONDS)
            for _ in range(jax.process_count() - 1):
                connection, _ = listener.accept()
                connection.settimeout(SECONDS)
                connections[int.from_bytes(_received(connection, 4), "big")] = connection
        else:
            connection = connections[0] = socket.create_connection(address, SECONDS)
            connection.sendall(jax.process_index().to_bytes(4, "big"))
    except OSError as error:
        problem = f"{address[0]}:{address[1]}: {error}"
    finally:
        if listener is not None:
            listener.close()
    for index, connection in connections.items():
        connection.settimeout(None)
        threading.Thread(target=_watch, args=(connection, index, lost), daemon=True).start()
    yield problem
    for connection in connections.values():
        with contextlib.suppress(OSError):  # of one that is already gone
            connection.sendall(_FAREWELL)


def _from_first(address: tuple[str, int] | None) -> tuple[str, int]:
    """The address that the first process gives, in all of them."""
    from jax.experimental import multihost_utils

    text = np.zeros(256, np.uint8)
    if address is not None:
        given = np.frombuffer(f"{address[0]} {address[1]}".encode(), np.uint8)
        text[: len(given)] = given
    host, port = (
        bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))).rstrip(b"\0").decode().split(" ")
    )
    return host, int(port)


def _received(connection: socket.socket, count: int) -> bytes:
    """So many bytes of a connection."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("a process has closed its connection")
        data += more
    return data


def _watch(connection: socket.socket, index: int, lost: Callable[[int], None]) -> None:
    """Waits for the farewell of a process, or for its death."""
    with contextlib.suppress(OSError):  # a reset, by a machine that has died
        if connection.recv(1) == _FAREWELL:
            return
    lost(index)
