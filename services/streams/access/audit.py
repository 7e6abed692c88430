"""Owns the audit log in Redis: one entry per change, with its outcome.

Must not hold a secret, nor lose a change: it is noted before it is made, and a note without an outcome, because the
gateway died, becomes an entry with the outcome `unknown`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from services.streams.connection.client import Redis
from services.streams.connection.functions import call

log = logging.getLogger(__name__)

LOG = "penstock:audit"
PENDING = "penstock:audit-pending"
"""Changes that are being made, by the id of their request."""
PENDING_S = 600.0
"""After this time a note has lost its gateway: no request takes so long."""
READ_AT_ONCE = 500
MOST_READ = 5000
"""Entries that one page looks at, whatever its filter."""
DAY_MS = 24 * 3600 * 1000


class ChangeOutcome(Enum):
    """What became of a change. UNKNOWN: its gateway ended before it knew."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


class AuditEntry(BaseModel):
    """Who (`principal`) did what (`method`, `route`, `run`, `project`), `at` (Unix s), from where, with which result.

    `changes`: the values that the request states. `principal` is empty for a request that did not prove who makes it.
    """

    at: float
    request: str
    principal: str = ""
    address: str = ""
    method: str
    path: str
    route: str = ""
    run: str = ""
    project: str = ""
    outcome: ChangeOutcome = ChangeOutcome.UNKNOWN
    status: int | None = None
    changes: dict[str, Any] = Field(default_factory=dict)


class AuditPage(BaseModel):
    """Entries, newest first. `next`: the cursor of older ones; null: there are none."""

    entries: list[AuditEntry]
    next: str | None


class AuditLog:
    """The audit log of a platform."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._swept_at = time.monotonic()

    async def begin(self, entry: AuditEntry) -> None:
        """Note a change that is about to be made, even if Redis is full. Raises RedisUnavailableError."""
        text = entry.model_dump_json()
        await call(self._redis, "begin_audit", pending_key=PENDING, request=entry.request, entry=text)

    async def end(self, entry: AuditEntry, kept: int, days: int) -> None:
        """Move a noted change into the log, and keep its last `kept` entries of the last `days` days."""
        await call(
            self._redis,
            "end_audit",
            pending_key=PENDING,
            log_key=LOG,
            request=entry.request,
            entry=entry.model_dump_json(),
            kept=kept,
            oldest=max(0, int(time.time() * 1000) - days * DAY_MS),
        )
        if time.monotonic() - self._swept_at > PENDING_S:
            self._swept_at = time.monotonic()
            await self.sweep(kept, days)

    async def sweep(self, kept: int, days: int) -> None:
        """Move changes whose gateway has ended into the log, with the outcome `unknown`."""
        for text in (await self._redis.hgetall(PENDING)).values():
            entry = _parsed(text)
            if entry and time.time() - entry.at > PENDING_S:
                log.warning("the outcome of request %s, %s %s, is unknown", entry.request, entry.method, entry.path)
                await self.end(entry, kept, days)

    async def page(self, before: str, count: int, wanted: Callable[[AuditEntry], bool]) -> AuditPage:
        """Up to `count` entries older than the one at cursor `before` ("+": the newest) for which `wanted` is true.

        One page looks at MOST_READ entries: it may be short, and still have a cursor.
        """
        found: list[AuditEntry] = []
        if not before.strip("0-"):  # nothing is older than the first id, and Redis refuses to be asked for it
            return AuditPage(entries=found, next=None)
        for _ in range(MOST_READ // READ_AT_ONCE):
            part = await self._redis.xrevrange(LOG, max=before if before == "+" else f"({before}", count=READ_AT_ONCE)
            for name, fields in part:
                before = name.decode()
                entry = _parsed(fields.get(b"m", b""))
                if entry and wanted(entry):
                    found.append(entry)
                    if len(found) == count:
                        return AuditPage(entries=found, next=before)
            if len(part) < READ_AT_ONCE:
                return AuditPage(entries=found, next=None)
        return AuditPage(entries=found, next=before)


def _parsed(text: bytes) -> AuditEntry | None:
    try:
        return AuditEntry.model_validate_json(text)
    except ValidationError as error:
        log.warning("an entry of the audit log cannot be read: %d faults", error.error_count())
        return None
