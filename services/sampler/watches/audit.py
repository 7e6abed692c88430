"""Owns the audit of a lane's open groups: what the sampler believes against what Redis holds, a few groups per look.

Must not release or change a group; its caller does.

Redis may differ from the sampler after it lost writes that it had acknowledged: a failover, a restart without the last
second. A group is orphaned when no stream holds a message of it any more, because one was damaged beyond parsing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from services.contracts import Lane
from services.process.hosting import Context
from services.sampler.groups import Group
from services.streams.state.group_state import KEPT, PENDING, read_fields, read_groups

EVERY_S = 5.0
GROUPS_PER_LOOK = 256


@dataclass(frozen=True)
class Differences:
    """`orphaned`: generating groups without a message. `changed`: groups that Redis has in another state, or not."""

    orphaned: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


class Audit:
    """Looks at GROUPS_PER_LOOK groups of one lane every EVERY_S seconds, one after another."""

    def __init__(self, context: Context, lane: Lane) -> None:
        self._redis, self._keys = context.redis, context.keys
        self._streams = context.keys.lane(lane)
        self._next_look = time.monotonic() + EVERY_S
        self._queue: deque[str] = deque()
        self._verdicts: dict[str, int] = {}
        self._suspects: dict[str, str] = {}

    @property
    def due(self) -> bool:
        """Whether it is time for the next look."""
        return time.monotonic() >= self._next_look

    async def look(self, generating: Mapping[str, Group], kept: Mapping[str, Group]) -> Differences:
        """Compare the next groups with Redis. A group is orphaned if two looks found the same message gone."""
        self._next_look = time.monotonic() + EVERY_S
        names = self._next(generating, kept)
        states = await read_fields(self._redis, self._keys, names, ("state",))
        wanted = {name: PENDING if name in generating else KEPT for name in names}
        changed = [name for name, [state] in zip(names, states, strict=True) if state != wanted[name].encode()]
        unchanged = {name: generating[name] for name in names if name in generating and name not in changed}
        slow = {name: group for name, group in unchanged.items() if self._is_slow(name, group)}
        missing = await self._missing_entries(slow)
        orphaned = [name for name, entry in missing.items() if self._suspects.get(name) == entry]
        self._suspects = {name: entry for name, entry in missing.items() if name not in orphaned}
        return Differences(orphaned, changed)

    def _next(self, generating: Mapping[str, Group], kept: Mapping[str, Group]) -> list[str]:
        if not self._queue:
            self._queue.extend((*generating, *kept))
            self._verdicts = {name: count for name, count in self._verdicts.items() if name in generating}
        # Suspects first: the next look settles whether they are orphaned.
        names = dict.fromkeys(name for name in self._suspects if name in generating)
        while self._queue and len(names) < GROUPS_PER_LOOK:
            if (name := self._queue.popleft()) in generating or name in kept:
                names[name] = None
        return list(names)

    def _is_slow(self, name: str, group: Group) -> bool:
        """Whether a group got no verdict since it was looked at before."""
        count = len(group.verdicts)
        before = self._verdicts.get(name)
        self._verdicts[name] = count
        return before == count

    async def _missing_entries(self, groups: Mapping[str, Group]) -> dict[str, str]:
        """By group: a message that it waits for and that is gone from its stream. Only groups with such a message."""
        awaited = [
            (name, stream, entry)
            async for name, fields in read_groups(self._redis, self._keys, list(groups))
            for stream, entry in set(self._awaited(fields, groups[name].task.wanted))
        ]
        async with self._redis.pipeline(transaction=False) as pipe:
            for _, stream, entry in awaited:
                pipe.xrange(stream, entry, entry, 1)
            found = await pipe.execute()
        return {name: entry.decode() for (name, _, entry), entries in zip(awaited, found, strict=True) if not entries}

    def _awaited(self, fields: Mapping[bytes, bytes], wanted: int) -> Iterator[tuple[str, bytes]]:
        """The stream and the entry of each message that a pending group waits for, from its hash.

        Every message is acked together with its effect, which stores the entry of the next one. A sampler of an older
        release stored no entries: then there is nothing to check.
        """
        if fields.get(b"state") != PENDING.encode():
            return
        stages = (("judged:", self._streams.verdicts), ("sample:", self._streams.samples))
        for index in range(wanted):
            if f"verdict:{index}".encode() in fields:
                continue
            known = [(stream, fields.get(f"{stage}{index}".encode())) for stage, stream in stages]
            for stream, entry in [*known, (self._streams.tasks, fields.get(b"entry"))]:
                if entry:
                    yield stream, entry
                    break
