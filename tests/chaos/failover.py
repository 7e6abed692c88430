"""Owns the failover that loses the last second: its moment, its strike, and when the replica has taken over.

Must not promote a server itself; the Sentinels do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.chaos import moments
from tests.chaos.cuts import Cut
from tests.chaos.ground import Watched
from tests.chaos.lookups import STREAMS, key
from tests.chaos.scene import Moment, Scene
from tests.chaos.strikes import Struck, struck_now
from tests.harness.servers.redis_servers import Process
from tests.harness.servers.watched_servers import in_sync

CUT_S = 1.0
"""How long the primary goes on alone before it dies; its writes of that time are lost."""
LONGEST_S = 6.0
"""After how long alone without a write the primary is left alive."""
SETTLED_S = 3.0
"""How long after the promotion the dead primary returns: a client that just asked the Sentinels must not find it."""
MARKER = "chaos:marker"


def watched(scene: Scene) -> Moment | None:
    """The primary while services hold something, and a failover is possible."""
    group = scene.ground.watched
    found = moments.running(scene) if group else None
    if group is None or found is None or not _whole(group):
        return None
    return Moment(None, group.roles[0].process.pid, found.leases, found.batch, found.sync)


def _whole(group: Watched) -> bool:
    """Whether both servers run and are in sync, and every Sentinel knows them."""
    return all(server.process.poll() is None for server in group.servers) and group.known() and in_sync(*group.roles)


def fail_over(scene: Scene, moment: Moment) -> Struck | None:
    """Cut the replica off, let the primary go on for a second, then kill -9 it.

    None, without effect, if nothing of the run was written meanwhile, or another fault holds the run.
    """
    group = scene.ground.watched
    if group is None or not scene.resuming.acquire(blocking=False):
        return None
    primary, replica = group.roles
    try:
        since = int(time.time() * 1000)
        group.cut()
        kept = last_entries(replica, scene.run)
        marker = f"{MARKER}:{scene.run}:{since}"
        primary.client().set(marker, "acknowledged")
        if not _goes_on(scene, primary, kept):
            return None
        counts = [_added(server, scene.run) for server in (primary, replica)]
        struck = struck_now(scene, moment, facts={"marker": marker, "lost_entries": counts[0] - counts[1]})
        primary.kill()
        scene.cuts.append(Cut(since, int(time.time() * 1000), kept))
    finally:
        if primary.process.poll() is None:
            group.mend()
        scene.resuming.release()
    struck.due = _promoted_for(group, replica, SETTLED_S)
    struck.release = lambda: _replace(group, primary)
    struck.had_effect = lambda: not group.roles[0].client().exists(marker)
    return struck


def _promoted_for(group: Watched, replica: Process, seconds: float) -> Callable[[], bool]:
    """Whether the replica has been the primary for so long."""
    since: list[float] = []

    def settled() -> bool:
        if not since and group.promoted(replica):
            since.append(time.monotonic())
        return bool(since) and time.monotonic() >= since[0] + seconds

    return settled


def _goes_on(scene: Scene, primary: Process, kept: dict[str, str]) -> bool:
    """Let the primary go on for CUT_S, or until it has an entry that the replica lacks; whether it has one."""
    begun = time.monotonic()
    while time.monotonic() < begun + LONGEST_S and not scene.ended():
        time.sleep(CUT_S / 10)
        if time.monotonic() > begun + CUT_S and last_entries(primary, scene.run) != kept:
            return True
    return False


def last_entries(server: Process, run: str) -> dict[str, str]:
    """By stream of the run that the server has: the id of the last entry that was added."""
    about = _streams(server, run)
    return {name: str(fields["last-generated-id"]) for name, fields in about.items()}


def _added(server: Process, run: str) -> int:
    return sum(int(fields["entries-added"]) for fields in _streams(server, run).values())


def _streams(server: Process, run: str) -> dict[str, dict[str, object]]:
    with server.client().pipeline(transaction=True) as pipe:
        for name in STREAMS:
            pipe.xinfo_stream(key(run, name))
        found = pipe.execute(raise_on_error=False)
    return {name: fields for name, fields in zip(STREAMS, found, strict=True) if isinstance(fields, dict)}


def _replace(group: Watched, dead: Process) -> None:
    """Bring the dead server back as a replica, so that there may be another failover."""
    group.mend()
    group.replace(dead)
