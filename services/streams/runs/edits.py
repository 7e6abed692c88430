"""Owns edits of a run's settings in flight: what may change, the check against the whole recipe, the record of it.

Must not apply an edit: each service takes it over where it may change (services.process.hosting.Context.refresh).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from services.contracts import EditedValue, RunEdit, RunState
from services.settings import Recipe, RecipeError
from services.settings.base import MOST_REPLICAS
from services.settings.faults import invalid
from services.settings.recipe import fault_line
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.state.policy_history import committed_step
from services.streams.state.run_record import LEARNING_RATE, RecordChange, RunRecord
from services.streams.state.runs import ACTIVE, RESUMABLE, RunRecords

ROLLOUT, VERIFIERS = "rollout.replicas", "verifier.replicas"
BUDGET, GPU_HOURS = "limits.budget", "limits.gpu_hours"
PRIORITY, STALENESS = "priority", "limits.max_staleness"
TUNING = "tuning.mode"
EDITABLE: Mapping[str, str] = {
    LEARNING_RATE: "from the next rollout step that is trained",
    STALENESS: "at the sampler's next look, seconds later; 0 cannot become another value, nor another value 0",
    "limits.max_inflight_groups": "at the sampler's next look",
    "evaluation.every": "at the sampler's next look",
    **dict.fromkeys((BUDGET, GPU_HOURS), "at the controller's next look; a run that spent it can then be resumed"),
    ROLLOUT: "at the controller's next look",
    VERIFIERS: "at the controller's next look",
    TUNING: "at the controller's next look",
    PRIORITY: "while the run is queued",
}
"""The settings that may change in flight, and when a change takes effect."""
PRIORITIES = range(-100, 101)
EDITS_KEPT = 100


@dataclass(frozen=True)
class Edited:
    """A record's values after an edit that was checked. `changes`: by setting, its value before and after."""

    recipe: Recipe
    rollout_replicas: int
    priority: int
    changes: Mapping[str, tuple[EditedValue, EditedValue]]

    @property
    def text(self) -> str:
        """What changes, for people."""
        return ", ".join(f"{name} {_shown(old)} -> {_shown(new)}" for name, (old, new) in self.changes.items())


def check_edit(record: RunRecord, wanted: Mapping[str, Any]) -> Edited:
    """What a run's record becomes. Raises RecipeError for a setting that cannot change, or for values that do not fit.

    A fault that the recipe had before, as another release accepted it, is none of the edit. Raises UnreadableRunError.
    """
    recipe = record.recipe
    if unknown := [name for name in wanted if name not in EDITABLE]:
        known = ", ".join(EDITABLE)
        raise RecipeError(
            "\n".join(invalid(name, wanted[name], f"a setting that may change: {known}") for name in unknown)
        )
    new = _with(recipe, {name: value for name, value in wanted.items() if name != PRIORITY})
    priority, replicas = wanted.get(PRIORITY, record.priority), record.rollout_replicas
    if not isinstance(priority, int) or isinstance(priority, bool) or priority not in PRIORITIES:
        raise RecipeError(invalid(PRIORITY, priority, f"a whole number from {PRIORITIES[0]} to {PRIORITIES[-1]}"))
    if ROLLOUT in wanted:
        replicas = new.rollout.replicas
        new = new.model_copy(update={"rollout": recipe.rollout})  # the record has their number
    for name, count in ((ROLLOUT, replicas), (VERIFIERS, new.verifier.replicas)):
        if name in wanted and count > MOST_REPLICAS:
            raise RecipeError(invalid(name, count, f"1 to {MOST_REPLICAS}"))
    if (new.limits.max_staleness == 0) != (recipe.limits.max_staleness == 0):
        expected = "0, because" if recipe.limits.max_staleness == 0 else "at least 1, because"
        reason = "it decides whether a response may have tokens of several policy versions"
        raise RecipeError(invalid(STALENESS, new.limits.max_staleness, f"{expected} {reason}"))
    before = {ROLLOUT: record.rollout_replicas, PRIORITY: record.priority}
    after = {ROLLOUT: replicas, PRIORITY: priority}
    changes = {
        name: (before.get(name, _value(recipe, name)), after.get(name, _value(new, name)))
        for name in EDITABLE
        if name in wanted
    }
    return Edited(new, replicas, priority, {name: pair for name, pair in changes.items() if pair[0] != pair[1]})


def _shown(value: EditedValue) -> str:
    return "null" if value is None else value if isinstance(value, str) else f"{value:g}"


def _value(recipe: Recipe, name: str) -> Any:
    return None if name == PRIORITY else attrgetter(name)(recipe)


def _with(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    document = recipe.model_dump(mode="json")
    for name, value in values.items():
        section, _, setting = name.partition(".")
        document[section][setting] = value
    try:
        new = Recipe.model_validate(document)
    except ValidationError as error:
        raise RecipeError("\n".join(fault_line(dict(fault)) for fault in error.errors())) from None
    before = {fault.partition(":")[0] for fault in recipe.device_faults + recipe.sampling_faults}
    found = [fault for fault in new.device_faults + new.sampling_faults if fault.partition(":")[0] not in before]
    if found:
        raise RecipeError("\n".join(found))
    return new


async def edit_run(redis: Redis, record: RunRecord, edited: Edited, by: str) -> RunRecord:
    """Change the record as checked, unless it was changed since `record` was read.

    Raises StaleRevisionError; RunStateError for a run that has succeeded or is closed.
    """
    step = max(0, await committed_step(redis, RunKeys(record.id)))
    edit = RunEdit(by=by, at=time.time(), step=step, changes=dict(edited.changes))
    # The first one says with which learning rate the steps of earlier releases were trained.
    edits = [*record.edits[:1], *record.edits[1:][-(EDITS_KEPT - 2) :], edit]
    fields = {
        "rollout_replicas": str(edited.rollout_replicas),
        "priority": str(edited.priority),
        "edits": json.dumps([entry.model_dump(mode="json") for entry in edits]),
    }
    if edited.recipe != record.recipe:
        fields["recipe"] = edited.recipe.model_dump_json()
    change = RecordChange(fields=fields, revision=record.revision)
    states: frozenset[RunState] = ACTIVE | RESUMABLE
    return await RunRecords(redis).change(record.id, states, change)
