"""Owns the sampler's part in taking a run back to an older rollout step: which groups are asked for again.

Must not touch weights; the learner goes back to its checkpoint at the same time and waits for this.
"""

from __future__ import annotations

import asyncio
import logging
import time

from services.contracts import AFTER, EvaluationRecord, Lane, Prompt, SamplerSnapshot, Task
from services.process import Context
from services.sampler.evaluation.schedule import STEP
from services.sampler.queue.dispatch import task_of
from services.streams.state.events import read_all
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import read_policy
from services.streams.state.rewind import GroupsChangedError, ReopenedGroup, RewindTarget, delete_evaluations, rewind
from services.streams.state.snapshots import read_snapshot

log = logging.getLogger(__name__)

WAIT = "snapshot"
POLL_S = 0.5
ATTEMPTS = 10


class ResumptionError(RuntimeError):
    """The run cannot be taken back; the text says what is missing."""


async def resume(context: Context, transitions: GroupTransitions, prompts: tuple[Prompt, ...]) -> None:
    """Take the run back to the step that its record asks for, unless that was done. Raises ResumptionError."""
    record, step = context.record, context.record.resume_step
    policy = await read_policy(context.redis, context.keys)
    if step is None or policy is None or policy.resumption >= record.resumptions:
        return
    snapshot = await _snapshot(context, step)
    if snapshot is None:
        return
    await _forget_evaluations(context, transitions, step)
    for attempt in range(1, ATTEMPTS + 1):
        groups = await _open_groups(context) + await _trained_after(context, step, {one.id: one for one in prompts})
        try:
            done = await rewind(
                context.redis,
                context.keys,
                "sampler",
                transitions.epoch,
                RewindTarget(
                    resumption=record.resumptions,
                    step=step,
                    groups=groups,
                    posteriors=snapshot.posteriors,
                    response_tokens=snapshot.response_tokens,
                ),
            )
            break
        except GroupsChangedError as error:
            log.warning("attempt %d of %d: %s", attempt, ATTEMPTS, error)
    else:
        raise ResumptionError(f"open groups changed {ATTEMPTS} times while the run was taken back to step {step}")
    if done:
        await context.event_log.write(
            "rewound", f"back to rollout step {step}: {len(groups)} groups are pending again, "
            f"{sum(one.trained for one in groups)} of them had been trained after it",
        )  # fmt: skip


async def _snapshot(context: Context, step: int) -> SamplerSnapshot | None:
    """The sampler's own snapshot at `step`, which the learner finds in its checkpoint; None when stopped meanwhile."""
    deadline_s = context.record.recipe.limits.startup_timeout_s
    ends = time.monotonic() + deadline_s
    with context.waits.on(WAIT, f"the learner to load the checkpoint of rollout step {step}", deadline_s):
        while not context.stopping.is_set():
            if found := await read_snapshot(context.redis, context.keys.snapshot(step)):
                return found
            if time.monotonic() > ends:
                raise ResumptionError(f"the checkpoint of rollout step {step} was not loaded within {deadline_s:g} s")
            await asyncio.sleep(POLL_S)
    return None


async def _forget_evaluations(context: Context, transitions: GroupTransitions, step: int) -> None:
    """Drop the evaluations of steps behind `step` and those under way: other weights will answer them."""
    redis, keys = context.redis, context.keys
    gone = []
    for entry, record in await read_all(redis, keys, keys.evaluations, EvaluationRecord):
        number = record.name.removeprefix(STEP)
        if record.name == AFTER or (number.isdigit() and int(number) > step):
            gone.append(entry)
    await delete_evaluations(redis, keys, "sampler", transitions.epoch, gone)


async def _open_groups(context: Context) -> list[ReopenedGroup]:
    names = sorted(member.decode() for member in await context.redis.smembers(context.keys.lane(Lane.TRAIN).pending))
    found = []
    for name in names:
        task = Task.model_validate_json(await context.redis.hget(context.keys.group(name), "task"))
        found.append(ReopenedGroup(task.model_copy(update={"stop": None}), trained=False))
    return found


async def _trained_after(context: Context, step: int, prompts: dict[str, Prompt]) -> list[ReopenedGroup]:
    found = []
    for _, record in await context.event_log.steps():
        if record.step <= step:
            continue
        for group, prompt in zip(record.groups, record.prompts, strict=True):
            if prompt not in prompts:
                raise ResumptionError(f"group {group}: prompt {prompt!r} is no longer among the training prompts")
            found.append(ReopenedGroup(task_of(context.record.recipe, group, prompts[prompt]), trained=True))
    return found
