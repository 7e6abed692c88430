"""Owns the quotas of projects: what their active runs use, and whether a change has room.

Must not start or stop a run; a run that is active already stays, also above a quota that was lowered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.api.access.roles import Access
from services.api.access.settings import ProjectQuota
from services.settings import Recipe, RecipeError, resource_requests
from services.settings.faults import invalid
from services.streams.access.project_lock import project_lock
from services.streams.connection.client import Redis
from services.streams.memory_bound import footprint
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords

MIB = 2**20
TINY = 1e-6
"""Sums of shares of GPUs are not exact."""


class QuotaError(RuntimeError):
    """A project has no room for a change; one line per quota: field, value, quota and use."""


@dataclass(frozen=True)
class Use:
    """What runs use together: GPUs, runs, planned bytes of Redis."""

    gpus: float = 0.0
    runs: int = 0
    redis_memory: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.gpus + other.gpus, self.runs + other.runs, self.redis_memory + other.redis_memory)


def use_of(recipe: Recipe, rollout_replicas: int) -> Use:
    """What one run uses while it is active, at most: tuning may raise its replicas and its groups in flight."""
    recipe, rollout_replicas = recipe.at_most, recipe.most_replicas(rollout_replicas)
    requests = resource_requests(recipe, rollout_replicas)
    gpus = sum(request.gpus for found in requests.values() for request in found)
    return Use(gpus, 1, footprint(recipe).total)


def use_by_project(records: Iterable[RunRecord], besides: str = "") -> Mapping[str, Use]:
    """What the active runs of each project use, without the run `besides`."""
    found: dict[str, Use] = {}
    for record in records:
        if record.id != besides and not record.state.ended and not record.problem:
            used = use_of(record.recipe, record.rollout_replicas)
            found[record.project] = found.get(record.project, Use()) + used
    return found


def faults_of(project: str, quota: ProjectQuota, used: Use, wanted: Use) -> list[str]:
    """For which quotas `used` and `wanted` together are too much; one line each."""
    lines = []
    for field, size, unit in (("gpus", 1, "GPUs"), ("runs", 1, "active runs"), ("redis_memory", MIB, "MiB of Redis")):
        most, has, asked = getattr(quota, field), getattr(used, field), getattr(wanted, field)
        if most is not None and asked and has + asked > most + TINY:
            room = max(0.0, (most - has) / size)
            lines.append(
                f"{field}: {asked / size:g} is not valid: expected at most {room:g} {unit}; the quota of project "
                f"{project!r} is {most / size:g}, of which {has / size:g} are in use"
            )
    return lines


class Quotas:
    """The quotas of a platform's projects."""

    def __init__(self, redis: Redis, records: RunRecords, access: Access) -> None:
        self._redis = redis
        self._records = records
        self._access = access

    def check_known(self, project: str) -> None:
        """Raises RecipeError for a project that the access file does not name; without a file, all are known."""
        settings = self._access.settings()
        named = settings.projects or settings.tokens or settings.oidc
        if named and project not in settings.known_projects:
            raise RecipeError(invalid("project", project, "a project of this platform (GET /v1/projects)"))

    @asynccontextmanager
    async def room_for(self, project: str, recipe: Recipe, rollout_replicas: int, run: str = "") -> AsyncIterator[None]:
        """Hold a project's lock while a run is added, or `run` is changed. Raises QuotaError, ProjectBusyError.

        Two changes at the same moment are counted one after the other, so that not both can take the last room.
        """
        quota = self._access.settings().quota(project)
        if quota == ProjectQuota():
            yield
            return
        async with project_lock(self._redis, project):
            used = use_by_project(await self._records.active(), run).get(project, Use())
            if faults := faults_of(project, quota, used, use_of(recipe, rollout_replicas)):
                raise QuotaError("\n".join(faults))
            yield
