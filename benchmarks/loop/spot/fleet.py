"""Owns the benchmark's fleet: its processes, when each was ready, and which one is taken away next.

Must not know what the replicas generate.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.loop.spot.replica import new_count, read_count

log = logging.getLogger(__name__)

END_S = 30.0


@dataclass
class Member:
    """One replica. `slot`: the place that it takes, below `Fleet.wanted`.

    `ended_at`: when it was told to end, or killed (monotonic clock); None while it may work.
    """

    process: subprocess.Popen[bytes]
    count: Path
    slot: int
    ended_at: float | None = None

    @property
    def ready_at(self) -> float:
        """Since when it has been ready; 0.0 before."""
        return read_count(self.count).ready_at

    @property
    def drawn(self) -> int:
        """The tokens that it has drawn."""
        return read_count(self.count).drawn

    def ready_s(self, since: float, until: float) -> float:
        """For how long it was ready between two moments, or still drew after its notice."""
        count = read_count(self.count)
        if not count.ready_at:
            return 0.0
        end = until if self.ended_at is None else max(self.ended_at, count.drew_at)
        return max(0.0, min(end, until) - max(count.ready_at, since))


@dataclass
class Fleet:
    """`wanted` replicas of a run; one that was taken away is replaced at once.

    Each place has a core of its own (two share one where there are too few), as it would have a node of its own: the
    start of a replacement must not take CPU from the replicas that work.
    """

    run: str
    redis_url: str
    folder: Path
    wanted: int
    members: list[Member] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def fill(self) -> None:
        """Start replicas until there are as many as wanted."""
        taken = {member.slot for member in self.members if member.ended_at is None}
        cores = sorted(os.sched_getaffinity(0))
        for slot in sorted(set(range(self.wanted)) - taken):
            name = f"replica-{next(self._numbers)}"
            count = self.folder / f"{name}.count"
            new_count(count)
            program = [sys.executable, "-m", "benchmarks.loop.spot.replica"]
            command = [*program, "--run", self.run, "--redis", self.redis_url]
            with (self.folder / f"{name}.log").open("wb") as output:
                roots = {"PENSTOCK_ROOTS": str(self.folder.parent)}  # of the model
                process = subprocess.Popen(
                    [*command, "--count", str(count), "--core", str(cores[slot % len(cores)])],
                    stdout=output,
                    stderr=output,
                    env=os.environ | roots,
                )
            self.members.append(Member(process, count, slot))

    def ready(self) -> list[Member]:
        """The replicas that work, the one first that has been ready for longest. Raises RuntimeError for a dead one."""
        for member in self.members:
            if member.ended_at is None and member.process.poll() is not None:
                last = member.count.with_suffix(".log").read_text(errors="replace").splitlines()[-5:]
                raise RuntimeError(f"a replica ended by itself: status {member.process.returncode}: {last}")
        working = [member for member in self.members if member.ended_at is None and member.ready_at]
        return sorted(working, key=lambda member: member.ready_at)

    def take_away(self, sent: signal.Signals) -> bool:
        """End the replica that has been ready for longest, and start another one. False if none is ready."""
        ready = self.ready()
        if not ready:
            return False
        victim = ready[0]
        victim.ended_at = time.monotonic()
        os.kill(victim.process.pid, sent)
        self.fill()
        return True

    def ready_s(self, since: float, until: float) -> float:
        """The seconds that replicas were ready between two moments, all together."""
        return sum(member.ready_s(since, until) for member in self.members)

    def drawn(self) -> int:
        """The tokens that all replicas have drawn."""
        return sum(member.drawn for member in self.members)

    def stop(self) -> None:
        """End all processes."""
        for member in self.members:
            member.process.terminate()
        for member in self.members:
            try:
                member.process.wait(END_S)
            except subprocess.TimeoutExpired:
                log.warning("replica %d did not end within %g s and is killed", member.process.pid, END_S)
                member.process.kill()
                member.process.wait()
