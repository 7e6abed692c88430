"""Owns what tuning knows of a run: the signals of one rollout step, and their sums over several.

Must not do I/O, nor decide anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from services.contracts import StepRecord

WAITING = "batch_wait_seconds"
"""The step metric: how long the learner waited for the batch."""


@dataclass(frozen=True)
class StepSignals:
    """One rollout step. `wall_s`: seconds from the end of the previous one's training to the end of its own.

    `waiting_s`: seconds of it that the learner waited for the batch. `tokens`: response tokens in the loss.
    `staleness`: the mean of its groups, in rollout steps. `kept`, `filtered`, `stale`: groups since the previous batch.
    `in_flight`: the most groups in flight during it. `steady`: nothing else than the knobs explains its time: neither
    a pause, nor a restart, nor replicas that are not ready.
    """

    step: int
    wall_s: float
    waiting_s: float
    groups: int
    tokens: float
    staleness: float
    kept: float
    filtered: float
    stale: float
    in_flight: int
    steady: bool = True


def signals_of(record: StepRecord, before: StepRecord, in_flight: int, steady: bool) -> StepSignals | None:
    """The signals of a step record after that of the step `before`; None if they do not follow each other.

    A learner of an older release does not state its wait: None too.
    """
    wall_s = record.learning_finished_at - before.learning_finished_at
    if record.step != before.step + 1 or wall_s <= 0 or WAITING not in record.metrics or not record.groups:
        return None
    metrics = record.metrics
    return StepSignals(
        step=record.step,
        wall_s=wall_s,
        waiting_s=min(wall_s, metrics[WAITING]),
        groups=len(record.groups),
        tokens=metrics.get("trained_tokens", 0.0),
        staleness=metrics.get("staleness_mean", fmean(record.staleness) if record.staleness else 0.0),
        kept=metrics.get("groups_kept", float(len(record.groups))),
        filtered=metrics.get("groups_filtered", 0.0),
        stale=metrics.get("groups_stale", 0.0),
        in_flight=in_flight,
        steady=steady and record.fence == before.fence,
    )


@dataclass(frozen=True)
class StepWindow:
    """Some rollout steps in a row, at least one."""

    steps: Sequence[StepSignals]

    @property
    def _wall_s(self) -> float:
        return sum(step.wall_s for step in self.steps)

    @property
    def idle_share(self) -> float:
        """The learner's share of the time that it waited for batches, 0 to 1."""
        return sum(step.waiting_s for step in self.steps) / self._wall_s

    @property
    def throughput(self) -> float:
        """Tokens per second of groups that were kept and not released as stale, with the trained ones' mean length.

        In the long run it is that of the trained tokens, but not while groups that wait add up or are used up. Groups
        per second would fall with the length of the responses.
        """
        kept = sum(step.kept - step.stale for step in self.steps)
        mean = sum(step.tokens or step.groups for step in self.steps) / sum(step.groups for step in self.steps)
        return max(kept, 1.0) * mean / self._wall_s

    @property
    def error(self) -> float:
        """The standard error of the throughput, as a share of it; 0 for a single step."""
        if len(self.steps) < 2:
            return 0.0
        rates = [StepWindow((step,)).throughput for step in self.steps]
        return stdev(rates) / math.sqrt(len(rates)) / fmean(rates)

    @property
    def staleness(self) -> float:
        """The mean staleness of the trained groups, in rollout steps."""
        return sum(step.staleness * step.groups for step in self.steps) / sum(step.groups for step in self.steps)

    @property
    def stale_share(self) -> float:
        """The groups released as stale, of those and the trained ones, 0 to 1."""
        stale = sum(step.stale for step in self.steps)
        return stale / (stale + sum(step.groups for step in self.steps))

    @property
    def survival(self) -> float:
        """The share of judged groups that were kept, above 0 and at most 1."""
        kept = sum(step.kept for step in self.steps)
        judged = kept + sum(step.filtered for step in self.steps)
        return max(kept / judged, 0.05) if judged else 1.0

    @property
    def in_flight(self) -> float:
        """The most groups in flight of a step, mean over the steps."""
        return fmean(step.in_flight for step in self.steps)
