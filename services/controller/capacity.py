"""Owns what runs book of a bounded cluster, and whether there is room for one more.

Must not ask the cluster what it has now: Ray's autoscaler adds pods for what is placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.contracts import RunState
from services.settings import Booking, Bounds
from services.streams.records import RunRecord


def bookings(record: RunRecord) -> dict[str, Sequence[Booking]]:
    """What a run's processes book, by role. A run of no rollout steps has no learner."""
    recipe = record.recipe
    ranks = recipe.learner.ranks if recipe.limits.rollout_steps else 0
    return {
        "rollout": [Booking(recipe.rollout.cpus, recipe.rollout.gpus)] * record.rollout_replicas,
        "verifier": [Booking(recipe.verifier.cpus, 0.0)] * recipe.verifier.replicas,
        "learner": [Booking(recipe.learner.cpus, recipe.learner.gpus)] * ranks,
    }


def shortage(bounds: Bounds, record: RunRecord, records: Iterable[RunRecord]) -> str | None:
    """Why a queued run has no room, or None. Runs are placed in the order in which they were submitted.

    One that would not even fit alone is passed over, so that it does not block those behind it.
    """
    others: dict[str, list[Booking]] = {}
    for other in records:
        before = other.state is RunState.QUEUED and (other.created_at, other.id) < (record.created_at, record.id)
        waits = before and bounds.shortage(bookings(other), {}) is None
        holds = not other.state.ended and other.state is not RunState.QUEUED
        if other.id != record.id and (waits or holds):
            for role, processes in bookings(other).items():
                others.setdefault(role, []).extend(processes)
    return bounds.shortage(bookings(record), dict(others))
