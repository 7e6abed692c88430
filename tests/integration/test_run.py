"""Whole runs through `penstock up` and REST: real Redis, Ray, vLLM, DeepSpeed, on a model of 0.3 M parameters."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import redis
from transformers import AutoModelForCausalLM

from services.contracts import Lane, Verdict
from services.streams.keys import RunKeys
from tests.harness import redis_log
from tests.harness.recipes import recipe_document
from tests.harness.stack import Stack
from tests.harness.workload import write_questions

RUN_DEADLINE_S = 240
STEPS = 12


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("runs"), os.environ.get("PENSTOCK_TEST_REDIS")) as one:
        yield one


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl")


def document(model, questions, max_staleness, steps):
    return recipe_document(
        model,
        data={"source": "jsonl", "path": str(questions), "train": 44, "held_out": 12, "options": {}},
        rollout={"cpus": 0.3},
        learner={"cpus": 0.3, "learning_rate": 1e-4},
        limits={"rollout_steps": steps, "max_staleness": max_staleness, "startup_timeout_s": 200},
        algorithm={"overlong": {"cache": 4}},
    )


class Verdicts(threading.Thread):
    """Reads a run's verdicts as they come, for the stream is trimmed below what the sampler has taken in."""

    def __init__(self, stack, run):
        super().__init__(daemon=True)
        self._redis = redis.Redis.from_url(stack.redis_url)
        self._stream = RunKeys(run).lane(Lane.TRAIN).verdicts
        self._done = threading.Event()
        self._found = {}
        self.start()

    def run(self):
        after = "0"
        while not self._done.is_set():
            for _, entries in self._redis.xread({self._stream: after}, block=200) or []:
                self._take((entry.decode(), fields) for entry, fields in entries)
                after = entries[-1][0]

    def _take(self, entries):
        self._found |= {entry: Verdict.model_validate_json(fields[b"m"]) for entry, fields in entries}

    def trained(self, steps):
        """When each trained sample was generated, by its own time stamps: (start, end) in Unix seconds."""
        self._done.set()
        self.join(10)
        # What was trimmed before this thread had its turn.
        self._take(redis_log.missed(self._redis, self._stream, self._found))
        self._redis.close()
        trained = {group for step in steps for group in step["groups"]}
        facts = {(one.group, one.index): one.facts for one in self._found.values() if one.group in trained}
        return [(fact.started_at, fact.finished_at) for fact in facts.values()]


def generated_while_learning(samples, steps):
    """How many trained samples were being generated while an optimizer step was being taken."""
    learning = [(step["learning_started_at"], step["learning_finished_at"]) for step in steps]
    return sum(any(start < until and end > since for since, until in learning) for start, end in samples)


def check_reconciled(view, summary, steps, between=()):
    groups = summary["groups"]
    assert groups["dispatched"] == sum(groups[name] for name in ("trained", "filtered", "stale", "dead", "pending"))
    assert groups["trained"] == 4 * steps
    assert (summary["rollout_steps"], summary["policy_version"]) == (steps, steps)
    assert summary["optimizer_steps"] == 2 * steps
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert [change["state"] for change in view["history"]] == ["queued", "starting", "running", *between, "succeeded"]


def check_evaluations(view, summary):
    """Both sets before and after, and single steps while training went on; every step else was announced as skipped."""
    records = {(one["set"], one["name"]): one for one in view["evaluations"]}
    assert len(records) == len(view["evaluations"])
    names = {name for _, name in records}
    assert set(records) == {(kind, name) for kind in ("held-out", "more") for name in names}
    steps = {name for name in names if name.startswith("step-")}
    assert names == {"before", "after"} | steps
    assert steps <= {f"step-{step}" for step in range(1, STEPS)}
    assert steps, "not one single step was evaluated while training went on"
    for (kind, name), one in records.items():
        assert one["prompts"] + one["dropped"] == {"held-out": 12, "more": 4}[kind]
        assert (one["temperature"], one["top_p"]) == (1.0, 0.7)
        assert 0 <= one["version"] <= one["newest_version"] <= STEPS
        if name.startswith("step-"):
            assert one["newest_version"] >= int(name.removeprefix("step-"))
    assert records["held-out", "before"]["version"] == 0
    assert (records["held-out", "after"]["version"], records["held-out", "after"]["newest_version"]) == (STEPS, STEPS)
    assert summary["evaluations"]["more"]["after"]["accuracy"] == records["more", "after"]["accuracy"]
    assert summary["accuracy_after"] == records["held-out", "after"]["accuracy"]


def kill_one(stack, run, service):
    """`kill -9` one replica of a fleet; its process id in Penstock."""
    [victim, *_] = [
        one for one in stack.view(run)["processes"] if one["service"] == service and one["state"] == "ready"
    ]
    os.kill(victim["pid"], signal.SIGKILL)
    return victim["id"]


@pytest.mark.timeout(600)
def test_asynchronous_run_survives_kills_and_scaling(stack, tiny_model, questions):
    more = {"name": "more", "source": "jsonl", "path": str(questions), "prompts": 4, "samples": 1}
    recipe = document(tiny_model, questions, max_staleness=1, steps=STEPS)
    run = stack.submit(recipe | {"evaluation": {"samples": 2, "every": 1, "sets": [more]}})
    verdicts = Verdicts(stack, run)
    stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version")
    killed = {kill_one(stack, run, "verifier"), kill_one(stack, run, "rollout")}

    def replaced(view):
        alive = [one for one in view["processes"] if one["id"] not in killed and one["state"] == "ready"]
        return {"verifier", "rollout"} <= {one["service"] for one in alive}

    with stack.paused(run):
        stack.until(run, replaced, "replacement of the killed replicas")
        assert stack.api.patch(f"/v1/runs/{run}/scale", json={"rollout": 2}).status_code == 202
        stack.until(
            run, lambda view: sum(one["service"] == "rollout" for one in view["processes"]) == 2, "a second replica"
        )
    targets = stack.api.get("/v1/prometheus/targets").json()
    for target in (target for target in targets if target["labels"].get("run") == run):
        page = httpx.get(f"http://{target['targets'][0]}/metrics", timeout=10).text
        assert "process_cpu_seconds_total" in page, target
    view = stack.until(run, lambda view: view["state"] == "succeeded", "success")
    summary = json.loads((stack.folder / run / "summary.json").read_text())
    check_reconciled(view, summary, STEPS, between=("paused", "running"))
    steps = stack.steps(run)
    assert generated_while_learning(verdicts.trained(steps), steps) > 0
    assert max(step["metrics"]["staleness_max"] for step in steps) >= 1
    assert all(step["metrics"]["staleness_max"] <= 1 for step in steps)
    # A batch right behind another has seen no group of its own, and reports no accuracy.
    assert all(0 < step["metrics"]["accuracy"] < 1 for step in steps if step["metrics"]["groups_kept"])
    trained = [group for step in steps for group in step["groups"]]
    assert len(set(trained)) == len(trained) == 4 * STEPS
    exported = AutoModelForCausalLM.from_pretrained(summary["export_path"])
    initial = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert (exported.get_input_embeddings().weight - initial.get_input_embeddings().weight).abs().max() > 1e-5
    check_evaluations(view, summary)
    stack.until(run, lambda view: view["processes"] == [], "the end of the run's processes", deadline_s=20)


@pytest.mark.timeout(300)
def test_eval_of_a_model_folder_trains_nothing(stack, tiny_model, questions):
    command = [
        Path(sys.executable).parent / "penstock", "eval", tiny_model, "--data", questions, "--prompts", "10",
        "--samples", "4", "--temperature", "0.9", "--top-p", "0.8", "--max-new-tokens", "16", "--max-model-len", "128",
        "--api", str(stack.api.base_url), "--json",
    ]  # fmt: skip
    told = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=RUN_DEADLINE_S)
    assert told.returncode == 0, told.stderr
    [record] = json.loads(told.stdout)
    assert (record["set"], record["name"], record["prompts"], record["unknown"]) == ("data", "evaluation", 10, 0)
    assert (record["samples_per_prompt"], record["temperature"], record["top_p"]) == (4, 0.9, 0.8)
    assert (record["version"], record["newest_version"]) == (0, 0), "the folder's weights are policy version 0"
    assert [one["k"] for one in record["pass_at"]] == [1, 2, 4]
    assert 0 < record["accuracy"] == pytest.approx(record["pass_at"][0]["value"])
    run = re.search(r"run (\S+) submitted", told.stderr)[1]
    view = stack.view(run)
    assert view["state"] == "succeeded"
    assert view["groups"]["dispatched"] == 0
    assert view["export_path"] is None
    assert "learner" not in {event["service"] for event in view["events"]}


@pytest.mark.timeout(600)
def test_on_policy_run_starts_from_an_export_and_never_overlaps(stack, questions):
    exports = sorted(stack.folder.glob("*/export"))
    assert exports, "the run before has exported its policy"
    run = stack.submit(document(exports[0], questions, max_staleness=0, steps=2))
    verdicts = Verdicts(stack, run)
    view = stack.until(run, lambda view: view["state"] == "succeeded", "success")
    check_reconciled(view, json.loads((stack.folder / run / "summary.json").read_text()), 2)
    steps = stack.steps(run)
    samples = verdicts.trained(steps)
    assert len(samples) == 2 * 4 * 4
    assert generated_while_learning(samples, steps) == 0
    assert [step["metrics"]["staleness_max"] for step in steps] == [0.0, 0.0]
    # On-policy, engine and learner must agree on every log-prob, at the first version and after the next sync.
    assert [step["metrics"]["mismatch_kl"] for step in steps] == pytest.approx([0.0, 0.0], abs=5e-9)  # (1e-4)^2 / 2
    assert [step["metrics"]["effective_sample_size"] for step in steps] == pytest.approx([1.0, 1.0], abs=1e-6)


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


@pytest.mark.timeout(120)
def test_missing_model_fails_with_one_clear_line(stack, questions):
    run = stack.submit(document("/no/such/model", questions, max_staleness=1, steps=1))
    ends = time.monotonic() + 60
    while (view := stack.view(run))["state"] != "failed":
        assert time.monotonic() < ends, view
        time.sleep(0.2)
    assert "model.path" in view["reason"]
    assert "/no/such/model" in view["reason"]


@pytest.mark.timeout(300)
def test_ctrl_c_while_training_leaves_nothing(stack, tiny_model, questions):
    run = stack.submit(document(tiny_model, questions, max_staleness=1, steps=50))
    stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version")
    began = time.monotonic()
    stack.stop()
    assert stack.left == [], stack.output
    assert time.monotonic() - began < 20, stack.output
