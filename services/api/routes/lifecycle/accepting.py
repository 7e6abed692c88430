"""Owns what submissions, resumptions and edits check alike, and how they are answered.

Must not change a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.api.access.roles import ForbiddenError, Principal, Role
from services.api.addresses import checked_addresses
from services.api.routes.run_view import view_of
from services.api.views.runs import AcceptedRun
from services.settings import (
    Recipe,
    RecipeError,
    check_files,
    check_reward_limits,
    check_trackers,
    load_cluster_limits,
    load_prices,
    parse_recipe,
)
from services.settings.cluster_limits import ResourceRequest, check_size_limits
from services.settings.faults import invalid
from services.settings.rewards.limits import VERIFIER_CODE, verifier_role
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.runs.budget import budget_faults
from services.streams.state.events import EventLog
from services.streams.state.run_record import RunRecord


def check_project(principal: Principal, project: str) -> None:
    """Raises ForbiddenError unless who asks may submit to the project."""
    if (principal.role_in(project) or 0) < Role.OPERATOR:
        raise ForbiddenError(f"{principal.name} lacks the role: expected operator in project {project!r}")


def checked_recipe(document: Mapping[str, Any], files: Mapping[str, str]) -> Recipe:
    """The recipe of a submission. Raises RecipeError for it, or for the files beside it."""
    recipe = checked_addresses(parse_recipe(dict(document)))
    check_files(recipe, dict(files))
    check_reward_limits(recipe)
    check_size_limits(recipe)
    check_trackers(recipe)
    if faults := budget_faults(recipe.limits, load_prices()):
        raise RecipeError("\n".join(faults))
    return recipe


def check_replicas(recipe: Recipe, field: str, replicas: int) -> None:
    """Raises RecipeError when the cluster may not grow so far; ClusterLimitsError when its limits are unreadable."""
    limits = load_cluster_limits()
    most = limits.most_replicas(recipe) if limits else None
    if limits and most is not None and replicas > most:
        requests = f"{recipe.rollout.cpus:g} CPUs, {recipe.rollout.gpus:g} GPUs"
        reason = f"the chart allows rollout {limits.rollout}, and a replica requests {requests} (rollout.maxReplicas)"
        raise RecipeError(invalid(field, replicas, f"1 to {most}; {reason}" if most else f"no replica; {reason}"))


def check_verifiers(recipe: Recipe, field: str, replicas: int) -> None:
    """The same for verifiers, whose pods depend on the recipe's rewards."""
    limits = load_cluster_limits()
    if limits is None:
        return
    role = limits.verifier_code if verifier_role(recipe.rewards) == VERIFIER_CODE else limits.verifier
    most = role.most(ResourceRequest(recipe.verifier.cpus, 0.0))
    if most is not None and replicas > most:
        reason = f"the chart allows verifier {role}, and a replica requests {recipe.verifier.cpus:g} CPUs"
        raise RecipeError(invalid(field, replicas, f"1 to {most}; {reason}"))


async def accepted(redis: Redis, record: RunRecord, warnings: list[str]) -> AcceptedRun:
    """The answer to a submission or resumption; its warnings are events too."""
    for text in warnings:
        await EventLog(redis, RunKeys(record.id), "api").write("redis-memory-planned", text)
    return AcceptedRun(**dict(await view_of(redis, record)), warnings=warnings)
