"""Owns the REST routes that add runs: submit, clone.

Must not place a run; the controller does.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from services.api.access.notes import note
from services.api.access.roles import Principal
from services.api.dependencies import Operator, Platform, PlatformOf, PrincipalOf, ViewedRun
from services.api.guard.redis_deadline import without_redis
from services.api.routes.lifecycle.accepting import accepted, check_project, checked_recipe
from services.api.routes.lifecycle.other_runs import check_exports, check_unused
from services.api.views.requests import CloneRequest, SubmitRequest
from services.api.views.runs import AcceptedRun
from services.settings import Recipe, RecipeError, parse_recipe
from services.settings.faults import invalid
from services.storage.places import SHARED_FOLDERS
from services.streams.keys import RunKeys
from services.streams.memory_plan import compare_plan
from services.streams.repeatable import RepeatableRequest, RepeatedRequestError
from services.streams.runs.clones import files_of, overridden
from services.streams.state.ended.cleanup import erase
from services.streams.state.run_record import NO_PROJECT, UnreadableRunError
from services.streams.state.runs import RunStateError, UnknownRunError

REPEATED = 200
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[!-~]{1,255}$",
        description="within 24 h the same key with the same body adds one run, and answers with it",
    ),
]

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("", status_code=201, responses={REPEATED: {"model": AcceptedRun, "description": "added before"}})
async def submit_run(
    platform: PlatformOf,
    principal: Operator,
    request: SubmitRequest,
    connection: Request,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> AcceptedRun:
    """Add a run; it starts as soon as the cluster has room. A plan above Redis' maxmemory is refused."""
    check_project(principal, request.project)
    recipe = checked_recipe(request.recipe, request.files)
    repeatable = _repeatable(principal, idempotency_key, request) if idempotency_key else None
    try:
        if repeatable and (repeated := await platform.records.earlier(repeatable)):
            raise repeated
        await check_exports(platform.records, principal, recipe)
        return await _add_run(platform, connection, request, recipe, repeatable)
    except RepeatedRequestError as repeated:
        response.status_code = REPEATED
        return await _answer_again(platform, principal, repeated.run)


async def _add_run(
    platform: Platform,
    connection: Request,
    request: SubmitRequest,
    recipe: Recipe,
    repeatable: RepeatableRequest | None = None,
) -> AcceptedRun:
    """Add the run of a request whose recipe was checked. Raises RepeatedRequestError for one that did so meanwhile."""
    redis, records = platform.redis, platform.records
    run = request.id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if run in SHARED_FOLDERS:
        raise RecipeError(invalid("id", run, f"another name; every run uses the folder {run}"))
    try:
        keys = RunKeys(run)
    except ValueError as error:
        raise RecipeError(str(error).removeprefix("run ")) from None  # the request's field is `id`
    note(run=run, project=request.project)
    platform.quotas.check_known(request.project)
    warnings = await compare_plan(redis, records, run, recipe)
    if request.id and not await records.exists(run):
        async with without_redis(connection):
            await check_unused(run)
    async with platform.quotas.room_for(request.project, recipe, recipe.rollout.replicas):
        if request.id:
            await erase(redis, keys, None)  # what processes of an earlier release wrote of a deleted run
        record = await records.create(
            run, recipe, request.files, request.project, priority=request.priority, request=repeatable
        )
    return await accepted(redis, record, warnings)


@router.post("/{run}/clone", status_code=201)
async def clone_run(
    platform: PlatformOf,
    principal: PrincipalOf,
    record: ViewedRun,
    connection: Request,
    request: CloneRequest | None = None,
) -> AcceptedRun:
    """Add a run with the recipe and files of another one, and other values where you name them.

    The same is checked as of a submission. The copy has the settings as they were edited last, and trains from its
    recipe's model.
    """
    wanted = request or CloneRequest()
    if record.project == NO_PROJECT and not wanted.project:
        raise UnreadableRunError(record.problem)
    project = wanted.project or record.project
    check_project(principal, project)
    document = overridden(record, wanted.overrides)
    texts = await files_of(platform.redis, record)
    named = {use.name for use in parse_recipe(document).file_uses}
    files = {name: text for name, text in texts.items() if name in named}
    recipe = checked_recipe(document, files)
    await check_exports(platform.records, principal, recipe)
    submission = SubmitRequest(recipe=document, files=files, id=wanted.id, project=project, priority=wanted.priority)
    return await _add_run(platform, connection, submission, recipe)


def _repeatable(principal: Principal, key: str, request: SubmitRequest) -> RepeatableRequest:
    body = json.dumps(request.model_dump(mode="json"), sort_keys=True)
    return RepeatableRequest(
        *(hashlib.sha256(text.encode()).hexdigest() for text in (f"{principal.name}\n{key}", body))
    )


async def _answer_again(platform: Platform, principal: Principal, run: str) -> AcceptedRun:
    gone = RunStateError(f"run {run!r}, which a request with this key has added, was deleted")
    try:
        record = await platform.records.shown(run)
    except UnknownRunError:
        raise gone from None
    if principal.role_in(record.project) is None:  # another project's run has the id now
        raise gone
    return await accepted(platform.redis, record, [])
