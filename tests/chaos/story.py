"""Owns what follows from the streams alone: a run's rewinds, its groups and what each was told, recomputed.

Must not import the code under test, nor look at what that says of a group's end.
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
class Asked:
    """What a group was dispatched for: how many samples at most, and how many its last task wants."""

    samples: int
    wanted: int


class Story:
    """Evidence with what can be derived from it. A life is the time between two rewinds; lives count from 0."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @cached_property
    def rewinds(self) -> list[tuple[int, int]]:
        """Where each rewind begins, in the order of entry ids: with the first task that is asked for once more."""
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

    def told(self, stream: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The run's own messages on a stream, with the life each belongs to."""
        for entry in self.evidence.own(stream):
            if entry.body is not None:
                yield self.life(entry), entry.body

    def told_between(self, stream: str, phase: str) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        """As `told`, and how many events of a phase had been written by then."""
        events = [
            event.order for event in self.evidence.own("events") if event.body and event.body.get("phase") == phase
        ]
        for entry in self.evidence.own(stream):
            if entry.body is not None:
                yield (self.life(entry), sum(order <= entry.order for order in events)), entry.body

    def dispatched(self, lane: str) -> dict[str, Asked]:
        """The lane's groups and what their last task asks for."""
        return self._dispatched[lane]

    @cached_property
    def _dispatched(self) -> dict[str, dict[str, Asked]]:
        found: dict[str, dict[str, Asked]] = {lane: {} for lane in LANES}
        for lane, prefix in LANES.items():
            for body in self.evidence.bodies(f"{prefix}tasks"):
                stop = body.get("stop")
                found[lane][body["group"]] = Asked(body["samples"], body["samples"] if stop is None else stop)
        return found

    def verdicts(self, lane: str) -> dict[str, dict[int, dict[str, Any]]]:
        """By group: the first verdict of each sample, in the last life in which the group was judged at all."""
        return self._verdicts[lane]

    @cached_property
    def _verdicts(self) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
        return {lane: self._judged(lane) for lane in LANES}

    def _judged(self, lane: str) -> dict[str, dict[int, dict[str, Any]]]:
        found: dict[str, tuple[int, dict[int, dict[str, Any]]]] = {}
        for life, body in self.told(f"{LANES[lane]}verdicts"):
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
        """The batch of each step: the one published last."""
        return {body["step"]: body for body in self.evidence.bodies("batches")}

    @cached_property
    def trained(self) -> dict[str, list[int]]:
        """By group: the steps of the surviving history that name it."""
        found: dict[str, list[int]] = {}
        for record in self.evidence.steps:
            for name in record["groups"]:
                found.setdefault(name, []).append(record["step"])
        return found

    @cached_property
    def letters(self) -> dict[str, dict[str, Any]]:
        """By group: the dead letter that ends it. A message that was no message of this run ends nothing."""
        letters = self.evidence.bodies("dead")
        return {letter["group"]: letter for letter in letters if letter.get("group") and letter["cause"] != "invalid"}

    @cached_property
    def orphaned(self) -> dict[str, str]:
        """By group: what the sampler said when it found that a group's messages are gone, and gave it up."""
        found = {}
        for event in self.evidence.bodies("events"):
            if event.get("phase") == ORPHANED:
                found[event["text"].split(":")[0]] = event["text"]
        return found

    def ending(self, name: str) -> str | None:
        """How a training group ended, None while it is open: as its hash says, or, where that is gone, as it must have.

        A hash goes long after its group was released. One that was kept and not trained can only have grown stale.
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

    def decision(self, name: str, asked: Asked) -> str | None:
        """What the verdicts make of a training group by the rule of dynamic sampling; None while one is missing."""
        known = self.judged.get(name, {})
        if len(known) < asked.samples:
            return None
        rule = self.evidence.recipe["algorithm"]["dynamic_sampling"]
        outcomes = [verdict["outcome"] for verdict in known.values()]
        correct, wrong = outcomes.count("correct"), outcomes.count("wrong")
        if correct + wrong < (rule.get("min_known") or asked.samples):
            return "dead"
        return "kept" if (correct and wrong) or not rule.get("enabled", True) else "filtered"
