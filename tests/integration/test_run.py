"""Whole runs on a shared stack: asynchronous, from an export, with two learner ranks, and evaluation only."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.runs import (
    Verdicts,
    check_reconciled,
    document,
    generated_while_learning,
    kill_one,
    summary_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

RUN_DEADLINE_S = 240
STEPS = 12


def check_evaluations(view, summary):
    """Both sets before and after training, and some steps during it; an event reports every step that was skipped."""
    records = {(record["set"], record["name"]): record for record in view["evaluations"]}
    assert len(records) == len(view["evaluations"])
    names = {name for _, name in records}
    assert set(records) == {(kind, name) for kind in ("held-out", "more") for name in names}
    steps = {name for name in names if name.startswith("step-")}
    assert names == {"before", "after"} | steps
    assert steps <= {f"step-{step}" for step in range(1, STEPS)}
    assert steps, "no step was evaluated during training"
    for (kind, name), record in records.items():
        assert record["prompts"] + record["dropped"] == {"held-out": 12, "more": 4}[kind]
        assert (record["temperature"], record["top_p"]) == (1.0, 0.7)
        assert 0 <= record["version"] <= record["newest_version"] <= STEPS
        if name.startswith("step-"):
            assert record["newest_version"] >= int(name.removeprefix("step-"))
    assert records["held-out", "before"]["version"] == 0
    assert (records["held-out", "after"]["version"], records["held-out", "after"]["newest_version"]) == (STEPS, STEPS)
    assert summary["evaluations"]["more"]["after"]["accuracy"] == records["more", "after"]["accuracy"]
    assert summary["accuracy_after"] == records["held-out", "after"]["accuracy"]


@pytest.mark.timeout(600)
def test_an_asynchronous_run_survives_kills_and_scaling(stack, tiny_model, questions):
    more = {"name": "more", "source": "jsonl", "path": str(questions), "prompts": 4, "samples": 1}
    recipe = document(tiny_model, questions, max_staleness=1, steps=STEPS)
    run = stack.submit(recipe | {"evaluation": {"samples": 2, "every": 1, "sets": [more]}})
    verdicts = Verdicts(stack, run)
    stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version")
    killed = {kill_one(stack, run, "verifier"), kill_one(stack, run, "rollout")}

    def replaced(view):
        alive = [
            process for process in view["processes"] if process["id"] not in killed and process["state"] == "ready"
        ]
        return {"verifier", "rollout"} <= {process["service"] for process in alive}

    with stack.paused(run):
        stack.until(run, replaced, "replacement of the killed replicas")
        assert stack.api.patch(f"/v1/runs/{run}/scale", json={"rollout": 2}).status_code == 202
        stack.until(
            run,
            lambda view: sum(process["service"] == "rollout" for process in view["processes"]) == 2,
            "a second replica",
        )
    targets = stack.api.get("/v1/prometheus/targets").json()
    for target in (target for target in targets if target["labels"].get("run") == run):
        page = httpx.get(f"http://{target['targets'][0]}/metrics", timeout=10).text
        assert "process_cpu_seconds_total" in page, target
    view = stack.until(run, lambda view: view["state"] == "succeeded", "success")
    summary = summary_of(stack, run)
    check_reconciled(view, summary, STEPS, between=("paused", "running"))
    steps = stack.steps(run)
    assert generated_while_learning(verdicts.trained(steps), steps) > 0
    assert max(step["metrics"]["staleness_max"] for step in steps) >= 1
    assert all(step["metrics"]["staleness_max"] <= 1 for step in steps)
    # A batch directly after another one may have no newly judged group, and then reports no accuracy.
    assert all(0 < step["metrics"]["accuracy"] < 1 for step in steps if step["metrics"]["groups_kept"])
    trained = [group for step in steps for group in step["groups"]]
    assert len(set(trained)) == len(trained) == 4 * STEPS
    check_evaluations(view, summary)
    stack.until(run, lambda view: view["processes"] == [], "the end of the run's processes", deadline_s=20)


@pytest.mark.timeout(300)
def test_eval_of_a_model_folder_trains_nothing(stack, tiny_model, questions):
    command = [
        Path(sys.executable).parent / "penstock",
        "eval",
        tiny_model,
        "--data",
        questions,
        "--prompts",
        "10",
        "--samples",
        "4",
        "--temperature",
        "0.9",
        "--top-p",
        "0.8",
        "--max-new-tokens",
        "16",
        "--max-model-len",
        "128",
        "--api",
        str(stack.api.base_url),
        "--json",
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=RUN_DEADLINE_S)
    assert done.returncode == 0, done.stderr
    [record] = json.loads(done.stdout)
    assert (record["set"], record["name"], record["prompts"], record["unknown"]) == ("data", "evaluation", 10, 0)
    assert (record["samples_per_prompt"], record["temperature"], record["top_p"]) == (4, 0.9, 0.8)
    assert (record["version"], record["newest_version"]) == (0, 0), "the folder's weights are policy version 0"
    assert [score["k"] for score in record["pass_at"]] == [1, 2, 4]
    assert 0 < record["accuracy"] == pytest.approx(record["pass_at"][0]["value"])
    run = re.search(r"run (\S+) submitted", done.stderr)[1]
    view = stack.view(run)
    assert view["state"] == "succeeded"
    assert view["groups"]["dispatched"] == 0
    assert view["export_path"] is None
    assert "learner" not in {event["service"] for event in view["events"]}


@pytest.mark.timeout(900)
def test_a_run_starts_from_an_export(stack, finished_run, questions):
    """Engine and learner agree on every log-prob, at the first version and after the next sync."""
    run = stack.submit(document(finished_run.summary["export_path"], questions, max_staleness=0, steps=2))
    view = stack.until(run, lambda view: view["state"] == "succeeded", "success")
    check_reconciled(view, summary_of(stack, run), 2)
    metrics = [step["metrics"] for step in stack.steps(run)]
    assert [step["staleness_max"] for step in metrics] == [0.0, 0.0]
    assert [step["mismatch_kl"] for step in metrics] == pytest.approx([0.0, 0.0], abs=5e-9)  # (1e-4)^2 / 2
    assert [step["effective_sample_size"] for step in metrics] == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.timeout(900)
def test_a_run_with_top_p_agrees_on_log_probs_and_replays(stack, tiny_model, questions):
    """The learner's log-probs are those of the engine's nuclei, and the archive keeps what a replay needs of them."""
    recipe = document(tiny_model, questions, max_staleness=0, steps=2)
    recipe["rollout"].update(top_p=0.7, top_k=20)
    run = stack.submit(recipe)
    view = stack.until(run, lambda view: view["state"] == "succeeded", "success")
    check_reconciled(view, summary_of(stack, run), 2)
    metrics = [step["metrics"] for step in stack.steps(run)]
    assert [step["mismatch_kl"] for step in metrics] == pytest.approx([0.0, 0.0], abs=5e-9)  # (1e-4)^2 / 2
    command = [Path(sys.executable).parent / "penstock", "replay", run, "2", "--runs", stack.folder]
    replayed = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.timeout(600)
def test_run_with_two_learner_ranks_and_cancel(stack, tiny_model, questions):
    recipe = document(tiny_model, questions, max_staleness=1, steps=50)
    recipe["learner"].update(ranks=2, zero_stage=2)
    run = stack.submit(recipe)
    stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version")
    assert stack.api.post(f"/v1/runs/{run}/cancel").status_code == 202
    ends = time.monotonic() + 60
    while (view := stack.view(run))["state"] != "cancelled":
        assert time.monotonic() < ends, view["state"]
        time.sleep(0.2)
    assert view["groups"]["reconciled"]
    assert view["groups"]["trained"] >= 4


@pytest.mark.timeout(600)
def test_ctrl_c_while_training_leaves_nothing(stack, tiny_model, questions):
    run = stack.submit(document(tiny_model, questions, max_staleness=1, steps=50))
    stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version")
    stack.stop()
    assert stack.left == [], stack.output
