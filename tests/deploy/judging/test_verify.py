"""Owns the tests of `penstock verify`: verdicts in the order of the lines, labels compared, errors that name the row.

Must not repeat the verifiers' own tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli.judging import local_judging
from deploy.cli.main import app
from tests.harness.small_run import recipe_document

pytestmark = pytest.mark.usefixtures("loaded_once")
RIGHT, WRONG = {"response": r"so \boxed{5}", "answer": "5"}, {"response": r"so \boxed{6}", "answer": 5}
REWARDS = """\
def score(prompt, response, reference, metadata):
    return {"score": len(prompt) * metadata.get("worth", 0) / 4, "correct": reference in response, "reason": "read"}
"""


def verify(*arguments: str, given: str = "") -> tuple[int, list[dict[str, Any]], str]:
    """Run the command; returns exit status, the lines of standard output, and standard error."""
    result = CliRunner().invoke(app, ["verify", *arguments], input=given)
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


def lines(*rows: Any) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.fixture
def few_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are read two by two."""
    monkeypatch.setattr(local_judging.LocalJudges.judge, "__kwdefaults__", {"together": 2})


def test_verdicts_have_the_order_of_the_lines(few_together: None) -> None:
    status, found, _ = verify(given=lines(*[RIGHT | {"id": f"r{n}"} if n % 2 else WRONG for n in range(21)]))
    assert status == 0
    assert [line["outcome"] for line in found] == ["correct" if n % 2 else "wrong" for n in range(21)]
    assert [line.get("id") or line["row"] for line in found] == [f"r{n}" if n % 2 else n + 1 for n in range(21)]
    assert "'6'" in found[0]["reason"]
    assert (found[0]["answer"], found[0]["score"]) == ("6", 0.0)


def test_labels_give_a_confusion_table(tmp_path: Path) -> None:
    file = tmp_path / "labelled.jsonl"
    unreadable = {"response": "x", "answer": "$$", "correct": False}
    rows = [RIGHT | {"correct": True}, WRONG | {"correct": True, "id": "w"}, RIGHT | {"correct": False}, unreadable]
    file.write_text(lines(*rows, RIGHT))
    status, found, errors = verify(str(file))
    assert status == 0
    assert [line["outcome"] for line in found] == ["correct", "wrong", "correct", "unknown", "correct"]
    assert "'$$' is not valid" in found[3]["reason"]
    table = errors.splitlines()
    assert table[1].split() == ["labelled", "correct", "1", "1", "0"]
    assert table[2].split() == ["labelled", "wrong", "1", "0", "1"]
    assert table[3] == "3 of 4 disagree:"
    assert table[4].startswith("row 2 (w): labelled correct, judged wrong, answer '6': ")


def test_a_function_of_this_folder_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say hello."}]
    asked = {"response": "hello", "answer": "hello", "metadata": {"worth": 1}, "prompt": prompt}
    bare = {"response": "bye", "answer": "hello"}
    status, found, errors = verify("--verifier", "python:./rewards.py:score", given=lines(asked, bare))
    assert status == 0, errors
    assert [(line["outcome"], line["score"]) for line in found] == [("correct", 0.5), ("wrong", 0.0)]
    assert found[0]["reason"] == "read"


def test_a_recipe_gives_reward_and_files(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    both = {"weighted": [{"verifier": "math"}, {"verifier": "mine", "name": "own"}]}
    data = {"source": "jsonl", "path": "rows.jsonl", "layout": "fields", "verifier": both}
    named = {"rewards": {"mine": "python:./rewards.py:score"}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_document("/m", data=data, verifier=named)))
    status, found, errors = verify("--recipe", str(recipe), given=lines(RIGHT | {"prompt": "?", "metadata": {}}))
    assert status == 0, errors
    assert (found[0]["outcome"], found[0]["rewards"]) == ("correct", {"math": 1.0, "own": 0.0})
    option = "{math: {last_number: true}}"
    status, found, _ = verify("--recipe", str(recipe), "--verifier", option, given=lines({**RIGHT, "response": "5"}))
    assert (status, found[0]["outcome"]) == (0, "correct")


def test_a_row_names_its_own_verifier() -> None:
    row = {"response": "abc", "verifier": "pattern", "reference": {"pattern": "b"}}
    assert verify(given=lines(row))[1][0]["outcome"] == "correct"
    status, _, errors = verify(given=lines(row | {"verifier": "python:os:system"}))
    assert status == 2
    assert "row 1: field 'verifier': 'python:os:system' is not valid" in errors


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("{", "row 2: not JSON"),
        ("[1]", "row 2: it is a list, which is not valid: expected an object"),
        ('{"response": "x"}', "row 2: field 'answer': missing"),
        ('{"response": "x", "answer": null}', "row 2: field 'answer': null is not valid: expected text or a number"),
        ('{"answer": "x"}', "row 2: field 'response': missing"),
        ('{"response": 1, "answer": "x"}', "row 2: field 'response': 1 is not valid: expected text"),
        ('{"response": "x", "answer": "5", "correct": "no"}', "row 2: field 'correct': 'no' is not valid"),
        ('{"response": "x", "answer": "5", "prompt": [1]}', "row 2: field 'prompt'"),
        ("[" * 100_000, "row 2: nested too deeply"),
    ],
)
def test_a_bad_line_is_an_error_before_any_verdict(tmp_path: Path, bad: str, expected: str) -> None:
    file, output = tmp_path / "rows.jsonl", tmp_path / "verdicts.jsonl"
    file.write_text(lines(RIGHT) + bad + "\n")
    status, found, errors = verify(str(file), "--output", str(output))
    assert (status, found) == (2, [])
    assert f"{file} {expected}" in errors
    assert not output.exists()


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_lines_before_a_bad_one_are_judged(few_together: None, before: int) -> None:
    status, found, errors = verify(given=lines(*[RIGHT] * before) + "{\n")
    assert (status, len(found)) == (2, before)
    assert f"standard input row {before + 1}: not JSON" in errors


def test_output_is_a_whole_file(tmp_path: Path) -> None:
    output = tmp_path / "verdicts.jsonl"
    status, found, _ = verify("--output", str(output), given=lines(RIGHT, WRONG))
    assert (status, found) == (0, [])
    assert [json.loads(line)["outcome"] for line in output.read_text().splitlines()] == ["correct", "wrong"]
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("nosuch", "--verifier: 'nosuch' is not valid"),
        ("{math: {x: 1}}", "--verifier.math.x: 1 is not valid"),
        ("{", "--verifier: '{' is not valid"),
        ("python:./missing.py:score", "--verifier: './missing.py' is not valid"),
        ("python:nosuchmodule:score", "nosuchmodule"),
    ],
)
def test_a_bad_reward_is_one_line(reward: str, expected: str) -> None:
    status, found, errors = verify("--verifier", reward, given=lines(RIGHT))
    assert (status, found) == (2, [])
    assert expected in errors
    assert errors.count("\n") == 1


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    status, _, errors = verify(str(tmp_path / "none.jsonl"))
    assert status == 2
    assert "none.jsonl" in errors
