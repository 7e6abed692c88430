"""Owns a run's summary: its results, in one small document.

Must not judge the run.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from services.contracts import AFTER, ALONE, BEFORE, EvaluationRecord
from services.settings import HELD_OUT
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.runs.ledger import read_ledger
from services.streams.runs.uses import ledger_document
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.policy_history import read_policy
from services.streams.state.run_record import RunRecord


async def summarise(redis: Redis, record: RunRecord) -> dict[str, Any]:
    """The run's results. `groups` are the group counters; accuracies are held-out avg@k with their standard errors.

    `evaluations` holds, by set and name, the records before and after training (or of a run that only evaluates).
    """
    keys = RunKeys(record.id)
    event_log = EventLog(redis, keys, "controller")
    steps = [step for _, step in await event_log.steps()]
    evaluations = await event_log.evaluations()
    held_out = {evaluation.name: evaluation for evaluation in evaluations if evaluation.set == HELD_OUT}
    before, after = held_out.get(BEFORE), held_out.get(AFTER)
    counts, policy = await group_counts(redis, keys), await read_policy(redis, keys)
    running = next((change.at for change in record.history if change.state.value == "running"), None)
    return {
        "run": record.id,
        "accuracy_before": before.accuracy if before else None,
        "accuracy_before_standard_error": before.standard_error if before else None,
        "accuracy_after": after.accuracy if after else None,
        "accuracy_after_standard_error": after.standard_error if after else None,
        "held_out_prompts": before.prompts if before else 0,
        "evaluations": _by_set(evaluations),
        "samples_per_prompt": record.recipe.evaluation.samples,
        "rollout_steps": len(steps),
        "optimizer_steps": sum(step.optimizer_steps for step in steps),
        "wall_seconds": time.time() - record.created_at,
        "startup_seconds": running - record.created_at if running else None,
        "policy_version": policy.version if policy else None,
        "groups": counts.model_dump(),
        "export_path": record.export_path,
        "ledger": ledger_document(await read_ledger(redis, keys)),
    }


def _by_set(records: list[EvaluationRecord]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    excluded = {"kind", "schema_version", "name", "set"}
    for record in records:
        if record.name in (BEFORE, AFTER, ALONE):
            found.setdefault(record.set, {})[record.name] = record.model_dump(exclude=excluded)
    return found


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    """Write `summary.json` into a run's `folder`, whole or not at all; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "summary.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(partial, path)
    return path
