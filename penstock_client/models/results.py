"""Owns the models of what a run yields: rollout steps, evaluations, comparisons.

Must not compute a score.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from penstock_client.models.base import ApiModel

REWARD_METRIC = "reward_"
"""The prefix of the step metric of a named reward."""


class PassRate(ApiModel):
    """pass@k with its standard error over prompts."""

    k: int
    value: float
    standard_error: float


class Evaluation(ApiModel):
    """The scores of one set: avg@k (`accuracy`), pass@k, maj@k, the mean score; errors are standard errors."""

    name: str
    set: str = "held-out"
    version: int = 0
    newest_version: int | None = None
    prompts: int = 0
    samples_per_prompt: int = 1
    accuracy: float = 0.0
    standard_error: float = 0.0
    pass_at: list[PassRate] = Field(default_factory=list)
    majority: float | None = None
    majority_standard_error: float | None = None
    score: float | None = None
    score_standard_error: float | None = None
    rewards: dict[str, float] = Field(default_factory=dict)
    unknown: int = 0
    dropped: int = 0


class RolloutStep(ApiModel):
    """The record of one rollout step; `id` is the cursor for those after it."""

    id: str
    step: int
    metrics: dict[str, float]
    learning_finished_at: float = 0.0


class StepList(ApiModel):
    """A run's time series, oldest step first."""

    steps: list[RolloutStep]


class SettingDifference(ApiModel):
    """A setting that is not the same in all runs; `values`: by run, without those that lack it."""

    path: str
    values: dict[str, Any]


class RunComparison(ApiModel):
    """Runs beside each other. `curves`: values at `steps`, by metric and run, None where there is none."""

    runs: list[str]
    settings: list[SettingDifference]
    steps: list[int]
    curves: dict[str, dict[str, list[float | None]]]
    thinned: bool = False


def reward_metric(name: str) -> str:
    """The step metric of the reward called `name`."""
    return REWARD_METRIC + name.replace("-", "_")


def reward_names(metrics: dict[str, float] | set[str]) -> list[str]:
    """The names of the rewards that have a metric among these step metrics, sorted."""
    return sorted(
        name.removeprefix(REWARD_METRIC).replace("_", "-") for name in metrics if name.startswith(REWARD_METRIC)
    )
