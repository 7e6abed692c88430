"""Owns the view of a run's dead letters, and their redrive: it requeues a letter's group.

Must not trust a letter: its content may be hostile.

A redriven group gets a new name (`g00000012` becomes `g00000012-r1`) and counts as one more dispatched group; the dead
one stays dead. Under its old name, a late verdict could judge a sample that it never saw, and a group whose hash is
gone could be trained twice.

The sampler reserves no slot for a redriven group in advance, so few may be pending at once (services/memory_bound.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from services.contracts import Cause, DeadLetter, Lane, Task
from services.streams.connection.client import Redis
from services.streams.connection.functions import RedisFullError, call
from services.streams.delivery.consumer import tail
from services.streams.delivery.validation import Malformed, Source, admit
from services.streams.keys import RunKeys
from services.streams.retention import REDRIVEN_KEPT, REDRIVEN_PENDING
from services.streams.state.events import EventLog

PAGE = 200
GROUP_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
REDRIVEN_ID = re.compile(r"(.+)-r(\d{1,6})")
REASON_SHOWN = 200
AT_LIMIT = -2
"""The reply of lua/groups/redrive.lua at the limit of pending redriven groups."""


class UnknownLetterError(LookupError):
    """No dead letter has this entry id."""


class NotRedrivableError(RuntimeError):
    """A letter's group cannot be requeued; the text says why."""


class RedriveLimitError(NotRedrivableError):
    """The limit of pending redriven groups is reached; the same letter can be redriven later."""


@dataclass(frozen=True)
class Letter:
    """A dead letter with its entry id. `redriven`: the new name of its group if it was redriven."""

    entry: str
    letter: DeadLetter
    redriven: str | None


@dataclass(frozen=True)
class RedriveResult:
    """The result of redriving one letter: the group's new name, or the reason why there is none."""

    entry: str
    group: str | None
    redriven: str | None
    reason: str


async def letters(redis: Redis, keys: RunKeys, after: str = "0-0", count: int = PAGE) -> list[Letter]:
    """Up to `count` dead letters after entry `after`, oldest first. An invalid entry is shown as an invalid letter."""
    entries = await tail(redis, keys.dead, after, count)
    return await _opened(redis, keys, entries)


async def get_letter(redis: Redis, keys: RunKeys, entry: str) -> Letter:
    """One dead letter. Raises UnknownLetterError."""
    entries = await redis.xrange(keys.dead, entry, entry)
    found = [(name.decode(), fields.get(b"m", b"")) for name, fields in entries]
    if not found:
        raise UnknownLetterError(f"run {keys.run!r} has no dead letter {entry!r}")
    return (await _opened(redis, keys, found))[0]


async def _opened(redis: Redis, keys: RunKeys, entries: list[tuple[str, bytes]]) -> list[Letter]:
    # The value is the new name, and a time until which it is kept.
    redriven = {old.decode(): new.decode().split(" ")[0] for old, new in (await redis.hgetall(keys.redriven)).items()}
    found = []
    for entry, body in entries:
        admitted = admit(keys, DeadLetter, body)
        if isinstance(admitted, Malformed):
            admitted = admitted.letter(Source(keys.dead, entry, body, deliveries=0))
        found.append(Letter(entry, admitted, redriven.get(admitted.group or "")))
    return found


async def redrive(redis: Redis, keys: RunKeys, found: Letter, event_log: EventLog) -> RedriveResult:
    """Requeue a letter's group, once; an event `redriven` reports it.

    Raises RedriveLimitError while REDRIVEN_PENDING such groups are pending, NotRedrivableError, RedisFullError.
    """
    if found.redriven:
        raise NotRedrivableError(f"its group was requeued before, as {found.redriven}")
    group = _group_of(keys, found.letter)
    task = await _task_of(redis, keys, found.letter, group)
    again = task.model_copy(update={"group": _next_name(group)})
    await _requeue(redis, keys, group, again)
    why = found.letter.reason[:REASON_SHOWN]
    await event_log.write("redriven", f"{group} is requeued as {again.group}; it was dead-lettered: {why}")
    return RedriveResult(found.entry, group, again.group, f"requeued as {again.group}")


async def _requeue(redis: Redis, keys: RunKeys, group: str, again: Task) -> None:
    lane = keys.lane(Lane.TRAIN)
    try:
        done = await call(
            redis,
            "redrive",
            redriven_key=keys.redriven,
            group_key=keys.group(group),
            new_group_key=keys.group(again.group),
            tasks_key=lane.tasks,
            counters_key=lane.counters,
            pending_key=lane.pending,
            dead_key=keys.dead,
            group=group,
            new_group=again.group,
            new_task=again.model_dump_json(),
            samples=again.samples,
            most_pending=REDRIVEN_PENDING,
            names_kept=REDRIVEN_KEPT,
        )
    except RedisFullError:
        limit = int((await redis.info("memory"))["maxmemory"]) / 2**20
        raise RedisFullError(
            f"Redis is at its maxmemory of {limit:,.0f} MiB: nothing is requeued; redrive it when groups in flight "
            f"have ended, or raise maxmemory"
        ) from None
    if done == AT_LIMIT:
        raise RedriveLimitError(
            f"{REDRIVEN_PENDING} redriven groups are pending, the most at once; redrive it when some of them have ended"
        )
    if done < 0:
        raise NotRedrivableError(await _why_not_dead(redis, keys, group))
    if not done:
        raise NotRedrivableError(f"its group was requeued before, as {again.group}")


async def redrive_all(redis: Redis, keys: RunKeys, event_log: EventLog) -> list[RedriveResult]:
    """Requeue the groups of all letters that were not redriven before, up to the limits.

    Returns a result per letter; one beyond a limit says so, and how many groups are left because of it.
    """
    results: list[RedriveResult] = []
    renamed: dict[str, str] = {}
    left: list[int] = []
    after = "0-0"
    while page := await letters(redis, keys, after):
        after = page[-1].entry
        for stored in page:
            group = stored.letter.group
            if group in renamed:
                results.append(RedriveResult(stored.entry, group, renamed[group], "with another letter of its group"))
            elif not stored.redriven:
                result, fits = await _try_redrive(redis, keys, stored, event_log)
                if not fits:
                    left.append(len(results))
                results.append(result)
                if group and result.redriven:
                    renamed[group] = result.redriven
    groups = {results[at].group for at in left} - set(renamed)
    for at in left:
        results[at] = replace(results[at], reason=f"{results[at].reason} ({len(groups)} groups are left)")
    return results


async def _try_redrive(redis: Redis, keys: RunKeys, found: Letter, event_log: EventLog) -> tuple[RedriveResult, bool]:
    """The result, and whether it is within the limits."""
    try:
        return await redrive(redis, keys, found, event_log), True
    except (NotRedrivableError, RedisFullError) as error:
        fits = not isinstance(error, RedriveLimitError | RedisFullError)
        return RedriveResult(found.entry, found.letter.group, None, str(error)), fits


def _group_of(keys: RunKeys, letter: DeadLetter) -> str:
    train, evaluation = keys.lane(Lane.TRAIN), keys.lane(Lane.EVALUATION)
    if letter.stream in (evaluation.tasks, evaluation.samples, evaluation.verdicts):
        raise NotRedrivableError("an evaluation is not requeued")
    if letter.stream not in (train.tasks, train.samples, train.verdicts):
        raise NotRedrivableError(f"stream {letter.stream[:100]!r} has no groups: expected tasks, samples or verdicts")
    if not letter.group:
        raise NotRedrivableError(f"it names no group: {letter.reason[:REASON_SHOWN]}")
    if not GROUP_ID.fullmatch(letter.group):
        raise NotRedrivableError(f"group {letter.group[:100]!r} is not a group of this run")
    return letter.group


async def _task_of(redis: Redis, keys: RunKeys, letter: DeadLetter, group: str) -> Task:
    """The task for a letter's group: the one in the group's hash, else the message itself."""
    stored = await redis.hget(keys.group(group), "task")
    if stored:
        return Task.model_validate_json(stored)
    if letter.stream != keys.lane(Lane.TRAIN).tasks:
        raise NotRedrivableError(f"group {group!r} is not a group of this run, or was released too long ago")
    if letter.cause is Cause.INVALID:
        raise NotRedrivableError(f"its task is not valid: {letter.reason[:REASON_SHOWN]}")
    if not letter.whole:
        raise NotRedrivableError(f"only {len(letter.body.encode())} of its {letter.size} bytes were kept")
    task = admit(keys, Task, letter.body.encode())
    if isinstance(task, Malformed):
        raise NotRedrivableError(task.reason)
    if task.group != group:
        raise NotRedrivableError(f"its task names another group, {task.group[:100]!r}")
    return task


async def _why_not_dead(redis: Redis, keys: RunKeys, group: str) -> str:
    state = (await redis.hget(keys.group(group), "state") or b"gone").decode()
    if state == "pending":
        return f"group {group!r} is pending: the sampler has not ended it; redrive it later"
    return f"group {group!r} is not dead but {state}"


def _next_name(group: str) -> str:
    before = REDRIVEN_ID.fullmatch(group)
    return f"{before[1]}-r{int(before[2]) + 1}" if before else f"{group}-r1"
