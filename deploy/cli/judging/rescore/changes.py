"""Owns what judging a run's trained responses again changes: per rollout step, in all, and sample by sample.

Must not judge, nor read an archive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from deploy.cli.judging.rescore.archived import TrainedSample
from services.contracts import Outcome
from services.sampler.advantage.rewards import Ramp, reward
from services.settings import Recipe
from verifier.sandbox.finding import Finding

HEADING = (
    f"{'step':>6}  {'samples':>7}  {'accuracy':>8}  {'now':>6}  {'reward':>7}  {'now':>7}  "
    f"{'c->w':>5}  {'w->c':>5}  {'->unknown':>9}  {'unknown->':>9}"
)


@dataclass(frozen=True)
class Rejudged:
    """A trained response with its finding of now. `reward`: of now, as the run would compute it; None if unknown."""

    sample: TrainedSample
    finding: Finding
    reward: float | None

    @property
    def changed(self) -> bool:
        """Whether the outcome is another one."""
        return self.sample.outcome is not self.finding.outcome

    @property
    def document(self) -> dict[str, Any]:
        """All that is known of it, for a line of JSON."""
        sample, finding = self.sample, self.finding
        return {
            "step": sample.step,
            "prompt": sample.prompt.id,
            "group": sample.group,
            "index": sample.index,
            "then": sample.outcome.value,
            "now": finding.outcome.value,
            "reward_then": sample.reward,
            "reward_now": self.reward,
            "score": finding.score,
            "answer": finding.answer,
            "reason": finding.reason,
            "response": sample.text,
        }

    @property
    def line(self) -> str:
        """What changed, in one line."""
        sample, finding = self.sample, self.finding
        where = f"step {sample.step}, prompt {sample.prompt.id}, sample {sample.index} of group {sample.group}"
        return f"{where}: {sample.outcome.value} then, {finding.outcome.value} now: {finding.reason}"


def rejudged(recipe: Recipe, sample: TrainedSample, finding: Finding) -> Rejudged:
    """A response with its finding, and the reward that the recipe's algorithm gives for it."""
    overlong = recipe.algorithm.overlong
    ramp = Ramp(recipe.rollout.max_new_tokens, recipe.overlong_cache, overlong.factor)
    punishment = (overlong.shape, ramp) if overlong.punishment else None
    earned = reward(recipe.algorithm.reward, finding.outcome, finding.score, sample.tokens, punishment)
    return Rejudged(sample, finding, earned)


@dataclass
class VerdictChanges:
    """What changed among the responses that were added. Means are over responses with a known verdict."""

    samples: int = 0
    moves: Counter[tuple[Outcome, Outcome]] = field(default_factory=Counter)
    rewards_then: list[float] = field(default_factory=list)
    rewards_now: list[float] = field(default_factory=list)

    def add(self, found: Rejudged) -> None:
        """Count a response."""
        self.samples += 1
        self.moves[found.sample.outcome, found.finding.outcome] += 1
        if found.sample.outcome is not Outcome.UNKNOWN:
            self.rewards_then.append(found.sample.reward)
        if found.reward is not None:
            self.rewards_now.append(found.reward)

    @property
    def changed(self) -> int:
        """How many responses have another outcome."""
        return sum(count for (then, now), count in self.moves.items() if then is not now)

    @property
    def accuracy_then(self) -> float | None:
        """The share of correct responses when they were trained; None without a verdict."""
        return self._accuracy(0)

    @property
    def accuracy_now(self) -> float | None:
        """The share of correct responses now; None without a verdict."""
        return self._accuracy(1)

    def _accuracy(self, side: int) -> float | None:
        outcomes = Counter[Outcome]()
        for move, count in self.moves.items():
            outcomes[move[side]] += count
        known = outcomes[Outcome.CORRECT] + outcomes[Outcome.WRONG]
        return outcomes[Outcome.CORRECT] / known if known else None

    def line(self, name: str) -> str:
        """A line below HEADING."""
        correct, wrong, unknown = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN
        gone = sum(self.moves[known, unknown] for known in (correct, wrong))
        come = sum(self.moves[unknown, known] for known in (correct, wrong))
        accuracies = [_shown(value, ".3f") for value in (self.accuracy_then, self.accuracy_now)]
        rewards = [_shown(_mean(values), "+.3f") for values in (self.rewards_then, self.rewards_now)]
        return (
            f"{name:>6}  {self.samples:>7}  {accuracies[0]:>8}  {accuracies[1]:>6}  {rewards[0]:>7}  {rewards[1]:>7}  "
            f"{self.moves[correct, wrong]:>5}  {self.moves[wrong, correct]:>5}  {gone:>9}  {come:>9}"
        )


@dataclass
class VerdictComparison:
    """The change of each rollout step, and of all together."""

    steps: dict[int, VerdictChanges] = field(default_factory=dict)
    total: VerdictChanges = field(default_factory=VerdictChanges)

    def add(self, found: Rejudged) -> None:
        """Count a response."""
        for change in (self.steps.setdefault(found.sample.step, VerdictChanges()), self.total):
            change.add(found)

    def summary(self) -> Iterator[str]:
        """What changed in all, and by how much the curve of the accuracy moved."""
        yield self.total.line("all")
        yield f"{self.total.changed} of {self.total.samples} verdicts changed"
        shifts = {
            step: change.accuracy_now - change.accuracy_then
            for step, change in self.steps.items()
            if change.accuracy_now is not None and change.accuracy_then is not None
        }
        if shifts:
            largest = max(shifts, key=lambda step: abs(shifts[step]))
            yield (
                f"the accuracy of a step moves by {fmean(shifts.values()):+.3f} on average, "
                f"at most by {shifts[largest]:+.3f} (step {largest})"
            )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
