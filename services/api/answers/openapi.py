"""Owns the OpenAPI 3.1 document: FastAPI's, made precise by the tables of this package.

Must not describe a route by hand: its name, docstring, parameters and models do.

docs/reference/openapi.json is its committed copy; tests/docs/openapi_copy.py writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict

from services.api.answers.examples import REQUESTS, RESPONSES
from services.api.answers.problems import MEDIA_TYPE, REQUEST_ID, TYPES, problem_of
from services.api.answers.statuses import MEANINGS, statuses_of
from services.settings import Recipe

TAGS: Mapping[str, str] = {
    "runs": "Submit, list, watch, change and end runs.",
    "events": "What happens in a run: pages of its story, and streams that follow it.",
    "logs": "What the processes of a run log.",
    "files": "Checkpoints and exports of a run: listed, and downloaded.",
    "samples": "What was generated and judged, and the story of each group.",
    "ledger": "What runs and projects used: GPU time, tokens and money.",
    "comparison": "Runs beside each other: settings that differ, and curves by rollout step.",
    "faults": "What went wrong in a run without ending it.",
    "recipes": "What helps to write a recipe.",
    "access": "Who asks, projects with their quotas, and the audit log.",
    "probes": "For kubelets and Prometheus.",
}
SCHEME = "bearer"
INTERVAL = "Seconds after which to ask again."
HEADERS_OF: Mapping[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}, "description": "`Bearer`"}},
    429: {"Retry-After": {"schema": {"type": "string"}, "description": INTERVAL}},
}
PREFIX = "#/components/schemas/"
SUBMITTED = "Submitted"
"""Before the names of a recipe's sections as they are submitted: with defaults, and not yet checked."""
RECIPE_OF = ("SubmitRequest",)
"""Bodies whose `recipe` is checked by parse_recipe, whose texts name each field; its schema describes it."""


class FieldError(BaseModel):
    """One value that is not valid. `value`: as recipes write it, cut to 200 characters; null if it is missing."""

    field: str
    value: str | None
    expected: str


class ProblemDetails(BaseModel):
    """An error (RFC 9457). `detail`: one line per fault; `request_id`: of the gateway's log."""

    model_config = ConfigDict(title="Problem", extra="allow")

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    errors: list[FieldError] = []


def describe(app: FastAPI, is_closed: Callable[[str], bool]) -> None:
    """Let the application serve the document as /openapi.json. `is_closed`: whether a path needs a token."""

    @lru_cache(maxsize=1)
    def document() -> dict[str, Any]:
        return openapi(app, is_closed)

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI documents it


def openapi(app: FastAPI, is_closed: Callable[[str], bool]) -> dict[str, Any]:
    """The document of an application; see `describe`."""
    made = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=_tags(app)
    )
    schemas = made["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = ProblemDetails.model_json_schema(ref_template=PREFIX + "{model}")
    schemas |= schemas["Problem"].pop("$defs")
    _type_recipes(schemas)
    _give_examples(schemas)
    made["components"]["responses"] = {str(status): _refusal(status) for status in MEANINGS}
    made["components"]["securitySchemes"] = {
        SCHEME: {"type": "http", "scheme": "bearer", "description": "A token of this platform, or of its OIDC issuer."}
    }
    for route, method in documented(app):
        closed = is_closed(route.path)
        _complete(made["paths"][route.path_format][method.lower()], route, statuses_of(route, method, closed=closed))
        if closed:
            made["paths"][route.path_format][method.lower()]["security"] = [{SCHEME: []}]
    return made


def documented(app: FastAPI) -> Iterator[tuple[APIRoute, str]]:
    """The routes in the document, each with its method."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in sorted(route.methods):
                yield route, method


def _tags(app: FastAPI) -> list[dict[str, str]]:
    used = {str(tag) for route, _ in documented(app) for tag in route.tags}
    return [{"name": name, "description": text} for name, text in TAGS.items() if name in used]


def _complete(operation: dict[str, Any], route: APIRoute, statuses: Iterable[int]) -> None:
    """Fill in what the tables know of one operation."""
    operation["summary"] = route.name.replace("_", " ").capitalize()
    operation["description"] = re.sub(r"\n(?=\S)", " ", operation.get("description", ""))
    answers = {status: text for status, text in operation["responses"].items() if status.startswith("2")}
    for status in statuses:
        answers[str(status)] = {"$ref": f"#/components/responses/{status}"}
    for answer in answers.values():
        if "content" in answer:
            answer["headers"] = {**answer.get("headers", {}), **_request_id()}
    operation["responses"] = answers


def _request_id() -> dict[str, Any]:
    return {REQUEST_ID: {"schema": {"type": "string"}, "description": "The request's id in the gateway's log."}}


def _refusal(status: int) -> dict[str, Any]:
    """The shared response of a status."""
    if status < 400:
        return {"description": MEANINGS[status]}
    problem = problem_of(status, EXAMPLES.get(status, MEANINGS[status].replace("`", "")))
    example = problem.marshal(uri=TYPES) | {"request_id": "5f0c1d2e3b4a5968"}
    return {
        "description": MEANINGS[status],
        "headers": {**_request_id(), **HEADERS_OF.get(status, {})},
        "content": {MEDIA_TYPE: {"schema": {"$ref": PREFIX + "Problem"}, "example": example}},
    }


EXAMPLES: Mapping[int, str] = {
    404: "run 'math-1' does not exist",
    409: "run 'math-1' has ended: it is cancelled",
    422: "learner.ranks: 0 is not valid: expected a number greater than 0",
}
"""By status: the text of its example."""


def _type_recipes(schemas: dict[str, Any]) -> None:
    """Give the bodies that have a recipe its JSON schema."""
    schema = Recipe.model_json_schema(ref_template=f"{PREFIX}{SUBMITTED}{{model}}")
    sections = schema.pop("$defs", {})
    schemas[f"{SUBMITTED}Recipe"] = schema
    schemas |= {f"{SUBMITTED}{name}": section for name, section in sections.items()}
    for name in RECIPE_OF:
        if name in schemas:
            schemas[name]["properties"]["recipe"] = {"$ref": f"{PREFIX}{SUBMITTED}Recipe"}


def _give_examples(schemas: dict[str, Any]) -> None:
    for name, example in {**REQUESTS, **RESPONSES}.items():
        if name in schemas:
            schemas[name]["examples"] = [example]
