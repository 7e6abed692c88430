"""Owns the learning rates of the optimizer: constant after a linear warm-up, in rollout steps.

Must not take an optimizer step.
"""

from __future__ import annotations

from typing import Any


class LearningRate:
    """The learning rates of an optimizer's parameter groups, of which the policy's is the first."""

    def __init__(self, optimizer: Any, warmup_rollout_steps: int) -> None:
        self._groups = optimizer.param_groups
        self._rates = [group["lr"] for group in self._groups]
        self._warm = warmup_rollout_steps

    def set(self, wanted: float | None, rollout_steps: int) -> float:
        """Set the rates for the rollout step after `rollout_steps` of them; never 0. Returns the policy's.

        `wanted`: the policy's rate from now on, before any warm-up; None: as it is.
        """
        self._rates[0] = self._rates[0] if wanted is None else wanted
        share = min(1.0, (rollout_steps + 1) / self._warm) if self._warm else 1.0
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = share * rate
        return share * float(self._rates[0])
