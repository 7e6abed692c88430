"""Owns what Ray's tables say of a named actor, and the bound on its restarts.

Must not know which service an actor hosts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import actors as actor_table
from ray.util import list_named_actors

from deploy.hosting.environment import NAMESPACE
from services.contracts import HostPid
from services.process import advertised_host

EARLY_DEATHS = 5
"""How often in a row a process may die before it became ready. Deaths of processes that were ready are not counted."""


@dataclass(frozen=True)
class ActorState:
    """An actor as Ray sees it: `restarts` so far; where it lives only while it is `alive`; `dead` is for good."""

    alive: bool
    dead: bool
    restarts: int
    process: HostPid | None


def host_pid(node_ip: str, pid: int) -> HostPid:
    """Where a process of Ray's lives, in the words of its own announcement.

    Of the node that this process is on, Ray may know another address than the one that our processes announce: it
    takes no loopback address, which is the laptop's.
    """
    here = node_ip == ray.util.get_node_ip_address()
    return (advertised_host() if here else str(node_ip)), int(pid)


def actor_state(actor: Any) -> ActorState:
    """Ask Ray's control store; blocks for a round trip."""
    row = actor_table(actor._actor_id.hex())
    alive = row.get("State") == "ALIVE"
    return ActorState(
        alive=alive,
        dead=row.get("State", "DEAD") == "DEAD",
        restarts=int(row.get("NumRestarts", 0)),
        # While an actor is restarted, its row still holds the process that died.
        process=host_pid(row["Address"]["IPAddress"], row["Pid"]) if alive else None,
    )


@dataclass
class Restarts:
    """Which of an actor's incarnations died without having been ready: the bound on restarting for ever."""

    _forgiven: int | None = None
    _processes: dict[HostPid, int] = field(default_factory=dict)

    def observe(self, state: ActorState, ready: Collection[HostPid]) -> int:
        """How many incarnations in a row have died early; `ready`: processes that are or lately were ready.

        The first look forgives what was before it: another process has looked then.
        """
        if self._forgiven is None:
            self._forgiven = state.restarts
        if state.process:
            self._processes[state.process] = state.restarts
        for one in [one for one in self._processes if one in ready]:
            # The death of the one that is ready is forgiven too, now that it is still to come.
            self._forgiven = max(self._forgiven, self._processes.pop(one) + 1)
        return max(0, state.restarts - self._forgiven)


def named_actor(name: str) -> Any | None:
    """The handle of a living actor of ours, or None."""
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def named_actors(prefix: str) -> list[str]:
    """The names of our living actors that begin with `prefix`."""
    return sorted(
        one["name"]
        for one in list_named_actors(all_namespaces=True)
        if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)
    )
