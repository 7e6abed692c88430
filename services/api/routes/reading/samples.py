"""Owns the REST routes of samples and of groups: what was generated, judged, kept or dropped, and trained.

Must not interpret a text: models write them.
"""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError

from services.api.dependencies import PlatformOf, ViewedRun
from services.api.guard.redis_deadline import beyond_redis, without_redis
from services.api.routes.reading.stored_files import MissingFileError
from services.api.routes.reading.token_texts import token_texts
from services.api.views.reading.samples import AttemptView, GroupView, SampleList, SampleView, StorySample, TokenView
from services.contracts import Lane, OptimizerStepRecord, Outcome, Release, StepRecord, Task, Verdict, VersionSpan
from services.storage.groups.filters import FoundSample, SampleFilter
from services.storage.groups.listing import DamagedPartError
from services.storage.groups.reader import GroupArchive
from services.storage.groups.story import ArchivedSample, GroupStory
from services.streams.connection.client import Redis
from services.streams.keys import EVALUATION_GROUP, RunKeys
from services.streams.state.events import read_step
from services.streams.state.group_state import EVALUATED, read_groups
from services.streams.state.run_record import RunRecord

MOST_AT_ONCE = 200
NUMBER = 2**31
CURSOR = r"^[0-9]{1,16}\.[0-9]{1,6}\.[A-Za-z0-9.-]{1,100}$"
RUNS_OPEN = 64
RELEASES = frozenset({EVALUATED, *Release})
Step = Annotated[int | None, Query(ge=0, lt=NUMBER)]
Score = Annotated[float | None, Query(ge=-1e9, le=1e9)]

router = APIRouter(prefix="/v1/runs", tags=["samples"])


@lru_cache(maxsize=RUNS_OPEN)
def _archive(run: str, _created_at: float) -> GroupArchive:
    """The archive of a run; an id that is used again has another time."""
    return GroupArchive.of_run(run)


@router.get("/{run}/samples")
async def list_samples(
    request: Request,
    record: ViewedRun,
    lane: Lane | None = None,
    outcome: Outcome | None = None,
    release: Annotated[str, Query(max_length=16)] = "",
    step: Step = None,
    version: Step = None,
    prompt: Annotated[str, Query(max_length=1024)] = "",
    text: Annotated[str, Query(max_length=1024)] = "",
    reward: Annotated[str, Query(max_length=64)] = "",
    score_min: Score = None,
    score_max: Score = None,
    after: Annotated[str | None, Query(pattern=CURSOR)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_AT_ONCE)] = 50,
) -> SampleList:
    """Samples of groups that have ended, the last ones first, training before evaluations.

    `text`: a part of the response, upper and lower case being equal. `score_min` and `score_max` limit the score of the
    named `reward`, or of the verdict.
    """
    wanted = SampleFilter(
        lane=lane,
        outcome=outcome,
        release=release,
        step=step,
        version=version,
        prompt=prompt,
        text=text,
        reward=reward,
        least=score_min,
        most=score_max,
    )
    beyond_redis(request)
    archive = await asyncio.to_thread(_archive, record.id, record.created_at)
    try:
        page = await asyncio.to_thread(archive.search, wanted, after or "", limit)
    except (DamagedPartError, OSError) as error:
        return SampleList(samples=[], next=None, problems=[str(error)[:500]])
    return SampleList(samples=[_sample(found) for found in page.samples], next=page.cursor, problems=list(page.damaged))


def _sample(found: FoundSample) -> SampleView:
    return SampleView(**dict(found), versions=sorted({span.version for span in found.spans}))


@router.get("/{run}/groups/{group}")
async def show_group(request: Request, platform: PlatformOf, record: ViewedRun, group: str) -> GroupView:
    """The story of a group: prompt, attempts with samples and verdicts, why it was kept or dropped, the step."""
    archive = await asyncio.to_thread(_archive, record.id, record.created_at)
    async with without_redis(request):
        stories, problem = await asyncio.to_thread(_stories, archive, group)
    keys = RunKeys(record.id)
    flying = None if stories else await _in_flight(platform.redis, keys, group)
    if not stories and flying is None and problem is None:
        raise MissingFileError(f"group {group[:200]!r} of run {record.id!r} is neither in flight nor archived")
    attempts = []
    for story in stories:
        step = None if story.step is None else await read_step(platform.redis, keys, story.step)
        checkpoint = await _checkpoint(platform.redis, keys, story.step)
        attempts.append(await asyncio.to_thread(_attempt, record, story, step, checkpoint))
    prompt = next((story.prompt for story in stories if story.prompt), None)
    lane = Lane.EVALUATION if group.startswith(EVALUATION_GROUP) else Lane.TRAIN
    if flying is not None:
        attempts, prompt = [flying[0]], flying[1].prompt
    release = attempts[0].release if attempts else None
    return GroupView(group=group[:200], lane=lane, release=release, prompt=prompt, attempts=attempts, problem=problem)


def _stories(archive: GroupArchive, group: str) -> tuple[list[GroupStory], str | None]:
    """The attempts at a group, the last one first, and what cannot be read."""
    try:
        last = archive.find(group)
        if last is None:
            return [], None
        earlier = [archive.find(group, resumption) for resumption in reversed(last.attempts[:-1])]
        return [last, *(story for story in earlier if story is not None)], None
    except (DamagedPartError, OSError) as error:
        return [], str(error)[:500]


def _attempt(record: RunRecord, story: GroupStory, step: StepRecord | None, checkpoint: str | None) -> AttemptView:
    samples = [
        StorySample(**dict(sample), tokens=_tokens(record, sample, ids, logprobs))
        for sample, ids, logprobs in zip(story.samples, story.response_ids, story.behaviour_logprobs, strict=True)
    ]
    return AttemptView(
        resumption=story.resumption,
        release=story.release,
        reason=story.reason,
        step=story.step,
        version=story.version,
        staleness=story.staleness,
        optimizer_step=story.optimizer_step,
        optimizer=_optimizer(story, step),
        optimizer_steps=step.optimizer_steps if step else None,
        learning_rate=step.learning_rate if step else None,
        checkpoint=checkpoint,
        samples=samples,
    )


def _optimizer(story: GroupStory, step: StepRecord | None) -> OptimizerStepRecord | None:
    """The optimizer step that trained the group, if Redis has the record of its rollout step."""
    number = story.optimizer_step
    return step.optimizer[number - 1] if step and number and number <= len(step.optimizer) else None


async def _checkpoint(redis: Redis, keys: RunKeys, step: int | None) -> str | None:
    """The first of the checkpoints that are kept which holds a step."""
    if step is None:
        return None
    kept: list[int] = json.loads(await redis.get(keys.checkpoints) or "[]")
    first = min((known for known in kept if known >= step), default=None)
    return None if first is None else f"step-{first:06d}"


def _tokens(
    record: RunRecord, sample: ArchivedSample, ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> list[TokenView]:
    texts = token_texts(record.model_path, ids)
    return [
        TokenView(id=token, text=texts[at] if texts else None, logprob=logprobs[at], version=_writer(sample.spans, at))
        for at, token in enumerate(ids)
    ]


def _writer(spans: tuple[VersionSpan, ...], at: int) -> int | None:
    return next((span.version for span in spans if span.start <= at < span.end), None)


async def _in_flight(redis: Redis, keys: RunKeys, group: str) -> tuple[AttemptView, Task] | None:
    """What Redis has of a group that has not ended: its task, and the verdicts so far."""
    async for _, fields in read_groups(redis, keys, [group]):
        try:
            task = Task.model_validate_json(fields[b"task"])
            found = [value for name, value in fields.items() if name.startswith(b"verdict:")]
            verdicts = sorted((Verdict.model_validate_json(value) for value in found), key=lambda each: each.index)
        except (KeyError, ValidationError):
            return None
        state = fields.get(b"state", b"").decode(errors="replace")
        samples = [StorySample(**dict(_judged(verdict)), tokens=[]) for verdict in verdicts]
        reason = f"it is {state}: {len(verdicts)} of {task.samples} samples are judged"
        release = state if state in RELEASES else None  # it has ended, and waits for the archive
        return AttemptView(release=release, reason=reason, samples=samples), task
    return None


def _judged(verdict: Verdict) -> ArchivedSample:
    """The fields that a verdict has, of the same names."""
    known = dict(verdict.facts) | dict(verdict)
    return ArchivedSample(**{name: known[name] for name in ArchivedSample.model_fields if name in known})
