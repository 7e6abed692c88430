"""Owns the simulation: prompts with known pass rates that rise with training, selected by the sampler's own rules.

Must not contain a selection rule.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.contracts import Outcome, Prompt
from services.sampler.advantage.filtering import KEPT, decide
from services.sampler.selection.posterior import PassRates, mixed
from services.sampler.selection.screening import COMPLETE, screen
from services.sampler.selection.strategies import STRATEGIES, Rule, Selection
from services.settings.algorithm.sampling import SelectionSettings as Defaults

Rates = NDArray[np.float64]


def u_shaped(rng: np.random.Generator, prompts: int) -> Rates:
    """Beta(1/2, 1/2): most prompts are solved almost always or almost never."""
    return rng.beta(0.5, 0.5, prompts)


def mostly_impossible(rng: np.random.Generator, prompts: int) -> Rates:
    """Of ten prompts, seven are never solved, at any step, and one always. The pass rates of the others are uniform."""
    kind = rng.random(prompts)
    return np.where(kind < 0.7, 0.0, np.where(kind < 0.8, 1.0, rng.random(prompts)))


POPULATIONS: Mapping[str, Callable[[np.random.Generator, int], Rates]] = {
    "U-shaped": u_shaped,
    "mostly impossible": mostly_impossible,
}


def risen(rates: Rates, drift: float) -> Rates:
    """The pass rates after a rollout step, which raises the logit of each by `drift`. 0 and 1 do not change."""
    odds: Rates = np.exp(drift) * rates
    return odds / (odds + (1.0 - rates))


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


class Way(NamedTuple):
    """One way to select prompts: an entry of STRATEGIES and, if it screens, the number of samples in the screen.

    `again`: the same way with other answers, which shows how much of a difference is chance.
    """

    strategy: str
    screen_samples: int = 4
    again: bool = False

    @property
    def screens(self) -> bool:
        """Whether a group is judged before it is complete."""
        return STRATEGIES[self.strategy].screens

    @property
    def title(self) -> str:
        """Its name in tables."""
        return f"{self.strategy}{f' {self.screen_samples}' if self.screens else ''}{' (again)' if self.again else ''}"


class Drawn(NamedTuple):
    """An in-flight group: its prompt, the pass rate when it was drawn, and the rollout step of its policy."""

    prompt: str
    rate: float
    step: int


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
        self._rates = POPULATIONS[population](np.random.default_rng(seed), scale.prompts)
        self._answers = random.Random(f"{seed}:{way.title}")
        self._way, self._scale, self._step = way, scale, 0
        self._posterior = PassRates(scale.half_life)
        prompts = tuple(Prompt(id=str(place), messages=(), verifier="", reference={}) for place in range(scale.prompts))
        self._selection = Selection(prompts, seed, self._posterior, Rule(scale.group_size, scale.exploration))
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
        self._rates = risen(self._rates, self._scale.drift)

    def _draw(self) -> Drawn:
        prompt = self._selection.next(self._way.strategy, self._step, {group.prompt for group in self._in_flight}).id
        rate = float(self._rates[int(prompt)])
        self.result.believed.append(self._posterior.of(prompt, self._step).mixed(self._scale.group_size))
        self.result.true.append(mixed(rate, self._scale.group_size))
        return Drawn(prompt, rate, self._step)

    def _judge(self, drawn: Drawn) -> bool:
        """Generate and judge a group. Returns whether it is kept."""
        size = self._scale.group_size
        answers = (Outcome.CORRECT if self._answers.random() < drawn.rate else Outcome.WRONG for _ in range(size))
        outcomes = list(islice(answers, self._way.screen_samples)) if self._way.screens else []
        if not outcomes or screen(outcomes, size, size) == COMPLETE:
            outcomes += answers
        self._posterior.observe(drawn.prompt, outcomes.count(Outcome.CORRECT), len(outcomes), drawn.step)
        self.result.samples[-1] += len(outcomes)
        kept = len(outcomes) == size and decide(outcomes, size, enabled=True) == KEPT
        if kept:
            self.result.kept_rates.append(drawn.rate)
            self.result.trained[drawn.prompt] += 1
        return kept
