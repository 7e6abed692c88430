"""Owns the Cluster protocol: what the controller may ask of whatever places processes.

Must not know Ray; deploy implements it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from services.contracts import HostPid
from services.streams.state.runs import RunRecord


class Cluster(Protocol):
    """Where a run's services live. Every method may be repeated without harm.

    What cannot be done now is an exception; its text is told, and it is asked again. A request that failed half-way is
    made good by the next one of its kind.

    A process that dies is replaced without being asked for, except the learner's: its ranks begin together, or not at
    all. Nothing here counts how often that happens, only how often in a row it did not help.
    """

    async def prepare_model(self, record: RunRecord) -> str:
        """Materialise the run's model; the Hugging Face folder that every service can read."""

    async def start(self, record: RunRecord) -> None:
        """Start the run's sampler, verifier and rollout fleets, and learner ranks unless it only evaluates.

        What runs already is found again, whoever started it, and the fleets get the record's number of replicas.
        """

    async def restart_learner(self, record: RunRecord) -> None:
        """End all learner ranks of a started run at once, whatever they are doing, and start all of them anew."""

    async def restart_sampler(self, run: str) -> None:
        """Kill the sampler of a started run, whatever it is doing; another one takes its place."""

    async def scale_rollout(self, run: str, replicas: int) -> None:
        """Change the number of rollout replicas; those that stay are not disturbed."""

    async def faults(self, run: str, ready: Collection[HostPid]) -> list[str]:
        """Services that failed for good, one line each: replacing them has not helped several times in a row.

        `ready`: where the run's processes live whose heartbeat says ready; a process that died is there until
        its heartbeat lapses. Its death does not count.
        """

    async def learner_fault(self, run: str) -> str | None:
        """Why the learner has to be started anew, or None: a rank failed, died, or cannot be found."""

    async def shortage(self, record: RunRecord) -> str | None:
        """Why the run cannot be placed now, or None."""

    async def stop(self, run: str, deadline_s: float) -> None:
        """Drain and end everything of the run within `deadline_s` seconds."""
