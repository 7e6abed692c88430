"""Owns the use of a limited cluster: what its runs request, and whether another run has room.

Must not ask the cluster for its current size: Ray's autoscaler adds pods for what is placed.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.contracts import RunState
from services.settings import ClusterLimits, ResourceRequest
from services.settings.cluster_limits import role_requests
from services.streams.runs.queue import rank
from services.streams.state.run_record import RunRecord


def shortage(limits: ClusterLimits, record: RunRecord, records: Iterable[RunRecord]) -> str | None:
    """Why a queued run has no room, or None. Runs are placed by priority, then in the order of their submission.

    A run that would not even fit alone is skipped, so that it does not block the runs behind it.
    """
    others: dict[str, list[ResourceRequest]] = {}
    for other in records:
        if other.problem:
            continue  # nothing is placed for a run that this release cannot read
        before = other.state is RunState.QUEUED and rank(other) < rank(record)
        waits = before and _alone(limits, other) is None
        holds = not other.state.ended and other.state is not RunState.QUEUED
        if other.id != record.id and (waits or holds):
            for role, processes in _requests(other).items():
                others.setdefault(role, []).extend(processes)
    return _not_allowed(limits, record) or limits.shortage(_requests(record), others)


def _alone(limits: ClusterLimits, record: RunRecord) -> str | None:
    return _not_allowed(limits, record) or limits.shortage(_requests(record), {})


def _not_allowed(limits: ClusterLimits, record: RunRecord) -> str:
    """Why the cluster does not allow its rewards: the chart may have changed since it was submitted."""
    return "; ".join(limits.reward_faults(record.recipe))


def _requests(record: RunRecord) -> dict[str, list[ResourceRequest]]:
    return role_requests(record.recipe, record.rollout_replicas)
