"""Owns the sampler's part in the rewind of a run to an older rollout step: which groups become pending again.

Must not touch weights. The learner loads its checkpoint at the same time and waits for this part.
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


class RewindError(RuntimeError):
    """The run cannot be rewound; the text says what is missing."""


async def rewind_run(context: Context, transitions: GroupTransitions, prompts: tuple[Prompt, ...]) -> None:
    """Rewind the run to the step that its record names, unless that was done. Raises RewindError."""
    record, step = context.record, context.record.resume_step
    policy = await read_policy(context.redis, context.keys)
    if step is None or policy is None or policy.resumption >= record.resumptions:
        return
    snapshot = await _snapshot(context, step)
    if snapshot is None:
        return
    await _delete_evaluations(context, transitions, step)
    by_id = {prompt.id: prompt for prompt in prompts}
    for attempt in range(1, ATTEMPTS + 1):
        groups = await _open_groups(context) + await _trained_after(context, step, by_id)
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
        raise RewindError(
            f"rewinding to rollout step {step} failed: the open groups changed in each of {ATTEMPTS} attempts; "
            "a restarted sampler retries"
        )
    if done:
        await context.event_log.write(
            "rewound",
            f"rewound to rollout step {step}: {len(groups)} groups are pending again, "
            f"{sum(group.trained for group in groups)} of them had been trained after it",
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


async def _delete_evaluations(context: Context, transitions: GroupTransitions, step: int) -> None:
    """Delete the evaluations after `step`, finished or in flight, because other weights will answer them."""
    redis, keys = context.redis, context.keys
    entries = []
    for entry, record in await read_all(redis, keys, keys.evaluations, EvaluationRecord):
        number = record.name.removeprefix(STEP)
        if record.name == AFTER or (number.isdigit() and int(number) > step):
            entries.append(entry)
    await delete_evaluations(redis, keys, "sampler", transitions.epoch, entries)


async def _open_groups(context: Context) -> list[ReopenedGroup]:
    names = sorted(member.decode() for member in await context.redis.smembers(context.keys.lane(Lane.TRAIN).pending))
    reopened = []
    for name in names:
        task = Task.model_validate_json(await context.redis.hget(context.keys.group(name), "task"))
        reopened.append(ReopenedGroup(task.model_copy(update={"stop": None}), trained=False))
    return reopened


async def _trained_after(context: Context, step: int, prompts: dict[str, Prompt]) -> list[ReopenedGroup]:
    reopened = []
    for _, record in await context.event_log.steps():
        if record.step <= step:
            continue
        for group, prompt in zip(record.groups, record.prompts, strict=True):
            if prompt not in prompts:
                raise RewindError(
                    f"rewinding to rollout step {step} failed: prompt {prompt!r} of group {group} is no longer among "
                    "the training prompts; restore the data that the run was started with"
                )
            reopened.append(ReopenedGroup(task_of(context.record.recipe, group, prompts[prompt]), trained=True))
    return reopened
