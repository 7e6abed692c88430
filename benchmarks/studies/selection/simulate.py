"""Owns the simulation: prompts with known pass rates that rise with training, selected by the sampler's own rules.

Must not contain a selection rule.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from benchmarks.studies.selection.prompts import Drawn, KnownPrompts, Way
from services.sampler.advantage.filtering import KEPT
from services.sampler.selection.posterior import mixed
from services.sampler.selection.screening import COMPLETE
from services.settings.algorithm.sampling import SelectionSettings as Defaults


@dataclass(frozen=True)
class Scale:
    """The size of the simulation. `drift`: the rise of the logit of every pass rate per rollout step.

    `in_flight`: groups that are generated while others are judged. `half_life` and `exploration`: the defaults of the
    settings.
    """

    prompts: int = 2000
    steps: int = 60
    groups_per_step: int = 64
    group_size: int = 16
    in_flight: int = 64
    drift: float = 0.0
    half_life: float = Defaults().half_life
    exploration: float = Defaults().exploration


@dataclass
class Result:
    """The result of one simulation. `samples`: by rollout step. `kept_rates`: pass rates of trained groups when drawn.

    `believed` and `true`: the probability that a drawn group is mixed, according to the posterior and in truth.
    """

    samples: list[int] = field(default_factory=list)
    kept_rates: list[float] = field(default_factory=list)
    trained: Counter[str] = field(default_factory=Counter)
    believed: list[float] = field(default_factory=list)
    true: list[float] = field(default_factory=list)


class Simulation:
    """One simulation. `result` grows with each rollout step. All ways see the same prompts for the same seed."""

    def __init__(self, population: str, way: Way, scale: Scale, seed: int) -> None:
        self._prompts = KnownPrompts(
            population, way, scale.prompts, scale.group_size, seed, scale.half_life, scale.exploration
        )
        self._scale, self._step = scale, 0
        self._in_flight: deque[Drawn] = deque()
        self.result = Result()

    def run(self) -> Result:
        """Simulate all rollout steps."""
        for _ in range(self._scale.steps):
            self.step()
        return self.result

    def step(self) -> None:
        """Draw and judge groups until a batch is full, then train on it."""
        self.result.samples.append(0)
        kept = 0
        while kept < self._scale.groups_per_step:
            while len(self._in_flight) < self._scale.in_flight:
                self._in_flight.append(self._draw())
            kept += self._judge(self._in_flight.popleft())
        self._step += 1
        self._prompts.rise(self._scale.drift)

    def _draw(self) -> Drawn:
        drawn = self._prompts.draw(self._step, {group.prompt for group in self._in_flight})
        posterior = self._prompts.posterior.of(drawn.prompt, self._step)
        self.result.believed.append(posterior.mixed(self._scale.group_size))
        self.result.true.append(mixed(drawn.rate, self._scale.group_size))
        return drawn

    def _judge(self, drawn: Drawn) -> bool:
        """Generate and judge a group. Returns whether it is kept."""
        prompts = self._prompts
        outcomes = prompts.answers(drawn, prompts.screened)
        if (decision := prompts.decide(outcomes)) == COMPLETE:
            outcomes += prompts.answers(drawn, prompts.size - len(outcomes))
            decision = prompts.decide(outcomes)
        prompts.observe(drawn, outcomes)
        self.result.samples[-1] += len(outcomes)
        if decision != KEPT:
            return False
        self.result.kept_rates.append(drawn.rate)
        self.result.trained[drawn.prompt] += 1
        return True
