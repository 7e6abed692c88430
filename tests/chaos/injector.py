"""Owns one fault, from the wait for its moment to its recovery, and its record.

Must not leave anything stopped, filled or delayed, even after an error.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.scene import Scene
from tests.chaos.strikes import Struck

MOMENT_S = 120.0
"""The longest wait for a moment in which the fault counts; a run that is resumed meanwhile takes a minute to start."""
RECOVERY_S = 300.0
LOOK_S = 0.002
POLL_S = 0.1


@dataclass
class Outcome:
    """The outcome of one fault. It counts if its victim held something and the fault had an effect; `why`: why not.

    `at`: Unix seconds; `seconds`: from the strike to the recovery, None if there was none.
    """

    fault: str
    run: str
    counted: bool
    why: str = ""
    at: float = 0.0
    seconds: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def recovered(self) -> bool:
        """Whether the system recovered in time."""
        return self.seconds is not None

    def as_json(self) -> dict[str, Any]:
        """One line of the results."""
        return {"kind": "fault", **asdict(self)}


def inject(scene: Scene, name: str) -> Outcome:
    """Wait for the fault's moment, inject it, wait for the recovery."""
    fault = FAULTS[name]
    struck = _strike(scene, fault)
    if struck is None:
        return Outcome(name, scene.run, False, f"no victim held anything within {MOMENT_S:g} s, or the run ended")
    try:
        seconds = _recovery(scene, fault, struck)
        had_effect = struck.had_effect()
    finally:
        if struck.release is not None:
            struck.release()
    evidence = struck.moment.as_json() | struck.facts | ({"entry": list(struck.entry)} if struck.entry else {})
    why = "" if had_effect else "it had no effect: its target was gone, or nothing needed it"
    return Outcome(name, scene.run, had_effect, why, struck.at, seconds, evidence)


def _strike(scene: Scene, fault: Fault) -> Struck | None:
    ends = time.monotonic() + MOMENT_S
    while time.monotonic() < ends:
        try:
            moment = fault.look(scene)
            struck = fault.strike(scene, moment) if moment else None
            if struck is not None:
                return struck
            if scene.ended():
                return None
        except redis.exceptions.RedisError:
            time.sleep(POLL_S)  # another fault has just hit Redis itself
        time.sleep(LOOK_S)
    return None


def _recovery(scene: Scene, fault: Fault, struck: Struck) -> float | None:
    """Seconds from the strike to the recovery; None if it did not recover in time."""
    ends = time.monotonic() + RECOVERY_S
    while time.monotonic() < ends:
        try:
            if struck.release is not None:
                # No command to Redis before the release: Redis may be the stopped process.
                if struck.due():
                    struck.release()
                    struck.release = None
            elif scene.succeeded() or fault.recovered(scene, struck):
                return time.time() - struck.at
            elif scene.ended():
                return None
        except redis.exceptions.RedisError:
            time.sleep(POLL_S)
        time.sleep(POLL_S)
    return None
