"""Owns the choice of free ports on the loopback interface for servers that do not choose their own.

Must not listen on them: another process may take a port before its server does.
"""

from __future__ import annotations

import random
import socket

# Below the ports for outgoing connections (Linux: from 32768): while a server is down, a client that tries to connect
# must not get the server's port as its own.
PORTS = range(20000, 32000)
TRIES = 100


class NoFreePortError(RuntimeError):
    """Nearly all of PORTS are in use."""


def free_ports(count: int) -> list[int]:
    """`count` different free ports. Raises NoFreePortError when a hundred ports have fewer that are free."""
    free: list[int] = []
    for port in random.sample(PORTS, TRIES):
        if len(free) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.append(port)
    if len(free) < count:
        raise NoFreePortError(f"no free port in {PORTS.start}-{PORTS.stop - 1}")
    return free
