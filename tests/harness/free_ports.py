"""Owns the choice of a free port for a test's server.

Must not listen on it, or import the code under test: the chaos runs use it.
"""

from __future__ import annotations

import os
import secrets
import socket

# Below the system's ephemeral ports: while a server is down, a client's connection must not get its port.
ALL_PORTS = range(20000, 32000)
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = ALL_PORTS[_WORKER :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
"""A separate share for each pytest-xdist worker: workers do not know each other's ports."""
_given: set[int] = set()


def free_port() -> int:
    """A free port of PORTS that was not returned before: its server may not listen yet."""
    # Not from `random`: tests set its seed, and parallel tests would try the same ports.
    for port in secrets.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port
    raise RuntimeError(f"no free port found in {ALL_PORTS.start}-{ALL_PORTS.stop - 1}")
