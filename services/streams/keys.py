"""Owns the names of Redis keys; a run's keys share one prefix.

Must not talk to Redis. The prefix has a hash tag, so that in a Redis Cluster all keys of a run would be on one server.
Penstock does not support Redis Cluster yet: every process rejects it when it connects (docs/operations/redis.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from services.contracts import Lane

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,95}")
RUNS = "penstock:runs"
"""The index of all runs, by the time of their creation."""
ACTIVE_RUNS = "penstock:active"
"""The index of the runs for which the controller has work; each change of a record changes it too."""
DELETED_RUNS = "penstock:deleted"
"""The runs that were deleted last: a controller that was frozen meanwhile must not take them for lost."""
EVALUATION_GROUP = "e."
"""The prefix of the ids of evaluation groups; ids of training groups never start with it."""
STREAM_READERS = {"tasks": "rollout", "samples": "verifier", "verdicts": "sampler"}
"""The only consumer group of each stream of a lane, by the stream's name."""
SHARED_HEARTBEATS = "penstock:{-}:heartbeats"
"""The heartbeats of processes that belong to no run; no run id is a dash."""


class _Key:
    """A key of its owner, called `name`; by default like its attribute, with dashes in place of underscores."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._name = self._name or attribute.replace("_", "-")

    def __get__(self, keys: Any, owner: type) -> str:
        name: str = keys.key(self._name)
        return name


@dataclass(frozen=True)
class LaneKeys:
    """The streams and counters of one lane of one run."""

    prefix: str

    tasks = _Key()
    samples = _Key()
    verdicts = _Key()
    counters = _Key()
    pending = _Key()
    released = _Key()

    def key(self, name: str) -> str:
        """The key called `name` in this lane."""
        return self.prefix + name


@dataclass(frozen=True)
class RunKeys:
    """All keys of one run. Raises ValueError for an id that could escape its prefix."""

    run: str

    record = _Key()
    reward_files = _Key()
    batches = _Key()
    steps = _Key()
    evaluations = _Key()
    events = _Key()
    dead = _Key()
    policy = _Key()
    sampler_state = _Key()
    queue = _Key()
    dropped = _Key()
    posteriors = _Key()
    starved = _Key()
    checkpoints = _Key()
    weight_plans = _Key()
    weight_acks = _Key()
    manifest = _Key("weight-manifest")
    heartbeats = _Key()
    judge_budget = _Key()
    unknown = _Key()
    row_functions = _Key()

    def __post_init__(self) -> None:
        if not RUN_ID.fullmatch(self.run):
            raise ValueError(
                f"run id: {self.run!r} is not valid: expected lower-case letters, digits and dashes, "
                "at most 96, the first of them not a dash"
            )

    def key(self, name: str) -> str:
        """The key called `name` in this run."""
        return f"penstock:{{{self.run}}}:{name}"

    def lane(self, lane: Lane) -> LaneKeys:
        """The lane's keys; each lane has its own streams and counters."""
        return LaneKeys(self.key("" if lane is Lane.TRAIN else f"{lane.value}:"))

    def streams(self, lane: Lane) -> dict[str, str]:
        """The lane's streams that consumer groups read, by their names in metrics; see services.metrics.STREAMS."""
        found = self.lane(lane)
        kinds = {"tasks": found.tasks, "samples": found.samples, "verdicts": found.verdicts}
        return {f"{lane.value}-{kind}": stream for kind, stream in kinds.items()}

    def stream_name(self, stream: str) -> str:
        """The name of a stream of this run in metrics."""
        names = {key: name for lane in Lane for name, key in self.streams(lane).items()}
        return names.get(stream, stream.removeprefix(self.key("")))

    def group(self, group: str) -> str:
        return self.key(f"group:{group}")

    def payload(self, group: str, index: int) -> str:
        return self.key(f"payload:{group}:{index}")

    def snapshot(self, step: int) -> str:
        return self.key(f"sampler-snapshot:{step}")

    def epoch(self, role: str) -> str:
        return self.key(f"epoch:{role}")
