"""Owns a client of Redis that counts what a service sends: every command, and every call of a Redis function.

Must not be used outside tests. Calls of functions that travel together count one by one: how many do depends on time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from services.streams.connection.client import connect
from services.streams.keys import RunKeys

EMPTY = " (nothing)"
"""Behind the name of a read that found no entry: a service that waits repeats it, as often as it has time."""


EVALUATION = "evaluation"


class CountedClient:
    """A client for one service of one run; `calls`: how often it sent what, by command and kind of key.

    While it is closed, the service's reads of its work wait, and `waits` says so: services work one after the other. Of
    the evaluation lane nothing is ever read: its groups would count beside those of the training.
    """

    waits = False

    def __init__(self, redis: Any, keys: RunKeys) -> None:
        self.redis = redis
        self.calls: Counter[str] = Counter()
        self._prefix = keys.key("")
        self._open = asyncio.Event()
        self._send, self._make_pipeline = redis.execute_command, redis.pipeline
        redis.execute_command, redis.pipeline = self._execute, self._pipeline

    @classmethod
    async def connect(cls, url: str, keys: RunKeys) -> CountedClient:
        """A client that is closed at first."""
        return cls(await connect(url), keys)

    def open(self) -> None:
        """Let the service read."""
        self._open.set()

    def close(self) -> None:
        """Let the service's next read wait."""
        self._open.clear()

    async def _execute(self, *command: Any, **options: Any) -> Any:
        names = self._names(command)
        if command[0] == "XREADGROUP":
            if names[0].startswith(f"XREADGROUP {EVALUATION}"):
                return await _nothing(waits="BLOCK" in map(_text, command))
            await self._gate()
        elif names == ["XREAD batches"]:
            await self._gate()
        reply = await self._send(*command, **options)
        if command[0] in ("XREADGROUP", "XREAD") and not reply:
            names = [names[0] + EMPTY]
        self.calls.update(names)
        return reply

    async def _gate(self) -> None:
        self.waits = not self._open.is_set()
        await self._open.wait()
        self.waits = False

    def _pipeline(self, *arguments: Any, **options: Any) -> Any:
        pipe = self._make_pipeline(*arguments, **options)
        execute = pipe.execute

        async def counted(*more: Any, **others: Any) -> Any:
            for command, _ in pipe.command_stack:
                self.calls.update(self._names(command))
            return await execute(*more, **others)

        pipe.execute = counted
        return pipe

    def _names(self, command: Any) -> list[str]:
        words = list(map(_text, command))
        if words[0] == "FCALL":
            return self._functions(words)
        key = words[words.index("STREAMS") + 1] if "STREAMS" in words else words[1] if len(words) > 1 else ""
        if not key.startswith(self._prefix):
            return [words[0]]
        kind, _, rest = key.removeprefix(self._prefix).partition(":")
        return [f"{words[0]} {kind} {rest}" if kind == EVALUATION else f"{words[0]} {kind}"]

    def _functions(self, words: list[str]) -> list[str]:
        """The functions that one command calls, each with the lane in front if that is the evaluation."""
        function, count = words[1].split("_", 2)[2], int(words[2])
        keys, arguments = words[3 : 3 + count], words[3 + count :]
        calls = [(function, count)]
        if function.startswith("together"):
            calls = [(arguments[3 * at + 1], int(arguments[3 * at + 2])) for at in range(int(arguments[0]))]
        names = []
        for name, size in calls:
            own, keys = keys[:size], keys[size:]
            evaluates = any(key.startswith(f"{self._prefix}{EVALUATION}:") for key in own)
            names.append(f"{EVALUATION} {name}" if evaluates else name)
        return names


def _text(word: Any) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)


async def _nothing(*, waits: bool) -> list[Any]:
    """The reply to a read of a stream that never gets an entry."""
    if waits:
        await asyncio.Event().wait()
    return []
