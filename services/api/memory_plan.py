"""Owns the comparison of a run's plan for Redis' memory with the server's maxmemory, before the run is accepted.

Must not change a run.
"""

from __future__ import annotations

from services.settings import Recipe, RecipeError
from services.settings.faults import invalid
from services.streams.connection.client import Redis
from services.streams.memory_bound import Footprint, footprint, most_inflight_groups
from services.streams.state.runs import RunRecords
from services.streams.state.stats import memory_use

NEAR = 0.7
"""The share of maxmemory above which a plan is told: above 85 % in use, nothing is dispatched."""


async def compare_plan(redis: Redis, records: RunRecords, run: str, recipe: Recipe) -> list[str]:
    """What to tell of a run's plan; nothing if Redis has no limit. Raises RecipeError for a plan above the limit."""
    _, limit = await memory_use(redis)
    if not limit:
        return []
    plan = footprint(recipe)
    if plan.total > limit:
        raise RecipeError(_refusal(recipe, plan, limit))
    told = []
    if plan.total > NEAR * limit:
        told.append(
            f"{_need(plan)}, which is more than {NEAR:.0%} of its maxmemory of {_mib(limit)}; while more than 85 % are "
            "in use, nothing is dispatched"
        )
    active = [record for record in await records.active() if not record.state.ended and not record.problem]
    others = [record for record in active if record.id != run]
    together = plan.total + sum(footprint(record.recipe).total for record in others)
    if together > limit:
        told.append(
            f"together with the plans of {len(others)} runs that have not ended, this run's is {_mib(together)} of "
            f"Redis, which is more than its maxmemory of {_mib(limit)}: the runs may wait for memory"
        )
    return told


def _refusal(recipe: Recipe, plan: Footprint, limit: int) -> str:
    most = most_inflight_groups(recipe, limit)
    expected = f"at most {most}" if most else "a recipe with a smaller plan, as no valid number of groups fits"
    reason = f"{_need(plan)}, and its maxmemory is {_mib(limit)} (`penstock plan` prints the parts)"
    return invalid("limits.max_inflight_groups", recipe.limits.max_inflight_groups, f"{expected}; {reason}")


def _need(plan: Footprint) -> str:
    without = "".join(f", without {size:,} bytes for each {prompt}" for prompt, size in plan.unsized.items())
    return f"the run may need {_mib(plan.total)} of Redis{without}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
