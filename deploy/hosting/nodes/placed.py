"""Owns what a hosted service does about its place: it waits where the run avoids it, and watches its devices.

Must not know the service, nor restart it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial

from deploy.hosting.nodes.devices import DeviceFault, DevicesUnreadableError, DeviceWatch
from deploy.hosting.nodes.places import own_place
from deploy.hosting.pod_registry import PodRegistry
from services.metrics import GPU_ERRORS
from services.process.hosting import Context, Service
from services.streams.runs.places import AVOIDED, AVOIDED_S, TOGETHER, AvoidedPlace, Location, avoid, avoided_places
from services.waits import cancel_and_wait

log = logging.getLogger(__name__)

LOOK_S = 5.0
WATCH_S = 1.0
"""How often devices are read; an Xid is noticed at once. A drain waits for the last look."""
KINDS = ("xid", "ecc", "remap")


class DeviceFailedError(RuntimeError):
    """A device of this process reported an error that does not pass. The text is one line."""


class PlacedService:
    """A service that minds its place.

    Serve cannot exclude a node from a running deployment, because the options of its replicas are part of its version:
    a change would replace every replica. So a replica that is placed where its run keeps failing holds the place, and
    starts no engine: nothing else is placed there, and the others are not disturbed.
    """

    def __init__(self, service: Service, *, holds: bool) -> None:
        self.name = service.name
        self._service = service
        self._holds = holds

    async def run(self, context: Context) -> None:
        """Wait until the place is not avoided, then run the service. Raises DeviceFailedError, and what it raises."""
        place, ray_node = own_place()
        if self._holds:
            await self._hold(context, place, ray_node)
        if not context.stopping.is_set():
            await self._run_watched(context, place, ray_node)

    async def _hold(self, context: Context, place: Location, ray_node: str) -> None:
        """Hold the place while it is avoided."""
        registry = PodRegistry.current()
        announced = False
        while not context.stopping.is_set() and (found := await self._avoided(context, place)):
            if not announced:
                announced = True
                log.warning("%s; this replica holds it and starts nothing", found)
                if registry and found.ray_node == ray_node:
                    registry.request_end(str(found))
                await context.heartbeat.update(state=AVOIDED)
            try:
                async with asyncio.timeout(LOOK_S):
                    await context.stopping.wait()
            except TimeoutError:
                continue
        if announced:
            if registry:
                registry.withdraw_end()
            if not context.stopping.is_set():
                log.info("%s is no longer avoided; %s starts", place, self.name)
                await context.heartbeat.update(state="starting")

    async def _avoided(self, context: Context, place: Location) -> AvoidedPlace | None:
        found = await avoided_places(context.redis, context.keys)
        return next((each for each in found if each.service == self.name and each.place.meets(place)), None)

    async def _run_watched(self, context: Context, place: Location, ray_node: str) -> None:
        watch = _opened(place)
        if watch is None:
            await self._service.run(context)
            return
        service = asyncio.create_task(self._service.run(context), name=self.name)
        watching = asyncio.create_task(_until_fatal(watch, place), name="devices")
        try:
            await asyncio.wait((service, watching), return_when=asyncio.FIRST_COMPLETED)
            if service.done():
                await service
                return
            fault = await watching
            lost = self._lost(fault, place, ray_node)
            if await avoid(context.redis, context.keys, lost):
                await context.event_log.write("node-avoided", str(lost))
            raise DeviceFailedError(f"{place}: {fault.text}")
        finally:
            await cancel_and_wait(service, watching)
            await asyncio.to_thread(watch.close)

    def _lost(self, fault: DeviceFault, place: Location, ray_node: str) -> AvoidedPlace:
        known = fault.device in place.device.split(TOGETHER)  # by its UUID, as a pod's node names it
        return AvoidedPlace(
            service=self.name,
            node=place.node,
            device=fault.device if known else place.device,
            count=1,
            reason=fault.text,
            until=time.time() + AVOIDED_S,
            ray_node=ray_node,
            kind=fault.kind,
        )


def placed(make: Callable[[], Service], *, holds: bool = True) -> Service:
    """The service that `make` makes, in its place. `holds`: it waits where its run avoids the place."""
    return PlacedService(make(), holds=holds)


def _opened(place: Location) -> DeviceWatch | None:
    """A watch of the devices of this process; None without devices, or where they cannot be watched."""
    if not place.device:
        return None
    for device in place.device.split(TOGETHER):
        for kind in KINDS:
            GPU_ERRORS.labels(place.node, device, kind)
    try:
        return DeviceWatch(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    except DevicesUnreadableError as error:
        log.warning("errors of %s are not watched: %s", place, error)
        return None


async def _until_fatal(watch: DeviceWatch, place: Location) -> DeviceFault:
    """Count the errors of devices until one does not pass, and return that."""
    devices = place.device.split(TOGETHER)
    while True:
        for fault in await asyncio.to_thread(partial(watch.look, WATCH_S)):
            log.error("%s: %s", place, fault.text)
            if fault.fatal:
                return fault
            device = fault.device if fault.device in devices else place.device
            GPU_ERRORS.labels(place.node, device, fault.kind).inc()
