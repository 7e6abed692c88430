"""Owns the REST route that compares runs: settings that differ, and curves by rollout step.

Must not judge which run is better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query

from services.api.access.roles import Principal
from services.api.dependencies import Platform, PlatformOf, Viewer
from services.api.views.reading.comparison import ComparisonView, DifferenceView
from services.contracts import StepRecord
from services.settings import RecipeError
from services.settings.faults import invalid
from services.streams.delivery.consumer import tail_messages
from services.streams.keys import RunKeys
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import UnknownRunError

MOST_RUNS, MOST_METRICS, MOST_POINTS = 8, 100, 2000
READ_AT_ONCE = 500
MOST_PATH = 500
"""Characters of a setting's section; the values below a longer one are compared as one."""
RUNS = r"^[a-z0-9][a-z0-9-]{0,95}(,[a-z0-9][a-z0-9-]{0,95}){1,7}$"
METRICS = r"^[\x20-\x2b\x2d-\x7e]{1,100}(,[\x20-\x2b\x2d-\x7e]{1,100}){0,99}$"

Curves = dict[str, dict[int, dict[str, float]]]
"""Metrics by run and step."""

router = APIRouter(prefix="/v1", tags=["comparison"])


@router.get("/compare")
async def compare_runs(
    platform: PlatformOf,
    principal: Viewer,
    runs: Annotated[str, Query(pattern=RUNS, description="2 to 8 ids of runs, separated by commas")],
    metrics: Annotated[
        str | None, Query(pattern=METRICS, description="names, separated by commas; by default all")
    ] = None,
    points: Annotated[int, Query(ge=2, le=MOST_POINTS, description="the most steps of a curve")] = 500,
) -> ComparisonView:
    """Runs beside each other: the settings that are not the same in all of them, and metrics by rollout step."""
    names = runs.split(",")
    if len({*names}) < len(names):
        raise RecipeError(invalid("runs", runs, "different runs"))
    records = [await _viewed(platform, principal, run) for run in names]
    curves: Curves = {run: await _metrics_of(platform, run) for run in names}
    wanted = metrics.split(",") if metrics else _known(curves)
    steps = sorted({step for found in curves.values() for step in found})
    chosen = thinned(steps, points)
    return ComparisonView(
        runs=names,
        settings=differences({record.id: settings_of(record) for record in records}),
        steps=chosen,
        curves={
            metric: {run: [_value(found.get(step, {}).get(metric)) for step in chosen] for run, found in curves.items()}
            for metric in wanted
        },
        thinned=len(chosen) < len(steps),
    )


async def _viewed(platform: Platform, principal: Principal, run: str) -> RunRecord:
    record = await platform.records.shown(run)
    if principal.role_in(record.project) is None:
        raise UnknownRunError(f"run {run!r} does not exist")
    return record


async def _metrics_of(platform: Platform, run: str) -> dict[int, dict[str, float]]:
    """A run's metrics by step; the rest of the records is not kept, because it grows with the batch."""
    keys, after, found = RunKeys(run), "0-0", dict[int, dict[str, float]]()
    while page := await tail_messages(platform.redis, keys, keys.steps, StepRecord, after, READ_AT_ONCE):
        after = page[-1][0]
        found |= {record.step: record.metrics for _, record in page}
    return found


def _known(curves: Curves) -> list[str]:
    names = {name for found in curves.values() for values in found.values() for name in values}
    return sorted(names)[:MOST_METRICS]


def _value(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def thinned(steps: list[int], most: int) -> list[int]:
    """At most `most` of the steps, chosen evenly, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def settings_of(record: RunRecord) -> dict[str, Any]:
    """A run's settings by dotted path; those of a recipe that this release cannot read as they are stored."""
    document = record.recipe_document if record.problem else record.recipe.model_dump(mode="json")
    return dict(_flat(document or {}))


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict) and value and len(prefix) < MOST_PATH:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differences(settings: Mapping[str, Mapping[str, Any]]) -> list[DifferenceView]:
    """The settings that are not the same in all runs, in the order of the recipes. `settings`: by run, then by path."""
    paths: Iterable[str] = dict.fromkeys(path for found in settings.values() for path in found)
    different = []
    for path in paths:
        values = {run: found[path] for run, found in settings.items() if path in found}
        if len(values) < len(settings) or any(value != next(iter(values.values())) for value in values.values()):
            different.append(DifferenceView(path=path, values=values))
    return different
