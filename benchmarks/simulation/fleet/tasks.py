"""Owns the groups of a simulated fleet: prompts with known pass rates, and responses with a long tail.

Must not contain a rule of selection, screening or filtering.
"""

from __future__ import annotations

import random
from collections import Counter

from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.pipeline import MORE
from benchmarks.simulation.replica import SimulatedGroup
from benchmarks.studies.selection.prompts import Drawn, KnownPrompts
from services.contracts import Outcome
from services.sampler.queue.starvation import Level
from services.sampler.selection.posterior import mixed
from services.sampler.selection.screening import COMPLETE


class FleetGroup(SimulatedGroup):
    """A group whose prompt and pass rate are known, with the outcomes of the samples that were requested."""

    def __init__(self, number: int, lengths: tuple[int, ...], drawn: Drawn) -> None:
        super().__init__(number, lengths)
        self.drawn = drawn
        self.answers: list[Outcome] = []


class FleetTasks:
    """The `Tasks` of a fleet. Length and correctness are independent.

    `signal`: by group decided, the chance 1 - p^G - (1-p)^G that a whole group of its prompt is mixed, added up.
    """

    def __init__(self, prompts: KnownPrompts, lengths: Lengths, seed: int) -> None:
        self._prompts, self._lengths = prompts, lengths
        self._random = random.Random(f"{seed}:lengths")
        self._in_flight: Counter[str] = Counter()
        self._numbers = 0
        self.decided, self.signal = 0, 0.0

    def draw(self, step: int, level: Level) -> tuple[SimulatedGroup, int]:
        """A new group; see `Tasks`."""
        prompts = self._prompts
        drawn = prompts.draw(step, self._in_flight, "boundary" if level >= Level.BOUNDARY else "")
        self._in_flight[drawn.prompt] += 1
        self._numbers += 1
        return FleetGroup(self._numbers, self._lengths.draw(self._random, prompts.size), drawn), prompts.screened

    def decide(self, group: SimulatedGroup) -> str:
        """The sampler's decision; see `Tasks`."""
        assert isinstance(group, FleetGroup)
        prompts, drawn = self._prompts, group.drawn
        group.answers += prompts.answers(drawn, group.requested - len(group.answers))
        if (decision := prompts.decide(group.answers)) == COMPLETE:
            return MORE
        prompts.observe(drawn, group.answers)
        self._in_flight[drawn.prompt] -= 1
        if not self._in_flight[drawn.prompt]:
            del self._in_flight[drawn.prompt]
        self.decided += 1
        self.signal += mixed(drawn.rate, prompts.size)
        return decision
