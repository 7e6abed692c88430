"""Owns run records: the recipe as submitted, desired replicas, state and its history.

Must not act on a record; the controller does.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from redis.exceptions import WatchError

from services.contracts import RunState, Transition
from services.settings import Recipe
from services.streams.connection import Redis
from services.streams.keys import RUNS, RunKeys

log = logging.getLogger(__name__)


class UnknownRunError(LookupError):
    """No run has this id."""


class EndedRunError(RuntimeError):
    """The run has ended and cannot be changed."""


@dataclass(frozen=True)
class RunRecord:
    """A run as the control plane knows it. `model_path` and `export_path` are set by the controller."""

    id: str
    recipe: Recipe
    state: RunState
    rollout_replicas: int
    cancel_requested: bool
    created_at: float
    history: tuple[Transition, ...]
    model_path: str | None
    export_path: str | None
    summary: dict[str, Any] | None

    @property
    def reason(self) -> str:
        """Why the run is in its state."""
        return self.history[-1].reason if self.history else ""


def _decode(run: str, fields: dict[bytes, bytes]) -> RunRecord:
    text = {name.decode(): value.decode() for name, value in fields.items()}
    history = tuple(Transition.model_validate(one) for one in json.loads(text["history"]))
    return RunRecord(
        id=run,
        recipe=Recipe.model_validate_json(text["recipe"]),
        state=RunState(text["state"]),
        rollout_replicas=int(text["rollout_replicas"]),
        cancel_requested=text.get("cancel_requested") == "1",
        created_at=float(text["created_at"]),
        history=history,
        model_path=text.get("model_path"),
        export_path=text.get("export_path"),
        summary=json.loads(text["summary"]) if "summary" in text else None,
    )


class RunRecords:
    """All runs of one Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def create(self, run: str, recipe: Recipe) -> RunRecord:
        """Add a queued run. Raises ValueError for an id in use or not accepted."""
        key = RunKeys(run).record
        now = time.time()
        first = Transition(state=RunState.QUEUED, at=now, reason="submitted")
        if not await self._redis.hsetnx(key, "created_at", repr(now)):
            raise ValueError(f"run id {run!r} is in use")
        fields = {
            "recipe": recipe.model_dump_json(),
            "state": first.state.value,
            "rollout_replicas": str(recipe.rollout.replicas),
            "history": json.dumps([first.model_dump(mode="json")]),
        }
        await self._redis.hset(key, mapping=fields)
        await self._redis.zadd(RUNS, {run: now})
        return await self.get(run)

    async def get(self, run: str) -> RunRecord:
        """One run. Raises UnknownRunError."""
        try:
            fields = await self._redis.hgetall(RunKeys(run).record)
        except ValueError:
            fields = {}
        if b"history" not in fields:
            raise UnknownRunError(f"run {run!r} does not exist")
        return _decode(run, fields)

    async def all(self) -> list[RunRecord]:
        """Every run that can be read, oldest first; one whose recipe is no longer accepted is logged and left out."""
        found = []
        for run in await self._redis.zrange(RUNS, 0, -1):
            try:
                found.append(await self.get(run.decode()))
            except ValidationError as error:
                log.warning("run %s cannot be read and is left out: %s", run.decode(), error.errors()[0]["msg"])
        return found

    async def transition(self, run: str, state: RunState, reason: str) -> RunRecord:
        """Change a run's state, with a time and a reason. Raises EndedRunError when it has ended."""
        key = RunKeys(run).record
        while True:
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(key)
                record = _decode(run, await pipe.hgetall(key))
                if record.state.ended:
                    raise EndedRunError(f"run {run!r} has {record.state.value}")
                history = [*record.history, Transition(state=state, at=time.time(), reason=reason)]
                pipe.multi()
                fields = {"state": state.value, "history": json.dumps([h.model_dump(mode="json") for h in history])}
                pipe.hset(key, mapping=fields)
                try:
                    await pipe.execute()
                except WatchError:
                    continue  # somebody else changed the record between our read and our write
                return await self.get(run)

    async def request_cancel(self, run: str) -> RunRecord:
        """Ask the controller to stop a run. Raises UnknownRunError, EndedRunError."""
        return await self._change(run, cancel_requested="1")

    async def scale(self, run: str, rollout: int) -> RunRecord:
        """Ask for another number of rollout replicas. Raises UnknownRunError, EndedRunError."""
        return await self._change(run, rollout_replicas=str(rollout))

    async def set_paths(self, run: str, **paths: str) -> None:
        """Note model_path or export_path."""
        await self._redis.hset(RunKeys(run).record, mapping=paths)

    async def set_summary(self, run: str, summary: dict[str, Any]) -> None:
        """Note what the run came to."""
        await self._redis.hset(RunKeys(run).record, mapping={"summary": json.dumps(summary)})

    async def _change(self, run: str, **fields: str) -> RunRecord:
        state = (await self.get(run)).state
        if state.ended:
            raise EndedRunError(f"run {run!r} has {state.value}")
        await self._redis.hset(RunKeys(run).record, mapping=fields)
        return await self.get(run)
