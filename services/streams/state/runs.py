"""Owns run records: the recipe as submitted, desired replicas, state and its history.

Must not act on a record; the controller does.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.contracts import Closing, Fence, RewardDigests, RunState, Transition
from services.settings import Recipe
from services.streams.connection.client import Redis
from services.streams.connection.functions import FencedError, call
from services.streams.keys import ACTIVE_RUNS, DELETED_RUNS, INDEX, WORDS, RunKeys, request_key, words
from services.streams.repeatable import REQUESTS_KEPT_S, RepeatableRequest, RepeatedRequestError
from services.streams.state.run_record import (
    DEFAULT_PROJECT,
    RecordChange,
    RunRecord,
    UnreadableRunError,
    flat,
    is_record,
    new_fields,
    read_record,
    stated,
)

log = logging.getLogger(__name__)

OWNER = "controller"
"""The role whose epoch fences writes to records."""
ANY = frozenset(RunState)
ACTIVE = frozenset(state for state in RunState if not state.ended)
ENDED = frozenset(state for state in RunState if state.ended)
RESUMABLE = frozenset({RunState.FAILED, RunState.CANCELLED})
READ_AT_ONCE = 100
"""Records per round trip."""


class UnknownRunError(LookupError):
    """No run has this id."""


class RunStateError(RuntimeError):
    """The run's state does not allow the change; the text names the state."""


class EndedRunError(RunStateError):
    """The run has ended and cannot be changed."""


class ClosedRunError(RunStateError):
    """The run is being deleted, or has expired: it cannot be resumed any more."""

    def __init__(self, run: str, closing: Closing) -> None:
        what = "was archived" if closing in (Closing.ARCHIVING, Closing.ARCHIVED) else "has expired"
        closed = f"{what}: its groups were deleted, and it can no longer be resumed"
        super().__init__(f"run {run!r} {'is being deleted' if closing is Closing.DELETING else closed}")


class UsedRunError(RunStateError):
    """Another run has the id."""

    def __init__(self, run: str) -> None:
        super().__init__(f"id: {run!r} is not valid: expected an id that is not in use")


class StaleRevisionError(RunStateError):
    """The record was changed since it was read."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run {run!r} was changed since it was read; read it again, then retry")


def unknown(run: str) -> UnknownRunError:
    """The error for an id of no run."""
    return UnknownRunError(f"run {run!r} does not exist")


REFUSED: dict[int, Callable[[str], Exception]] = {-1: unknown, -2: StaleRevisionError}
"""By the reply of `change_record`."""


class NoCheckpointError(ValueError):
    """A run cannot be resumed from the named step; the text lists the possible steps."""


@dataclass(frozen=True)
class ResumeChanges:
    """How to resume a run that ended: from an older step's checkpoint, with other numbers; None: unchanged."""

    from_step: int | None = None
    learner_ranks: int | None = None
    rollout: int | None = None


UNCHANGED = ResumeChanges()


class RecordReader:
    """Reads the records of runs, and keeps their indices."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._unreadable: set[str] = set()

    async def exists(self, run: str) -> bool:
        """Whether the run has a record."""
        return bool(await self._redis.exists(RunKeys(run).record))

    async def get(self, run: str, fence: Fence | None = None) -> RunRecord:
        """One run. Raises UnknownRunError, UnreadableRunError; FencedError for the `fence` of a replaced controller."""
        record = await self.shown(run, fence)
        if record.damage:
            raise UnreadableRunError(record.problem)
        return record

    async def shown(self, run: str, fence: Fence | None = None) -> RunRecord:
        """As `get`, but with what can be read of a damaged record."""
        try:
            keys = RunKeys(run)
        except ValueError:
            raise unknown(run) from None
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.record)
            pipe.get(keys.epoch(OWNER))
            fields, token = await pipe.execute()
        if not is_record(fields):
            raise unknown(run)
        if fence and (newest := Fence.parse(token)).replaces(fence):
            raise FencedError(f"a newer controller owns run {run!r}: {newest.owner}")
        return read_record(run, fields)

    async def shown_together(self, runs: Sequence[str]) -> dict[str, RunRecord]:
        """What can be read of these runs, by id; those without a record are left out."""
        found = dict[str, RunRecord]()
        for start in range(0, len(runs), READ_AT_ONCE):
            part = runs[start : start + READ_AT_ONCE]
            async with self._redis.pipeline(transaction=False) as pipe:
                for run in part:
                    pipe.hgetall(RunKeys(run).record)
                replies = await pipe.execute()
            found |= {
                run: read_record(run, fields) for run, fields in zip(part, replies, strict=True) if is_record(fields)
            }
        return found

    async def active(self) -> list[RunRecord]:
        """The runs for which the controller has work, by their index, oldest first; others are removed from it.

        One whose record is damaged is logged once and left out.
        """
        listed = [run.decode() for run in await self._redis.smembers(ACTIVE_RUNS)]
        found = []
        for record in (await self.shown_together(listed)).values():
            if record.damage and record.id not in self._unreadable:
                log.warning("left out: %s", record.problem)
                self._unreadable.add(record.id)
            elif record.active and not record.damage:
                found.append(record)
        for run in {*listed} - {record.id for record in found}:
            await self.index(run)
        return sorted(found, key=lambda record: (record.created_at, record.id))

    async def with_edits(self, record: RunRecord) -> RunRecord:
        """A record with the recipe as edited since; the same if there is none to read, or the run was resumed."""
        revision = await self._redis.hget(RunKeys(record.id).record, "revision")
        if revision is None or revision == str(record.revision).encode():
            return record
        newer = await self.shown(record.id)
        if newer.problem or newer.resumptions != record.resumptions:
            return record
        return replace(record, stored_recipe=newer.stored_recipe, edits=newer.edits, revision=newer.revision)

    async def index(self, run: str) -> None:
        """Bring the indices in line with a run's record. A process of an earlier release does not do it."""
        await call(self._redis, "index_run", record_key=RunKeys(run).record, run=run, **INDEX, **WORDS)


class RunRecords(RecordReader):
    """All runs of one Redis. Every change is one step, and possible while Redis is at its maxmemory.

    A change with a `fence` is that of a role's owner: it raises FencedError once a newer process owns the role.
    """

    async def create(
        self,
        run: str,
        recipe: Recipe,
        files: Mapping[str, str] | None = None,
        project: str = DEFAULT_PROJECT,
        *,
        priority: int = 0,
        request: RepeatableRequest | None = None,
    ) -> RunRecord:
        """Add a queued run of a project, with the texts of the recipe's files by name.

        Raises UsedRunError, ValueError for an id that is not valid, RedisFullError; RepeatedRequestError and
        OtherRequestError for a `request` whose key was used.
        """
        now, texts = time.time(), files or {}
        first = Transition(state=RunState.QUEUED, at=now, reason="submitted")
        fields = new_fields(recipe, recipe.rollout.replicas, [first], RewardDigests.of(texts).files)
        fields |= {"project": project, "priority": str(priority)}
        if not await self._create(run, now, fields, texts, request):
            raise UsedRunError(run)
        return await self.get(run)

    async def create_failed(
        self, run: str, recipe: Recipe, created_at: float, reason: str, files: Mapping[str, str], project: str
    ) -> RunRecord:
        """Add the record of a run that was created before, as failed. Raises UsedRunError, RedisFullError."""
        failed = Transition(state=RunState.FAILED, at=time.time(), reason=reason)
        fields = new_fields(recipe, recipe.rollout.replicas, [failed], RewardDigests.of(files).files)
        if not await self._create(run, created_at, fields | {"project": project}, files):
            raise UsedRunError(run)
        return await self.get(run)

    async def restore_failed(self, record: RunRecord, reason: str) -> bool:
        """Add the record of a run that Redis lost again, as failed. False if there is one, or the run was deleted."""
        deleted = f"{record.id} {record.created_at!r}".encode()
        if any(fields[b"m"] == deleted for _, fields in await self._redis.xrevrange(DELETED_RUNS)):
            return False
        failed = Transition(state=RunState.FAILED, at=time.time(), reason=reason)
        fields = new_fields(record.recipe, record.rollout_replicas, [*record.history, failed], record.files)
        edits = json.dumps([edit.model_dump(mode="json") for edit in record.edits]) if record.edits else ""
        fields |= {"project": record.project, "priority": str(record.priority)} | stated(
            place=record.place, edits=edits
        )
        return await self._create(record.id, record.created_at, fields, {})

    async def earlier(self, request: RepeatableRequest) -> RepeatedRequestError | None:
        """What is known of a request that was carried out before. Raises OtherRequestError."""
        stored = await self._redis.get(request_key(request.key))
        return request.check(stored) if stored else None

    async def _create(
        self,
        run: str,
        created_at: float,
        fields: Mapping[str, str],
        texts: Mapping[str, str],
        request: RepeatableRequest | None = None,
    ) -> bool:
        created = await call(
            self._redis,
            "create_record",
            record_key=RunKeys(run).record,
            files_key=RunKeys(run).reward_files,
            request_key=request_key(request.key if request else ""),
            run=run,
            created_at=repr(created_at),
            request=request.stored(run) if request else "",
            request_kept_s=REQUESTS_KEPT_S,
            field_list=flat(fields),
            file_list=flat(texts),
            **INDEX,
            **WORDS,
        )
        if request and created < 0 and (repeated := await self.earlier(request)):
            raise repeated
        return created > 0

    async def transition(self, run: str, state: RunState, reason: str, fence: Fence | None = None) -> RunRecord:
        """Change a run's state, with a time and a reason. Raises EndedRunError when it has ended, FencedError."""
        return await self.change(run, ACTIVE, RecordChange(state, reason), fence)

    async def request_cancel(self, run: str) -> RunRecord:
        """Ask the controller to stop a run. Raises UnknownRunError, EndedRunError."""
        return await self.change(run, ACTIVE, RecordChange(fields={"cancel_requested": "1"}))

    async def request_pause(self, run: str) -> RunRecord:
        """Ask the controller to pause a running run. Raises UnknownRunError, RunStateError."""
        refusal = "only a running one can be paused"
        return await self.change(
            run, {RunState.RUNNING}, RecordChange(fields={"pause_requested": "1"}), refusal=refusal
        )

    async def resume(self, run: str, changes: ResumeChanges = UNCHANGED) -> RunRecord:
        """Resume a paused run, or requeue one that failed or was cancelled.

        A requested pause that has not started is cancelled. Raises UnknownRunError, RunStateError,
        NoCheckpointError.
        """
        record = await self.get(run)
        if record.closing:
            raise ClosedRunError(run, record.closing)
        if record.state in RESUMABLE:
            return await self._requeue(record, changes)
        if record.state is not RunState.PAUSED and not (record.state is RunState.RUNNING and record.pause_requested):
            hint = "it has nothing left to do" if record.state.ended else "cancel it first"
            raise RunStateError(f"run {run!r} is {record.state.value}; {hint}")
        if changes != UNCHANGED:
            raise RunStateError(f"run {run!r} is {record.state.value}; cancel it first, then resume it with changes")
        change = RecordChange(drop=("pause_requested",), delete_keys=(RunKeys(run).starved,))
        return await self.change(run, {record.state}, change, refusal="its state changed meanwhile; retry")

    async def _requeue(self, record: RunRecord, changes: ResumeChanges) -> RunRecord:
        run, fields = record.id, {}
        drop = ["cancel_requested", "pause_requested", "summary", "adopted_step"]
        if changes.from_step is None and record.adopted_step is not None:
            # Of an adopted run, Redis has nothing of the sampler after the checkpoint.
            changes = replace(changes, from_step=record.adopted_step)
        if changes.from_step is None:
            reason = "resumed"
            drop.append("resume_step")
        else:
            await self._check_step(run, changes.from_step)
            reason, fields["resume_step"] = f"resumed from step {changes.from_step}", str(changes.from_step)
            drop.append("export_path")  # it contains weights that leave the history
        if changes.learner_ranks is not None:
            learner = record.recipe.learner.model_copy(update={"ranks": changes.learner_ranks})
            fields["recipe"] = record.recipe.model_copy(update={"learner": learner}).model_dump_json()
            reason += f", {changes.learner_ranks} learner ranks"
        if changes.rollout is not None:
            fields["rollout_replicas"] = str(changes.rollout)
            reason += f", {changes.rollout} rollout replicas"
        change = RecordChange(RunState.QUEUED, reason, fields, tuple(drop), "resumptions", (RunKeys(run).starved,))
        return await self.change(run, RESUMABLE, change, refusal="its state changed meanwhile; retry")

    async def _check_step(self, run: str, step: int) -> None:
        keys = RunKeys(run)
        stored, committed = await self._redis.get(keys.checkpoints), await self._redis.hget(keys.policy, "step")
        # A rewind that was cut off leaves checkpoints of steps that are no longer in the history.
        newest = math.inf if committed is None else int(committed)
        accepted = sorted({0, *(known for known in json.loads(stored or "[]") if known <= newest)})
        if step not in accepted:
            raise NoCheckpointError(
                f"from_step: {step} is not valid: expected a rollout step with a checkpoint, or 0 for the initial "
                f"model: {', '.join(map(str, accepted))}"
            )

    async def scale(self, run: str, rollout: int) -> RunRecord:
        """Set the desired number of rollout replicas. Raises UnknownRunError, EndedRunError."""
        return await self.change(run, ACTIVE, RecordChange(fields={"rollout_replicas": str(rollout)}))

    async def set_paths(self, run: str, fence: Fence | None = None, role: str = OWNER, **paths: str) -> None:
        """Set model_path, inputs, export_path or place, as the owner of a role. Raises UnknownRunError, FencedError."""
        await self.change(run, ANY, RecordChange(fields=paths), fence, role=role)

    async def set_summary(self, run: str, summary: dict[str, Any], fence: Fence | None = None) -> None:
        """Set the run's results. Raises UnknownRunError, FencedError."""
        await self.change(run, ANY, RecordChange(fields={"summary": json.dumps(summary)}), fence)

    async def change(
        self,
        run: str,
        states: Collection[RunState],
        change: RecordChange,
        fence: Fence | None = None,
        refusal: str = "",
        role: str = OWNER,
    ) -> RunRecord:
        """Change the record of a run in one of `states`. Raises UnknownRunError, FencedError, RunStateError."""
        try:
            keys = RunKeys(run)
        except ValueError:
            raise unknown(run) from None
        done = await call(
            self._redis,
            "change_record",
            record_key=keys.record,
            epoch_key=keys.epoch(role),
            deleted_keys=change.delete_keys,
            fence=fence.token if fence else "",
            run=run,
            states=words(states),
            closings=words(change.closings),
            revision="" if change.revision is None else change.revision,
            transition=change.transition(),
            counted_field=change.count,
            deleted_field_list=change.drop,
            set_field_list=change.set_fields(),
            **INDEX,
            **WORDS,
        )
        if done in REFUSED:
            raise REFUSED[done](run)
        record = await self.shown(run)
        if done:
            return record
        if record.closing and record.closing not in change.closings:
            raise ClosedRunError(run, record.closing)
        if refusal:
            raise RunStateError(f"run {run!r} is {record.state.value}; {refusal}")
        raise EndedRunError(f"run {run!r} has ended: it is {record.state.value}")


async def is_paused(redis: Redis, keys: RunKeys) -> bool:
    """Whether a pause was requested, or the run starves or is not judged, and waits to be resumed."""
    state, requested = await redis.hmget(keys.record, "state", "pause_requested")
    starved = await redis.exists(keys.starved)
    return bool(starved) or requested == b"1" or state == RunState.PAUSED.value.encode()
