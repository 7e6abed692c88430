"""Runs that are resumed after a power failure, or rewound with other numbers of processes. The engines are real."""

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
"""Enough steps that no run ends before the test interrupts it; all checkpoints are kept, including that of step 2."""


def check_history(records: list[dict[str, Any]], view: dict[str, Any]) -> None:
    """Every step and every group occurs once in the surviving history."""
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    versions = [record["version"] for record in records]
    assert versions == sorted(set(versions)), versions
    trained = [group for record in records for group in record["groups"]]
    assert len(trained) == len(set(trained)) == 4 * STEPS
    groups = view["groups"]
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
    """Kill all processes of the stack at once."""
    everything = [*stack.below(), psutil.Process(stack.process.pid)]
    for process in everything:
        send(process.pid, signal.SIGSTOP)  # so that no process restarts another one that dies first
    for process in everything:
        send(process.pid, signal.SIGKILL)
    stack.process.wait(10)
    psutil.wait_procs(everything, timeout=10)


@pytest.mark.timeout(700)
def test_a_run_resumes_after_a_power_failure(tmp_path: Path, document: dict[str, Any]) -> None:
    runs = tmp_path / "runs"
    with Stack(runs) as stack:
        stack.submit(document, "cut")
        stack.until("cut", lambda view: view["rollout_steps"] >= 3, "the third step")
        before = stack.view("cut")["rollout_steps"]
        cut_power(stack)
    with Stack(runs) as stack:
        view = stack.until("cut", lambda view: view["state"] == "succeeded", "success after the cut")
        records = stack.steps("cut")
        check_history(records, view)
        ready = [event["text"] for event in view["events"] if event["phase"] == "ready"]
    assert before >= 3
    assert any("(bit-identical to the committed one)" in text for text in ready), ready
    assert [record["version"] for record in records] == list(range(1, STEPS + 1)), "the same weights, the same versions"
    assert stack.left == []


@pytest.mark.timeout(700)
def test_a_run_is_rewound_with_other_numbers_of_processes(tmp_path: Path, document: dict[str, Any]) -> None:
    with Stack(tmp_path / "runs") as stack:
        stack.submit(document, "back")
        stack.until("back", lambda view: view["rollout_steps"] >= 5, "the fifth step")
        assert stack.api.post("/v1/runs/back/cancel").status_code == 202
        stack.until("back", lambda view: view["state"] == "cancelled", "the cancellation")
        first = stack.steps("back")
        refused = stack.api.post("/v1/runs/back/resume", json={"from_step": 3})
        assert refused.status_code == 422
        assert "from_step: 3 is not valid" in refused.text
        changes = {"from_step": 2, "learner_ranks": 2, "rollout": 2}
        assert stack.api.post("/v1/runs/back/resume", json=changes).status_code == 202
        view = stack.until("back", lambda view: view["state"] == "succeeded", "success from the older step")
        records = stack.steps("back")
    check_history(records, view)
    assert [record["weights"] for record in records[:2]] == [record["weights"] for record in first[:2]]
    # Versions are never reused: those after step 2 are higher than all previous ones.
    assert records[2]["version"] > max(record["version"] for record in first)
    phases = [event["phase"] for event in view["events"]]
    assert "rewound" in phases, phases
