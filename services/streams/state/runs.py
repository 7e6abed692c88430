"""Owns run records: the recipe as submitted, desired replicas, state and its history.

Must not act on a record; the controller does.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from services.contracts import Closing, Fence, RewardDigests, RunState, Transition
from services.settings import Recipe
from services.streams.connection.client import Redis
from services.streams.connection.functions import FencedError, call
from services.streams.keys import ACTIVE_RUNS, DELETED_RUNS, RUNS, RunKeys
from services.streams.state.run_record import RunRecord, UnreadableRunError, decode_record

log = logging.getLogger(__name__)

OWNER = "controller"
"""The role whose epoch fences writes to records."""
ANY = frozenset(RunState)
ACTIVE = frozenset(state for state in RunState if not state.ended)
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
        expired = "has expired: its groups were deleted, and it can no longer be resumed"
        super().__init__(f"run {run!r} {'is being deleted' if closing is Closing.DELETING else expired}")


class NoCheckpointError(ValueError):
    """A run cannot be resumed from the named step; the text lists the possible steps."""


@dataclass(frozen=True)
class RecordChange:
    """A change of a record, made in one step; `delete_keys` names other keys of the run to delete with it.

    `closings`: a run is changed only if its closing is one of these; "": it is not closed.
    """

    state: RunState | None = None
    reason: str = ""
    fields: Mapping[str, str] | None = None
    drop: tuple[str, ...] = ()
    count: str = ""
    delete_keys: tuple[str, ...] = ()
    closings: tuple[str, ...] = ("",)

    def transition(self) -> str:
        """The transition to append to the run's history, as JSON; '' without a new state."""
        if self.state is None:
            return ""
        return Transition(state=self.state, at=time.time(), reason=self.reason).model_dump_json()

    def set_fields(self) -> list[str]:
        """The fields to set, as field, value, field, value, ..."""
        fields = dict(self.fields or {})
        if self.state is not None:
            fields["state"] = self.state.value
        return _flat(fields)


def _words(words: Iterable[str]) -> str:
    """Words as the Redis functions take them."""
    return f",{','.join(words)},"


ACTIVE_WORDS = _words(sorted([*ACTIVE, *(closing for closing in Closing if closing.open)]))
"""The states and closings of runs for which the controller has work."""


def _flat(fields: Mapping[str, str]) -> list[str]:
    return list(chain.from_iterable(fields.items()))


def _new_fields(
    recipe: Recipe, replicas: int, history: Sequence[Transition], files: Mapping[str, str]
) -> dict[str, str]:
    """The fields of a new record. `files`: the digests of the user's files, by name."""
    return {
        "recipe": recipe.model_dump_json(),
        "state": history[-1].state.value,
        "rollout_replicas": str(replicas),
        "history": f"[{','.join(change.model_dump_json() for change in history)}]",
        **_given(files=json.dumps(dict(files)) if files else ""),
    }


def _given(**fields: str) -> dict[str, str]:
    """Those of the fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True)
class ResumeChanges:
    """How to resume a run that ended: from an older step's checkpoint, with other numbers; None: unchanged."""

    from_step: int | None = None
    learner_ranks: int | None = None
    rollout: int | None = None


UNCHANGED = ResumeChanges()


class RunRecords:
    """All runs of one Redis. Every change is one step, and possible while Redis is at its maxmemory.

    A change with a `fence` is that of a role's owner: it raises FencedError once a newer process owns the role.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._unreadable: set[str] = set()

    async def create(self, run: str, recipe: Recipe, files: Mapping[str, str] | None = None) -> RunRecord:
        """Add a queued run, with the texts of the recipe's files by name.

        Raises ValueError for an id in use or not valid, RedisFullError.
        """
        now, texts = time.time(), files or {}
        first = Transition(state=RunState.QUEUED, at=now, reason="submitted")
        fields = _new_fields(recipe, recipe.rollout.replicas, [first], RewardDigests.of(texts).files)
        if not await self._create(run, now, fields, texts):
            raise ValueError(f"run id: {run!r} is not valid: expected an id that is not in use")
        return await self.get(run)

    async def restore_failed(self, record: RunRecord, reason: str) -> bool:
        """Add the record of a run that Redis lost again, as failed. False if there is one, or the run was deleted."""
        deleted = f"{record.id} {record.created_at!r}".encode()
        if any(fields[b"m"] == deleted for _, fields in await self._redis.xrevrange(DELETED_RUNS)):
            return False
        failed = Transition(state=RunState.FAILED, at=time.time(), reason=reason)
        fields = _new_fields(record.recipe, record.rollout_replicas, [*record.history, failed], record.files)
        return await self._create(record.id, record.created_at, fields | _given(place=record.place), {})

    async def _create(self, run: str, created_at: float, fields: Mapping[str, str], texts: Mapping[str, str]) -> bool:
        created = await call(
            self._redis,
            "create_record",
            record_key=RunKeys(run).record,
            runs_key=RUNS,
            active_key=ACTIVE_RUNS,
            files_key=RunKeys(run).reward_files,
            run=run,
            created_at=repr(created_at),
            field_list=_flat(fields),
            file_list=_flat(texts),
        )
        return bool(created)

    async def exists(self, run: str) -> bool:
        """Whether the run has a record."""
        return bool(await self._redis.exists(RunKeys(run).record))

    async def get(self, run: str, fence: Fence | None = None) -> RunRecord:
        """One run. Raises UnknownRunError, UnreadableRunError; FencedError for the `fence` of a replaced controller."""
        try:
            keys = RunKeys(run)
        except ValueError:
            raise _unknown(run) from None
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.record)
            pipe.get(keys.epoch(OWNER))
            fields, token = await pipe.execute()
        if b"history" not in fields:
            raise _unknown(run)
        if fence and (newest := Fence.parse(token)).replaces(fence):
            raise FencedError(f"a newer controller owns run {run!r}: {newest.owner}")
        return decode_record(run, fields)

    async def all(self) -> list[RunRecord]:
        """Every run, oldest first; one whose record is damaged is logged and left out."""
        return await self._read([run.decode() for run in await self._redis.zrange(RUNS, 0, -1)])

    async def active(self) -> list[RunRecord]:
        """Those of `all` for which the controller has work, by their index; others are removed from it."""
        listed = [run.decode() for run in await self._redis.smembers(ACTIVE_RUNS)]
        found = [record for record in await self._read(listed) if record.active]
        for run in {*listed} - {record.id for record in found}:
            await self.index(run)
        return sorted(found, key=lambda record: (record.created_at, record.id))

    async def index(self, run: str) -> None:
        """List a run as active, or no longer, as its record says. A process of an earlier release does not do it."""
        await call(
            self._redis,
            "index_run",
            record_key=RunKeys(run).record,
            active_key=ACTIVE_RUNS,
            run=run,
            active_words=ACTIVE_WORDS,
        )

    async def _read(self, runs: list[str]) -> list[RunRecord]:
        found = []
        for start in range(0, len(runs), READ_AT_ONCE):
            part = runs[start : start + READ_AT_ONCE]
            async with self._redis.pipeline(transaction=False) as pipe:
                for run in part:
                    pipe.hgetall(RunKeys(run).record)
                found += list(self._decoded(zip(part, await pipe.execute(), strict=True)))
        return found

    def _decoded(self, found: Iterable[tuple[str, dict[bytes, bytes]]]) -> Iterator[RunRecord]:
        """The records that can be read; others are logged once."""
        for run, fields in found:
            if b"history" not in fields:
                log.debug("run %s is in an index but has no record", run)
                continue
            try:
                yield decode_record(run, fields)
            except UnreadableRunError as error:
                if run not in self._unreadable:
                    log.warning("left out: %s", error)
                self._unreadable.add(run)

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
        drop = ["cancel_requested", "pause_requested", "summary"]
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
            raise _unknown(run) from None
        done = await call(
            self._redis,
            "change_record",
            record_key=keys.record,
            epoch_key=keys.epoch(role),
            active_key=ACTIVE_RUNS,
            deleted_keys=change.delete_keys,
            fence=fence.token if fence else "",
            run=run,
            states=_words(states),
            closings=_words(change.closings),
            active_words=ACTIVE_WORDS,
            transition=change.transition(),
            counted_field=change.count,
            deleted_field_list=change.drop,
            set_field_list=change.set_fields(),
        )
        if done < 0:
            raise _unknown(run)
        record = await self.get(run)
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


def _unknown(run: str) -> UnknownRunError:
    return UnknownRunError(f"run {run!r} does not exist")
