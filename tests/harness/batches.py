"""Owns rollout steps for the learner in tests and benchmarks, in which only the groups matter.

Must not make the groups, nor import torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.contracts import Batch, BatchGroup, SamplerState


def batch_with(groups: Iterable[BatchGroup], *, step: int = 0, version: int = 0) -> Batch:
    """A batch of `groups`, in their order, from a sampler that has just started."""
    return Batch(
        step=step,
        version=version,
        groups=tuple(groups),
        sampler_state=SamplerState(cursor=0, next_group=0),
        sampling_metrics={},
        generation_started_at=0.0,
        generation_finished_at=0.0,
    )
