"""Owns how the rewards of a rollout step become one advantage per token, with the values of a value head (PPO).

Must not run the network or an optimizer step; it gets the values at the start of the rollout step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from learner.algorithm.values import Estimate, gae, moments, whitened
from learner.training.minibatches import MicroBatch
from services.settings import ValueSettings

Parts = Sequence[Sequence[MicroBatch]]


def with_advantages(
    work: Parts, values: Sequence[Sequence[Tensor]], settings: ValueSettings, all_reduce: Callable[[Tensor], Tensor]
) -> tuple[list[list[MicroBatch]], list[list[Tensor]]]:
    """Replace the reward in the `data.advantage` of each micro-batch by GAE's advantages. Collective.

    values: [N] for each micro-batch of each optimizer step, as `work`. `all_reduce` adds up a CPU tensor over all
    ranks. Returns the micro-batches, and the returns [N] of each.
    """
    estimates = [
        [_estimate(batch, before, settings) for batch, before in zip(part, parts, strict=True)]
        for part, parts in zip(work, values, strict=True)
    ]
    if settings.whiten:
        estimates = _whitened(work, estimates, all_reduce)
    trained = [
        [
            replace(batch, data=replace(batch.data, advantage=found.advantage))
            for batch, found in zip(*parts, strict=True)
        ]
        for parts in zip(work, estimates, strict=True)
    ]
    return trained, [[found.returns for found in part] for part in estimates]


def _estimate(batch: MicroBatch, values: Tensor, settings: ValueSettings) -> Estimate:
    return gae(values, batch.data.advantage, batch.data.sample, settings.discount, settings.gae_lambda)


def _whitened(
    work: Parts, estimates: list[list[Estimate]], all_reduce: Callable[[Tensor], Tensor]
) -> list[list[Estimate]]:
    """Scale the advantages by their moments over all trained tokens of the rollout step, on all ranks."""
    total = torch.zeros(3, dtype=torch.float64)
    for part, found in zip(work, estimates, strict=True):
        for batch, estimate in zip(part, found, strict=True):
            total += moments(estimate.advantage, batch.data.weight > 0)
    total = all_reduce(total)
    return [
        [estimate._replace(advantage=whitened(estimate.advantage, total)) for estimate in part] for part in estimates
    ]
