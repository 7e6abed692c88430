"""Owns the view of a run's dead letters, and the one way back: a letter's group is asked for anew.

Must not trust a letter: what it holds may be hostile.

A redriven group gets a name of its own (`g00000012` becomes `g00000012-r1`) and is one more dispatched group; the dead
one stays dead. Under its old name, a late verdict could judge a sample that it never saw, and a group whose hash is
gone could be trained twice.

The sampler has no slot for a redriven group until it hears of it, so few may be pending at once (footprint.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from services.contracts import Cause, DeadLetter, Lane, Task
from services.streams.connection.client import Redis
from services.streams.connection.functions import RedisFullError, call
from services.streams.delivery.consumer import tail
from services.streams.delivery.validation import Malformed, admit
from services.streams.keys import RunKeys
from services.streams.retention import REDRIVEN_KEPT, REDRIVEN_PENDING
from services.streams.state.events import EventLog

PAGE = 200
GROUP_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
AGAIN = re.compile(r"(.+)-r(\d{1,6})")
REASON_SHOWN = 200
AT_LIMIT = -2
"""What lua/redrive.lua replies when as many redriven groups are pending as may be."""


class UnknownLetterError(LookupError):
    """No dead letter has this entry id."""


class NotRedrivableError(RuntimeError):
    """A letter's group cannot be asked for anew; the text says why."""


class RedriveLimitError(NotRedrivableError):
    """As many redriven groups are pending as may be at once; the same letter can be redriven later."""


@dataclass(frozen=True)
class Letter:
    """A dead letter with its entry id. `redriven`: the name under which its group was asked for anew, if it was."""

    entry: str
    letter: DeadLetter
    redriven: str | None


@dataclass(frozen=True)
class RedriveResult:
    """What came of redriving one letter: the group's new name, or why there is none."""

    entry: str
    group: str | None
    redriven: str | None
    reason: str


async def letters(redis: Redis, keys: RunKeys, after: str = "0-0", count: int = PAGE) -> list[Letter]:
    """Up to `count` dead letters behind entry `after`, oldest first. What is no letter is shown as one that says so."""
    entries = await tail(redis, keys.dead, after, count)
    return await _opened(redis, keys, entries)


async def get_letter(redis: Redis, keys: RunKeys, entry: str) -> Letter:
    """One dead letter. Raises UnknownLetterError."""
    found = [(one.decode(), fields.get(b"m", b"")) for one, fields in await redis.xrange(keys.dead, entry, entry)]
    if not found:
        raise UnknownLetterError(f"run {keys.run!r} has no dead letter {entry!r}")
    return (await _opened(redis, keys, found))[0]


async def _opened(redis: Redis, keys: RunKeys, entries: list[tuple[str, bytes]]) -> list[Letter]:
    # Behind the new name stands how long it is remembered.
    redriven = {old.decode(): new.decode().split(" ")[0] for old, new in (await redis.hgetall(keys.redriven)).items()}
    found = []
    for entry, body in entries:
        admitted = admit(keys, DeadLetter, body)
        if isinstance(admitted, Malformed):
            admitted = admitted.letter(keys.dead, entry, body, deliveries=0)
        found.append(Letter(entry, admitted, redriven.get(admitted.group or "")))
    return found


async def redrive(redis: Redis, keys: RunKeys, one: Letter, event_log: EventLog) -> RedriveResult:
    """Ask anew for a letter's group, once; an event `redriven` says so.

    Raises RedriveLimitError while REDRIVEN_PENDING such groups are pending, NotRedrivableError, RedisFullError.
    """
    if one.redriven:
        raise NotRedrivableError(f"its group is drawn again already, as {one.redriven}")
    group = _group_of(keys, one.letter)
    task = await _task_of(redis, keys, one.letter, group)
    again = task.model_copy(update={"group": _next_name(group)})
    await _ask(redis, keys, group, again)
    why = one.letter.reason[:REASON_SHOWN]
    await event_log.write("redriven", f"{group} is drawn again as {again.group}; it was given up: {why}")
    return RedriveResult(one.entry, group, again.group, f"drawn again as {again.group}")


async def _ask(redis: Redis, keys: RunKeys, group: str, again: Task) -> None:
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
            f"Redis is at its maxmemory of {limit:,.0f} MiB: nothing is drawn again; redrive it when groups under way "
            f"have ended, or raise maxmemory"
        ) from None
    if done == AT_LIMIT:
        raise RedriveLimitError(
            f"{REDRIVEN_PENDING} groups that were drawn again are pending, the most at once; redrive it when some of "
            f"them have ended"
        )
    if done < 0:
        raise NotRedrivableError(await _standing(redis, keys, group))
    if not done:
        raise NotRedrivableError(f"its group is drawn again already, as {again.group}")


async def redrive_all(redis: Redis, keys: RunKeys, event_log: EventLog) -> list[RedriveResult]:
    """Ask anew for the groups of all letters that were not redriven before, as many as there is room for.

    What came of each letter; one that there was no room for says so, and how many groups are left like its own.
    """
    attempts: list[RedriveResult] = []
    renamed: dict[str, str] = {}
    left: list[int] = []
    after = "0-0"
    while page := await letters(redis, keys, after):
        after = page[-1].entry
        for one in page:
            group = one.letter.group
            if group in renamed:
                attempts.append(RedriveResult(one.entry, group, renamed[group], "with another letter of its group"))
            elif not one.redriven:
                attempt, fits = await _attempt(redis, keys, one, event_log)
                if not fits:
                    left.append(len(attempts))
                attempts.append(attempt)
                if group and attempt.redriven:
                    renamed[group] = attempt.redriven
    groups = {attempts[at].group for at in left} - set(renamed)
    for at in left:
        attempts[at] = replace(attempts[at], reason=f"{attempts[at].reason} ({len(groups)} groups are left)")
    return attempts


async def _attempt(redis: Redis, keys: RunKeys, one: Letter, event_log: EventLog) -> tuple[RedriveResult, bool]:
    """What came of it, and whether there was room."""
    try:
        return await redrive(redis, keys, one, event_log), True
    except (NotRedrivableError, RedisFullError) as error:
        fits = not isinstance(error, RedriveLimitError | RedisFullError)
        return RedriveResult(one.entry, one.letter.group, None, str(error)), fits


def _group_of(keys: RunKeys, letter: DeadLetter) -> str:
    train, evaluation = keys.lane(Lane.TRAIN), keys.lane(Lane.EVALUATION)
    if letter.stream in (evaluation.tasks, evaluation.samples, evaluation.verdicts):
        raise NotRedrivableError("an evaluation is not drawn again")
    if letter.stream not in (train.tasks, train.samples, train.verdicts):
        raise NotRedrivableError(f"stream {letter.stream[:100]!r} carries no group; tasks, samples and verdicts do")
    if not letter.group:
        raise NotRedrivableError(f"it names no group: {letter.reason[:REASON_SHOWN]}")
    if not GROUP_ID.fullmatch(letter.group):
        raise NotRedrivableError(f"group {letter.group[:100]!r} is not one of this run")
    return letter.group


async def _task_of(redis: Redis, keys: RunKeys, letter: DeadLetter, group: str) -> Task:
    """The task that asks for a letter's group: the one its hash holds, else the message itself."""
    stored = await redis.hget(keys.group(group), "task")
    if stored:
        return Task.model_validate_json(stored)
    if letter.stream != keys.lane(Lane.TRAIN).tasks:
        raise NotRedrivableError(f"group {group!r} is not one of this run, or was released too long ago")
    if letter.cause is Cause.INVALID:
        raise NotRedrivableError(f"its task is not accepted: {letter.reason[:REASON_SHOWN]}")
    if not letter.whole:
        raise NotRedrivableError(f"of its {letter.size} bytes only the first {len(letter.body.encode())} were kept")
    task = admit(keys, Task, letter.body.encode())
    if isinstance(task, Malformed):
        raise NotRedrivableError(task.reason)
    if task.group != group:
        raise NotRedrivableError(f"its task is of another group than it says, {task.group[:100]!r}")
    return task


async def _standing(redis: Redis, keys: RunKeys, group: str) -> str:
    state = (await redis.hget(keys.group(group), "state") or b"gone").decode()
    if state == "pending":
        return f"group {group!r} is pending: the sampler has not ended it; try again"
    return f"group {group!r} is not dead but {state}"


def _next_name(group: str) -> str:
    before = AGAIN.fullmatch(group)
    return f"{before[1]}-r{int(before[2]) + 1}" if before else f"{group}-r1"
