"""Owns the places that a run avoids: a node, or devices of a node, on which its processes kept failing.

Must not decide what is avoided; the controller does, and a process whose device reports an error that does not pass.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from pydantic import ValidationError

from services.contracts.base import Value
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import RunKeys

log = logging.getLogger(__name__)

AVOIDED_S = 6 * 3600.0
"""How long a place is avoided; then it is tried again, because it may have been mended."""
AVOIDED = "avoided"
"""The state of a process that holds an avoided place, and does nothing else."""
TOGETHER = "+"
"""Joins the devices of a process that has several."""


class Location(NamedTuple):
    """Where a process runs: a node's name, and its devices there, joined by TOGETHER; none without a GPU."""

    node: str
    device: str = ""

    def meets(self, other: Location) -> bool:
        """Whether the two have a device in common; a place without a device is its whole node."""
        if self.node != other.node:
            return False
        mine, others = set(self.device.split(TOGETHER)), set(other.device.split(TOGETHER))
        return not self.device or not other.device or bool(mine & others)

    def __str__(self) -> str:
        return f"node {self.node}, device {self.device}" if self.device else f"node {self.node}"


class AvoidedPlace(Value):
    """A place that a service of a run avoids, until a time (Unix seconds).

    `count`: how often its processes failed there in a row; `ray_node`: the id of Ray's node at that time; `kind`: of
    the device's error (xid, ecc, remap), empty if it reported none.
    """

    service: str
    node: str
    device: str = ""
    count: int
    reason: str
    until: float
    ray_node: str = ""
    kind: str = ""

    @property
    def place(self) -> Location:
        """Where it is."""
        return Location(self.node, self.device)

    @property
    def name(self) -> str:
        """Its name among those of its run: SERVICE NODE DEVICE, without the device if there is none."""
        return f"{self.service} {self.node} {self.device}".rstrip()

    def __str__(self) -> str:
        until = time.strftime("%H:%M", time.gmtime(self.until))
        return f"{self.service} avoids {self.place} until {until} UTC ({self.count} failed there: {self.reason})"


async def avoid(redis: Redis, keys: RunKeys, place: AvoidedPlace) -> bool:
    """Avoid a place from now on; whether it was not avoided before, or its time was over.

    Like a heartbeat it needs no owner: a process may report its device, and exits.
    """
    fresh = await call(
        redis,
        "avoid_place",
        places_key=keys.places,
        field=place.name,
        now=repr(time.time()),
        place=place.model_dump_json(),
    )
    return bool(fresh)


async def forget_unproven(redis: Redis, keys: RunKeys) -> int:
    """Forget the places whose devices reported no error; returns their number.

    A fault of the recipe or of the image looks the same, and may have been mended. Else they are found again.
    """
    return await call(redis, "forget_places", places_key=keys.places)


async def forget_place(redis: Redis, keys: RunKeys, name: str) -> bool:
    """Forget the place of this name, whatever is behind it; False if there is none."""
    return bool(await redis.hdel(keys.places, name))


async def avoided_places(redis: Redis, keys: RunKeys) -> list[AvoidedPlace]:
    """The places that are avoided now. One whose time is over stays in Redis with its run, until it is renewed.

    Nothing is deleted here: a process may renew a place between the read and the deletion.
    """
    found: list[AvoidedPlace] = []
    for field, value in sorted((await redis.hgetall(keys.places)).items()):
        try:
            place = AvoidedPlace.model_validate_json(value)
        except ValidationError as error:
            log.warning("avoided place %r cannot be parsed and is left out: %s", field, error.errors()[0]["msg"])
            continue
        if place.until > time.time():
            found.append(place)
    return found
