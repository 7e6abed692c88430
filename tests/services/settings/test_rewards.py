"""Rewards as recipes write them: their forms, names, limits, and errors that name the field."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from services.settings import Recipe, RecipeError, parse_recipe
from services.settings.rewards.kinds import KINDS, PythonReward
from services.settings.rewards.reward import (
    MOST_TEXT,
    Reward,
    RewardError,
    RewardNames,
    parse_reward,
    parse_text,
)
from tests.harness.small_run import recipe_document

JUDGE = {"judge": {"url": "https://j.internal/v1", "model": "m", "rubric": "./rubric.md"}}
NEEDY = {"python": {"function": "a.b:f", "needs": ["network"]}}
SCORE = "python:./rewards.py:score"
URL = "https://rewards.internal:8443/score"


@pytest.mark.parametrize(
    ("document", "shortest"),
    [
        ("math", "math"),
        ({"math": None}, "math"),
        ({"math": {}}, "math"),
        ({"math": {"last_number": False}}, "math"),
        ({"math": {"last_number": True}}, {"math": {"last_number": True}}),
        ({"python": "./rewards.py:score"}, SCORE),
        ({"python": {"function": "./rewards.py:score"}}, SCORE),
        (
            {"python": {"function": "a.b:f", "needs": ["network"]}},
            {"python": {"function": "a.b:f", "needs": ["network"]}},
        ),
        ({"http": URL}, URL),
        ({"http": {"url": URL, "batch": 16}}, URL),
        ({"http": {"url": URL, "batch": 8}}, {"http": {"url": URL, "batch": 8}}),
        (JUDGE, JUDGE),
        ("mine", "mine"),
        ({"all": ["math", {"python": "./rewards.py:score"}]}, {"all": ["math", SCORE]}),
        ({"any": ["math", "math", {"verifier": "math"}]}, {"any": ["math", "math", "math"]}),
        ({"any": [{"name": "value", "verifier": "math"}]}, {"any": [{"name": "value", "verifier": "math"}]}),
        ({"any": [{"name": "math", "verifier": "math"}]}, {"any": ["math"]}),
        (
            {"weighted": [{"verifier": "math"}, {"verifier": SCORE, "weight": 3, "name": "style"}]},
            {
                "weighted": [
                    {"name": "math", "verifier": "math", "weight": 1.0},
                    {"name": "style", "verifier": SCORE, "weight": 3.0},
                ]
            },
        ),
    ],
)
def test_a_reward_has_one_shortest_form(document: Any, shortest: Any) -> None:
    reward = parse_reward(document)
    assert reward.document == shortest
    assert parse_reward(reward.document) == reward
    assert parse_text(reward.text) == reward
    assert isinstance(shortest, str) == (reward.text == shortest)


def test_parts_have_names_of_their_own() -> None:
    names = [part.name for part in parse_reward({"all": ["math", "math", "mine", SCORE, URL, JUDGE, "math"]}).parts]
    assert names == ["math", "math-2", "mine", "score", "http", "judge", "math-3"]
    long = parse_reward({"all": [f"python:a:{'x' * 60}", f"python:b:{'x' * 60}", "python:a:__f__"]})
    assert [len(part.name) for part in long.parts] == [38, 38, 1]
    assert parse_text(long.text) == long


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "verifier: null is not valid: expected a verifier (math, answer-line, pattern, reasoning-gym, code), a"),
        ("", "verifier: '' is not valid"),
        ("Math", "verifier: 'Math' is not valid"),
        ("a" * 41, "is not valid: expected a verifier"),
        ("{", "verifier: '{' is not valid"),
        ({}, "verifier: {} is not valid"),
        ({"math": {}, "pattern": {}}, "is not valid: expected a verifier"),
        ({"maths": {}}, "verifier: 'maths' is not valid"),
        ({"math": []}, "math: [] is not valid: expected a mapping"),
        ({"math": {"first": 1}}, "math.first: 1 is not valid: expected a known field"),
        ({"math": {"last_number": "maybe"}}, "math.last_number: 'maybe' is not valid: expected a valid boolean"),
        ({"pattern": {"x": 1}}, "pattern.x: 1 is not valid: expected a known field"),
        ("python", "python.function: missing"),
        ("python:rewards.py", "python.function: 'rewards.py' is not valid: expected ./FILE.py:FUNCTION"),
        ("python:../rewards.py:f", "python.function: '../rewards.py:f' is not valid"),
        ("python:./a/../rewards.py:f", "python.function: './a/../rewards.py' is not valid: expected ./FILE, a path"),
        ("python:./a//b.py:f", "python.function: './a//b.py' is not valid"),
        ("python:/etc/x.py:f", "python.function: '/etc/x.py:f' is not valid"),
        ("python:os:system()", "python.function: 'os:system()' is not valid"),
        ("python:./r.py:f\n", "python.function: './r.py:f\\n' is not valid"),
        ({"python": {"function": "a:f", "needs": ["root"]}}, "python.needs.0: 'root' is not valid: expected 'network'"),
        ("http://", "http.url: 'http://' is not valid: expected http://HOST[:PORT]/PATH"),
        ("https://user:word@host/", "http.url: 'https://user:word@host/' is not valid"),
        ("https://host:port/", "http.url: 'https://host:port/' is not valid"),
        ("https://host/#part", "http.url: 'https://host/#part' is not valid"),
        ({"http": "file:///etc/passwd"}, "http.url: 'file:///etc/passwd' is not valid"),
        ({"http": {"url": URL, "secret": "AWS_SECRET"}}, "http.secret: 'AWS_SECRET' is not valid: expected a string"),
        ({"http": {"url": URL, "attempts": 0}}, "http.attempts: 0 is not valid: expected a number greater than"),
        ("judge", "judge.url: missing: this field is required; judge.model: missing"),
        (
            {"judge": {**JUDGE["judge"], "rubric": "/etc/passwd"}},
            "judge.rubric: '/etc/passwd' is not valid: expected ./F",
        ),
        ({"judge": {**JUDGE["judge"], "threshold": 0}}, "judge.threshold: 0 is not valid"),
        ({"code": {"cpu_s": float("inf")}}, "code.cpu_s: inf is not valid"),
        ({"all": "math"}, "all: 'math' is not valid: expected a list of 1 to 16 rewards"),
        ({"any": []}, "any: [] is not valid: expected a list of 1 to 16 rewards"),
        ({"all": ["math"] * 17}, "expected a list of 1 to 16 rewards"),
        ({"all": [{"verifier": "math", "weight": 2}]}, "expected rewards, or {verifier, name}"),
        ({"all": [{"verifier": "math", "name": "A b"}]}, "all.name: 'A b' is not valid: expected at most 40"),
        (
            {"any": ["math", {"verifier": "pattern", "name": "math"}]},
            "any.name: 'math' is not valid: expected names tha",
        ),
        ({"weighted": ["math"]}, "weighted: 'math' is not valid: expected a list of {verifier, weight, name}"),
        (
            {"weighted": [{"verifier": "math", "weight": 0}]},
            "weighted.weight: 0 is not valid: expected a number",
        ),
        ({"weighted": [{"verifier": "math", "weight": True}]}, "weighted.weight: true is not valid"),
        ({"weighted": [{"verifier": "math", "weight": float("nan")}]}, "weighted.weight: nan is not valid"),
        ({"weighted": [{"verifier": "math", "name": None}]}, "weighted.name: null is not valid"),
        ({"all": [{"math": {"x": 1}}]}, "math.x: 1 is not valid"),
    ],
)
def test_the_error_of_a_reward_names_what_is_wrong(document: Any, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        parse_reward(document)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def nested(levels: int) -> Any:
    document: Any = "math"
    for _ in range(levels):
        document = {"all": [document]}
    return document


def test_four_combinations_may_be_inside_each_other() -> None:
    assert parse_reward(nested(4)).singles == (Reward("math", parse_reward("math").options),)
    for levels in (5, 900):
        with pytest.raises(RewardError, match="expected at most 4 combinations inside each other"):
            parse_reward(nested(levels))
    with pytest.raises(RewardError, match="is not valid: expected a verifier"):
        parse_text('{"all":[' * 99_999)


def test_names_stand_for_rewards() -> None:
    names = RewardNames({"mine": SCORE, "both": {"all": ["math", "mine"]}, "rated": JUDGE, "twice": "both"})
    assert names.names == ("mine", "both", "rated", "twice")
    found = names.resolved(parse_reward({"any": ["twice", "pattern"]}))
    assert [single.kind for single in found.singles] == ["math", "python", "pattern"]
    assert parse_text(found.text) == found, "messages keep the names of the parts"
    assert [part.name for part in found.parts] == ["twice", "pattern"]
    assert [part.name for part in found.parts[0].reward.parts] == ["math", "mine"]
    assert names.texts == {"math", SCORE, parse_reward(JUDGE).text}
    assert found.files == ("./rewards.py",)
    assert names.resolved(parse_reward("rated")).files == ("./rubric.md",)
    assert names.resolved(parse_reward("rated")).hosts == ("j.internal",)


@pytest.mark.parametrize(
    ("rewards", "name", "message"),
    [
        ({"a": "math"}, "b", "verifier: 'b' is not valid: .*; verifier.rewards has a$"),
        ({"a": "a"}, "a", "verifier: 'a' is not valid: expected a reward that does not contain itself"),
        ({"a": {"all": ["math", "b"]}, "b": {"any": ["a"]}}, "b", "expected a reward that does not contain itself"),
        ({"a": nested(3), "b": {"any": [{"all": ["a"]}]}}, "b", "expected at most 4 combinations inside each other"),
        (
            {f"n{at}": f"n{at + 1}" for at in range(5000)},
            "n0",
            "'n0' is not valid: expected at most 32 names",
        ),
    ],
)
def test_names_that_stand_for_no_reward(rewards: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardNames(rewards).resolved(parse_reward(name))


def test_a_few_names_cannot_stand_for_millions() -> None:
    rewards: dict[str, Any] = {"n0": "math"}
    for level in range(1, 5):
        rewards[f"n{level}"] = {"all": [f"n{level - 1}"] * 16}
    started = time.monotonic()
    with pytest.raises(RewardError, match=f"is not valid: expected at most {MOST_TEXT} characters as JSON"):
        RewardNames(rewards).resolved(parse_reward("n4"))
    assert time.monotonic() - started < 5


def test_a_recipe_keeps_its_rewards() -> None:
    document = recipe_document(
        "/model",
        data={"source": "jsonl", "path": "/d.jsonl", "layout": "fields", "options": {}, "verifier": {"math": None}},
        evaluation={"sets": [{"name": "exam", "source": "csv", "path": "/e.csv", "verifier": {"all": ["mine", URL]}}]},
    )
    document["verifier"] = {"rewards": {"mine": {"python": {"function": "./rewards.py:score"}}}, "files": ["./more.py"]}
    recipe = parse_recipe(document)
    dumped = recipe.model_dump(mode="json")
    assert dumped["data"]["verifier"] == "math"
    assert dumped["evaluation"]["sets"][0]["verifier"] == {"all": ["mine", URL]}
    assert dumped["verifier"]["rewards"] == {"mine": SCORE}
    assert parse_recipe(json.loads(json.dumps(dumped))) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert [reward.text for reward in recipe.rewards] == [
        "math",
        json.dumps({"all": [{"name": "mine", "verifier": SCORE}, URL]}, separators=(",", ":")),
        SCORE,
    ]
    assert recipe.reward_files == ("./rewards.py", "./more.py")


def test_generated_data_is_judged_by_its_own_scorers() -> None:
    assert [reward.text for reward in parse_recipe(recipe_document("/model")).rewards] == ["reasoning-gym"]


FILES = {"source": "jsonl", "path": "/d.jsonl", "options": {}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"verifier": "mine"}}, "data.verifier: 'mine' is not valid: expected a verifier (math"),
        ({"data": {"verifier": 3}}, "data.verifier: 3 is not valid"),
        ({"data": {"verifier": {"math": {"x": 1}}}}, "data.verifier.math.x: 1 is not valid: expected a known field"),
        ({"verifier": {"rewards": {"mine": 3}}}, "verifier.rewards.mine: 3 is not valid: expected a verifier"),
        ({"verifier": {"rewards": {"mine": {"all": []}}}}, "verifier.rewards.mine.all: [] is not valid"),
        (
            {"data": {"on_bad_reference": "keep"}},
            "data.on_bad_reference: 'keep' is not valid: expected 'error' or 'drop'",
        ),
        (
            {"evaluation": {"sets": [{**FILES, "name": "exam", "verifier": "mine"}]}},
            "evaluation.sets 'exam'.verifier: 'mine' is not valid",
        ),
        ({"verifier": {"rewards": {"mine": "yours"}}}, "verifier.rewards.mine: 'yours' is not valid"),
        (
            {"verifier": {"rewards": {"mine": "mine"}}},
            "verifier.rewards.mine: 'mine' is not valid: expected a reward that",
        ),
        (
            {"verifier": {"rewards": {"math": "mine"}}},
            "verifier.rewards.math: 'math' is not valid: expected a name that",
        ),
        ({"verifier": {"rewards": {"all": "math"}}}, "verifier.rewards.all: 'all' is not valid"),
        ({"verifier": {"rewards": {"A": "math"}}}, "verifier.rewards.A"),
        (
            {"verifier": {"files": ["/etc/passwd"]}},
            "verifier.files.0: '/etc/passwd' is not valid: expected ./FILE, a path",
        ),
        ({"verifier": {"files": ["./a/../b.py"]}}, "verifier.files.0: './a/../b.py' is not valid"),
        ({"data": {"fields": {"metadata": 3}}}, "data.fields.metadata: 3 is not valid"),
    ],
)
def test_the_error_of_a_recipe_names_the_field(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(recipe_document("/model", **sections))
    assert message in str(caught.value)


def test_every_kind_has_options() -> None:
    assert parse_reward("python:a:f").options == PythonReward(function="a:f")
    assert {kind for kind, options in KINDS.items() if not options.model_fields} == {
        "answer-line",
        "pattern",
        "reasoning-gym",
    }
