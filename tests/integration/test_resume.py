"""Runs that are taken on again: after a power cut, and from an older step with other numbers. The engines are real."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.stack import Stack, send
from tests.harness.workload import recipe, write_model, write_questions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

STEPS = 14
"""Enough that no run is over before the test has cut it off; every checkpoint is kept, that of step 2 too."""


def check_history(records: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Every step once, and no group twice in the history that survives."""
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    versions = [record["version"] for record in records]
    assert versions == sorted(set(versions)), versions
    trained = [group for record in records for group in record["groups"]]
    assert len(trained) == len(set(trained)) == 4 * STEPS
    groups = one["groups"]
    assert groups["reconciled"], groups
    assert groups["trained"] == 4 * STEPS


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    model, questions = write_model(tmp_path / "model"), write_questions(tmp_path / "questions.jsonl")
    made = recipe(model, questions, steps=STEPS, replicas=1, ranks=1, staleness=1)
    made["learner"] |= {"checkpoint_every": 2, "checkpoints_kept": STEPS // 2, "zero_stage": 1}
    made["evaluation"] = {"samples": 1}
    return made


def cut_power(stack: Stack) -> None:
    """Everything of the stack ends at once, without a word."""
    everything = [*stack.below(), psutil.Process(stack.process.pid)]
    for process in everything:
        send(process.pid, signal.SIGSTOP)  # so that nobody restarts what dies before it
    for process in everything:
        send(process.pid, signal.SIGKILL)
    stack.process.wait(10)
    psutil.wait_procs(everything, timeout=10)


@pytest.mark.timeout(700)
def test_a_run_goes_on_after_a_power_cut(tmp_path: Path, document: dict[str, Any]) -> None:
    runs = tmp_path / "runs"
    with Stack(runs) as stack:
        stack.submit(document, "cut")
        stack.until("cut", lambda one: one["rollout_steps"] >= 3, "the third step")
        before = stack.view("cut")["rollout_steps"]
        cut_power(stack)
    with Stack(runs) as stack:
        one = stack.until("cut", lambda one: one["state"] == "succeeded", "success after the cut")
        records = stack.steps("cut")
        check_history(records, one)
        ready = [event["text"] for event in one["events"] if event["phase"] == "ready"]
    assert before >= 3
    assert any("again, bit by bit" in text for text in ready), ready
    assert [record["version"] for record in records] == list(range(1, STEPS + 1)), "the same weights, the same versions"
    assert stack.left == []


@pytest.mark.timeout(700)
def test_a_run_is_taken_back_to_an_older_step_with_other_numbers(tmp_path: Path, document: dict[str, Any]) -> None:
    with Stack(tmp_path / "runs") as stack:
        stack.submit(document, "back")
        stack.until("back", lambda one: one["rollout_steps"] >= 5, "the fifth step")
        assert stack.api.post("/v1/runs/back/cancel").status_code == 202
        stack.until("back", lambda one: one["state"] == "cancelled", "the cancellation")
        first = stack.steps("back")
        refused = stack.api.post("/v1/runs/back/resume", json={"from_step": 3})
        assert refused.status_code == 422
        assert "from_step: value 3 is not accepted" in refused.text
        wish = {"from_step": 2, "learner_ranks": 2, "rollout": 2}
        assert stack.api.post("/v1/runs/back/resume", json=wish).status_code == 202
        one = stack.until("back", lambda one: one["state"] == "succeeded", "success from the older step")
        records = stack.steps("back")
    check_history(records, one)
    assert [record["weights"] for record in records[:2]] == [record["weights"] for record in first[:2]]
    # Versions are never reused: what follows step 2 is published above all that was published before.
    assert records[2]["version"] > max(record["version"] for record in first)
    phases = [event["phase"] for event in one["events"]]
    assert "rewound" in phases, phases
