"""Owns the choice of a port on which a test lets something listen.

Must not listen there itself, nor import the code under test: the chaos runs use it.
"""

from __future__ import annotations

import os
import secrets
import socket

# Below those that the system gives to outgoing connections: while a server is away, who knocks must not get its port.
ALL_PORTS = range(20000, 32000)
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = ALL_PORTS[_WORKER :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
"""A share for each process that pytest-xdist runs tests in: what one has given, another does not know."""
_given: set[int] = set()


def free_port() -> int:
    """A port of PORTS that nobody listens on and that was not given before: whoever got it may not listen yet."""
    # Not from `random`, whose seed tests set: those that run at the same time would all try the same ports.
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
