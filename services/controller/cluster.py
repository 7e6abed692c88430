"""Owns the Cluster protocol: what the controller may request of the system that places processes.

Must not know Ray; deploy implements it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from services.contracts import HostPid
from services.streams.runs.places import AvoidedPlace
from services.streams.state.run_record import RunRecord


class Cluster(Protocol):
    """Where a run's services run. Every method is idempotent.

    A method raises an error when it cannot fulfil the request now. The controller reports the error and repeats the
    request, which completes what the failed one left unfinished.

    The cluster replaces a process that dies without a request, except a rank of the learner: all ranks start together.
    It does not limit replacements, only those in a row that did not help.
    """

    async def prepare_model(self, record: RunRecord) -> str:
        """Prepare the run's model; returns its name for the record, see services.storage.models."""

    async def prepare_data(self, record: RunRecord) -> dict[str, str]:
        """Download the data that the recipe names on the hub; returns their names for the record, by those."""

    async def check_memory(self, record: RunRecord) -> None:
        """Raise an error if the prepared model cannot fit the run's GPUs, or the cluster's only machine.

        What is unknown is not checked: the memory of GPUs that no chart states, and of nodes that may be added.
        """

    async def start(self, record: RunRecord) -> None:
        """Start the run's sampler, verifier and rollout fleets, and learner ranks unless it only evaluates.

        The record may not have the model's name yet: services wait until it has.
        Services that run already are kept, and the fleets get the record's number of replicas.
        """

    async def restart_learner(self, record: RunRecord) -> None:
        """Kill all learner ranks of a started run at once, whatever they are doing, and start all of them again."""

    async def restart_sampler(self, run: str) -> None:
        """Kill the sampler of a started run, whatever it is doing; it is replaced."""

    async def scale_rollout(self, run: str, replicas: int) -> None:
        """Change the number of rollout replicas; those that stay are not disturbed."""

    async def scale_verifier(self, run: str, replicas: int) -> None:
        """Change the number of verifier replicas; those that stay are not disturbed."""

    async def faults(self, run: str, ready: Collection[HostPid], joining: Collection[HostPid]) -> list[str]:
        """Services whose replacements did not help several times in a row, one line each.

        `ready`: host and pid of the run's processes whose heartbeat reports ready; a process that died is among them
        until its heartbeat lapses. The death of such a process does not count. `joining`: the same of those that wait
        for weights; their death is no fault of their place.
        """

    async def avoid(self, run: str, places: Collection[AvoidedPlace]) -> None:
        """Place nothing of these services there from now on, if there is room elsewhere. Replaces earlier places."""

    async def used_up(self, run: str) -> list[AvoidedPlace]:
        """The places to avoid from now on: processes kept failing there, and there is room elsewhere.

        A place is reported until `avoid` names it.
        """

    async def blamed(self, record: RunRecord) -> list[AvoidedPlace]:
        """The nodes behind the fault that `learner_fault` reported last, if the ranks can leave them; `count` is 1."""

    async def learner_fault(self, run: str) -> str | None:
        """Why the learner has to be restarted, or None: a rank failed, died, or cannot be found."""

    async def shortage(self, record: RunRecord) -> str | None:
        """Why the run cannot be placed now, or None."""

    async def fits_alone(self, record: RunRecord) -> bool:
        """Whether the run would have room if no other one ran."""

    async def stop(self, run: str, deadline_s: float) -> None:
        """Drain and stop everything of the run within `deadline_s` seconds."""
