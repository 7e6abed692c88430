"""Owns the results of a rollout step: its optimizer steps, and the metrics that they add up to.

Must not run a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.algorithm.loss import SUMS, means
from learner.algorithm.parity import EngineComparison, ReplicaDifference
from learner.training.minibatches import MiniBatch
from services.contracts import OptimizerStepRecord


@dataclass(frozen=True)
class Trained:
    """The result of one rollout step: its metrics, and its optimizer steps in order."""

    metrics: dict[str, float]
    optimizer: tuple[OptimizerStepRecord, ...]
    damaged: tuple[str, ...] = ()
    """The payloads that could not be trained, with the reason. Their loss was masked."""
    batch_digest: str = ""
    """That of the batch as it was archived, with these masks."""
    differences: dict[str, ReplicaDifference] = field(default_factory=dict)
    """Between the log-probs of the learner and those of each rollout replica, on tokens of the same weights."""
    step_of: dict[str, int] = field(default_factory=dict)
    """By group: the number of its optimizer step, from 1 on. A group without one was in no trainable mini-batch."""

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps that were applied."""
        return sum(step.applied for step in self.optimizer)

    @property
    def skipped(self) -> int:
        """The number of optimizer steps that were skipped because of a non-finite gradient."""
        return len(self.optimizer) - self.optimizer_steps


@dataclass(frozen=True)
class OptimizerStep:
    """The result of one optimizer step.

    sums, histograms: those of TokenLoss, over all ranks. gradient_norm: before clipping. applied: false if skipped.
    """

    sums: Tensor
    histograms: Tensor
    gradient_norm: float
    applied: bool

    @property
    def record(self) -> OptimizerStepRecord:
        """The stored form, in which values that are not finite are None, because JSON has no number for them."""
        loss, norm = float(self.sums[SUMS.index("loss")]), self.gradient_norm
        return OptimizerStepRecord(
            loss=loss if math.isfinite(loss) else None,
            gradient_norm=norm if math.isfinite(norm) else None,
            applied=self.applied,
        )


def summary(
    plans: Sequence[MiniBatch],
    steps: Sequence[OptimizerStep],
    comparison: EngineComparison,
    rate: float,
    seconds: float,
    *,
    per_token: bool,
) -> Trained:
    """The result of a rollout step of the mini-batches `plans`.

    `rate`: the policy's learning rate; `seconds`: how long the step took. `per_token`: whether the tokens of a response
    have advantages of their own, so that no response as a whole has none.
    """
    trained = [sample for plan in plans for share in plan.shares for sample in share]
    metrics = {
        **_means([step for step in steps if step.applied]),
        **comparison.metrics(),
        "learning_rate": rate,
        "skipped_optimizer_steps": float(sum(not step.applied for step in steps)),
        "learning_seconds": seconds,
    }
    if not per_token:
        metrics["zero_advantage_share"] = sum(sample.advantage == 0 for sample in trained) / max(len(trained), 1)
    return Trained(
        metrics, tuple(step.record for step in steps), differences=comparison.by_replica(), step_of=numbered(plans)
    )


def numbered(plans: Sequence[MiniBatch]) -> dict[str, int]:
    """By group: which of the optimizer steps of `plans` trains it, counted from 1 on. See `Trained.step_of`."""
    trainable = [plan for plan in plans if plan.trainable]
    return {group: number for number, plan in enumerate(trainable, start=1) for group in plan.groups}


def _means(applied: list[OptimizerStep]) -> dict[str, float]:
    """The metrics of the tokens in the applied optimizer steps; none, rather than zeros, if no step was applied.

    The sums of a skipped step may not be finite, and a step record is JSON.
    """
    if not applied:
        return {}
    sums = torch.stack([step.sums for step in applied]).sum(0)
    histograms = torch.stack([step.histograms for step in applied]).sum(0)
    return means(sums, histograms) | {
        "loss": float(sums[SUMS.index("loss")]) / len(applied),
        "gradient_norm": sum(step.gradient_norm for step in applied) / len(applied),
    }
