"""Owns the seconds and CPU-seconds in which a training reaches an accuracy, from its steps and its evaluations.

Must not measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Spent:
    """What a training has spent since its first response began, start-up and evaluations apart."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Reached:
    """What was spent until an accuracy was reached; if it never was (`in_time` false), until the last step."""

    spent: Spent
    in_time: bool


@dataclass(frozen=True)
class Training:
    """One training of either side. `spent`: at the end of each step; step 0, where it starts, is among them.

    `accuracies`: on the held-out questions, by step, in increasing order. `start_up`: what was spent before the first
    response began.
    """

    spent: Mapping[int, Spent]
    accuracies: Mapping[int, float]
    start_up: Spent

    @property
    def last(self) -> int:
        """The last step."""
        return max(self.spent)

    def reaching(self, accuracy: float) -> Reached:
        """When the accuracy was first reached; between two evaluations, a straight line over what was spent."""
        steps = sorted(self.accuracies)
        if self.accuracies[steps[0]] >= accuracy:
            return Reached(self.spent[steps[0]], True)
        for before, after in pairwise(steps):
            low, high = self.accuracies[before], self.accuracies[after]
            if high >= accuracy:
                share, early, late = (accuracy - low) / (high - low), self.spent[before], self.spent[after]
                seconds = early.seconds + share * (late.seconds - early.seconds)
                return Reached(Spent(seconds, early.cpu_s + share * (late.cpu_s - early.cpu_s)), True)
        return Reached(self.spent[self.last], False)


def of_record(document: Mapping[str, Any], accuracies: Mapping[int, float]) -> Training:
    """The training that a record of benchmarks.peers.trl.train tells of. Raises KeyError for one that is not whole."""
    steps = {int(step["step"]): Spent(step["seconds"], step["cpu_seconds"]) for step in document["steps"]}
    start_up = Spent(document["startup_seconds"], document["startup_cpu_seconds"])
    return Training({0: Spent(0.0, 0.0)} | steps, accuracies, start_up)


def unreached(name: str, accuracy: float, found: Sequence[Reached]) -> str | None:
    """A sentence on the repeats in which a side did not reach an accuracy; None if it did in all."""
    late = sum(not each.in_time for each in found)
    if not late:
        return None
    missed = f"{late} of {len(found)} repeats"
    return f"{name} did not reach {accuracy:.2f} in {missed}: the whole training stands for it."
