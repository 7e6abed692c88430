"""Owns the runs that integration tests submit to a shared stack, their data, and checks for all of them.

Must not start a stack.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from services.contracts import Lane, Verdict
from services.streams.keys import RunKeys
from tests.harness.servers import redis_log
from tests.harness.small_run import recipe_document
from tests.harness.stack import Stack

STEPS = 3
"""Rollout steps of the finished run that tests share."""
ANSWER_S = 60.0
"""The time limit for an answer of Redis on a busy machine; redis-py's own limit is 5 s."""


def document(model: Path | str, questions: Path, max_staleness: int, steps: int) -> dict[str, Any]:
    """A recipe small enough that several runs fit on two cores."""
    return recipe_document(
        model,
        data={"source": "jsonl", "path": str(questions), "train": 44, "held_out": 12, "options": {}},
        rollout={"cpus": 0.3, "max_threads": 2},
        learner={"cpus": 0.3, "learning_rate": 1e-4},
        limits={"rollout_steps": steps, "max_staleness": max_staleness, "startup_timeout_s": 200},
        algorithm={"overlong": {"cache": 4}},
    )


class Verdicts(threading.Thread):
    """Reads a run's verdicts as they arrive: the stream is trimmed once the sampler has consumed them."""

    def __init__(self, stack: Stack, run: str) -> None:
        super().__init__(daemon=True)
        self._redis = redis.Redis.from_url(stack.redis_url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
        self._stream = RunKeys(run).lane(Lane.TRAIN).verdicts
        self._done = threading.Event()
        self._found: dict[str, Verdict] = {}
        self.start()

    def run(self) -> None:
        """Read until `trained` is called."""
        after = "0"
        while not self._done.is_set():
            found: Any = self._redis.xread({self._stream: after}, block=200)
            for _, entries in found or []:
                self._take((entry.decode(), fields) for entry, fields in entries)
                after = entries[-1][0]

    def _take(self, entries: Iterable[tuple[str, dict[bytes, bytes]]]) -> None:
        self._found |= {entry: Verdict.model_validate_json(fields[b"m"]) for entry, fields in entries}

    def trained(self, steps: list[dict[str, Any]]) -> list[tuple[float, float]]:
        """When each trained sample was generated: (start, end) in Unix seconds, from the sample's facts."""
        self._done.set()
        self.join(ANSWER_S)
        assert not self.is_alive(), f"no answer from Redis within {ANSWER_S:g} s"
        # Add the entries that were trimmed before this thread read them.
        self._take(redis_log.missed(self._redis, self._stream, self._found))
        self._redis.close()
        trained = {group for step in steps for group in step["groups"]}
        verdicts = [verdict for verdict in self._found.values() if verdict.group in trained]
        facts = {(verdict.group, verdict.index): verdict.facts for verdict in verdicts}
        return [(fact.started_at, fact.finished_at) for fact in facts.values()]


def generated_while_learning(samples: Iterable[tuple[float, float]], steps: list[dict[str, Any]]) -> int:
    """The number of trained samples that were generated while an optimizer step ran."""
    learning = [(step["learning_started_at"], step["learning_finished_at"]) for step in steps]
    return sum(any(start < until and end > since for since, until in learning) for start, end in samples)


def check_reconciled(view: dict[str, Any], summary: dict[str, Any], steps: int, between: Sequence[str] = ()) -> None:
    """The counts of groups add up, and the run went through its states in order."""
    groups = summary["groups"]
    assert groups["dispatched"] == sum(groups[name] for name in ("trained", "filtered", "stale", "dead", "pending"))
    assert groups["trained"] == 4 * steps
    assert (summary["rollout_steps"], summary["policy_version"]) == (steps, steps)
    assert summary["optimizer_steps"] == 2 * steps
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert [change["state"] for change in view["history"]] == ["queued", "starting", "running", *between, "succeeded"]


def kill_one(stack: Stack, run: str, service: str) -> str:
    """`kill -9` one replica of a fleet; returns its process id in Penstock."""
    fleet = [process for process in stack.view(run)["processes"] if process["service"] == service]
    [victim, *_] = [process for process in fleet if process["state"] == "ready"]
    os.kill(victim["pid"], signal.SIGKILL)
    return str(victim["id"])


def summary_of(stack: Stack, run: str) -> dict[str, Any]:
    """The summary in the run's folder."""
    found: dict[str, Any] = json.loads((stack.folder / run / "summary.json").read_text())
    return found


@dataclass(frozen=True)
class FinishedRun:
    """A run that has succeeded.

    `samples`: when each trained sample was generated, (start, end) in Unix seconds; `killed`: the id of the rollout
    replica that was killed; `replaced_by`: the ids of the replicas that were ready after it.
    """

    view: dict[str, Any]
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    samples: list[tuple[float, float]]
    killed: str
    replaced_by: set[str]


def finish_run(stack: Stack, model: Path, questions: Path) -> FinishedRun:
    """Train STEPS steps on-policy; after the first one, kill the only rollout replica."""
    run = stack.submit(document(model, questions, max_staleness=0, steps=STEPS))
    verdicts = Verdicts(stack, run)
    stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version")
    killed = kill_one(stack, run, "rollout")
    replaced_by: set[str] = set()

    def succeeded(view: dict[str, Any]) -> bool:
        fleet = [process for process in view["processes"] if process["service"] == "rollout"]
        replaced_by.update({process["id"] for process in fleet if process["state"] == "ready"} - {killed})
        return bool(view["state"] == "succeeded")

    view = stack.until(run, succeeded, "success")
    steps = stack.steps(run)
    return FinishedRun(view, summary_of(stack, run), steps, verdicts.trained(steps), killed, replaced_by)
