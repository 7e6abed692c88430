"""Owns the state of named actors in Ray's tables, and the limit on their restarts.

Must not know which service an actor hosts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util import list_named_actors

from deploy.hosting.environment import NAMESPACE
from deploy.hosting.ray_internals import actor_row
from services.contracts import HostPid
from services.contracts.listening import advertised_host


@dataclass(frozen=True)
class ActorState:
    """An actor as Ray sees it: `restarts` so far; its `process` only while it is `alive`; `dead` is final."""

    alive: bool
    dead: bool
    restarts: int
    process: HostPid | None


def host_pid(node_ip: str, pid: int) -> HostPid:
    """Host and process id of one of Ray's processes, as the process itself announces them.

    For the node of this process, Ray may report an address that differs from the announced one: on a laptop, our
    processes announce the loopback address, which Ray does not use.
    """
    here = node_ip == ray.util.get_node_ip_address()
    return (advertised_host() if here else str(node_ip)), int(pid)


def actor_state(actor: Any) -> ActorState:
    """Ask Ray's control store; blocks for a round trip."""
    row = actor_row(actor)
    alive = row.get("State") == "ALIVE"
    return ActorState(
        alive=alive,
        dead=row.get("State", "DEAD") == "DEAD",
        restarts=int(row.get("NumRestarts", 0)),
        # While an actor is being restarted, its row still shows the process that died.
        process=host_pid(row["Address"]["IPAddress"], row["Pid"]) if alive else None,
    )


@dataclass
class Restarts:
    """Counts the incarnations of an actor that died before they were ready, to limit restarts."""

    _forgiven: int | None = None
    _processes: dict[HostPid, int] = field(default_factory=dict)

    def observe(self, state: ActorState, ready: Collection[HostPid]) -> int:
        """How many incarnations in a row died early; `ready`: processes that are ready, or were until recently.

        The first call does not count earlier restarts: another process has observed them.
        """
        if self._forgiven is None:
            self._forgiven = state.restarts
        if state.process:
            self._processes[state.process] = state.restarts
        for process in [process for process in self._processes if process in ready]:
            # The next death of the process that is ready does not count either, hence the 1.
            self._forgiven = max(self._forgiven, self._processes.pop(process) + 1)
        return max(0, state.restarts - self._forgiven)


def named_actor(name: str) -> Any | None:
    """The handle of a living actor in our namespace, or None."""
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def named_actors(prefix: str) -> list[str]:
    """The names of the living actors in our namespace that start with `prefix`."""
    return sorted(
        actor["name"]
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)
    )
