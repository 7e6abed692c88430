"""Owns the count of replicas that died before they were ready, by place: whether a place is at fault, or the run.

Must not ask Ray or Serve; the fleet passes what it saw.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
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
"""Deaths on so many nodes are no fault of a node, and deaths on so many devices of a node no fault of a device."""
MOST_DEATHS = 100
"""Without a single replica that is ready, so many deaths in a row end the run, even if others are still starting."""
STUCK_S = 300.0
"""How long replicas may hold avoided places while none starts, if none was ever ready: a new node takes minutes."""
TINY = 1e-6


class SeenReplica(NamedTuple):
    """A replica as it was seen: its process and its place, each None until it is known."""

    process: HostPid | None = None
    place: Location | None = None


@dataclass(frozen=True)
class Rooms:
    """The devices of each node, by its name; {""} for a node whose processes need none. `may_grow`: nodes may be added.

    `needed`: how many devices one process takes, a fraction for a share of one. `spare`: how many devices of a node no
    process takes now; of a node that is not listed all of them.
    """

    nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    needed: float = 1
    may_grow: bool = False
    spare: Mapping[str, float] = field(default_factory=dict)

    def left(self, used: Collection[Location]) -> bool:
        """Whether there is room apart from the `used` places, if nothing else runs there."""
        return self.may_grow or any(self._others(node, used) >= self.needed for node in self.nodes)

    def free(self, used: Collection[Location], own: Collection[Location]) -> bool:
        """Whether there is room now, apart from the `used` places. `own`: where the fleet's replicas are."""
        return self.may_grow or any(self._unused(node, used, own) + TINY >= self.needed for node in self.nodes)

    def _others(self, node: str, used: Collection[Location]) -> int:
        taken = _devices(node, used)
        return 0 if "" in taken else len(self.nodes[node] - taken)

    def _unused(self, node: str, used: Collection[Location], own: Collection[Location]) -> float:
        others = self._others(node, used)
        if node not in self.spare or not others:
            return others
        # A `used` device that no replica has is spare too. Of a device that is shared, a part may be.
        shared = self.needed < 1
        idle = _devices(node, used) - (set() if shared else _devices(node, own))
        return min(others, self.spare[node] - len(idle))


def _devices(node: str, places: Collection[Location]) -> set[str]:
    return {device for place in places if place.node == node for device in place.device.split(TOGETHER)}


@dataclass
class EarlyDeaths:
    """Counts the replicas of a fleet that died before they were ready: in a row, and at each place.

    `leaving`: how many replicas are to leave because the fleet was scaled down. `in_row`: since a replica last became
    ready; `at`: since one last became ready at that place; `failed_at`: those of them whose engine never worked, since
    one last worked there. What fails later, such as a synchronisation of weights, is no fault of the place.
    """

    leaving: int = 0
    in_row: int = 0
    at: Counter[Location] = field(default_factory=Counter)
    failed_at: Counter[Location] = field(default_factory=Counter)
    clock: Callable[[], float] = time.monotonic
    _replicas: dict[str, SeenReplica] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)
    _worked: set[str] = field(default_factory=set)
    _avoided: frozenset[Location] = frozenset()
    _ever_ready: bool = False
    _stuck_since: float | None = None

    def observe(
        self,
        replicas: Mapping[str, SeenReplica],
        ready: Collection[HostPid],
        avoided: Collection[Location] = (),
        joining: Collection[HostPid] = (),
    ) -> int:
        """Record the current replicas; returns how many in a row died early.

        `ready`: processes that are ready, or were until they died recently; `joining`: the same of those whose engine
        works, and that wait for weights. `avoided`: places where replicas only wait.
        """
        for place in self._avoided - frozenset(avoided):
            del self.at[place], self.failed_at[place]  # it is tried again
        self._avoided = frozenset(avoided)
        for name, seen in replicas.items():
            before = self._replicas.get(name, SeenReplica())
            self._replicas[name] = SeenReplica(seen.process or before.process, seen.place or before.place)
        for name, replica in self._replicas.items():
            if name not in self._worked and (replica.process in joining or replica.process in ready):
                self._worked.add(name)
                if replica.place:
                    del self.failed_at[replica.place]
            if replica.process in ready and name not in self._ready:
                self._ready.add(name)
                self.in_row, self._ever_ready = 0, True
                if replica.place:
                    del self.at[replica.place]
        for name in sorted(self._replicas.keys() - replicas.keys()):
            self._depart(name)
        if not self._stuck:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = self.clock()
        return self.in_row

    def place(self, name: str) -> Location | None:
        """Where a replica is, if that is known."""
        return self._replicas.get(name, SeenReplica()).place

    def _depart(self, name: str) -> None:
        replica = self._replicas.pop(name)
        was_ready, worked = name in self._ready, name in self._worked
        self._ready.discard(name)
        self._worked.discard(name)
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
            self.failed_at[replica.place] += not worked

    def used_up(self, rooms: Rooms) -> list[Location]:
        """The places to avoid from now on: they have used up their tries, no replica works there, there are others."""
        working = [place for name in self._ready if (place := self._replicas[name].place)]
        return [
            place
            for place, count in self.failed_at.items()
            if count >= PLACE_TRIES
            and not self._is_avoided(place)
            and not any(place.meets(other) for other in working)
            and self._others(place, rooms)
        ]

    def hopeless(self, rooms: Rooms) -> bool:
        """Whether replacing replicas does not help: none is ready, and they die wherever they start, or all hold."""
        if self._ready:
            return False
        if self._stuck_since is not None and self.clock() - self._stuck_since > STUCK_S:
            return True
        if self._avoided and not self._promising and not rooms.left(self._avoided):
            return True
        if self.in_row <= EARLY_DEATHS:
            return False
        nodes = {place.node for place, count in self.at.items() if count}
        everywhere = len(nodes) >= NODES or not rooms.free(self._failed, self._places)
        return self.in_row > MOST_DEATHS or (everywhere and not self._promising)

    @property
    def suspicious(self) -> bool:
        """Whether `used_up` or `hopeless` may find something."""
        return bool(self.in_row or self._avoided or self.at.total())

    def _others(self, place: Location, rooms: Rooms) -> bool:
        """Whether a replica works elsewhere, or may: where none has died since one was ready."""
        elsewhere = (self._replicas[name].place for name in self._ready)
        if any(other != place for other in elsewhere) or self._promising:
            return True
        return rooms.free(self._failed, self._places)

    @property
    def _failed(self) -> set[Location]:
        """Where replicas failed; all of a node, if they did on several of its devices."""
        found = {place for place, count in self.at.items() if count} | self._avoided
        nodes = Counter(place.node for place in found)
        return found | {Location(node) for node, devices in nodes.items() if devices >= NODES}

    @property
    def _places(self) -> set[Location]:
        return {replica.place for replica in self._replicas.values() if replica.place}

    @property
    def _promising(self) -> bool:
        return any(not self.at[place] and not self._is_avoided(place) for place in self._places)

    @property
    def _stuck(self) -> bool:
        """Whether replicas hold avoided places, the others have no place, and none was ever ready."""
        return not self._ever_ready and bool(self._places) and all(map(self._is_avoided, self._places))

    def _is_avoided(self, place: Location) -> bool:
        return any(place.meets(other) for other in self._avoided)
