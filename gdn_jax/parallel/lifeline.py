"""Connections over which the processes of a run notice at once that one of them has died.

Every process holds a connection to the first one. When a process dies its system closes its end, whatever killed it,
and the other end is told so. JAX notices too, but ends the process with a trace of its C++ code.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

SECONDS = 20.0
"""Time to connect in."""
_FAREWELL = b"."
_SECRET_BYTES = 16
_GREETING_BYTES = _SECRET_BYTES + 4
"""Bytes that a process sends first: the run's secret, which a stranger on the port does not know, and its number."""


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
      ValueError: the name of the first process' machine is longer than 200 bytes.
    """
    if jax.process_count() == 1:
        yield None
        return
    listener = _listener() if jax.process_index() == 0 else None
    port = 0 if listener is None else listener.getsockname()[1]
    name = (host or socket.getfqdn()).strip("[]")
    secret, address = _from_first(secrets.token_bytes(_SECRET_BYTES), name, port)
    connections: dict[int, socket.socket] = {}
    problem = None
    try:
        if listener is not None:
            _accept(listener, secret, connections, jax.process_count() - 1)
        else:
            connections[0] = socket.create_connection(address, SECONDS)
            connections[0].sendall(secret + jax.process_index().to_bytes(4, "big"))
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


def _listener() -> socket.socket:
    """A port for the other processes, over both versions of the internet protocol where the system has them."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accept(
    listener: socket.socket, secret: bytes, connections: dict[int, socket.socket], count: int
) -> None:
    """Fills in the connections of so many processes by their numbers; who does not know the secret is sent away."""
    end = time.monotonic() + SECONDS
    while len(connections) < count:
        listener.settimeout(max(0.01, end - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(1.0)  # a process greets at once
        try:
            greeting = _received(connection, _GREETING_BYTES)
        except OSError:
            greeting = b""
        if greeting[:_SECRET_BYTES] == secret:
            connections[int.from_bytes(greeting[_SECRET_BYTES:], "big")] = connection
        else:
            connection.close()


def _from_first(secret: bytes, name: str, port: int) -> tuple[bytes, tuple[str, int]]:
    """The secret, and the name and the port, of the first process, in all of them."""
    from jax.experimental import multihost_utils

    if len(name.encode()) > 200:
        raise ValueError(f"host: expected a name of at most 200 bytes, got {name!r}")
    text, given = np.zeros(256, np.uint8), secret + f"{port} {name}".encode()
    text[: len(given)] = np.frombuffer(given, np.uint8)
    found = bytes(np.asarray(multihost_utils.broadcast_one_to_all(text)))
    number, _, first = found[_SECRET_BYTES:].rstrip(b"\0").decode().partition(" ")
    return found[:_SECRET_BYTES], (first, int(number))


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
