"""A whole run that trains the scores of a user's functions, one of them named by rows; the file is edited meanwhile."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.contracts import reward_names
from tests.integration.runs import check_reconciled, document, kill_one, summary_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

STEPS = 4
NAME = "./rewards.py"
REWARDS = """\
def score(prompt, response, reference, metadata):
    share = len(set(response) & set(reference)) / len(reference)
    return {"score": share, "correct": share >= 0.2, "reason": f"{share:.2f} of the characters of {reference}"}

def short(prompt, response, reference, metadata):
    return 1 - min(len(response), 16) / 16

def lower(prompt, response, reference, metadata):
    assert prompt[-1]["content"].startswith(metadata["begins"])
    return response != response.upper()
"""
EDITED = """\
def score(prompt, response, reference, metadata):
    raise RuntimeError("the edited file")

short = lower = score
"""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COUNT = re.compile(r"^(\d+) of (\d+) verdicts changed$", re.M)


def rows(file, count, **more):
    """A file of questions that begin with its name."""
    asked = [(f"{file.stem} {number}: letters?", LETTERS[number % 6 : number % 6 + 20]) for number in range(count)]
    file.write_text(
        "\n".join(json.dumps({"question": question, "answer": letters} | more) for question, letters in asked)
    )
    return str(file)


def scored(model, folder):
    """A recipe of two named rewards; the rows of its evaluation set name a function that the recipe does not."""
    made = document(model, folder / "none", max_staleness=1, steps=STEPS)
    made["data"] = {"source": "jsonl", "path": rows(folder / "train.jsonl", 60), "layout": "fields", "verifier": "both"}
    made["data"] |= {"train": 44, "held_out": 8}
    parts = [
        {"name": "letters", "verifier": f"python:{NAME}:score"},
        {"name": "short", "verifier": f"python:{NAME}:short", "weight": 0.25},
    ]
    made["verifier"] = {"rewards": {"both": {"weighted": parts}}, "files": [NAME]}
    made["algorithm"]["reward"] = "score"
    path = rows(folder / "exam.jsonl", 4, verifier=f"python:{NAME}:lower", metadata={"begins": "exam"})
    fields = {"verifier": "verifier", "metadata": "metadata"}
    exam = {"name": "exam", "source": "jsonl", "path": path, "layout": "fields", "fields": fields}
    made["evaluation"] = {"samples": 2, "sets": [exam]}
    return made


def rescored(stack, run, folder, verifier):
    """The answer of `penstock rescore` in a folder: how many verdicts changed, of how many, and all lines."""
    command = [Path(sys.executable).parent / "penstock", "rescore", run, "--runs", stack.folder, "--verifier", verifier]
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    changed, samples = map(int, COUNT.search(done.stdout).groups())
    return changed, samples, done.stdout.splitlines()


@pytest.mark.timeout(900)
def test_a_run_trains_scores_of_the_users_file(stack, tiny_model, tmp_path):
    file, digest = tmp_path / "rewards.py", hashlib.sha256(REWARDS.encode()).hexdigest()
    file.write_text(REWARDS)
    submission = {"recipe": scored(tiny_model, tmp_path), "files": {NAME: file.read_text()}}
    answer = stack.api.post("/v1/runs", json=submission)
    assert answer.status_code == 201, answer.text
    run = answer.json()["id"]
    assert answer.json()["files"] == {NAME: digest}

    stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version")
    file.write_text(EDITED)
    killed = kill_one(stack, run, "verifier")  # what replaces it loads the run's own copy
    view = stack.until(run, lambda view: view["state"] == "succeeded", "success")
    check_reconciled(view, summary_of(stack, run), STEPS)
    # A short run may end before its silence counts as a death.
    stack.until(run, lambda view: killed not in {each["id"] for each in view["processes"]}, "the dead one's removal")

    for metrics in (step["metrics"] for step in stack.steps(run) if step["metrics"]["groups_kept"]):
        assert reward_names(metrics) == ["letters", "short"]
        assert 0 < metrics["reward_letters"] < 1
        assert 0 <= metrics["reward_short"] < 1
    assert view["unknown_verdicts"] == []
    assert {(each["set"], each["unknown"]) for each in view["evaluations"]} == {("held-out", 0), ("exam", 0)}

    kept = stack.folder / run / "rewards" / "rewards.py"
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == digest == view["files"][NAME]
    assert [event["text"] for event in view["events"] if event["phase"] == "reward-file-differs"] == []
    changed, samples, lines = rescored(stack, run, tmp_path, "both")
    assert (changed, samples) == (0, 4 * 4 * STEPS), lines
    total = next(line.split() for line in lines if line.split()[:1] == ["all"])
    assert total[2] == total[3], "the accuracy"
    assert total[4] == total[5], "the mean reward"
    assert rescored(stack, run, tmp_path, f"python:{NAME}:score")[0] == samples, "the edited file is another reward"
