"""Owns the logs of a run's processes in Redis: the last lines of each, for users who do not see its files.

Must not hold a secret: lines are redacted before they leave the process. Must not delay what is logged: lines that
Redis cannot take are dropped, and counted. The files beside the run, or the pod's output, have all of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from redis.exceptions import RedisError

from services.contracts import ProcessInfo, Value
from services.contracts.base import Finite
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.connection.url import parse_redis_url
from services.streams.keys import RunKeys

log = logging.getLogger(__name__)

LINES_KEPT, LINE_CHARACTERS, LOGS_KEPT = 300, 400, 64
"""Of each process; of each line; processes of a run. Together at most 9 MiB of Redis, in practice a tenth of it."""
KEEP_S = 7 * 24 * 3600
FLUSH_S, WAITING = 1.0, 300
"""How often lines are sent, and how many wait for it."""
LINES_OF_RECORD = 40
HIDDEN = "***"
SHORTEST_SECRET = 6
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL|AUTH", re.IGNORECASE)
# Each with bounded repeats: a line may come from a model.
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"://[^\s'\"]{1,500}@"), f"://{HIDDEN}@"),
    (re.compile(r"\b(bearer|basic)\s{1,3}[\w.~+/=-]{6,2000}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (
        re.compile(
            r"((?:password|passwd|secret|token|api[_-]?key|access[_-]?key|authorization)['\"]?\s{0,3}[=:]\s{0,3}['\"]?)"
            r"(?!(?:bearer|basic)\b)[^\s'\",;&]{1,2000}",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(?:hf_|ghp_|sk-|AKIA|ASIA)[A-Za-z0-9_-]{12,200}"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{8,2000}\.[\w-]{5,2000}\.[\w-]{5,2000}"), HIDDEN),
)
"""What a secret looks like, and what is shown instead."""
_shipping: ContextVar[str] = ContextVar("_shipping", default="")
"""The process (a service's id) to which what is logged belongs; "" in threads that no service has started."""
_active: set[str] = set()


class LogLine(Value):
    """One line of a process's log. `at`: Unix seconds."""

    at: Finite
    level: str
    text: str


class LogSource(Value):
    """A process with a log: when it was last written, and how many `lines` were copied and `dropped`.

    Those that were dropped are in its file only; of those that were copied, the last ones are kept.
    """

    process: str
    service: str
    host: str
    started_at: float
    last_at: float
    lines: int
    dropped: int


def secrets_of(environment: Mapping[str, str], redis_url: str) -> list[str]:
    """Secret values that this process knows, the longest first: they are hidden wherever they occur."""
    found = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    with suppress(ValueError):
        found.add(parse_redis_url(redis_url).password or "")
    return sorted((value for value in found if len(value) >= SHORTEST_SECRET), key=len, reverse=True)


def redacted_line(text: str, secrets: list[str]) -> str:
    """A line without secrets, control characters and lone surrogates, cut to LINE_CHARACTERS."""
    text = text[: 10 * LINE_CHARACTERS]
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    text = "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in text)
    return text if len(text) <= LINE_CHARACTERS else f"{text[: LINE_CHARACTERS - 3]}..."


class LogShipping(logging.Handler):
    """Copies what a service's process logs to Redis, while it is entered. Two services may share a process."""

    def __init__(self, redis: Redis, keys: RunKeys, info: ProcessInfo, redis_url: str) -> None:
        super().__init__(logging.INFO)
        self._redis, self._keys, self._info = redis, keys, info
        self._secrets = secrets_of(os.environ, redis_url)
        self._waiting: deque[LogLine] = deque()
        self._sent = self._dropped = 0
        self._sender: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record of this service; the thread that logs does not wait."""
        owner = _shipping.get()
        if owner != self._info.id and (owner or len(_active) != 1):
            return
        try:
            self._queue(record.created, record.levelname, f"{record.name}: {record.getMessage()}")
            if record.exc_info:
                self._queue(record.created, record.levelname, "".join(traceback.format_exception(*record.exc_info)))
        except Exception:  # noqa: BLE001  # as logging itself does: the caller's work goes on
            self.handleError(record)

    def _queue(self, at: float, level: str, text: str) -> None:
        lines = [line for line in text.splitlines() if line.strip()]
        for line in [*lines[: LINES_OF_RECORD // 2], *lines[LINES_OF_RECORD // 2 :][-LINES_OF_RECORD // 2 :]]:
            if len(self._waiting) >= WAITING:
                self._dropped += 1
                continue
            self._waiting.append(LogLine(at=at, level=level, text=redacted_line(line, self._secrets)))

    async def __aenter__(self) -> LogShipping:
        """Start to copy."""
        _shipping.set(self._info.id)
        _active.add(self._info.id)
        logging.getLogger().addHandler(self)
        self._sender = asyncio.create_task(self._send_all(), name="log of this process")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is left, with the error that ends the service, for at most a few seconds."""
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._queue(time.time(), "ERROR", "".join(traceback.format_exception(error)))
        logging.getLogger().removeHandler(self)
        _active.discard(self._info.id)
        self._ending.set()
        assert self._sender is not None
        try:
            async with asyncio.timeout(2 * FLUSH_S):
                await self._sender
        except TimeoutError:
            log.warning("the last lines of this process's log are in its file only: Redis does not answer")

    async def _send_all(self) -> None:
        """Send what waits, every FLUSH_S seconds, and once more at the end."""
        ended = False
        while not ended:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._ending.wait()
            ended = self._ending.is_set()
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                if lines:
                    await self._send(lines)
            except RedisError as error:  # also a Redis at its maxmemory: these lines are in the file only
                self._dropped += len(lines)
                self._sent -= len(lines)
                log.debug("%d lines of the log were not copied: %s", len(lines), error)

    async def _send(self, lines: list[LogLine]) -> None:
        self._sent += len(lines)
        about = LogSource(
            process=self._info.id,
            service=self._info.service,
            host=self._info.host,
            started_at=self._info.started_at,
            last_at=lines[-1].at,
            lines=self._sent,
            dropped=self._dropped,
        )
        known = await call(
            self._redis,
            "append_log",
            record_key=self._keys.record,
            logs_key=self._keys.logs,
            log_key=self._keys.log(self._info.id),
            process=self._info.id,
            about=about.model_dump_json(),
            kept=LINES_KEPT,
            keep_s=KEEP_S,
            line_list=[line.model_dump_json() for line in lines],
        )
        if known > LOGS_KEPT:
            await self._forget_oldest(known - LOGS_KEPT)

    async def _forget_oldest(self, count: int) -> None:
        for source in (await log_sources(self._redis, self._keys))[:count]:
            await self._redis.unlink(self._keys.log(source.process))
            await self._redis.hdel(self._keys.logs, source.process)


async def log_sources(redis: Redis, keys: RunKeys) -> list[LogSource]:
    """The processes of a run that have a log, the one that was written longest ago first."""
    found = (await redis.hgetall(keys.logs)).values()
    return sorted(_sources(found), key=lambda source: (source.last_at, source.process))


def _sources(found: Any) -> Iterator[LogSource]:
    for body in found:
        with suppress(ValueError):  # of a later release
            yield LogSource.model_validate_json(body)


def read_line(body: bytes) -> LogLine | None:
    """A line of a log; None for an entry that is none."""
    try:
        return LogLine.model_validate(json.loads(body))
    except (ValueError, RecursionError):
        return None
