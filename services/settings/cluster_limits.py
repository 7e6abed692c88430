"""Owns how far a cluster may grow, as its chart says: pods per role, and what one pod holds.

Must not know what runs; whoever asks says what is wanted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from services.settings.base import Section
from services.settings.recipe import Recipe

VARIABLE = "PENSTOCK_BOUNDS"
TINY = 1e-6
"""Sums of shares such as 0.1 are not exact."""


class ClusterLimitsError(ValueError):
    """The file of PENSTOCK_BOUNDS cannot be used; one line."""


class ResourceRequest(NamedTuple):
    """What one process books of its pod."""

    cpus: float
    gpus: float


def resource_requests(recipe: Recipe, rollout_replicas: int) -> dict[str, list[ResourceRequest]]:
    """What each process of a run books, by role. A run of no rollout steps has no learner."""
    ranks = recipe.learner.ranks if recipe.limits.rollout_steps else 0
    return {
        "rollout": [ResourceRequest(recipe.rollout.cpus, recipe.rollout.gpus)] * rollout_replicas,
        "verifier": [ResourceRequest(recipe.verifier.cpus, 0.0)] * recipe.verifier.replicas,
        "learner": [ResourceRequest(recipe.learner.cpus, recipe.learner.gpus)] * ranks,
    }


class RoleLimits(Section):
    """At most `pods` pods serve a role, each with `cpus` and `gpus`."""

    pods: Annotated[int, Field(ge=0)]
    cpus: Annotated[float, Field(ge=0)]
    gpus: Annotated[float, Field(ge=0)]

    def per_pod(self, one: ResourceRequest) -> int | None:
        """How many processes that book so much fit into one pod; None: any number."""
        shares = [has / wants for has, wants in zip((self.cpus, self.gpus), one, strict=True) if wants]
        return int(min(shares) + TINY) if shares else None

    def most(self, one: ResourceRequest) -> int | None:
        """How many such processes fit into all pods; None: any number."""
        each = self.per_pod(one)
        return None if each is None and self.pods else self.pods * (each or 0)

    def pods_for(self, processes: Iterable[ResourceRequest]) -> int | None:
        """How many pods hold the processes (first fit, the greediest first); None if one of them fits into no pod."""
        pods: list[ResourceRequest] = []
        for one in sorted(processes, reverse=True):
            if self.per_pod(one) == 0:
                return None
            for at, free in enumerate(pods):
                if one.cpus <= free.cpus + TINY and one.gpus <= free.gpus + TINY:
                    pods[at] = ResourceRequest(free.cpus - one.cpus, free.gpus - one.gpus)
                    break
            else:
                pods.append(ResourceRequest(self.cpus - one.cpus, self.gpus - one.gpus))
        return len(pods)

    def __str__(self) -> str:
        return f"at most {self.pods} pods of {self.cpus:g} CPUs and {self.gpus:g} GPUs"


class ClusterLimits(Section):
    """The bounds of every role. `cpu` are the pods of the samplers, which book nothing."""

    cpu: RoleLimits
    verifier: RoleLimits
    rollout: RoleLimits
    learner: RoleLimits

    def shortage(
        self, wanted: Mapping[str, Sequence[ResourceRequest]], others: Mapping[str, Sequence[ResourceRequest]]
    ) -> str | None:
        """Why what is `wanted` by role has no room beside what the `others` book, or None."""
        for role, processes in wanted.items():
            bound: RoleLimits = getattr(self, role)
            if not processes:
                continue
            what = f"{role}: {len(processes)} x {processes[0].cpus:g} CPUs, {processes[0].gpus:g} GPUs"
            alone = bound.pods_for(processes)
            if alone is None:
                return f"{what}: one is more than a pod holds; the chart allows {bound}"
            if alone > bound.pods:
                return f"{what} need {alone} pods; the chart allows {bound} ({role}.maxReplicas)"
            together = bound.pods_for([*processes, *others.get(role, ())])
            if together is None or together > bound.pods:
                return f"{what} have no room beside the other runs; the chart allows {bound} ({role}.maxReplicas)"
        return None

    def most_replicas(self, recipe: Recipe) -> int | None:
        """The most rollout replicas that a run of `recipe` may have; None: any number."""
        return self.rollout.most(ResourceRequest(recipe.rollout.cpus, recipe.rollout.gpus))


def load_cluster_limits() -> ClusterLimits | None:
    """The limits as the file states them now: a chart upgrade changes it. None without a file.

    Raises ClusterLimitsError.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        return ClusterLimits.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ClusterLimitsError(
            f"{VARIABLE}: {path!r} cannot be read ({error.strerror}); the chart's bounds.json is"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ClusterLimitsError(
            f"{VARIABLE}: {path!r}: {where}: {first['msg']}; see the chart's bounds.json"
        ) from None
