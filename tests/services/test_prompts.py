"""Prompt sources: splits without overlap, a cursor that repeats, errors that name the field."""

import json

import pytest

from services.sampler.prompts import DataError, PromptCursor, load_splits
from services.settings import Data

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def questions(prompts):
    return {prompt.messages[-1]["content"] for prompt in prompts}


def test_reasoning_gym_splits_share_no_question_and_repeat():
    data = Data(options=ONE_DIGIT, train=120, held_out=64)
    first, second = load_splits(data), load_splits(data)
    assert first == second
    assert len(questions(first.train)) == 120
    assert len(questions(first.held_out)) == 64
    assert not questions(first.train) & questions(first.held_out)


def test_cursor_gives_the_same_prompts_from_the_same_position():
    prompts = load_splits(Data(options=ONE_DIGIT, train=10, held_out=5)).train
    cursor = PromptCursor(prompts, seed=3)
    walked = [cursor.next().id for _ in range(25)]
    assert sorted(walked[:10]) == sorted(walked[10:20]) == sorted(prompt.id for prompt in prompts)
    assert walked[:10] != walked[10:20]
    assert [PromptCursor(prompts, seed=3, position=17).next().id] == walked[17:18]


def test_jsonl_keeps_each_question_once(tmp_path):
    rows = [{"question": f"q{n % 6}", "verifier": "pattern", "reference": {"pattern": "a"}} for n in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    splits = load_splits(Data(source="jsonl", path=str(path), train=4, held_out=2, suffix="!"))
    assert questions(splits.train) | questions(splits.held_out) == {f"q{n}!" for n in range(6)}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Data(options=ONE_DIGIT, train=190, held_out=64), r"data\.train \+ data\.held_out = 254 but .* 200"),
        (Data(task="no_such_task"), "data.task 'no_such_task'"),
        (Data(options={"min_terms": 0}), "min_terms"),
        (Data(source="jsonl", path="/no/such.jsonl"), "data.path '/no/such.jsonl' cannot be read"),
    ],
)
def test_errors_name_the_field(data, says):
    with pytest.raises(DataError, match=says):
        load_splits(data)


def test_damaged_jsonl_names_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "verifier": "pattern", "reference": {}}\n{"question": "b"}\n')
    with pytest.raises(DataError, match="line 2"):
        load_splits(Data(source="jsonl", path=str(path), train=1, held_out=1))
