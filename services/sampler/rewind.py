"""Owns the sampler's part in the rewind of a run to an older rollout step: which groups become pending again.

Must not touch weights. The learner loads its checkpoint at the same time and waits for this part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.contracts import (
    AFTER,
    Batch,
    EvaluationRecord,
    Lane,
    Prompt,
    SamplerSnapshot,
    StepRecord,
    Task,
)
from services.process.hosting import Context
from services.sampler.evaluation.schedule import STEP
from services.streams.delivery.snapshots import read_snapshot
from services.streams.state.events import read_all
from services.streams.state.group_state import REOPENED, GroupTransitions, read_fields
from services.streams.state.policy_history import read_policy
from services.streams.state.rewind import ReopenedGroup, Rewind

WAIT = "snapshot"
POLL_S = 0.5


class RewindError(RuntimeError):
    """The run cannot be rewound; the text says what is missing."""


async def rewind_run(
    context: Context,
    transitions: GroupTransitions,
    prompts: tuple[Prompt, ...],
    archive: Callable[[], Awaitable[object]],
) -> None:
    """Rewind the run to the step that its record names, unless that was done. Raises RewindError.

    `archive` archives the groups that have ended: some of them are drawn again.

    A run that was resumed without a step while a rewind was cut off ends that rewind at the step which it had reached.
    """
    record, policy = context.record, await read_policy(context.redis, context.keys)
    if policy is None:
        return
    named = record.resume_step if policy.resumption < record.resumptions else None
    if named is None and not policy.rewinding:
        return
    snapshot = await _snapshot(context, named) if named is not None else None
    if named is not None and snapshot is None:
        return
    step = policy.step if named is None else named
    known = {prompt.id for prompt in prompts}
    records = [(entry, found) for entry, found in await context.event_log.steps() if found.step > step]
    _check_prompts(step, records, known)
    await archive()
    rewind = Rewind(context.redis, context.keys, "sampler", transitions.fence, record.resumptions)
    await _delete_evaluations(context, rewind, step)
    batches = [batch.step for _, batch in await read_all(context.redis, context.keys, context.keys.batches, Batch)]
    if not await rewind.start():
        return
    opened = await _open_groups(context)
    await rewind.reopen(opened)
    size = record.recipe.algorithm.group_size
    for entry, left in reversed(records):
        pairs = zip(left.groups, left.prompts, strict=True)
        await rewind.reopen([ReopenedGroup(group, prompt, size) for group, prompt in pairs], left.step, entry)
    if snapshot is not None:
        await rewind.store_posteriors(snapshot.posteriors)
    left_in_redis = [step, *batches, *(left.step for _, left in records[-1:])]
    trained = sum(len(left.groups) for _, left in records)
    text = f"rewound to rollout step {step}: {len(opened) + trained} groups are pending again"
    text += f", {trained} of them had been trained after it"
    await rewind.finish(step, snapshot.response_tokens if snapshot else None, left_in_redis, text)


def _check_prompts(step: int, records: list[tuple[str, StepRecord]], known: set[str]) -> None:
    """Raises RewindError, before anything is changed, if a prompt to be drawn again is gone."""
    for _, record in records:
        for group, prompt in zip(record.groups, record.prompts, strict=True):
            if prompt not in known:
                raise RewindError(
                    f"rewinding to rollout step {step} failed: prompt {prompt!r} of group {group} is no longer among "
                    "the training prompts; restore the data that the run was started with"
                )


async def _snapshot(context: Context, step: int) -> SamplerSnapshot | None:
    """The sampler's snapshot at `step`, which the learner loads with its checkpoint. None if the process stops first.

    Raises RewindError after limits.startup_timeout_s.
    """
    deadline_s = context.record.recipe.limits.startup_timeout_s
    deadline = time.monotonic() + deadline_s
    with context.waits.on(WAIT, f"the learner to load the checkpoint of rollout step {step}", deadline_s):
        while not context.stopping.is_set():
            if found := await read_snapshot(context.redis, context.keys.snapshot(step)):
                return found
            if time.monotonic() > deadline:
                raise RewindError(
                    f"rewinding to rollout step {step} failed: the learner did not load its checkpoint within "
                    f"{deadline_s:g} s (limits.startup_timeout_s)"
                )
            await asyncio.sleep(POLL_S)
    return None


async def _delete_evaluations(context: Context, rewind: Rewind, step: int) -> None:
    """Delete the evaluations after `step`, finished or in flight, because other weights will answer them."""
    redis, keys = context.redis, context.keys
    entries, kept_tokens = [], 0
    for entry, record in await read_all(redis, keys, keys.evaluations, EvaluationRecord):
        number = record.name.removeprefix(STEP)
        if record.name == AFTER or (number.isdigit() and int(number) > step):
            entries.append(entry)
        else:
            kept_tokens += record.response_tokens
    await rewind.delete_evaluations(entries, kept_tokens)


async def _open_groups(context: Context) -> list[ReopenedGroup]:
    """The groups that are pending, except those that are reopened already."""
    redis, keys = context.redis, context.keys
    pending = keys.lane(Lane.TRAIN).pending
    names = sorted({member.decode() async for member in redis.sscan_iter(pending, count=1000)})
    facts = await read_fields(redis, keys, names, ("state", "task"))
    reopened = []
    for name, (state, task) in zip(names, facts, strict=True):
        if state != REOPENED.encode() and task is not None:
            found = Task.model_validate_json(task)
            reopened.append(ReopenedGroup(name, found.prompt.id, found.samples))
    return reopened
