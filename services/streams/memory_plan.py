"""Owns the comparison of a run's plan for Redis' memory with the server's: at submit, and once its prompts are loaded.

Must not change a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.settings import Recipe, RecipeError
from services.settings.faults import invalid
from services.streams.connection.client import Redis
from services.streams.memory_bound import Footprint, footprint, most_inflight_groups, with_prompts
from services.streams.state.runs import RunRecords
from services.streams.state.stats import memory_use

NEAR = 0.7
"""The share of maxmemory above which a plan is told: above 85 % in use, nothing is dispatched."""


async def compare_plan(redis: Redis, records: RunRecords, run: str, recipe: Recipe) -> list[str]:
    """What to tell of a run's plan; nothing if Redis has no limit. Raises RecipeError for a plan above the limit."""
    used, limit, _ = await memory_use(redis)
    if not limit:
        return []
    recipe = recipe.at_most
    plan = footprint(recipe)
    _refuse_above(recipe, plan, limit)
    told = []
    if plan.total > NEAR * limit:
        told.append(
            f"{_need(plan)}, which is more than {NEAR:.0%} of its maxmemory of {_mib(limit)}; while more than 85 % are "
            "in use, nothing is dispatched"
        )
    if plan.unsized:
        told.append(
            f"{_need(plan)}; if the plan with all prompts is above its maxmemory of {_mib(limit)}, the run fails once "
            "its prompts are loaded"
        )
    if plan.total > limit - used:
        told.append(
            f"{_need(plan)}, of which {_mib(max(0, limit - used))} are free now: the run may wait for memory until "
            "others free some"
        )
    active = [record for record in await records.active() if not record.state.ended and not record.problem]
    others = [record for record in active if record.id != run]
    together = plan.total + sum(footprint(record.recipe.at_most).total for record in others)
    if together > limit:
        told.append(
            f"together with the plans of {len(others)} runs that have not ended, this run's is {_mib(together)} of "
            f"Redis, which is more than its maxmemory of {_mib(limit)}: the runs may wait for memory"
        )
    return told


async def compare_loaded(redis: Redis, recipe: Recipe, train: int | None, sets: Mapping[str, int]) -> None:
    """Compare the plan again if it lacked prompts at submit. Raises RecipeError for one above maxmemory.

    `train`, `sets`: how many training prompts were loaded, and how many of each of evaluation.sets.
    """
    limit = (await memory_use(redis)).limit
    if limit and footprint(recipe).unsized:
        whole = with_prompts(recipe.at_most, train, sets)
        _refuse_above(whole, footprint(whole), limit)


def _refuse_above(recipe: Recipe, plan: Footprint, limit: int) -> None:
    if plan.total <= limit:
        return
    most = most_inflight_groups(recipe, limit)
    expected = f"at most {most}" if most else "a recipe with a smaller plan, as no valid number of groups fits"
    reason = f"{_need(plan)}, and its maxmemory is {_mib(limit)} (`penstock plan` prints the parts)"
    tuned = recipe.tuning.mode == "on" and recipe.tuning.inflight_groups
    field = "tuning.inflight_groups" if tuned else "limits.max_inflight_groups"
    raise RecipeError(invalid(field, recipe.limits.max_inflight_groups, f"{expected}; {reason}"))


def _need(plan: Footprint) -> str:
    without = "".join(f", without {size:,} bytes for each {prompt}" for prompt, size in plan.unsized.items())
    return f"the run may need {_mib(plan.total)} of Redis{without}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
