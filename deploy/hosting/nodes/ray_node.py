"""Owns what the first process of a pod asks Ray about the node that it has started: whether it joined, its drain, and
whether its control store reaches Redis.

Must not start or end processes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil
from ray.exceptions import RayError

from deploy.hosting.ray_internals import living_nodes, request_drain, store_reader

log = logging.getLogger(__name__)

REQUEST_S = 5.0
READ_EVERY_S = 5.0
LOST_S = 60.0
"""After how long without a read the control store has lost Redis. One on a busy machine answers late."""


class Node(NamedTuple):
    """A Ray node: its id, and where its cluster's control store (GCS) listens, as host:port."""

    id: str
    gcs: str


def started_node(process: psutil.Process) -> Node | None:
    """The node whose raylet runs below `process`; None before it has started."""
    try:
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    for child in children:
        try:
            if child.name() != "raylet":
                continue
            options = dict(part.split("=", 1) for part in child.cmdline() if part.startswith("--") and "=" in part)
        except psutil.NoSuchProcess:
            continue
        if "--node_id" in options and "--gcs-address" in options:
            return Node(options["--node_id"], options["--gcs-address"])
    return None


def joined(node: Node) -> bool:
    """Whether the control store lists the node as alive; False when it does not answer.

    Ray waits some seconds for a connection, then REQUEST_S seconds for the answer.
    """
    try:
        return node.id in living_nodes(node.gcs, REQUEST_S)
    except RayError as error:
        log.info("Ray's control store at %s does not answer: %s", node.gcs, _first_line(error))
        return False


class StoreWatch:
    """Notices, from threads, that the control store no longer reaches its Redis: it never connects again by itself.

    Ray would end it at the fifth error of a request, also when Redis only refuses writes for a while because its memory
    or volume is full; with the retries of deploy.hosting.environment it waits instead. Its callers wait with it, so
    that the head's own thread may hang in Ray.

    `server`: the id of the server that a new connection reaches, "" where it has none; None if there is no answer. It
    may hang. `first`: what it was before the control store connected.
    """

    def __init__(self, node: Node, server: Callable[[], str | None], first: str | None) -> None:
        self._gcs = node.gcs
        self._server = server
        self._first = first
        self._read_at = time.monotonic()
        self._other_since: float | None = None
        self._stopping = threading.Event()
        for watch in (self._watch_reads, self._watch_server):
            threading.Thread(target=watch, name="store-watch", daemon=True).start()

    @property
    def problem(self) -> str | None:
        """Why the head has to restart, or None. A read that hangs, or is no longer tried, is a reason as well."""
        now, other_since = time.monotonic(), self._other_since
        if now - self._read_at > LOST_S:
            return f"Ray's control store has read nothing from Redis for {now - self._read_at:.0f} s"
        if other_since is not None and now - other_since > LOST_S:
            # A server that became a replica lets its clients stay, and refuses their writes.
            return f"Redis is another server, for {now - other_since:.0f} s, than that of Ray's control store"
        return None

    def close(self) -> None:
        """Ask nothing more."""
        self._stopping.set()

    def _watch_reads(self) -> None:
        read: Callable[[float], None] | None = None
        while not self._stopping.wait(READ_EVERY_S):
            try:
                read = read or store_reader(self._gcs)
                read(REQUEST_S)
                self._read_at = time.monotonic()
            except (RayError, OSError, ValueError) as error:
                log.warning("Ray's control store did not read from Redis: %s", _first_line(error))

    def _watch_server(self) -> None:
        while not self._stopping.wait(READ_EVERY_S):
            found = self._server()
            self._first = self._first or found
            if found in (None, self._first):
                self._other_since = None
            elif self._other_since is None:
                self._other_since = time.monotonic()


def drain(node: Node, deadline_s: float) -> None:
    """Make Ray place nothing more on the node, which ends within `deadline_s` seconds; failures are logged.

    Returns after at most REQUEST_S seconds: Ray's own time limit for connecting is longer and would leave no time to
    drain.
    """
    request = threading.Thread(target=_request_drain, args=(node, deadline_s), name="ray-drain", daemon=True)
    request.start()
    request.join(REQUEST_S)
    if request.is_alive():
        log.warning(
            "Ray's control store at %s has not answered within %g s; it may still place processes here",
            node.gcs,
            REQUEST_S,
        )


def _request_drain(node: Node, deadline_s: float) -> None:
    until_ms = int((time.time() + deadline_s) * 1000)
    try:
        accepted, why = request_drain(node.gcs, node.id, until_ms, REQUEST_S)
    except RayError as error:
        log.warning("Ray's control store at %s did not receive the drain request: %s", node.gcs, _first_line(error))
        return
    if not accepted:
        log.warning("Ray refuses to drain node %s: %s", node.id, why)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
