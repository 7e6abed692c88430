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
        if other.id != record.id and (waits or _holds(other)):
            for role, processes in _requests(other).items():
                others.setdefault(role, []).extend(processes)
    return _not_allowed(limits, record) or limits.shortage(_requests(record), others)


def beside(
    limits: ClusterLimits, record: RunRecord, records: Iterable[RunRecord], role: str, least: int, most: int
) -> int:
    """How many processes of a role the run may have beside those of runs that hold room: `least` to `most`."""
    others = [
        request
        for other in records
        if other.id != record.id and _holds(other) and not other.problem
        for request in _requests(other).get(role, ())
    ]
    [request, *_] = role_requests(record.recipe, 1)[role]
    pods = limits.of(role)
    for number in range(most, least, -1):
        needed = pods.pods_for([*[request] * number, *others])
        if needed is not None and needed <= pods.all_pods:
            return number
    return least


def _holds(record: RunRecord) -> bool:
    return not record.state.ended and record.state is not RunState.QUEUED


def _alone(limits: ClusterLimits, record: RunRecord) -> str | None:
    return _not_allowed(limits, record) or limits.shortage(_requests(record), {})


def _not_allowed(limits: ClusterLimits, record: RunRecord) -> str:
    """Why the cluster does not allow its rewards: the chart may have changed since it was submitted."""
    return "; ".join(limits.reward_faults(record.recipe))


def _requests(record: RunRecord) -> dict[str, list[ResourceRequest]]:
    return role_requests(record.recipe, record.rollout_replicas)
