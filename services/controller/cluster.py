"""Owns the Cluster protocol: what the controller may request of the system that places processes.

Must not know Ray; deploy implements it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from services.contracts import HostPid
from services.streams.state.runs import RunRecord


class Cluster(Protocol):
    """Where a run's services run. Every method is idempotent.

    A request that cannot be fulfilled now raises; its text is reported, and the request is repeated. What a failed
    request left half done is completed by the next request of its kind.

    A process that dies is replaced without a request, except the learner's: all of its ranks start together. The
    cluster counts no replacements, only those in a row that did not help.
    """

    async def prepare_model(self, record: RunRecord) -> str:
        """Materialise the run's model; the Hugging Face folder that every service can read."""

    async def start(self, record: RunRecord) -> None:
        """Start the run's sampler, verifier and rollout fleets, and learner ranks unless it only evaluates.

        Services that run already are kept, and the fleets get the record's number of replicas.
        """

    async def restart_learner(self, record: RunRecord) -> None:
        """Kill all learner ranks of a started run at once, whatever they are doing, and start all of them again."""

    async def restart_sampler(self, run: str) -> None:
        """Kill the sampler of a started run, whatever it is doing; it is replaced."""

    async def scale_rollout(self, run: str, replicas: int) -> None:
        """Change the number of rollout replicas; those that stay are not disturbed."""

    async def faults(self, run: str, ready: Collection[HostPid]) -> list[str]:
        """Services that failed for good, one line each: replacing them has not helped several times in a row.

        `ready`: host and pid of the run's processes whose heartbeat says ready; a process that died is among them
        until its heartbeat lapses. Its death does not count.
        """

    async def learner_fault(self, run: str) -> str | None:
        """Why the learner has to be restarted, or None: a rank failed, died, or cannot be found."""

    async def shortage(self, record: RunRecord) -> str | None:
        """Why the run cannot be placed now, or None."""

    async def stop(self, run: str, deadline_s: float) -> None:
        """Drain and stop everything of the run within `deadline_s` seconds."""
