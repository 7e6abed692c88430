"""Owns the warm functions of a server: which ones are held, and how many texts are judged at once.

Must not import a function's file again for each text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifier.remote.faults import one_line
from verifier.remote.functions.files import FileStore
from verifier.remote.functions.warm import START_S, FunctionFailedError, TextLimits, WarmFunction
from verifier.remote.protocol import tidy
from verifier.verifiers.base import UndecidedError
from verifier.verifiers.returned import judgement_of

log = logging.getLogger(__name__)

HELD = 8
WAITING = 1024
PROCESSES_PER_CORE = 4
"""Texts judged at once: functions that use a network wait most of the time."""
TRY_AGAIN_S = 30.0
"""After an import that failed: a function's server of yours may have been away."""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A function and the digests of its files."""


class CrewBusyError(Exception):
    """So many texts wait that no more are accepted."""


@dataclass
class _HeldFunction:
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    warm: WarmFunction | None = None
    fault: str = ""
    failed_at: float = 0.0
    users: int = 0


class Crew:
    """Judges by functions, for one event loop. `processes`: texts judged at once; `held`: warm functions kept."""

    def __init__(
        self,
        processes: int = PROCESSES_PER_CORE * (os.cpu_count() or 1),
        held: int = HELD,
        start_s: float = START_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = FileStore()
        self._room = asyncio.Semaphore(processes)
        self._most_held = held
        self._start_s = start_s
        self._clock = clock
        self._held: OrderedDict[Key, _HeldFunction] = OrderedDict()
        self._texts = 0
        self._retiring = set[asyncio.Task[None]]()

    async def judge_all(
        self, function: str, digests: Mapping[str, str], requests: Sequence[Mapping[str, Any]], limits: TextLimits
    ) -> list[dict[str, Any]]:
        """One result per request, in their order. Raises CrewBusyError; KeyError for a file that is missing."""
        if self._texts + len(requests) > WAITING:
            raise CrewBusyError
        contents = self.files.contents(digests)
        held = self._entry((function, tuple(sorted(digests.items()))))
        held.users += 1
        self._texts += len(requests)
        try:
            async with asyncio.TaskGroup() as texts:
                tasks = [
                    texts.create_task(self._result(held, function, contents, request, limits)) for request in requests
                ]
        finally:
            held.users -= 1
            self._texts -= len(requests)
            self._drop_oldest()
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """End all functions."""
        held, self._held = self._held, OrderedDict()
        for entry in held.values():
            self._retire(entry)
        if self._retiring:
            await asyncio.wait(self._retiring)

    def _entry(self, key: Key) -> _HeldFunction:
        held = self._held.setdefault(key, _HeldFunction())
        self._held.move_to_end(key)
        return held

    def _drop_oldest(self) -> None:
        idle = [key for key, held in self._held.items() if not held.users]
        for key in idle[: max(0, len(self._held) - self._most_held)]:
            self._retire(self._held.pop(key))

    def _retire(self, held: _HeldFunction) -> None:
        """End a function's process after the texts that it judges now."""
        warm, held.warm = held.warm, None
        if warm is not None:
            task = asyncio.ensure_future(warm.close())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _result(
        self,
        held: _HeldFunction,
        function: str,
        contents: Mapping[str, bytes],
        request: Mapping[str, Any],
        limits: TextLimits,
    ) -> dict[str, Any]:
        try:
            async with self._room:
                warm = await self._warm(held, function, contents)
                judgement = tidy(judgement_of(await warm.judge(request, limits)))
        except (FunctionFailedError, UndecidedError, OSError) as error:
            return {"id": request["id"], "error": one_line(str(error), 600)}
        return {
            "id": request["id"],
            "score": judgement.score,
            "correct": judgement.correct,
            "reason": judgement.reason,
            "answer": judgement.answer,
        }

    async def _warm(self, held: _HeldFunction, function: str, contents: Mapping[str, bytes]) -> WarmFunction:
        """The function's process, started if it does not run or if its files were changed."""
        async with held.starting:
            if held.warm is not None and held.warm.usable():
                return held.warm
            if held.warm is not None:
                log.warning("%s: its process ended or its files were changed; it is started again", function)
                self._retire(held)
            if held.fault and self._clock() - held.failed_at < TRY_AGAIN_S:
                raise FunctionFailedError(held.fault)
            warm = WarmFunction(function, contents, self._start_s)
            try:
                await warm.ready()
            except BaseException as error:
                await warm.close()
                if isinstance(error, FunctionFailedError):
                    held.fault, held.failed_at = str(error), self._clock()
                raise
            held.warm, held.fault = warm, ""
            return warm
