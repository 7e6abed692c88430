"""Owns a synthetic run for the oracle's tests: all the evidence of a clean run, small enough to edit.

Must not be used outside tests.
"""

from __future__ import annotations

from typing import Any

from tests.chaos.evidence import Entry, Evidence, Lane
from tests.chaos.lookups import READERS, STREAMS

TRAINED = {1: ("g0", "g1"), 2: ("g2", "g3")}
FILTERED, STALE, KEPT, PENDING = "g4", "g5", "g6", "g7"
PROMPTS = ("e.held-out.before.000000", "e.held-out.before.000001")
SAMPLES = 2


class Writer:
    """Appends entries with increasing ids, as Redis does."""

    def __init__(self) -> None:
        self.entries: dict[str, list[Entry]] = {name: [] for name in STREAMS}
        self._clock = 1000

    def add(self, stream: str, body: dict[str, Any] | None) -> str:
        """Append an entry; returns its id."""
        self._clock += 1
        self.entries[stream].append(Entry(f"{self._clock}-0", body))
        return f"{self._clock}-0"


def task(group: str, stop: int | None = None) -> dict[str, Any]:
    return {"kind": "task", "group": group, "samples": SAMPLES, "stop": stop}


def sample(group: str, index: int) -> dict[str, Any]:
    return {"kind": "sample", "group": group, "index": index, "facts": _facts(group, index)}


def verdict(group: str, index: int, outcome: str) -> dict[str, Any]:
    return {"kind": "verdict", "group": group, "index": index, "outcome": outcome, "facts": _facts(group, index)}


def _facts(group: str, index: int) -> dict[str, Any]:
    return {"payload": payload(group, index), "oldest_version": 0}


def payload(group: str, index: int) -> str:
    return f"penstock:{{run}}:payload:{group}:{index}"


def batch(step: int, groups: tuple[str, ...], last: bool) -> dict[str, Any]:
    return {
        "kind": "batch",
        "step": step,
        "version": step - 1,
        "last": last,
        "groups": [
            {
                "group": name,
                "samples": [
                    {"payload": payload(name, index), "tokens": 3, "masked": False, "staleness": step - 1}
                    for index in range(SAMPLES)
                ],
            }
            for name in groups
        ],
    }


def record(step: int, groups: tuple[str, ...]) -> dict[str, Any]:
    owner = {"epoch": 2, "owner": "learner-1a2b3c4d"}
    return {"kind": "step", "step": step, "version": step, "groups": list(groups)} | owner


def generate(writer: Writer, group: str, outcomes: tuple[str, ...], prefix: str = "") -> None:
    """A group from its task to its verdicts."""
    writer.add(f"{prefix}tasks", task(group))
    for index in range(SAMPLES):
        writer.add(f"{prefix}samples", sample(group, index))
    for index, outcome in enumerate(outcomes):
        writer.add(f"{prefix}verdicts", verdict(group, index, outcome))


def clean_run() -> Evidence:
    """A run of two steps that succeeded, with a group of every ending and a complete evaluation."""
    writer, mixed = Writer(), ("correct", "wrong")
    for prompt in PROMPTS:
        generate(writer, prompt, ("correct", "correct"), "evaluation:")
    evaluation = {"set": "held-out", "name": "before", "prompts": 2, "dropped": 0}
    writer.add("evaluations", evaluation)
    groups: dict[str, dict[str, str]] = {}
    for step, names in TRAINED.items():
        for name in names:
            generate(writer, name, mixed)
            groups[name] = {"state": "trained"}
        writer.add("batches", batch(step, names, last=step == 2))
        writer.add("steps", record(step, names))
    generate(writer, FILTERED, ("wrong", "wrong"))
    generate(writer, STALE, mixed)
    generate(writer, KEPT, mixed)
    waiting = writer.add("tasks", task(PENDING))
    groups |= {FILTERED: {"state": "filtered"}, STALE: {"state": "stale"}}
    groups |= {KEPT: {"state": "kept"}, PENDING: {"state": "pending"}}
    counts = {name: len(entries) for name, entries in writer.entries.items()}
    batches = {step: batch(step, names, last=step == 2) for step, names in TRAINED.items()}
    return Evidence(
        recipe={
            "algorithm": {"dynamic_sampling": {"enabled": True, "min_known": None}},
            "limits": {"max_staleness": 1},
        },
        state="succeeded",
        entries=writer.entries,
        added=dict(counts),
        read=counts,
        restarted=set(),
        unacked={name: {waiting} if name == "tasks" else set() for name in STREAMS},
        lanes={
            "train": Lane({"dispatched": 8, "trained": 4, "filtered": 1, "stale": 1}, {KEPT, PENDING}),
            "evaluation": Lane({"dispatched": 2, "evaluated": 2}, set()),
        },
        groups=groups,
        steps=[record(step, names) for step, names in TRAINED.items()],
        evaluations=[evaluation],
        policy={"version": "2", "step": "2"},
        archive=batches,
        records={step: record(step, names) for step, names in TRAINED.items()},
        shares={
            step: [(payload(name, index), name) for name in names for index in range(SAMPLES)]
            for step, names in TRAINED.items()
        },
        checkpoints={2},
    )


def append(evidence: Evidence, stream: str, body: dict[str, Any] | None, entry: str) -> None:
    """Add an entry that the tail has read."""
    evidence.entries[stream].append(Entry(entry, body))
    evidence.added[stream] += 1
    evidence.read[stream] += 1


def rewound_run() -> Evidence:
    """Step 2 left the history: its groups are dispatched, generated, judged and trained again.

    The evaluation before the run stays, and the lane of evaluations starts from 0.
    """
    run = clean_run()
    run.lanes["evaluation"].counters.clear()
    for name in PROMPTS:
        run.groups.pop(name, None)
    writer = Writer()
    writer._clock = 9000
    for group in ("g2", "g3"):
        generate(writer, group, ("correct", "wrong"))
    run.unacked["tasks"] = {writer.add("tasks", task(PENDING))}
    writer.add("events", {"kind": "event", "phase": "rewound"})
    writer.add("batches", batch(2, ("g2", "g3"), last=True))
    for stream, entries in writer.entries.items():
        for entry in entries:
            append(run, stream, entry.body, entry.id)
    run.restarted = {name for name in STREAMS if name in READERS} | {"batches"}
    run.added |= dict.fromkeys(run.restarted, 1)
    return run
