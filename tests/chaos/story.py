"""Owns what follows from the streams alone: a run's rewinds, its groups, their verdicts and endings, recomputed.

Must not import the code under test, or use its decision on a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.chaos.evidence import Entry, Evidence
from tests.chaos.lookups import LANES

REWOUND, ORPHANED = "rewound", "group-orphaned"


@dataclass(frozen=True)
class GroupSize:
    """The size of a dispatched group: its samples, and how many of them its last task requests."""

    samples: int
    wanted: int


class Story:
    """The evidence and what follows from it. A life is the time between two rewinds; lives are counted from 0."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @cached_property
    def rewinds(self) -> list[tuple[int, int]]:
        """The first entry after each rewind, as an entry id: the first task that is dispatched again."""
        marks: list[tuple[int, int]] = []
        for event in self.evidence.own("events"):
            if event.body is None or event.body.get("phase") != REWOUND:
                continue
            since = marks[-1] if marks else (0, 0)
            whole: dict[str, bool] = {}
            mark = event.order
            for task in self.evidence.own("tasks"):
                if task.body is None or not since <= task.order <= event.order:
                    continue
                name, screened = task.body["group"], task.body.get("stop") is not None
                if name in whole and (screened or whole[name]):
                    mark = task.order
                    break
                whole[name] = not screened
            marks.append(mark)
        return marks

    def life(self, entry: Entry) -> int:
        """The life of the run in which an entry was written."""
        return sum(mark <= entry.order for mark in self.rewinds)

    def messages(self, stream: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The run's own messages on a stream, each with its life."""
        for entry in self.evidence.own(stream):
            if entry.body is not None:
                yield self.life(entry), entry.body

    def messages_between(self, stream: str, phase: str) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        """Like `messages`, with the life and how many events of `phase` precede the message."""
        events = [
            event.order for event in self.evidence.own("events") if event.body and event.body.get("phase") == phase
        ]
        for entry in self.evidence.own(stream):
            if entry.body is not None:
                yield (self.life(entry), sum(order <= entry.order for order in events)), entry.body

    def dispatched(self, lane: str) -> dict[str, GroupSize]:
        """The lane's groups and their sizes."""
        return self._dispatched[lane]

    @cached_property
    def _dispatched(self) -> dict[str, dict[str, GroupSize]]:
        found: dict[str, dict[str, GroupSize]] = {lane: {} for lane in LANES}
        for lane, prefix in LANES.items():
            for body in self.evidence.bodies(f"{prefix}tasks"):
                stop = body.get("stop")
                found[lane][body["group"]] = GroupSize(body["samples"], body["samples"] if stop is None else stop)
        return found

    @cached_property
    def evaluated_again(self) -> set[str]:
        """The evaluation groups dispatched since the last rewind, which deletes all others."""
        return {body["group"] for life, body in self.messages("evaluation:tasks") if life == len(self.rewinds)}

    def verdicts(self, lane: str) -> dict[str, dict[int, dict[str, Any]]]:
        """By group: the first verdict of each sample, in the last life that has verdicts of the group."""
        return self._verdicts[lane]

    @cached_property
    def _verdicts(self) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
        return {lane: self._judged(lane) for lane in LANES}

    def _judged(self, lane: str) -> dict[str, dict[int, dict[str, Any]]]:
        found: dict[str, tuple[int, dict[int, dict[str, Any]]]] = {}
        for life, body in self.messages(f"{LANES[lane]}verdicts"):
            latest, known = found.get(body["group"], (life, {}))
            if life > latest:
                known = {}
            known.setdefault(body["index"], body)
            found[body["group"]] = (life, known)
        return {name: known for name, (_, known) in found.items()}

    @cached_property
    def judged(self) -> dict[str, dict[int, dict[str, Any]]]:
        """The verdicts of the training lane."""
        return self.verdicts("train")

    @cached_property
    def batches(self) -> dict[int, dict[str, Any]]:
        """The last published batch of each step."""
        return {body["step"]: body for body in self.evidence.bodies("batches")}

    @cached_property
    def trained(self) -> dict[str, list[int]]:
        """By group: the steps of the surviving history that trained it."""
        found: dict[str, list[int]] = {}
        for record in self.evidence.steps:
            for name in record["groups"]:
                found.setdefault(name, []).append(record["step"])
        return found

    @cached_property
    def letters(self) -> dict[str, dict[str, Any]]:
        """By group: the dead letter that ends it. The letter of an invalid message ends nothing."""
        letters = self.evidence.bodies("dead")
        return {letter["group"]: letter for letter in letters if letter.get("group") and letter["cause"] != "invalid"}

    @cached_property
    def orphaned(self) -> dict[str, str]:
        """By group: the text of its event group-orphaned: its messages were gone, and it was released as dead."""
        found = {}
        for event in self.evidence.bodies("events"):
            if event.get("phase") == ORPHANED:
                found[event["text"].split(":")[0]] = event["text"]
        return found

    def ending(self, name: str) -> str | None:
        """How a training group ended, None while it is open: by its hash or, if that is deleted, as derived.

        A hash is deleted long after its group was released. A kept group that was not trained can only be stale.
        """
        if name in self.trained:
            return "trained"
        state = self.evidence.groups.get(name, {}).get("state")
        if state is not None:
            return state if state in ("filtered", "stale", "dead") else None
        if name in self.letters or name in self.orphaned:
            return "dead"
        decision = self.decision(name, self.dispatched("train")[name])
        return "stale" if decision == "kept" else decision

    def decision(self, name: str, size: GroupSize) -> str | None:
        """The decision on a training group by the rule of dynamic sampling; None while a verdict is missing."""
        known = self.judged.get(name, {})
        if len(known) < size.samples:
            return None
        rule = self.evidence.recipe["algorithm"]["dynamic_sampling"]
        outcomes = [verdict["outcome"] for verdict in known.values()]
        correct, wrong = outcomes.count("correct"), outcomes.count("wrong")
        if correct + wrong < (rule.get("min_known") or size.samples):
            return "dead"
        return "kept" if (correct and wrong) or not rule.get("enabled", True) else "filtered"
