"""`penstock reward`: what `check` reports, and with which exit status; how `try` names what it was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.command_line import penstock
from tests.harness.small_run import recipe_document


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)


def rows(name: str, answers: list[Any]) -> str:
    """A file of questions in the current folder; its path, as a recipe names it."""
    lines = [json.dumps({"question": f"{name} {at}?", "answer": answer}) for at, answer in enumerate(answers)]
    Path(f"{name}.jsonl").write_text("\n".join(lines))
    return f"{name}.jsonl"


def recipe(**sections: Any) -> str:
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe_document("/model", **sections)))
    return "recipe.yaml"


def own(path: str, **more: Any) -> dict[str, Any]:
    fields = {"source": "jsonl", "path": path, "layout": "fields", "train": None, "held_out": 1, "options": {}}
    return fields | more


def test_all_references_of_a_recipe_are_read() -> None:
    sets = [{"name": "exam", "source": "jsonl", "path": rows("exam", ["x", "y"]), "layout": "fields"}]
    path = recipe(data=own(rows("own", ["1", "2", "3"]), verifier="mine"), evaluation={"sets": sets})
    document = yaml.safe_load(Path(path).read_text())
    document["verifier"] = {"rewards": {"mine": {"all": ["math", "answer-line"]}}}
    Path(path).write_text(yaml.safe_dump(document))
    status, output = penstock("reward", "check", path)
    assert output.splitlines() == [
        'data: 3 rows, 3 distinct questions; references: 3 for {"all":["math","answer-line"]}',
        "evaluation.sets 'exam': 2 rows, 2 distinct questions; references: 2 for math",
        "3 rows, 3 distinct questions, 0 duplicates removed (0 of them with another answer; the first is kept), "
        "0 removed from training because an evaluation set has them: 2 to train on, 1 held out, 2 in set 'exam'",
        "all 5 references can be read",
    ]
    assert status == 0


@pytest.mark.parametrize("rule", ["error", "drop"])
def test_each_fault_is_shown_up_to_twenty(rule: str) -> None:
    answers = ["1", "2", *(f"\\frac{{{number}" for number in range(22))]
    status, output = penstock("reward", "check", recipe(data=own(rows("own", answers), on_bad_reference=rule)))
    first, *faults, last = output.splitlines()
    assert first == "data: 24 rows, 2 distinct questions; references: 2 for math, 22 cannot be read"
    assert len(faults) == 20
    where = f"data.path: '{Path.cwd()}/own.jsonl'"
    assert faults[0].startswith(rf"{where} row 3: field 'answer': '\\frac{{0' is not valid: expected")
    assert (last, status) == ("and 2 more", 1)


def test_answers_that_are_none_are_all_shown() -> None:
    status, output = penstock("reward", "check", recipe(data=own(rows("own", ["1", "2", "", None, [3], True]))))
    first, *faults = output.splitlines()
    assert first == "data: 6 rows, 2 distinct questions; references: 2 for math, 4 cannot be read"
    shown = [f"row {row}: field 'answer': {value} is not valid" for row, value in enumerate(("''", "null", "[3]"), 3)]
    assert len(faults) == 4
    assert all(text in fault for text, fault in zip(shown, faults, strict=False))
    assert status == 1


def with_functions(functions: list[str], source: str) -> str:
    """A recipe with the file rewards.py, whose rows name these functions of it."""
    Path("rewards.py").write_text(source)
    named = [{"question": f"{name}?", "answer": "1", "verifier": f"python:./rewards.py:{name}"} for name in functions]
    Path("own.jsonl").write_text("\n".join(map(json.dumps, named)))
    fields = {"verifier": "verifier"}
    return recipe(data=own("own.jsonl", fields=fields), verifier={"files": ["./rewards.py"]})


SCORE = "def score(prompt, response, reference, metadata):\n    return True\n"


def test_functions_that_rows_name_must_exist() -> None:
    both = SCORE + SCORE.replace("score", "more")
    status, output = penstock("reward", "check", with_functions(["score", "more"], both))
    assert output.splitlines()[-1] == "all 2 references can be read"
    assert status == 0
    status, output = penstock("reward", "check", with_functions(["score", "missing"], SCORE))
    assert output.strip() == (
        f"penstock: data.path: '{Path.cwd()}/own.jsonl' row 2: field 'verifier': "
        "'python:./rewards.py:missing' is not valid: expected a function that './rewards.py' defines at top "
        "level: it has 'score'"
    )
    assert status == 2


def test_rows_do_not_name_more_functions_than_stay_loaded() -> None:
    names = [f"f{number}" for number in range(25)]
    source = "".join(SCORE.replace("score", name) for name in names)
    status, output = penstock("reward", "check", with_functions(names, source))
    assert "data: 25 is not valid: expected rows that name at most 24 different functions of verifier.files" in output
    assert status == 2


def test_a_recipe_has_no_more_functions_than_stay_loaded() -> None:
    Path("rewards.py").write_text("".join(SCORE.replace("score", f"f{number:02}") for number in range(33)))
    named = {f"f{number:02}": f"python:./rewards.py:f{number:02}" for number in range(33)}
    expected = "at most 28 different functions without `needs` in a recipe, which has 33"
    path = recipe(data=own(rows("own", ["1", "2"])), verifier={"rewards": named})
    for command in (("validate",), ("reward", "check")):
        status, output = penstock(*command, path)
        assert f"verifier.rewards.f28: 'python:./rewards.py:f28' is not valid: expected {expected}" in output
        assert status == 2


def test_functions_that_do_not_load_are_named() -> None:
    path = with_functions(["score"], "import absent\n" + SCORE)
    document = yaml.safe_load(Path(path).read_text())
    document["data"]["verifier"] = {"all": ["python:os.path:absent", "math"]}
    document["verifier"]["rewards"] = {"gone": "python:absent.module:f", "good": "python:math:sqrt"}
    Path(path).write_text(yaml.safe_dump(document))
    status, output = penstock("reward", "check", path)
    in_data, gone, in_row = output.removeprefix("data: 1 rows").splitlines()[-3:]
    loads = "is not valid: expected a function that can be loaded here"
    assert in_data.startswith(f"penstock: data.verifier: 'python:os.path:absent' {loads}")
    assert gone.startswith(f"verifier.rewards.gone: 'python:absent.module:f' {loads}")
    assert "ModuleNotFoundError: No module named 'absent'" in gone
    assert in_row.startswith(
        f"data.path: '{Path.cwd()}/own.jsonl' row 1: field 'verifier': 'python:./rewards.py:score' {loads}"
    )
    assert "(rewards.py, line 1)" in in_row
    assert status == 2


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("rewards.py:absent", "REWARD: './rewards.py:absent' is not valid: expected a function that './rewards.py' de"),
        ("rewards.py", "REWARD: 'rewards.py' is not valid: expected FILE:FUNCTION"),
        ("python:rewards.py:", "REWARD: 'python:rewards.py:' is not valid: expected FILE:FUNCTION"),
        ("{math: ", "REWARD: '{math: ' is not valid"),
        ("{math: {a: 1}}", "REWARD.math.a: 1 is not valid"),
    ],
)
def test_a_trial_names_its_argument(reward: str, expected: str) -> None:
    Path("rewards.py").write_text(SCORE)
    status, output = penstock("reward", "try", reward, "--data", rows("own", ["1"]))
    assert output.startswith(f"penstock: {expected}")
    assert status == 2


def test_the_files_of_a_recipe_are_checked() -> None:
    path = with_functions(["score"], SCORE)
    Path("rewards.py").unlink()
    status, output = penstock("reward", "check", path)
    assert "verifier.files: './rewards.py' is not valid: expected a file in" in output
    assert status == 2


def test_generated_prompts_need_no_trial() -> None:
    status, output = penstock("reward", "check", recipe())
    assert output.splitlines()[-1].startswith("no reference to try: all prompts are generated")
    assert status == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "absent.jsonl"}, "data.path: "),
        ({"path": "absent.jsonl"}, "/absent.jsonl' is not valid: expected a file that exists"),
        ({"verifier": "absent"}, "data.verifier: 'absent' is not valid"),
        ({"held_out": 3}, "data.train + data.held_out: 4 is not valid: expected at most 3"),
        ({"fields": {"answer": "absent"}}, "row 1: field 'absent': missing; the row has 'question', 'answer'"),
    ],
)
def test_other_faults_end_it_with_status_2(data: dict[str, Any], message: str) -> None:
    status, output = penstock("reward", "check", recipe(data=own(rows("own", ["1", "2", "3"])) | data))
    assert message in output
    assert status == 2
