"""Bodies below the limit of bytes with so many values that each could be a fault: refused before any is looked at."""

import json

import pytest

from services.api.guard.json_only import MOST_VALUES, _exceeds
from services.streams.keys import RUNS
from tests.harness.each import each
from tests.harness.small_run import recipe_document

MANY = MOST_VALUES + 1
JSON = {"content-type": "application/json"}
SECTIONS = {
    "values": {"recipe": [0] * MANY},
    "settings": {"recipe": recipe_document("/none") | {f"k{number}": 1 for number in range(MANY)}},
    "sets": {"recipe": recipe_document("/none", evaluation={"sets": [{}] * MANY})},
    "nested": {"recipe": recipe_document("/none", data={"options": [[[0]]] * (MANY // 3)})},
    "files": {"recipe": recipe_document("/none"), "files": {f"./f{number}.py": "" for number in range(MANY)}},
    "members": {f"k{number}": 1 for number in range(MANY)},
}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("path", ["/v1/runs", "/v1/recipes/check"])
async def test_too_many_values_are_named_at_once(api, redis, section, path):
    before = await redis.zcard(RUNS)
    answer = await api.post(path, content=json.dumps(SECTIONS[section]), headers=JSON)
    assert answer.status_code == 422
    expected = f"body: more than {MOST_VALUES} values is not valid: expected at most {MOST_VALUES}"
    assert answer.json()["detail"] == expected
    assert await redis.zcard(RUNS) == before


async def test_long_texts_are_few_values(api):
    """A text may have as many commas as it likes; only the recipe is at fault here."""
    files = {"./rewards.py": "[1,2,3],{'a': 1},\n" * 20_000}
    answer = await api.post("/v1/runs", content=json.dumps({"recipe": {}, "files": files}), headers=JSON)
    assert answer.status_code == 422
    assert "values" not in answer.json()["detail"]


@each(
    "document, exceeds",
    [([0] * 10, False), ([0] * 11, True), ({"a": [0] * 9}, False), ({"a": [0] * 10}, True), (1, False)],
)
def test_values_are_counted_in_all_depths(document, exceeds):
    assert _exceeds(document, 10) is exceeds
