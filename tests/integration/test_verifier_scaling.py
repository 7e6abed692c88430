"""The verifier fleet is scaled by REST while a run continues: up, where the new replica judges, and down again."""

import re

import httpx
import pytest

from tests.integration.runs import document, summary_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

STEPS, START_S = 60, 400.0
JUDGED = re.compile(r"^penstock_verdict_seconds_count\{[^}]*\} (\S+)$", re.M)


def ready(view):
    return [process for process in view["processes"] if (process["service"], process["state"]) == ("verifier", "ready")]


def judged(process):
    """How many responses a verifier has judged, by its own page."""
    page = httpx.get(f"http://{process['metrics']}/metrics", timeout=10).text
    return sum(float(count) for count in JUDGED.findall(page))


def scale(stack, run, count):
    answer = stack.api.patch(f"/v1/runs/{run}/scale", json={"verifier": count})
    assert answer.status_code == 202, answer.text
    assert answer.json()["recipe"]["verifier"]["replicas"] == count


@pytest.mark.timeout(1500)
def test_verifiers_come_and_go_and_nothing_is_lost(stack, tiny_model, questions):
    recipe = document(tiny_model, questions, max_staleness=1, steps=STEPS)
    recipe["limits"]["startup_timeout_s"] = START_S
    run = stack.submit(recipe)
    view = stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version", START_S)
    assert len(ready(view)) == 1
    with stack.paused(run):
        scale(stack, run, 2)
        view = stack.until(run, lambda view: len(ready(view)) == 2, "a second verifier")
    stack.until(run, lambda view: all(judged(process) for process in ready(view)), "verdicts of both verifiers")
    scale(stack, run, 1)
    view = stack.until(run, lambda view: len(view["processes"]) and len(ready(view)) == 1, "the end of one verifier")
    assert view["state"] == "running", "it was scaled while the run continued"
    view = stack.until(run, lambda view: view["state"] == "succeeded", "success")
    groups, steps = view["groups"], stack.steps(run)
    trained = [group for step in steps for group in step["groups"]]
    assert len(set(trained)) == len(trained) == 4 * STEPS == groups["trained"]
    ends = ("trained", "filtered", "stale", "dead", "pending")
    assert groups["dispatched"] == sum(groups[end] for end in ends)
    assert groups["dead"] == 0
    assert stack.api.get(f"/v1/runs/{run}/dead").raise_for_status().json() == []
    assert [edit["changes"] for edit in view["edits"]] == [{"verifier.replicas": [1, 2]}, {"verifier.replicas": [2, 1]}]
    assert summary_of(stack, run)["state"] == "succeeded"
