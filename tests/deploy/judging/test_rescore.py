"""Owns the tests of `penstock rescore`: an archive judged again, what is left out of it, and errors as one line.

Must not train; the archive is written as the learner writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.archive import RunArchive, RunFacts
from rollout.prompts import ChatTokenizer
from services.contracts import BatchGroup, BatchSample, Prompt
from services.settings import Recipe, parse_recipe
from services.storage.kept_files import keep_files
from services.storage.mirror import NO_MIRROR
from services.streams.delivery.payloads import SamplePayload
from tests.deploy.command_line import penstock
from tests.harness.batches import batch_with
from tests.harness.small_run import recipe_document
from tests.harness.tiny_model import write_tiny_model
from tests.learner.committed import WRITER

pytestmark = pytest.mark.usefixtures("loaded_once")
RUN = "tiny-1"
ROWS = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(12)]
LENIENT = """\
def score(prompt, response, reference, metadata):
    return {"score": 0.5, "correct": "1" in response, "reason": f"{prompt[-1]['content']} has {reference}"}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class WrittenRun:
    """The archive of a run below `runs`, and the tokenizer of its model."""

    def __init__(self, runs: Path, recipe: Recipe, model: Path) -> None:
        self.runs, self.recipe = runs, recipe
        self.archive = RunArchive(runs / RUN)
        self.archive.start(
            RunFacts(run=RUN, recipe=recipe, model_path=str(model), ranks=2, device="cpu", versions={}), WRITER
        )
        self.tokenizer = ChatTokenizer(str(model), recipe.max_prompt_tokens, recipe.model.chat_template)

    def payload(self, question: str, response: str) -> SamplePayload:
        messages = ({"role": "user", "content": question},)
        prompt = self.tokenizer.prompt_ids(Prompt(id="p", messages=messages, verifier="math", reference={}))
        ids = self.tokenizer._tokenizer(response)["input_ids"] + [3]  # the end-of-sequence token
        return SamplePayload(prompt, np.array(ids, np.int32), np.zeros(len(ids), np.float32), "", "", ())

    def step(self, step: int, groups: dict[int, list[tuple[str, dict[str, Any]]]], rank: int = 0) -> None:
        """Archive a step: by row, the responses with fields of their samples."""
        payloads, written = dict[str, SamplePayload](), []
        for row, responses in groups.items():
            samples = []
            for index, (response, fields) in enumerate(responses):
                key = f"penstock:{{{RUN}}}:payload:g{row}:{index}"
                payloads[key] = self.payload(ROWS[row]["question"], response)
                correct = fields.get("correct", False)
                known = {"advantage": 0.5, "reward": 1.0 if correct else -1.0, "correct": correct, "masked": False}
                samples.append(BatchSample(payload=key, tokens=len(response), staleness=0, **(known | fields)))
            written.append(BatchGroup(group=f"g{row}", samples=tuple(samples), prompt=f"p{row + 1:06d}"))
        batch = batch_with(written, step=step)
        self.archive.write_share(batch, rank, payloads, WRITER)
        self.archive.write_batch(batch, WRITER)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def written(tmp_path: Path, model: Path) -> Callable[..., WrittenRun]:
    def write(**sections: Any) -> WrittenRun:
        write_rows(tmp_path / "rows.jsonl", ROWS)
        data = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "layout": "fields", "train": 8, "held_out": 2}
        document = recipe_document(model, algorithm={"overlong": {"punishment": False}})
        document["data"] = data | sections.pop("data", {})
        return WrittenRun(tmp_path / "runs", parse_recipe(document | sections), model)

    return write


def rescore(run: WrittenRun, *arguments: str) -> tuple[int, list[str]]:
    status, output = penstock("rescore", RUN, "--runs", str(run.runs), *arguments)
    return status, output.splitlines()


UNKNOWN = {"reward": 0.0, "advantage": 0.0, "masked": True}


def two_steps(run: WrittenRun) -> None:
    run.step(1, {1: [(r"\boxed{2}", {"correct": True}), ("no", {})], 2: [(r"\boxed{4}", {}), ("5", {"correct": True})]})
    run.step(2, {3: [(r"\boxed{6}", UNKNOWN), (r"\boxed{7}", UNKNOWN), ("no idea", {})]}, rank=1)


@pytest.mark.slow
def test_changes_are_shown_per_step(written: Callable[..., WrittenRun], tmp_path: Path) -> None:
    run = written()
    two_steps(run)
    status, lines = rescore(run, "--output", str(tmp_path / "changed.jsonl"))
    assert status == 0, lines
    first, second, total = (line.split() for line in lines[1:4])
    assert first == ["1", "4", "0.500", "0.500", "+0.000", "+0.000", "1", "1", "0", "0"]
    assert second == ["2", "3", "0.000", "0.333", "-1.000", "-0.333", "0", "0", "0", "2"]
    assert total[:4] == ["all", "7", "0.400", "0.429"]
    assert "4 of 7 verdicts changed" in lines[4]
    assert "at most by +0.333 (step 2)" in lines[5]
    assert any(
        line.startswith("step 1, prompt p000003, sample 0 of group g2: wrong then, correct now: extracted '4'")
        for line in lines
    )
    changed = [json.loads(line) for line in (tmp_path / "changed.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"], row["index"], row["then"], row["now"]) for row in changed] == [
        (1, "p000003", 0, "wrong", "correct"),
        (1, "p000003", 1, "correct", "wrong"),
        (2, "p000004", 0, "unknown", "correct"),
        (2, "p000004", 1, "unknown", "wrong"),
    ]
    assert changed[0]["response"] == r"\boxed{4}"


@pytest.mark.slow
def test_another_reward_with_a_file_judges(
    written: Callable[..., WrittenRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written()
    run.step(1, {5: [("10", {"correct": True}), ("2", {})], 6: [("12", {}), ("12", {"correct": True})]})
    (tmp_path / "rewards.py").write_text(LENIENT)
    monkeypatch.chdir(tmp_path)
    status, lines = rescore(run, "--verifier", "python:./rewards.py:score", "--output", "changed.jsonl")
    assert status == 0, lines
    [changed] = [json.loads(line) for line in (tmp_path / "changed.jsonl").read_text().splitlines()]
    assert (changed["group"], changed["now"], changed["score"]) == ("g6", "correct", 0.5)
    assert changed["reason"] == "What is 6 + 6? has 12"
    status, lines = rescore(run, "--verifier", "{math: {last_number: true}}")
    assert (status, lines[1].split()[3]) == (0, "0.750")
    status, lines = rescore(run, "--verifier", "pattern")
    assert (status, lines[1].split()[3]) == (0, "0.750")


def test_the_runs_own_files_judge(written: Callable[..., WrittenRun]) -> None:
    rewards = {"rewards": {"mine": "python:./rewards.py:score"}}
    run = written(data={"verifier": "mine"}, verifier=rewards)
    keep_files(run.archive.folder, NO_MIRROR, {"./rewards.py": LENIENT})
    run.step(1, {5: [("1", {}), ("2", {})]})
    for arguments in ([], ["--verifier", "mine"]):
        status, lines = rescore(run, *arguments)
        assert status == 0, lines
        assert lines[1].split()[3] == "0.500"
    status, lines = rescore(run, "--verifier", "math")
    assert (status, lines[1].split()[3]) == (0, "0.000")


@pytest.mark.slow
def test_steps_are_chosen(written: Callable[..., WrittenRun]) -> None:
    run = written()
    two_steps(run)
    for given, shown in (("2", ["2"]), ("1-1", ["1"]), ("2-", ["2"]), ("1-9", ["1", "2"])):
        status, lines = rescore(run, "--steps", given)
        assert status == 0, lines
        assert [line.split()[0] for line in lines[1 : len(shown) + 2]] == [*shown, "all"]
    assert rescore(run, "--steps", "7-9") == (
        2,
        ["penstock: --steps: '7-9' is not valid: expected archived steps: 1 to 2"],
    )
    assert "two rollout steps" in rescore(run, "--steps", "x")[1][0]


def test_changed_data_is_left_out(written: Callable[..., WrittenRun], tmp_path: Path) -> None:
    run = written()
    two_steps(run)
    write_rows(tmp_path / "rows.jsonl", [*ROWS[:2], {"question": "What is 2 + 3?", "answer": 5}, *ROWS[3:]])
    status, lines = rescore(run)
    assert status == 0, lines
    assert lines[1].split()[:2] == ["1", "2"]
    assert "2 trained samples were left out: the recipe's data has another prompt in its place" in lines


def test_errors_are_one_line(written: Callable[..., WrittenRun], tmp_path: Path) -> None:
    run = written()
    two_steps(run)
    assert rescore(run, "--verifier", "nosuch")[1][0].startswith("penstock: --verifier: 'nosuch' is not valid")
    status, output = penstock("rescore", "other", "--runs", str(run.runs))
    assert (status, "RUN: 'other' is not valid" in output) == (2, True)
    share = run.archive.share_path(1, 0, WRITER)
    share.write_bytes(share.read_bytes()[:-40])
    status, lines = rescore(run)
    assert (status, len(lines)) == (2, 1)
    assert f"{share}: damaged" in lines[0]
    (tmp_path / "rows.jsonl").unlink()
    status, lines = rescore(run)
    assert (status, len(lines)) == (2, 1)
    assert "rows.jsonl" in lines[0]
