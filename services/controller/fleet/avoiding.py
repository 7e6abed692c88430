"""Owns which places a run avoids: recorded where its processes kept failing, reported once, and told to the cluster.

Must not count failures; the cluster does, which sees where processes are.
"""

from __future__ import annotations

from collections.abc import Collection

from services.controller.cluster import Cluster
from services.metrics import AVOIDED_PLACES, LOST_GPUS
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.runs.places import AvoidedPlace, Location, avoid, avoided_places
from services.streams.state.events import EventLog

REASON_CHARACTERS = 300
TRIES = 3
"""Failures of ranks in a row, without a new rollout step, after which the learner leaves the node behind them."""
MOVES = 5
"""So many times a place that is avoided from now on gives the run more time, because its processes start elsewhere."""


class Avoiding:
    """The avoided places of one run. They are in Redis, so that the next controller avoids them too."""

    def __init__(self, redis: Redis, cluster: Cluster, event_log: EventLog, run: str) -> None:
        self._redis = redis
        self._cluster = cluster
        self._event_log = event_log
        self._run = run
        self._keys = RunKeys(run)
        self._blamed: dict[str, int] = {}
        self._previous: set[tuple[str, Location]] | None = None
        self._moves = 0
        self.places: list[AvoidedPlace] = []
        """What the last look found."""

    async def look(self) -> bool:
        """Record the places that were used up since, report new ones, and tell the cluster which are avoided now.

        Returns whether one is avoided that was not at the previous look, MOVES times at most.
        """
        for place in await self._cluster.used_up(self._run):
            await self.avoid(place)
        found = await avoided_places(self._redis, self._keys)
        await self._cluster.avoid(self._run, found)
        self.places = found
        self._show(found)
        return self._moved(found)

    def _moved(self, found: list[AvoidedPlace]) -> bool:
        now = {(place.service, place.place) for place in found}
        moves = self._previous is not None and not now <= self._previous and self._moves < MOVES
        self._previous = now
        self._moves += moves
        return moves

    async def avoid(self, place: AvoidedPlace) -> None:
        """Avoid a place from now on, and report it with the last failure of its service."""
        failure = await self._last_failure(place.service)
        reason = f"{place.reason}; last: {failure}" if failure else place.reason
        place = place.model_copy(update={"reason": reason[:REASON_CHARACTERS]})
        if await avoid(self._redis, self._keys, place):
            await self._event_log.write("node-avoided", str(place))

    async def blame(self, places: Collection[AvoidedPlace], *, forgiven: bool) -> None:
        """Count a failure of the learner against these nodes, and avoid one behind TRIES failures in a row.

        `forgiven`: the learner had worked before, so that earlier failures do not count.
        """
        before = {} if forgiven else self._blamed
        self._blamed = {place.node: before.get(place.node, 0) + place.count for place in places}
        for place in places:
            if (count := self._blamed[place.node]) >= TRIES:
                await self.avoid(place.model_copy(update={"count": count}))
                del self._blamed[place.node]
        await self._cluster.avoid(self._run, await avoided_places(self._redis, self._keys))

    def _show(self, found: list[AvoidedPlace]) -> None:
        """Show the number of places by service, and the devices that are avoided because of an error of theirs."""
        LOST_GPUS.remove_by_labels({"run": self._run})
        for place in found:
            if place.kind:
                LOST_GPUS.labels(self._run, place.service, *place.place, place.kind).set(1)
        for service in ("learner", "rollout", "verifier"):
            AVOIDED_PLACES.labels(self._run, service).set(sum(place.service == service for place in found))

    def close(self) -> None:
        """Show nothing of this run any more."""
        self._show([])

    async def _last_failure(self, service: str) -> str:
        async for event in self._event_log.newest_events():
            if event.phase == "service-failed" and event.service == service:
                return event.text
        return ""
