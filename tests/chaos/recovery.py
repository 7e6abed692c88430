"""Owns the conditions of recovery from a fault, read from Redis by raw commands, from the disk and from the API.

Must not change anything. A run that has succeeded has recovered from everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.chaos import lookups
from tests.chaos.cuts import lost, order
from tests.chaos.lookups import READERS, key, message
from tests.chaos.scene import Scene
from tests.chaos.story import REWOUND
from tests.chaos.strikes import Struck, same

Recovered = Callable[[Scene, Struck], bool]


def work_done(scene: Scene, struck: Struck) -> bool:
    """The victim's work is done: its entries are acked, its batch is committed, the fleet has its sync's version."""
    held = struck.moment
    if held.batch is not None and scene.step() < held.batch:
        return False
    if held.sync is not None and not _synced(scene, held.sync.version):
        return False
    return not lookups.still_leased(scene.server, scene.run, held.leases)


def _synced(scene: Scene, version: int) -> bool:
    policy = lookups.policy(scene.server, scene.run)
    if policy is None or policy[0] < version:
        return False
    return all((process.version or 0) >= version for process in scene.ready("rollout"))


def replaced(service: str) -> Recovered:
    """The service has as many ready processes as the run requires, not counting the killed one."""

    def look(scene: Scene, struck: Struck) -> bool:
        return sum(not same(process, struck) for process in scene.ready(service)) >= scene.wanted(service)

    return look


def back(service: str) -> Recovered:
    """The stopped process is ready again, or was replaced."""

    def look(scene: Scene, struck: Struck) -> bool:
        return any(process.id == struck.moment.process for process in scene.ready(service)) or replaced(service)(
            scene, struck
        )

    return look


def progressing(scene: Scene, struck: Struck) -> bool:
    """A group, an evaluation prompt or a rollout step has finished since the fault."""
    return scene.endings() > struck.endings


def answering(scene: Scene, struck: Struck) -> bool:
    """The API serves the run, from another process than the killed one."""
    pid = scene.stack.gateway()
    return pid is not None and pid not in struck.dead and scene.stack.answers(f"/v1/runs/{scene.run}")


def checkpoint_written(scene: Scene, struck: Struck) -> bool:
    """The disk has a complete checkpoint that is newer than the step committed at the fault."""
    for path in (scene.files / "checkpoints").glob("step-*/checkpoint.json"):
        try:
            if json.loads(path.read_text())["step"] > struck.step:
                return True
        except (OSError, ValueError):
            continue  # a newer checkpoint is replacing it
    return False


def _taken(scene: Scene, stream: str, entry: str) -> bool:
    """Whether a failover lost an entry, or a rewind restarted its stream."""
    if lost(scene.cuts, stream, entry):
        return True
    if scene.server.xrange(key(scene.run, stream), entry, entry):
        return False
    events = (message(fields) for _, fields in scene.server.xrange(key(scene.run, "events"), min=entry))
    return any(event is not None and event.get("phase") == REWOUND for event in events)


def group_ended(scene: Scene, struck: Struck) -> bool:
    """The payload's group was trained or released: it is no longer pending."""
    return not scene.server.sismember(key(scene.run, "pending"), str(struck.moment.facts["group"]))


def entry_dealt_with(scene: Scene, struck: Struck) -> bool:
    """The added entry was acked; or, if it is a batch, was rejected, or its step or a later one is committed.

    Or it is gone with its stream.
    """
    assert struck.entry is not None
    stream, entry = struck.entry
    name = key(scene.run, stream)
    if _taken(scene, stream, entry):
        return True
    if stream == "batches":
        return rejected(scene, struck) or scene.step() > (struck.moment.batch or 0)
    reader = READERS[stream]
    groups = [group for group in scene.server.xinfo_groups(name) if group["name"].decode() == reader]
    delivered = groups[0]["last-delivered-id"].decode() if groups else "0-0"
    if order(delivered) < order(entry):
        return False
    return not scene.server.xpending_range(name, reader, entry, entry, 1)


def rejected(scene: Scene, struck: Struck) -> bool:
    """The added entry is in the dead-letter stream, as an invalid message; or it is gone with its stream."""
    assert struck.entry is not None
    stream, entry = struck.entry
    letters = [message(fields) for _, fields in scene.server.xrange(key(scene.run, "dead"))]
    about = (key(scene.run, stream), entry, "invalid")
    if any(letter and (letter["stream"], letter["entry"], letter["cause"]) == about for letter in letters):
        return True
    return _taken(scene, stream, entry)


def all_of(*conditions: Recovered) -> Recovered:
    """All conditions hold at the same time."""
    return lambda scene, struck: all(condition(scene, struck) for condition in conditions)
