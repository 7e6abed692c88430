"""Owns the moments in which a fault counts: its victim holds a lease, a batch or a sync, read by raw commands.

Must not change anything; each look returns a Moment or None.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.chaos import lookups
from tests.chaos.lookups import BODY, READERS, Process, key
from tests.chaos.scene import Moment, Scene
from tests.harness.stack import engine_core, exists

Look = Callable[[Scene], Moment | None]
PAYLOADS_SCANNED = 400
VERDICT_S, POLL_S = 0.5, 0.01
"""How long a stopped sampler may wait for a verdict, and how often it is looked for."""
OPEN = (b"pending", b"kept", b"batched")


def _chosen(scene: Scene, service: str) -> list[Process]:
    """The service's live processes in random order."""
    found = [process for process in lookups.processes(scene.server, scene.run, service) if exists(process.pid)]
    scene.rng.shuffle(found)
    return found


def working(service: str) -> Look:
    """A process of the service that has entries under lease."""

    def look(scene: Scene) -> Moment | None:
        for process in _chosen(scene, service):
            if held := lookups.leases(scene.server, scene.run, service, process.id):
                return Moment(process.id, process.pid, leases=tuple(held))
        return None

    return look


def sampling(scene: Scene) -> Moment | None:
    """The sampler while it has verdicts under lease, or will have: a replica or a verifier is at work.

    It records what it reads within milliseconds. But while it waits in a read, Redis leases the next verdict to it even
    if it is stopped by then; see `confirmed`.
    """
    for process in _chosen(scene, "sampler"):
        held = lookups.leases(scene.server, scene.run, "sampler", process.id)
        if held or lookups.leases(scene.server, scene.run):
            return Moment(process.id, process.pid, leases=tuple(held), patience_s=VERDICT_S)
    return None


def syncing(scene: Scene) -> Moment | None:
    """A rollout replica that a weight plan names and that has not acked it."""
    sync = lookups.open_sync(scene.server, scene.run)
    for process in _chosen(scene, "rollout") if sync else ():
        if sync and process.id in sync.missing:
            return Moment(process.id, process.pid, sync=sync)
    return None


def inside(look: Look) -> Look:
    """The engine core of the replica that `look` finds."""

    def deeper(scene: Scene) -> Moment | None:
        found = look(scene)
        if found is None or found.pid is None:
            return None
        core = engine_core(found.pid)
        facts = {"replica": found.pid}
        return Moment(found.process, core, found.leases, found.batch, found.sync, facts) if core else None

    return deeper


def learning(scene: Scene) -> Moment | None:
    """A learner rank while an uncommitted batch is in the stream."""
    batch = lookups.batch_in_flight(scene.server, scene.run)
    for process in _chosen(scene, "learner") if batch else ():
        if batch and process.state == lookups.READY:
            return Moment(process.id, process.pid, batch=batch[1])
    return None


def later_rank(scene: Scene) -> Moment | None:
    """A learner rank above 0 while an uncommitted batch is in the stream. Rank 0 alone owns the learner's role."""
    batch, first = lookups.batch_in_flight(scene.server, scene.run), lookups.owner(scene.server, scene.run, "learner")
    for process in _chosen(scene, "learner") if batch and first else ():
        if batch and process.state == lookups.READY and process.id != first:
            return Moment(process.id, process.pid, batch=batch[1], facts={"rank_0": first})
    return None


def first_rank(scene: Scene) -> Moment | None:
    """Rank 0 of several, while an uncommitted batch is in the stream."""
    batch, first = lookups.batch_in_flight(scene.server, scene.run), lookups.owner(scene.server, scene.run, "learner")
    ranks = _chosen(scene, "learner") if batch else []
    for process in ranks if len(ranks) > 1 else ():
        if batch and process.state == lookups.READY and process.id == first:
            return Moment(process.id, process.pid, batch=batch[1])
    return None


def publishing(scene: Scene) -> Moment | None:
    """A learner rank in the middle of a weight sync."""
    sync = lookups.open_sync(scene.server, scene.run)
    for process in _chosen(scene, "learner") if sync else ():
        return Moment(process.id, process.pid, sync=sync)
    return None


def running(scene: Scene) -> Moment | None:
    """Everything that the services hold, while the run is running."""
    if lookups.state(scene.server, scene.run) != "running":
        return None
    held = lookups.leases(scene.server, scene.run)
    batch = lookups.batch_in_flight(scene.server, scene.run)
    sync = lookups.open_sync(scene.server, scene.run)
    return Moment(leases=tuple(held), batch=batch[1] if batch else None, sync=sync) if held or batch or sync else None


def confirmed(scene: Scene, moment: Moment) -> Moment | None:
    """What the victim of an earlier look holds now. Called while the victim is stopped, so that it cannot change.

    Waits for a lease as long as the moment has patience.
    """
    if moment.sync is not None:
        sync = lookups.open_sync(scene.server, scene.run)
        sender = any(process.id == moment.process for process in lookups.processes(scene.server, scene.run, "learner"))
        return replace(moment, sync=sync) if sync and (sender or moment.process in sync.missing) else None
    if moment.batch is not None:
        batch = lookups.batch_in_flight(scene.server, scene.run)
        return replace(moment, batch=batch[1]) if batch else None
    ends = time.monotonic() + moment.patience_s
    while not (held := lookups.leases(scene.server, scene.run, consumer=moment.process)) and time.monotonic() < ends:
        time.sleep(POLL_S)
    return replace(moment, leases=tuple(held)) if held else None


def controlling(scene: Scene) -> Moment | None:
    """The gateway while it controls a run whose services hold something; it holds no lease itself."""
    found, pid = running(scene), scene.stack.gateway()
    return Moment(None, pid, found.leases, found.batch, found.sync, {"keeps": scene.run}) if found and pid else None


def hosting(scene: Scene) -> Moment | None:
    """Ray's head process while the services that it hosts hold something; they die with it."""
    found, pid = running(scene), scene.stack.head()
    return Moment(None, pid, found.leases, found.batch, found.sync) if found and pid else None


def serving(scene: Scene) -> Moment | None:
    """The embedded Redis while a service holds a lease, batch or sync."""
    found, pid = running(scene), scene.stack.redis()
    return Moment(None, pid, found.leases, found.batch, found.sync) if found and pid else None


def connected(scene: Scene) -> Moment | None:
    """All connections through the proxy, while a service holds something."""
    found = running(scene)
    return Moment(None, None, found.leases, found.batch, found.sync) if found and scene.ground.proxy else None


def checkpoint_coming(scene: Scene) -> Moment | None:
    """The disk of the next checkpoint, while a batch that leads to it is in flight.

    Only if the checkpoints have a separate disk (disk.py), which nothing else uses.
    """
    if not (scene.folder / "checkpoints").is_mount():
        return None
    batch = lookups.batch_in_flight(scene.server, scene.run)
    every, last = scene.recipe["learner"]["checkpoint_every"], scene.recipe["limits"]["rollout_steps"]
    # After the last checkpoint of a run no later one could succeed.
    if batch is None or batch[1] > last - 4 * every:
        return None
    return Moment(None, None, batch=batch[1])


def checkpointed(scene: Scene) -> Moment | None:
    """A learner rank with a batch in flight and a checkpoint to resume from."""
    found = learning(scene)
    if found is None:
        return None
    newest = newest_checkpoint(scene.folder)
    return Moment(found.process, found.pid, batch=found.batch, facts={"checkpoint": newest.name}) if newest else None


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step that has a manifest."""
    whole = [path.parent for path in (folder / "checkpoints").glob("step-*/checkpoint.json")]
    return max(whole, key=lambda path: path.name, default=None)


def payload_waiting(scene: Scene) -> Moment | None:
    """A payload of a group that is not trained yet."""
    step = scene.step()
    prefix = key(scene.run, "payload:")
    for name in scene.server.scan_iter(match=f"{prefix}*", count=PAYLOADS_SCANNED):
        group = name.decode().removeprefix(prefix).rsplit(":", 1)[0]
        if group.startswith("e."):
            continue
        state, batched = scene.server.hmget(key(scene.run, f"group:{group}"), "state", "step")
        if state in OPEN and (batched is None or int(batched) > step):
            return Moment(None, None, facts={"payload": name.decode(), "group": group, "state": state.decode()})
    return None


def message_in_flight(*streams: str) -> Look:
    """An entry under lease on one of the streams; for batches, an uncommitted one."""

    def look(scene: Scene) -> Moment | None:
        for stream in scene.rng.sample(streams, len(streams)):
            found = _entry(scene, stream)
            if found:
                return found
        return None

    return look


def _entry(scene: Scene, stream: str) -> Moment | None:
    if stream == "batches":
        batch = lookups.batch_in_flight(scene.server, scene.run)
        entry, held, step = (batch[0], (), batch[1]) if batch else (None, (), None)
    else:
        leases = [lease for lease in lookups.leases(scene.server, scene.run, READERS[stream]) if lease.stream == stream]
        entry, held, step = (leases[0].entry, (leases[0],), None) if leases else (None, (), None)
    if entry is None:
        return None
    found = scene.server.xrange(key(scene.run, stream), entry, entry)
    if not found:
        return None
    return Moment(None, None, held, step, facts={"stream": stream, "entry": entry, "body": found[0][1][BODY]})
