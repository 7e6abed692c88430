"""Owns what the API answers of a run, for the tests of what is printed.

Must not call an API.
"""

from __future__ import annotations

from typing import Any

from penstock_client.models import Evaluation, RolloutStep, Run
from services.contracts import EvaluationRecord, PassAt


def step(number: int, finished: float, **metrics: float) -> RolloutStep:
    """A rollout step as the API returns it, with the fields that are printed."""
    return RolloutStep(id=f"{number}-0", step=number, learning_finished_at=finished, metrics=metrics)


def evaluated(name: str, **fields: Any) -> Evaluation:
    """An evaluation as the API returns it."""
    record = EvaluationRecord(
        name=name,
        version=0,
        newest_version=0,
        prompts=64,
        samples_per_prompt=4,
        accuracy=0.195,
        standard_error=0.02,
        pass_at=(PassAt(k=1, value=0.195, standard_error=0.02), PassAt(k=4, value=0.5, standard_error=0.06)),
        majority=0.25,
        majority_standard_error=0.05,
        unknown=0,
    )
    return Evaluation.model_validate(record.model_copy(update=fields).model_dump(mode="json"))


def viewed(**fields: Any) -> Run:
    """A run as the API returns it, with the fields that are printed; evaluations may be models."""
    found = {"id": "r", "created_at": 1000.0, "state": "running", "reason": "ready", "rollout_steps_total": 2}
    return Run.model_validate({**found, "recipe": {"limits": {"response_tokens": None}}, **fields})


def happened(phase: str, text: str, at: float, service: str = "rollout") -> dict[str, Any]:
    """An event as the API returns it."""
    return {"service": service, "phase": phase, "text": text, "at": at}
