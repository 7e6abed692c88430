"""Owns the Cluster protocol: what the controller may ask of whatever places processes.

Must not know Ray; deploy implements it.
"""

from __future__ import annotations

from typing import Protocol

from services.streams.records import RunRecord


class Cluster(Protocol):
    """Where a run's services live. Every method may be repeated without harm."""

    async def prepare_model(self, record: RunRecord) -> str:
        """Materialise the run's model; the Hugging Face folder that every service can read."""

    async def start(self, record: RunRecord) -> None:
        """Start the run's sampler, verifier and rollout fleets, and learner ranks unless it only evaluates."""

    async def scale_rollout(self, run: str, replicas: int) -> None:
        """Change the number of rollout replicas; those that stay are not disturbed."""

    async def faults(self, run: str) -> list[str]:
        """Services that failed for good, one line each; not those that are being replaced."""

    async def shortage(self, record: RunRecord) -> str | None:
        """Why the run cannot be placed now, or None."""

    async def stop(self, run: str, deadline_s: float) -> None:
        """Drain and end everything of the run within `deadline_s` seconds."""
