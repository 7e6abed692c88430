"""Owns what runs book of a bounded cluster, and whether there is room for one more.

Must not ask the cluster what it has now: Ray's autoscaler adds pods for what is placed.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.contracts import RunState
from services.settings import ClusterLimits, ResourceRequest, resource_requests
from services.streams.state.runs import RunRecord


def shortage(bounds: ClusterLimits, record: RunRecord, records: Iterable[RunRecord]) -> str | None:
    """Why a queued run has no room, or None. Runs are placed in the order in which they were submitted.

    One that would not even fit alone is passed over, so that it does not block those behind it.
    """
    others: dict[str, list[ResourceRequest]] = {}
    for other in records:
        before = other.state is RunState.QUEUED and (other.created_at, other.id) < (record.created_at, record.id)
        waits = before and bounds.shortage(_booked(other), {}) is None
        holds = not other.state.ended and other.state is not RunState.QUEUED
        if other.id != record.id and (waits or holds):
            for role, processes in _booked(other).items():
                others.setdefault(role, []).extend(processes)
    return bounds.shortage(_booked(record), others)


def _booked(record: RunRecord) -> dict[str, list[ResourceRequest]]:
    return resource_requests(record.recipe, record.rollout_replicas)
