"""Rows: which rewards they may name in which forms, the references that each needs, and their metadata."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from services.contracts import Prompt
from services.sampler.data import DataError, RowRewards, load_splits, row_functions
from services.settings import DataSettings, SourceSettings, parse_recipe
from services.settings.rewards.confined import MOST_FUNCTIONS, MOST_ROW_FUNCTIONS
from tests.harness.small_run import recipe_document
from tests.services.sampler.loading import read_set

SCORE = "python:./rewards.py:score"
JUDGE = {"judge": {"url": "https://j/v1", "model": "m", "rubric": "./rubric.md"}}
NAMED = RowRewards(
    {"mine": SCORE, "strict": {"all": ["math", "mine"]}, "rated": JUDGE, "plain": "answer-line"},
    files={"./rewards.py": None, "./lib/more.py": "from helper import form as other\nLIMIT = 2\n_hidden = 3\n"},
)
LAST = {"math": {"last_number": True}}
LAST_TEXT = '{"math":{"last_number":true}}'


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows in the form of the path's suffix; in CSV, objects are JSON text."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            for row in rows:
                writer.writerow({k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()})
    return str(path)


def load(
    folder: Path, rows: list[dict[str, Any]], rewards: RowRewards | None = None, kind: str = "jsonl", **source: Any
) -> tuple[Prompt, ...]:
    """The prompts of these rows, read only: tests/services/sampler/data/test_references.py has the trial."""
    path = write(folder / f"rows.{kind}", rows)
    return read_set(SourceSettings(source=kind, path=path, **source), rewards)  # type: ignore[arg-type]


def row(verifier: Any, reference: Any = None, **more: Any) -> dict[str, Any]:
    return {"question": "q", "verifier": verifier, "reference": reference or {"answer": "1"}, **more}


@pytest.mark.parametrize(
    ("verifier", "text"),
    [
        ("math", "math"),
        (LAST, LAST_TEXT),
        (LAST_TEXT, LAST_TEXT),
        ('  {"math": null} ', "math"),
        ({"math": {"last_number": False}}, "math"),
        ({"all": ["math", "answer-line"]}, '{"all":["math","answer-line"]}'),
        ("mine", SCORE),
        (SCORE, SCORE),
        ({"python": {"function": "./rewards.py:score"}}, SCORE),
        ("python:./lib/more.py:other", "python:./lib/more.py:other"),
        ("strict", json.dumps({"all": ["math", {"name": "mine", "verifier": SCORE}]}, separators=(",", ":"))),
        ({"any": ["plain", LAST]}, f'{{"any":[{{"name":"plain","verifier":"answer-line"}},{LAST_TEXT}]}}'),
        ("rated", json.dumps(JUDGE, separators=(",", ":"), sort_keys=True)),
    ],
)
def test_names_and_forms_are_resolved(tmp_path: Path, verifier: Any, text: str) -> None:
    [prompt] = load(tmp_path, [row(verifier)], NAMED)
    assert prompt.verifier == text
    assert prompt.reference == {"answer": "1"}


FOR_ROWS = r"expected one of answer-line, math, pattern, reasoning-gym, mine, strict, rated, plain \(of verifier\.rew"


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("maths", rf"'maths' is not valid: {FOR_ROWS}"),
        ("python:./rewards.pyc:f", r"python\.function: './rewards\.pyc:f' is not valid"),
        ("python:./other.py:f", rf"'python:\./other\.py:f' is not valid: {FOR_ROWS}"),
        ("python:os:system", rf"'python:os:system' is not valid: {FOR_ROWS}"),
        ({"python": {"function": "./rewards.py:f", "needs": ["network"]}}, rf"network.* is not valid: {FOR_ROWS}"),
        ("https://attacker/x", rf"'https://attacker/x' is not valid: {FOR_ROWS}"),
        ({"all": ["math", "https://attacker/x"]}, "'https://attacker/x' is not valid"),
        ("code", rf"'code' is not valid: {FOR_ROWS}"),
        ({"judge": {**JUDGE["judge"], "model": "dear"}}, f"is not valid: {FOR_ROWS}"),
        ({"math": {"last_number": "perhaps"}}, r"math\.last_number: 'perhaps' is not valid"),
        ({"math": {}, "pattern": {}}, FOR_ROWS),
        ({"all": []}, r"all: \[\] is not valid: expected a list of 1 to 16 rewards"),
        ("{not json", rf"'{{not json' is not valid: {FOR_ROWS}"),
        ('{"a":' * 5000, "is not valid: expected at most 8192 characters"),
        ('{"a":' * 1500, FOR_ROWS),
        (" ", FOR_ROWS),
        (None, f"null is not valid: {FOR_ROWS}"),
        (7, FOR_ROWS),
        (["math"], FOR_ROWS),
    ],
)
def test_what_rows_may_not_name(tmp_path: Path, verifier: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"^data\.path: '.*rows\.jsonl' row 2: field 'verifier': ") as caught:
        load(tmp_path, [row("math"), row(verifier)], NAMED)
    assert caught.match(message)
    assert len(str(caught.value)) < 1200


HAS = r"expected a function that './lib/more\.py' defines at top level: it has 'LIMIT', 'other'"


@pytest.mark.parametrize(
    ("verifier", "shown"),
    [
        ("python:./lib/more.py:missing", r"'python:\./lib/more\.py:missing'"),
        ({"python": {"function": "./lib/more.py:form"}}, r"'python:\./lib/more\.py:form'"),
        ({"all": ["math", "python:./lib/more.py:missing"]}, r"'python:\./lib/more\.py:missing'"),
    ],
)
def test_a_row_names_a_function_that_exists(tmp_path: Path, verifier: Any, shown: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl' row 2: field 'verifier': {shown} is not valid: {HAS}$"):
        load(tmp_path, [row("math"), row(verifier, question="r")], NAMED)


def test_functions_of_rows_are_those_that_only_rows_name() -> None:
    own = {"all": ["python:./rewards.py:own", "math"]}
    data = {"source": "jsonl", "path": "rows.jsonl", "layout": "fields", "verifier": own, "options": {}}
    recipe = parse_recipe(recipe_document("/model", data=data, verifier={"rewards": {"mine": SCORE}}))
    rows = ["math", SCORE, "python:./rewards.py:own", '{"any":["python:./m.py:f","math",{"python":"./m.py:g"}]}']
    needs = '{"python":{"function":"./m.py:h","needs":["files"]}}'
    assert row_functions(recipe, [*rows, needs, "python:./m.py:g"]) == ("python:./m.py:f", "python:./m.py:g")
    names = [f"python:./m.py:f{number}" for number in range(MOST_ROW_FUNCTIONS + 1)]
    assert len(row_functions(recipe, [*names[1:], *rows[:3]])) == MOST_ROW_FUNCTIONS
    with pytest.raises(DataError, match=r"^data: 25 is not valid: expected rows that name at most 24 different"):
        row_functions(recipe, names)


def test_functions_of_recipe_and_rows_are_counted_together() -> None:
    rewards = {f"r{number}": f"python:./m.py:own{number}" for number in range(20)}
    data = {"source": "jsonl", "path": "rows.jsonl", "options": {}}
    recipe = parse_recipe(recipe_document("/model", data=data, verifier={"rewards": rewards}))
    names = [f"python:./m.py:f{number}" for number in range(MOST_FUNCTIONS - len(rewards) + 1)]
    assert len(row_functions(recipe, [*names[1:], *rewards.values(), "math"])) == 8
    with pytest.raises(DataError, match=r"^data: 9 is not valid: expected .* at most 8 .* the recipe has 20 of its o"):
        row_functions(recipe, names)


def test_without_a_recipe_rows_have_the_built_in_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'mine' is not valid: expected one of answer-line, math, pattern, reasoning-g"):
        load(tmp_path, [row("mine")])


def test_a_row_may_repeat_its_sources_own_reward(tmp_path: Path) -> None:
    own = {"verifier": {"all": ["code", "https://rewards/x"]}}
    prompts = load(tmp_path, [row("https://rewards/x"), row("math", question="r")], **own)
    assert [prompt.verifier for prompt in prompts] == ["https://rewards/x", "math"]
    with pytest.raises(DataError, match="'https://rewards/y' is not valid"):
        load(tmp_path, [row("https://rewards/y")], **own)


def test_a_name_of_a_source_needs_its_recipe(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": [1, {"a": None}]}]
    [prompt] = load(tmp_path, rows, NAMED, layout="fields", verifier="mine")
    assert (prompt.verifier, prompt.reference) == (SCORE, {"answer": [1, {"a": None}]})
    with pytest.raises(DataError, match=r"^data\.verifier: 'mine' is not valid"):
        load(tmp_path, rows, layout="fields", verifier="mine")


@pytest.mark.parametrize(
    ("verifier", "answer", "reference"),
    [
        ("math", 4, {"answer": "4"}),
        ("pattern", "x|y", {"pattern": "x|y"}),
        (SCORE, 4, {"answer": 4}),
        (SCORE, None, {"answer": None}),
        (SCORE, {"b": [1]}, {"answer": {"b": [1]}}),
        ("rated", False, {"answer": False}),
        ("https://rewards/x", [], {"answer": []}),
        ({"all": ["answer-line", SCORE]}, 4.5, {"answer": "4.5"}),
        ({"any": [SCORE, "rated"]}, 4.5, {"answer": 4.5}),
    ],
)
def test_a_bare_answer_becomes_a_reference(tmp_path: Path, verifier: Any, answer: Any, reference: Any) -> None:
    rows = [{"question": "q", "answer": answer}]
    [prompt] = load(tmp_path, rows, NAMED, layout="fields", verifier=verifier)
    assert prompt.reference == reference


@pytest.mark.parametrize(
    ("verifier", "reference", "message"),
    [
        ("math", {"pattern": "x"}, "expected answer for verifier 'math'"),
        ("reasoning-gym", {"task": "chain_sum"}, "expected entry for verifier 'reasoning-gym'"),
        ({"all": ["math", "pattern"]}, {"answer": "1"}, "expected pattern for verifier"),
        ("mine", [1], r"\[1\] is not valid: expected an object"),
        ("mine", "[1]", r"'\[1\]' is not valid: expected an object"),
        ("mine", "[" * 99_999, "is not valid: expected an object, or one as JSON text"),
        ("mine", {"a": float("nan")}, "{'a': nan} is not valid: expected JSON values"),
        ("mine", {"a": "\ud800"}, "expected JSON values, and text that UTF-8 can encode"),
    ],
)
def test_references_have_what_rewards_need(tmp_path: Path, verifier: Any, reference: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl' row 2: field 'reference': ") as caught:
        load(tmp_path, [row("math"), row(verifier, reference, question="r")], NAMED)
    assert caught.match(message)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 99_999 + "\n")
    with pytest.raises(DataError, match=r"row 1: nested too deeply; expected one object per line"):
        read_set(SourceSettings(source="jsonl", path=str(path)))


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a\ud800", "answer": 1},
        {"question": "a", "answer": "\ud800"},
        {"question": "a", "answer": 1, "metadata": {"\ud800": 1}},
    ],
)
def test_text_that_messages_cannot_carry_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write(tmp_path / "rows.jsonl", [row])
    fields = {"metadata": "metadata"}
    with pytest.raises(DataError, match=r"row 1: field '\w+': .* is not valid: expected .* UTF-8 can encode"):
        read_set(SourceSettings(source="jsonl", path=path, layout="fields", fields=fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_cells_hold_rewards_references_and_metadata(tmp_path: Path, kind: str) -> None:
    rows = [
        row(LAST, {"answer": "1"}, metadata={"level": 3}) | {"question": "a"},
        row(LAST, {"answer": "2"}, metadata={"level": 4}) | {"question": "b"},
    ]
    first, second = load(tmp_path, rows, kind=kind)
    assert first.verifier == second.verifier == LAST_TEXT
    assert (first.reference, second.reference) == ({"answer": "1"}, {"answer": "2"})
    assert (first.metadata, second.metadata) == ({"level": 3}, {"level": 4})


def test_parquet_cells_may_be_json_text_or_differ(tmp_path: Path) -> None:
    rows = [
        row({"math": {"last_number": True}, "answer-line": None}, {"answer": "1"}) | {"question": "a"},
        row({"math": None, "answer-line": {"unused": None}}, {"answer": "2"}) | {"question": "b"},
    ]
    with pytest.raises(DataError, match=r"row 2: field 'verifier': answer-line\.unused: null is not valid"):
        load(tmp_path, rows, kind="parquet")  # Arrow has no empty struct; JSON text is the form for such columns
    texts = [row(json.dumps(LAST)), row("answer-line", question="b")]
    assert [prompt.verifier for prompt in load(tmp_path, texts, kind="parquet")] == [LAST_TEXT, "answer-line"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_metadata_is_optional(tmp_path: Path, kind: str) -> None:
    rows = [row("math", '{"answer": "1"}'), row("math", '{"answer": "2"}', question="b")]
    assert [prompt.metadata for prompt in load(tmp_path, rows, kind=kind)] == [{}, {}]
    blank = [rows[0] | {"metadata": ""}, rows[1] | {"metadata": '{"a": [1, null]}'}]
    assert [prompt.metadata for prompt in load(tmp_path, blank, kind=kind)] == [{}, {"a": [1, None]}]


def test_fields_map_metadata(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": 1, "extra": {"source": {"name": "x"}}},
        {"question": "b", "answer": 1, "extra": {}},
        {"question": "c", "answer": 1},
    ]
    mapped = {"layout": "fields", "fields": {"metadata": "extra.source"}}
    found = [prompt.metadata for prompt in load(tmp_path, rows, **mapped)]
    assert found == [{"name": "x"}, {}, {}]
    assert load(tmp_path, rows[:1], kind="parquet", **mapped)[0].metadata == {"name": "x"}
    with pytest.raises(DataError, match="has no column 'other'"):
        load(tmp_path, rows[:1], kind="parquet", layout="fields", fields={"metadata": "other"})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([1], r"\[1\] is not valid: expected an object"),
        ("x", "'x' is not valid: expected an object, or one as JSON text"),
        ({"a": float("inf")}, "{'a': inf} is not valid: expected JSON values"),
    ],
)
def test_metadata_is_an_object_of_json(tmp_path: Path, metadata: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"row 1: field 'metadata': {message}"):
        load(tmp_path, [row("math", metadata=metadata)])


def test_gold_decides_whether_duplicates_conflict(tmp_path: Path) -> None:
    rows = [
        row("math", {"answer": "1"}, metadata={"n": 1}),
        row('{"math": {}}', {"answer": "1"}, metadata={"n": 2}),
        row("math", {"answer": "2"}),
        row("answer-line", {"answer": "1"}),
        row(LAST, {"answer": "1"}),
        row("math", {"answer": "2"}),
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    splits = load_splits(DataSettings(source="jsonl", path=path, train=None, held_out=0))
    assert (splits.report.rows, splits.report.distinct, splits.report.conflicts) == (6, 1, 4)
    assert [(prompt.reference, prompt.metadata) for prompt in splits.train] == [({"answer": "1"}, {"n": 1})]
