"""Owns the names of Redis keys, those of a run with one prefix, and which indices each change of a record changes.

Must not talk to Redis. The prefix has a hash tag, so that in a Redis Cluster all keys of a run would be on one server.
Penstock does not support Redis Cluster yet: every process rejects it when it connects (docs/operations/redis.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.contracts import Closing, Lane, RunState

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,95}")
RUNS = "penstock:runs"
"""The index of all runs, by the time of their creation. A change of a record changes all indices in the same step."""
ACTIVE_RUNS = "penstock:active"
"""The index of the runs for which the controller has work."""
ENDED_RUNS = "penstock:ended"
"""The index of the runs that have ended, by the time of their end."""
UNCLOSED_RUNS = "penstock:unclosed"
"""Those of them that are not closed: they may still expire."""
ANY_WORD = "*"
DELETED_RUNS = "penstock:deleted"
"""The runs that were deleted last: a controller that was frozen meanwhile must not take them for lost."""
PROJECTS = "penstock:ledgers"
"""The projects that have a ledger; they keep it when their runs are deleted."""
EVALUATION_GROUP = "e."
"""The prefix of the ids of evaluation groups; ids of training groups never start with it."""
STREAM_READERS = {"tasks": "rollout", "samples": "verifier", "verdicts": "sampler"}
"""The only consumer group of each stream of a lane, by the stream's name."""
NODE_PROBLEMS = "penstock:node-problems"
"""Why nodes cannot do their work, as their pods reported it."""
SHARED_HEARTBEATS = "penstock:{-}:heartbeats"
"""The heartbeats of processes that belong to no run; no run id is a dash."""


def run_list(project: str = ANY_WORD, word: str = ANY_WORD) -> str:
    """The index of runs of a project and with a word, by the time of their creation; ANY_WORD: whatever it is.

    The word of a run is its state; with `.closed` for one that has ended and is closed; `unreadable` for a state that
    this release does not know.
    """
    return RUNS if project == word == ANY_WORD else f"{RUNS}:{project}/{word}"


def project_ledger(project: str) -> str:
    """The key of what all runs of a project used together."""
    return f"penstock:ledger:{project}"


def words(found: Iterable[str]) -> str:
    """Words as the Redis functions take them."""
    return f",{','.join(found)},"


INDEX = {
    "lists_key": RUNS,
    "active_key": ACTIVE_RUNS,
    "ended_key": ENDED_RUNS,
    "unclosed_key": UNCLOSED_RUNS,
}
"""The keys of the indices."""
WORDS = {
    "active_words": words(
        [state for state in RunState if not state.ended] + [closing for closing in Closing if closing.open]
    ),
    "ended_words": words(state for state in RunState if state.ended),
}
"""The states and closings of runs for which the controller has work; the states of ended runs."""
CLOSED = ".closed"
UNREADABLE = "unreadable"
OPEN_WORDS = (*(state.value for state in RunState), UNREADABLE)
"""The words of lists of runs that are not closed; see services.streams.keys.run_list."""
CLOSED_WORDS = tuple(f"{state.value}{CLOSED}" for state in RunState if state.ended)


def request_key(digest: str) -> str:
    """The key of a submission that may be repeated; see services.streams.state.runs."""
    return f"penstock:request:{digest}"


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
    unarchived = _Key()
    bare = _Key("unarchived-bare")
    tokens_in_flight = _Key()

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
    step_tokens = _Key()
    ledger = _Key()
    weight_plans = _Key()
    weight_acks = _Key()
    manifest = _Key("weight-manifest")
    heartbeats = _Key()
    judge_budget = _Key()
    unknown = _Key()
    row_functions = _Key()
    logs = _Key()
    places = _Key()

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

    def partials(self, group: str) -> str:
        return self.key(f"partials:{group}")

    def made(self, group: str, samples: int) -> list[str]:
        """The keys of what was generated for a group: its payloads, and what is kept of half-drawn responses."""
        return [*(self.payload(group, index) for index in range(samples)), self.partials(group)]

    def snapshot(self, step: int) -> str:
        return self.key(f"sampler-snapshot:{step}")

    def log(self, process: str) -> str:
        return self.key(f"log:{process}")

    def epoch(self, role: str) -> str:
        return self.key(f"epoch:{role}")
