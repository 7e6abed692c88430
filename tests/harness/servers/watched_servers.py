"""Owns a primary, its replica and the Sentinels that watch them, on real servers; tests cut, kill and replace them.

Must not decide what a test expects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.servers.redis_servers import Process, start_sentinel, start_server

SERVICE = "penstock"
SENTINELS = 3
DEADLINE_S, POLL_S = 90.0, 0.1
STRANGER = "stranger"
"""A user that no server has: a replica with its name cannot connect to its primary."""


@dataclass
class Watched:
    """Two servers, the second a replica of the first when they start, and three Sentinels."""

    servers: list[Process]
    sentinels: list[Process]

    @property
    def url(self) -> str:
        """The address that Penstock gets."""
        return f"redis+sentinel://{','.join(f'127.0.0.1:{sentinel.port}' for sentinel in self.sentinels)}/{SERVICE}/0"

    def until(self, condition: Callable[[], bool], problem: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for a condition; a failed assertion names the problem."""
        ends = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < ends, problem
            time.sleep(POLL_S)

    def until_watched(self) -> None:
        """Wait until a failover is possible."""
        self.until(lambda: in_sync(*self.servers), "the replica is not in sync")
        self.until(self.known, "the Sentinels do not know each other")

    def known(self) -> bool:
        """Whether every Sentinel knows the replica and the other Sentinels: a failover is impossible before."""
        masters = [sentinel.client().sentinel_master(SERVICE) for sentinel in self.sentinels]
        return all((master["num-slaves"], master["num-other-sentinels"]) == (1, SENTINELS - 1) for master in masters)

    @property
    def roles(self) -> tuple[Process, Process]:
        """(the primary, the other server), as a majority of the Sentinels reports it."""
        ports = [int(sentinel.client().sentinel_master(SERVICE)["port"]) for sentinel in self.sentinels]
        first, second = self.servers
        return (first, second) if ports.count(first.port) > len(ports) // 2 else (second, first)

    def cut(self) -> None:
        """Cut the replica off; returns when it has applied all that reached it. Its primary does not notice."""
        primary, replica = self.roles
        follower = replica.client()
        follower.config_set("masterauth", STRANGER)
        follower.config_set("masteruser", STRANGER)
        primary.client().client_kill_filter(_type="replica")
        self.until(
            lambda: follower.info("replication").get("master_link_status") == "down", "the replica kept its connection"
        )

    def mend(self) -> None:
        """Undo `cut` on every server that runs."""
        for server in self.servers:
            if server.process.poll() is None:
                server.client().config_set("masteruser", "")
                server.client().config_set("masterauth", "")

    def promoted(self, replica: Process) -> bool:
        """Whether a server is the primary, and every Sentinel reports it: no client finds the old one any more."""
        named = {int(sentinel.client().sentinel_master(SERVICE)["port"]) for sentinel in self.sentinels}
        return is_primary(replica) and named == {replica.port}

    def replace(self, dead: Process) -> None:
        """Start a killed primary again, as the replica of the other server if that was promoted."""
        other = next(server for server in self.servers if server is not dead)
        dead.start(*(("--replicaof", "127.0.0.1", other.port) if is_primary(other) else ("--replicaof", "no", "one")))


def is_primary(server: Process) -> bool:
    """Whether the server runs as a primary."""
    return server.process.poll() is None and bool(server.client().info("replication")["role"] == "master")


def in_sync(primary: Process, replica: Process) -> bool:
    """Whether the replica has the primary's data and follows it."""
    info: dict[str, Any] = replica.client().info("replication")
    return info.get("master_link_status") == "up" and info["master_port"] == primary.port


@contextmanager
def watched_servers(folder: Path, down_after_ms: int, *settings: object) -> Iterator[Watched]:
    """Start them all. The Sentinels report a primary as down that is silent for `down_after_ms`."""
    durable = ("--appendfsync", "always", *settings)
    with ExitStack() as started:
        primary = started.enter_context(start_server(folder, *durable))
        replica = started.enter_context(start_server(folder, *durable, "--replicaof", "127.0.0.1", primary.port))
        sentinels = [
            started.enter_context(start_sentinel(folder, SERVICE, primary.port, 2, down_after_ms=down_after_ms))
            for _ in range(SENTINELS)
        ]
        group = Watched([primary, replica], sentinels)
        group.until_watched()
        yield group
