"""References are tried when data is loaded: a bad one is an error with its row, or its row is dropped and counted."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from services.sampler.data import (
    DataError,
    ReferenceTrialError,
    RowRewards,
    load_evaluated,
    load_splits,
    read_sources,
    references,
)
from services.sampler.data.references import tried
from services.sampler.evaluation.evaluator import load_held_out
from services.settings import DataSettings, EvaluationSet, parse_recipe
from tests.harness.small_run import recipe_document

BAD = "\\frac{1}{"
EXPECTED = "expected a number, a formula"


def write(path: Path, answers: list[Any], name: str = "q") -> str:
    rows = [{"question": f"{name}{number}", "answer": answer} for number, answer in enumerate(answers, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data(path: str, **more: Any) -> DataSettings:
    settings = {"source": "jsonl", "path": path, "layout": "fields", "train": None, "held_out": 0, **more}
    return DataSettings.model_validate(settings)


def exam(path: str, **more: Any) -> EvaluationSet:
    settings = {"name": "exam", "source": "jsonl", "path": path, "layout": "fields", **more}
    return EvaluationSet.model_validate(settings)


def asked(prompts: tuple[Any, ...]) -> set[str]:
    return {prompt.messages[-1]["content"] for prompt in prompts}


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line per start of the program, which is otherwise the real one."""
    log = tmp_path / "starts"
    script = tmp_path / "program.py"
    script.write_text(
        f"import sys\nopen({str(log)!r}, 'a').write('x\\n')\nfrom verifier.references import main\nsys.exit(main())\n"
    )
    monkeypatch.setattr(references, "PROGRAM", (sys.executable, str(script)))
    return log


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a program of this text in place of the verifier's."""
    script = tmp_path / "program.py"
    script.write_text(text)
    monkeypatch.setattr(references, "PROGRAM", (sys.executable, str(script)))


def test_a_bad_reference_is_an_error_with_file_and_row(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["1", "2", BAD, "4", "{", BAD])
    with pytest.raises(DataError) as caught:
        load_splits(data(path))
    assert str(caught.value).startswith(
        f"data.path: {path!r} row 3: field 'answer': '\\\\frac{{1}}{{' is not valid: {EXPECTED}"
    )
    assert str(caught.value).endswith("(and 2 more such references)")


def test_a_bad_reference_of_a_layout_is_shown_whole(tmp_path: Path) -> None:
    row = {"question": "q", "verifier": "reasoning-gym", "reference": {"task": "no", "entry": {"answer": "1"}}}
    (tmp_path / "rows.jsonl").write_text("\n" + json.dumps(row))
    with pytest.raises(DataError, match=r"row 2: field 'reference': {'task': .*}} is not valid: reference task: "):
        load_splits(data(str(tmp_path / "rows.jsonl"), layout="penstock"))
    row |= {"verifier": {"all": ["math", "pattern"]}, "reference": {"answer": "1", "pattern": "("}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"row 1: field 'reference': .* reference pattern: '\(' is not valid: "):
        load_splits(data(str(tmp_path / "rows.jsonl"), layout="penstock"))


def test_each_source_has_its_own_rule(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good.jsonl", ["1", "2"]), write(tmp_path / "bad.jsonl", ["1", BAD], "e")
    with pytest.raises(DataError, match=r"^evaluation\.sets 'exam'\.path: '.*bad\.jsonl' row 2: field 'answer': "):
        load_splits(data(good, on_bad_reference="drop"), (exam(bad),))
    splits = load_splits(data(good), (exam(bad, on_bad_reference="drop"),))
    assert asked(splits.sets["exam"]) == {"e1"}
    assert splits.report.text.endswith(
        f"2 to train on, 0 held out, 1 in set 'exam'; rows dropped because of their reference: "
        f"1 of evaluation.sets 'exam' (1: {EXPECTED} in LaTeX, a choice or words, at most 2000 characters)"
    )


def test_rows_with_bad_references_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = ["1", BAD, "3", "{", "...", "6", "((", BAD]
    path = write(tmp_path / "rows.jsonl", answers)
    with caplog.at_level(logging.WARNING):
        splits = load_splits(data(path, on_bad_reference="drop"))
    assert asked(splits.train) == {"q1", "q3", "q6"}
    report = splits.report
    assert (report.rows, report.distinct, report.duplicates) == (8, 3, 0)
    assert report.bad_references["data"].total() == 5
    assert "; rows dropped because of their reference: 5 of data (" in report.text
    logged = [record.getMessage() for record in caplog.records]
    assert [f"row {number}: field 'answer'" in line for number, line in zip((2, 4, 5), logged, strict=False)] == [
        True
    ] * 3
    assert logged[3:] == ["data: dropped 5 of 8 rows, whose references cannot be read"]


UNUSABLE = ["", " ", None, [1], True, {"a": 1}, float("nan"), "\ud800"]


def test_unusable_answers_are_an_error_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["1", None, BAD, ""])
    with pytest.raises(DataError) as caught:
        load_splits(data(path))
    assert str(caught.value) == (
        f"data.path: {path!r} row 2: field 'answer': null is not valid: expected text or a number "
        "(and 2 more such references)"
    )


def test_unusable_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["1", *UNUSABLE, BAD, "11"])
    sources = read_sources(data(path, on_bad_reference="drop"), (), RowRewards()).settled()
    assert [bad.text.split(": field")[0].split()[-1] for bad in sources.bad] == [str(row) for row in range(2, 11)]
    assert sources.tried == 3
    assert sources.bad_references["data"]["expected text or a number"] == len(UNUSABLE) - 1
    splits = load_splits(data(path, on_bad_reference="drop"))
    assert asked(splits.train) == {"q1", "q11"}
    assert (splits.report.rows, splits.report.distinct, splits.report.duplicates) == (11, 2, 0)


def test_unusable_references_are_dropped(tmp_path: Path) -> None:
    references = [{"answer": "1"}, {"pattern": "x"}, [], "x", {"answer": "2"}]
    rows = [{"question": f"q{at}", "verifier": "math", "reference": each} for at, each in enumerate(references)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    splits = load_splits(data(str(tmp_path / "rows.jsonl"), layout="penstock", on_bad_reference="drop"))
    assert asked(splits.train) == {"q0", "q4"}


def test_answers_without_their_mark_are_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["so #### 1", "so 2"])
    splits = load_splits(data(path, fields={"answer_after": "####"}, on_bad_reference="drop"))
    assert asked(splits.train) == {"q1"}


def test_rows_without_an_answer_leave_it_to_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": "q", "answer": answer}) + "\n" for answer in (None, None, "", "2")))
    splits = load_splits(data(str(path), on_bad_reference="drop"))
    assert [prompt.reference for prompt in splits.train] == [{"answer": "2"}]
    assert splits.report.bad_references["data"].total() == 3


def test_a_row_that_lacks_the_field_is_never_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{"question": "r"}\n')
    with pytest.raises(DataError, match="row 2: field 'answer': missing"):
        load_splits(data(str(path), on_bad_reference="drop"))


def test_dropped_rows_leave_their_question_to_others(tmp_path: Path) -> None:
    rows = [("q", BAD), ("q", BAD), ("q", "2"), ("q", "3"), ("r", "1"), ("r", BAD)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows))
    splits = load_splits(data(str(path), on_bad_reference="drop"))
    assert {prompt.messages[0]["content"]: prompt.reference for prompt in splits.train} == {
        "q": {"answer": "2"},
        "r": {"answer": "1"},
    }
    report = splits.report
    assert (report.rows, report.distinct, report.duplicates, report.conflicts) == (6, 2, 1, 1)
    assert report.bad_references["data"].total() == 3


def test_a_source_of_bad_references_alone_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [BAD, "{"])
    with pytest.raises(DataError, match=r"^data\.path: .* all 2 rows were dropped; the first: data\.path: .*row 1"):
        load_splits(data(path, on_bad_reference="drop"))


def test_later_questions_replace_dropped_ones_of_a_set(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["1", BAD, "3", "4"])
    loaded = load_evaluated(None, (exam(path, on_bad_reference="drop", prompts=3),))
    assert asked(loaded.sets["exam"]) == {"q1", "q3", "q4"}
    assert loaded.text.startswith("0 held out, 3 in set 'exam'; rows dropped because of their reference: 1 of ")
    with pytest.raises(DataError, match=r"evaluation\.sets 'exam'\.prompts: 4 is not valid: expected at most 3"):
        load_evaluated(None, (exam(path, on_bad_reference="drop", prompts=4),))


def test_the_program_starts_once_per_load(tmp_path: Path, starts: Path) -> None:
    own, other = write(tmp_path / "a.jsonl", ["1", "2", "2"]), write(tmp_path / "b.jsonl", ["2", "3"], "e")
    sources = read_sources(data(own), (exam(other),), RowRewards())
    assert (sources.tried, sources.bad) == (3, ())
    assert starts.read_text() == "x\n"


def test_generated_references_are_not_tried(starts: Path) -> None:
    load_splits(DataSettings(train=3, held_out=2))
    assert not starts.exists()


def test_a_run_that_only_evaluates_reads_what_it_needs(tmp_path: Path, starts: Path) -> None:
    own, other = write(tmp_path / "a.jsonl", ["1", "2", "3"]), write(tmp_path / "b.jsonl", ["1", "2", "3"])
    loaded = load_evaluated(data(own, held_out=2), (exam(other),))
    assert (len(loaded.held_out), loaded.text) == (2, "2 held out, 3 in set 'exam'")
    assert loaded.held_out == load_splits(data(own, held_out=2)).held_out
    assert starts.read_text() == "x\nx\n"


def test_an_evaluation_uses_the_recipes_names(tmp_path: Path) -> None:
    row = {"question": "q", "verifier": "both", "reference": {"answer": "1"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    entry = {"name": "exam", "source": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    document = recipe_document("/model", evaluation={"sets": [entry]}, data={"held_out": 0})
    recipe = parse_recipe(document | {"verifier": {"rewards": {"both": {"all": ["math", "answer-line"]}}}})
    [held_out], text = load_held_out(recipe, {})
    assert [prompt.verifier for prompt in held_out.prompts] == ['{"all":["math","answer-line"]}']
    assert text == "0 held out, 1 in set 'exam'"
    with pytest.raises(DataError, match="'both' is not valid"):
        load_held_out(parse_recipe(document), {})


READ_ONE = "import sys\nsys.stdin.readline()\nprint('{}', flush=True)\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit('no such library')", "ended with status 1 after 0 of 2 references: no such library"),
        (READ_ONE + "import os; os.abort()", "died of SIGABRT after 1 of 2 references"),
        (READ_ONE, "ended with status 0 after 1 of 2 references"),
        (READ_ONE + "print('[]\\n{}')", r"wrote b'\[\]\\n', expected JSON"),
        (READ_ONE + "print('{}\\n{}')", "ended with status 0 after 3 of 2 references"),
    ],
)
def test_a_program_that_fails_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    program(tmp_path, monkeypatch, text)
    with pytest.raises(ReferenceTrialError, match=f"^the program that tries references {message}"):
        load_splits(data(write(tmp_path / "rows.jsonl", ["1", "2"]), on_bad_reference="drop"))


def test_a_program_that_hangs_is_killed_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far it came by then depends on the machine."""
    program(tmp_path, monkeypatch, READ_ONE + "import time; time.sleep(60)")
    monkeypatch.setattr(references, "START_S", 1.0)
    message = r"^the program that tries references exceeded its deadline of 1\.1 s and was killed after [01] of 2 ref"
    with pytest.raises(ReferenceTrialError, match=message):
        load_splits(data(write(tmp_path / "rows.jsonl", ["1", "2"]), on_bad_reference="drop"))


def test_the_program_gets_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        tmp_path,
        monkeypatch,
        "import json, os, sys\nfor line in sys.stdin: print(json.dumps({'fault': str(os.environ)}))",
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-value")
    monkeypatch.setenv("PENSTOCK_REWARD_KEY", "hidden-value")
    [variables] = tried([b"{}\n"])
    assert "PYTHONPATH" in variables
    assert "hidden-value" not in variables


def test_the_program_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verifier.py").write_text("raise SystemExit('the wrong program')")
    assert tried([b'{"verifier":"pattern","reference":{"pattern":"a"}}\n']) == [""]
