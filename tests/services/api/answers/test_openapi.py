"""The OpenAPI document is complete, its examples are valid, and its committed copy is current."""

import json

import pytest
from jsonschema import Draft202012Validator

from services.api.answers.examples import REQUESTS, RESPONSES
from services.api.answers.openapi import PREFIX, RECIPE_OF, TAGS
from services.settings import Recipe
from tests.docs.openapi_copy import COPY, current

DOCUMENT = json.loads(current())
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATIONS = {
    operation["operationId"]: (path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for operation in operations.values()
}


def validator(name):
    return Draft202012Validator({**DOCUMENT, "$ref": f"{PREFIX}{name}"})


def models(operation):
    """The names of the models of a request and its successful responses."""
    contents = [operation.get("requestBody", {}).get("content", {})]
    contents += [answer["content"] for status, answer in operation["responses"].items() if "content" in answer]
    text = json.dumps(contents)
    return {part.split('"')[0] for part in text.split(PREFIX)[1:]}


def test_the_committed_copy_is_current():
    assert current() == COPY.read_text(), "docs/reference/openapi.json is old: run `python -m tests.docs.openapi_copy`"


def test_the_document_is_openapi_3_1():
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert DOCUMENT["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


def test_every_operation_is_described():
    for name, (path, operation) in OPERATIONS.items():
        assert operation["summary"], name
        assert len(operation["description"]) > 10, name
        [tag] = operation["tags"]
        assert tag in TAGS, name
        assert operation.get("security") == ([{"bearer": []}] if path.startswith("/v1/") else None), name
    assert len(OPERATIONS) == sum(map(len, DOCUMENT["paths"].values()))
    assert {tag["name"] for tag in DOCUMENT["tags"]} == {operation["tags"][0] for _, operation in OPERATIONS.values()}


def test_every_model_of_an_operation_has_an_example():
    found = {name for _, operation in OPERATIONS.values() for name in models(operation)}
    assert found - {*REQUESTS, *RESPONSES} == set()
    assert {name for name in (*REQUESTS, *RESPONSES) if name not in SCHEMAS} == set()


@pytest.mark.parametrize("name", [*REQUESTS, *RESPONSES])
def test_an_example_is_valid(name):
    [example] = SCHEMAS[name]["examples"]
    assert [error.message for error in validator(name).iter_errors(example)] == []


def test_every_error_is_a_problem_with_an_example():
    for status, answer in DOCUMENT["components"]["responses"].items():
        if int(status) < 400:
            continue
        content = answer["content"]["application/problem+json"]
        assert content["schema"] == {"$ref": f"{PREFIX}Problem"}
        assert [error.message for error in validator("Problem").iter_errors(content["example"])] == []


def test_no_reference_is_open():
    text = json.dumps(DOCUMENT)
    for part in text.split('"$ref": "#/')[1:]:
        found = DOCUMENT
        for name in part.split('"')[0].split("/"):
            found = found[name]


@pytest.mark.parametrize("name", RECIPE_OF)
def test_the_recipe_is_typed(name):
    schema = SCHEMAS[name]["properties"]["recipe"]
    assert schema == {"$ref": f"{PREFIX}SubmittedRecipe"}
    assert SCHEMAS["SubmittedRecipe"]["properties"].keys() == Recipe.model_fields.keys()
    faults = [
        error.json_path for error in validator(name).iter_errors({"recipe": {"name": "x", "learner": {"ranks": 0}}})
    ]
    assert len(faults) >= 2
