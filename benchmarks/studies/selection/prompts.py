"""Owns prompts with known pass rates, drawn and judged by the sampler's own rules.

Must not contain a selection rule, nor know how long a response takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.contracts import Outcome, Prompt
from services.sampler.advantage.filtering import decide
from services.sampler.selection.posterior import PassRates
from services.sampler.selection.screening import screen
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


class KnownPrompts:
    """The prompts, their selection, and their posteriors. All ways see the same prompts for the same seed."""

    def __init__(
        self,
        population: str,
        way: Way,
        prompts: int,
        group_size: int,
        seed: int,
        half_life: float = Defaults().half_life,
        exploration: float = Defaults().exploration,
    ) -> None:
        self.rates = POPULATIONS[population](np.random.default_rng(seed), prompts)
        self.way, self.size = way, group_size
        self.posterior = PassRates(half_life)
        self._answers = random.Random(f"{seed}:{way.title}")
        known = tuple(Prompt(id=str(place), messages=(), verifier="", reference={}) for place in range(prompts))
        self._selection = Selection(known, seed, self.posterior, Rule(group_size, exploration))

    @property
    def screened(self) -> int:
        """How many samples of a group are wanted first."""
        return self.way.screen_samples if self.way.screens else self.size

    def draw(self, step: int, in_flight: Container[str], strategy: str = "") -> Drawn:
        """The next prompt for the policy of a rollout step, by this way's strategy or another."""
        prompt = self._selection.next(strategy or self.way.strategy, step, in_flight).id
        return Drawn(prompt, float(self.rates[int(prompt)]), step)

    def answers(self, drawn: Drawn, samples: int) -> list[Outcome]:
        """The outcomes of this many more samples."""
        draw, rate = self._answers.random, drawn.rate
        return [Outcome.CORRECT if draw() < rate else Outcome.WRONG for _ in range(samples)]

    def decide(self, outcomes: Sequence[Outcome]) -> str:
        """The decision on a group: COMPLETE, KEPT, or the name of its release."""
        if len(outcomes) < self.size:
            return screen(outcomes, self.size, self.size)
        return decide(outcomes, self.size, enabled=True)

    def observe(self, drawn: Drawn, outcomes: Sequence[Outcome]) -> None:
        """Add a decided group to its prompt's posterior."""
        self.posterior.observe(drawn.prompt, outcomes.count(Outcome.CORRECT), len(outcomes), drawn.step)

    def rise(self, drift: float) -> None:
        """Train: raise the pass rates."""
        self.rates = risen(self.rates, drift)
