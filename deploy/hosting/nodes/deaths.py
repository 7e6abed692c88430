"""Owns the count of replicas that died before they were ready, by place: whether a place is at fault, or the run.

Must not ask Ray or Serve; the fleet passes what it saw.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.contracts import HostPid
from services.streams.runs.places import TOGETHER, Location

log = logging.getLogger(__name__)

EARLY_DEATHS = 5
"""How many times in a row a process may die before it is ready. Deaths of processes that were ready do not count."""
PLACE_TRIES = 3
"""How many of these deaths in a row use up a place, while others are left."""
NODES = 3
"""Deaths on so many nodes are no fault of a node."""
MOST_DEATHS = 100
"""Without a single replica that is ready, so many deaths in a row end the run, even if others are still starting."""


class SeenReplica(NamedTuple):
    """A replica as it was seen: its process and its place, each None until it is known."""

    process: HostPid | None = None
    place: Location | None = None


@dataclass(frozen=True)
class Rooms:
    """The devices of each node, by its name; {""} for a node whose processes need none. `may_grow`: nodes may be added.

    `needed`: how many devices one process takes.
    """

    nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    needed: int = 1
    may_grow: bool = False

    def left(self, used: Collection[Location]) -> bool:
        """Whether there is room apart from the `used` places."""
        return self.may_grow or any(self._free(node, used) >= self.needed for node in self.nodes)

    def _free(self, node: str, used: Collection[Location]) -> int:
        taken = {device for place in used if place.node == node for device in place.device.split(TOGETHER)}
        return 0 if "" in taken else len(self.nodes[node] - taken)


@dataclass
class EarlyDeaths:
    """Counts the replicas of a fleet that died before they were ready: in a row, and at each place.

    `leaving`: how many replicas are to leave because the fleet was scaled down. `in_row`: since a replica last became
    ready; `at`: since one last became ready at that place.
    """

    leaving: int = 0
    in_row: int = 0
    at: Counter[Location] = field(default_factory=Counter)
    _replicas: dict[str, SeenReplica] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)
    _avoided: frozenset[Location] = frozenset()

    def observe(
        self, replicas: Mapping[str, SeenReplica], ready: Collection[HostPid], avoided: Collection[Location] = ()
    ) -> int:
        """Record the current replicas; returns how many in a row died early.

        `ready`: processes that are ready, or were until they died recently. `avoided`: places where replicas only wait.
        """
        for place in self._avoided - frozenset(avoided):
            del self.at[place]  # it is tried again
        self._avoided = frozenset(avoided)
        for name, seen in replicas.items():
            before = self._replicas.get(name, SeenReplica())
            self._replicas[name] = SeenReplica(seen.process or before.process, seen.place or before.place)
        for name, replica in self._replicas.items():
            if replica.process in ready and name not in self._ready:
                self._ready.add(name)
                self.in_row = 0
                if replica.place:
                    del self.at[replica.place]
        for name in sorted(self._replicas.keys() - replicas.keys()):
            self._depart(name)
        return self.in_row

    def place(self, name: str) -> Location | None:
        """Where a replica is, if that is known."""
        return self._replicas.get(name, SeenReplica()).place

    def _depart(self, name: str) -> None:
        replica = self._replicas.pop(name)
        was_ready = name in self._ready
        self._ready.discard(name)
        if self.leaving:
            self.leaving -= 1
            return
        where = str(replica.place) if replica.place else "an unknown place"
        log.warning(
            "replica %s at %s is gone (%s); it is replaced",
            name,
            where,
            "was ready" if was_ready else "was never ready",
        )
        if was_ready or (replica.place and self._is_avoided(replica.place)):
            return
        self.in_row += 1
        if replica.place:
            self.at[replica.place] += 1

    def used_up(self, rooms: Rooms) -> list[Location]:
        """The places to avoid from now on: they have used up their tries, and there are others."""
        return [
            place
            for place, count in self.at.items()
            if count >= PLACE_TRIES and not self._is_avoided(place) and self._others(place, rooms)
        ]

    def hopeless(self, rooms: Rooms) -> bool:
        """Whether replacing replicas does not help: they die wherever they were tried, and none is ready."""
        working = (self._replicas[name].place for name in self._ready)
        if any(place not in self._failed for place in working):
            return False
        if self._avoided and not self._promising and not rooms.left(self._avoided):
            return True
        if self.in_row <= EARLY_DEATHS:
            return False
        nodes = {place.node for place, count in self.at.items() if count}
        everywhere = len(nodes) >= NODES or not rooms.left(self._failed)
        return self.in_row > MOST_DEATHS or (everywhere and not self._promising)

    @property
    def suspicious(self) -> bool:
        """Whether `used_up` or `hopeless` may find something."""
        return bool(self.in_row or self._avoided or self.at.total())

    def _others(self, place: Location, rooms: Rooms) -> bool:
        """Whether a replica works elsewhere, or may: where none has died since one was ready."""
        elsewhere = (self._replicas[name].place for name in self._ready)
        return any(other != place for other in elsewhere) or self._promising or rooms.left(self._failed)

    @property
    def _failed(self) -> set[Location]:
        return {place for place, count in self.at.items() if count} | self._avoided

    @property
    def _promising(self) -> bool:
        places = (replica.place for replica in self._replicas.values())
        return any(place and not self.at[place] and not self._is_avoided(place) for place in places)

    def _is_avoided(self, place: Location) -> bool:
        return any(place.meets(other) for other in self._avoided)
