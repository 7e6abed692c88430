"""Owns how far a cluster may grow, as its chart states: pods per role, and the size of a pod and its GPUs.

Must not know what runs; its callers say what is requested.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from services.settings.base import Section
from services.settings.faults import invalid
from services.settings.recipe import Recipe, RecipeError
from services.settings.rewards.limits import VERIFIER_CODE, RewardLimits, leaves_verifier, verifier_role

log = logging.getLogger(__name__)

VARIABLE = "PENSTOCK_BOUNDS"
TINY = 1e-6
"""Sums of shares such as 0.1 are not exact."""
SHARE_OF_CPU_POD = 0.25
"""CPUs of a cpu pod for a sampler or tracker: the chart lets each CPU of such a pod take four of them."""
FIELDS = {VERIFIER_CODE: "verifier_code"}
"""By role: its field here, where the two differ."""
VALUES = {VERIFIER_CODE: "verifierCode"}
"""By role: its section of the chart's values, where the two differ."""


class ClusterLimitsError(ValueError):
    """What the operator sets for all runs cannot be used: PENSTOCK_BOUNDS, or PENSTOCK_ROOTS; one line."""


class ResourceRequest(NamedTuple):
    """What one process requests of its pod."""

    cpus: float
    gpus: float

    @property
    def placed(self) -> ResourceRequest:
        """With what it takes of the GPUs: a share is on one GPU, so that two GPUs hold two of 0.6, not three."""
        alike = int(1 / self.gpus + TINY) if 0 < self.gpus < 1 else 0
        return ResourceRequest(self.cpus, 1 / alike) if alike else self


def resource_requests(recipe: Recipe, rollout_replicas: int) -> dict[str, list[ResourceRequest]]:
    """The request of each process of a run, by service. A run of 0 rollout steps has no learner."""
    ranks = recipe.learner.ranks if recipe.limits.rollout_steps else 0
    return {
        "rollout": [ResourceRequest(recipe.rollout.cpus, recipe.rollout.gpus)] * rollout_replicas,
        "verifier": [ResourceRequest(recipe.verifier.cpus, 0.0)] * recipe.verifier.replicas,
        "learner": [ResourceRequest(recipe.learner.cpus, recipe.learner.gpus)] * ranks,
    }


def role_requests(recipe: Recipe, rollout_replicas: int) -> dict[str, list[ResourceRequest]]:
    """The same by role of the pods: the verifiers of a run that judges programs have pods of their own.

    With its sampler and tracker, which ask Ray for no CPUs but share the cpu pods with those of other runs.
    """
    requests = resource_requests(recipe, rollout_replicas)
    of_role = {verifier_role(recipe.rewards) if name == "verifier" else name: of for name, of in requests.items()}
    return {**of_role, "cpu": [ResourceRequest(SHARE_OF_CPU_POD, 0.0)] * (1 + bool(recipe.tracking.named))}


class PodLimits(Section):
    """At most `pods` pods of one kind, each with `cpus` and `gpus`; `gpu_memory_gib`: of one GPU, None if unknown."""

    pods: Annotated[int, Field(ge=0)]
    cpus: Annotated[float, Field(ge=0)]
    gpus: Annotated[float, Field(ge=0)]
    gpu_memory_gib: Annotated[float, Field(gt=0)] | None = None

    def per_pod(self, request: ResourceRequest) -> int | None:
        """How many processes with this request fit into one pod; None: any number."""
        sizes = zip((self.cpus, self.gpus), request.placed, strict=True)
        shares = [capacity / amount for capacity, amount in sizes if amount]
        return int(min(shares) + TINY) if shares else None

    def __str__(self) -> str:
        return f"{self.pods} pods of {self.cpus:g} CPUs and {self.gpus:g} GPUs"


class RoleLimits(PodLimits):
    """The pods that serve a role: one kind, and further `groups` of other kinds, such as spot nodes or other GPUs."""

    groups: tuple[PodLimits, ...] = ()

    @property
    def kinds(self) -> tuple[PodLimits, ...]:
        """Every group of the role."""
        return (self, *self.groups)

    @property
    def all_pods(self) -> int:
        """The most pods of all groups."""
        return sum(kind.pods for kind in self.kinds)

    @property
    def least_gpu_memory_gib(self) -> float | None:
        """The memory of the smallest GPU that a process may get, in GiB; None if no group states it."""
        stated = [gib for kind in self.kinds if (gib := kind.gpu_memory_gib) is not None]
        return min(stated, default=None)

    def most(self, request: ResourceRequest) -> int | None:
        """How many such processes fit into all pods; None: any number."""
        if self.all_pods and self.per_pod(request) is None:
            return None
        return sum(kind.pods * (kind.per_pod(request) or 0) for kind in self.kinds)

    def pods_for(self, requests: Iterable[ResourceRequest]) -> int | None:
        """How many pods hold the processes (first fit, the largest first); None if one of them fits into no pod.

        More than `all_pods`, if the processes do not fit into them.
        """
        kinds = sorted(self.kinds, key=lambda kind: (kind.gpus, kind.cpus))
        left = [kind.pods for kind in kinds]
        pods: list[ResourceRequest] = []
        missing = 0
        for request in sorted((request.placed for request in requests), reverse=True):
            fitting = [at for at, kind in enumerate(kinds) if kind.per_pod(request) != 0]
            if not fitting:
                return None
            for index, free in enumerate(pods):
                if request.cpus <= free.cpus + TINY and request.gpus <= free.gpus + TINY:
                    pods[index] = ResourceRequest(free.cpus - request.cpus, free.gpus - request.gpus)
                    break
            else:
                at = next((at for at in fitting if left[at]), fitting[-1])
                missing += not left[at]
                left[at] = max(0, left[at] - 1)
                pods.append(ResourceRequest(kinds[at].cpus - request.cpus, kinds[at].gpus - request.gpus))
        return self.all_pods + missing if missing else len(pods)

    def __str__(self) -> str:
        return "at most " + " and ".join(str(PodLimits.__str__(kind)) for kind in self.kinds)


class ClusterLimits(Section):
    """The limits of every role, and of rewards. `cpu`: the pods of samplers and trackers.

    What a chart does not state of `verifier_code` and `rewards`, it does not allow.
    """

    cpu: RoleLimits
    verifier: RoleLimits
    verifier_code: RoleLimits = RoleLimits(pods=0, cpus=0, gpus=0)
    rollout: RoleLimits
    learner: RoleLimits
    rewards: RewardLimits = RewardLimits()

    def of(self, role: str) -> RoleLimits:
        """The limits of a role."""
        found: RoleLimits = getattr(self, FIELDS.get(role, role))
        return found

    def shortage(
        self, wanted: Mapping[str, Sequence[ResourceRequest]], others: Mapping[str, Sequence[ResourceRequest]]
    ) -> str | None:
        """Why the processes `wanted` by role have no room beside the requests of the `others`, or None."""
        for role, processes in wanted.items():
            limits = self.of(role)
            value = f"{VALUES.get(role, role)}.maxReplicas"
            if not processes:
                continue
            what = f"{role}: {len(processes)} x {processes[0].cpus:g} CPUs, {processes[0].gpus:g} GPUs"
            alone = limits.pods_for(processes)
            if alone is None:
                return f"{what}: one of them is larger than a pod; the chart allows {limits}"
            if alone > limits.all_pods:
                return f"{what} need {alone} pods; the chart allows {limits} ({value})"
            together = limits.pods_for([*processes, *others.get(role, ())])
            if together is None or together > limits.all_pods:
                return f"{what} have no room beside the other runs; the chart allows {limits} ({value})"
        return None

    def reward_faults(self, recipe: Recipe) -> list[str]:
        """What of a recipe's rewards the cluster does not allow, one line per fault."""
        return self.rewards.faults(list(recipe.stated_rewards.items()), code=self.verifier_code.all_pods > 0)

    def size_faults(self, recipe: Recipe) -> list[str]:
        """What of a recipe can never be placed: a process larger than any pod, or more of them than all pods hold."""
        faults: list[str] = []
        for role, processes in role_requests(recipe, recipe.rollout.replicas).items():
            if processes and role != "cpu":  # no recipe states the size of a sampler
                faults += self._size_faults(role, processes)
        return faults

    def _size_faults(self, role: str, processes: Sequence[ResourceRequest]) -> list[str]:
        limits, request, values = self.of(role), processes[0], VALUES.get(role, role)
        section = "verifier" if role == VERIFIER_CODE else role
        largest = [max(sizes) for sizes in zip(*((kind.cpus, kind.gpus) for kind in limits.kinds), strict=True)]
        larger = [
            invalid(
                f"{section}.{field}", asked, f"at most {has:g}, as a {role} pod of this cluster has ({values}.{field})"
            )
            for field, asked, has in zip(request._fields, request, largest, strict=True)
            if asked > has + TINY
        ]
        most = limits.most(request)
        if larger or most is None or len(processes) <= most:
            return larger
        accepted = f"1 to {most}" if most else "none"
        number = "ranks" if role == "learner" else "replicas"
        reason = f"the chart allows {role} {limits} ({values}.maxReplicas)"
        return [invalid(f"{section}.{number}", len(processes), f"{accepted}; {reason}")]

    def most_replicas(self, recipe: Recipe) -> int | None:
        """The most rollout replicas that a run of `recipe` may have; None: any number."""
        return self.rollout.most(ResourceRequest(recipe.rollout.cpus, recipe.rollout.gpus))


def check_reward_limits(recipe: Recipe) -> None:
    """Check that the cluster allows a recipe's rewards. Raises RecipeError, ClusterLimitsError."""
    limits = load_cluster_limits() if any(map(leaves_verifier, recipe.rewards)) else None
    if limits and (faults := limits.reward_faults(recipe)):
        raise RecipeError("\n".join(faults))


def check_size_limits(recipe: Recipe) -> None:
    """Check that the cluster can ever place a recipe. Raises RecipeError.

    Where the limits are unreadable nothing is checked: the run waits until they are readable.
    """
    try:
        limits = load_cluster_limits()
    except ClusterLimitsError as error:
        log.warning("%s; the size of a recipe is not checked", error)
        return
    if limits and (faults := limits.size_faults(recipe)):
        raise RecipeError("\n".join(faults))


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
        expected = f"the chart's bounds.json as a readable file ({error.strerror})"
        raise ClusterLimitsError(invalid(VARIABLE, path, expected)) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        expected = f"the chart's bounds.json ({where}: {first['msg']})"
        raise ClusterLimitsError(invalid(VARIABLE, path, expected)) from None
