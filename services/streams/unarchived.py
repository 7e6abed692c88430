"""Owns the groups that have ended and wait for the archive: reading them, and taking them off their lists.

Must not write the archive, nor decide which groups lose their payloads.

A group that ends keeps its hash and its payloads, and its lane's list `unarchived` names it. Only when the archive
could not be written for long does it move to `unarchived-bare`, without its payloads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.contracts import Lane
from services.streams.delivery.payloads import WHOLE, read_fields
from services.streams.retention import UNARCHIVED_KEPT
from services.streams.state.group_state import EVALUATED_TTL_S
from services.streams.state.ownership import RoleOwner
from services.streams.state.policy_history import groups_per_call

PAYLOAD_FIELDS = (*WHOLE, "text_crc", "crc")
"""What is read of a payload: not its nuclei, which may be a hundred times as large."""
_NAMES = tuple(name.encode() for name in PAYLOAD_FIELDS)


@dataclass(frozen=True)
class EndedGroup:
    """A group as Redis has it. `fields`: its hash; `payloads`: those that exist, as fields by sample index."""

    name: str
    fields: dict[bytes, bytes]
    payloads: dict[int, dict[bytes, bytes]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """How many samples it may have; 0 if Redis lost that."""
        return int(self.fields.get(b"samples", b"0"))


class Backlog(NamedTuple):
    """How many groups of a lane wait for the archive: with their payloads, and without."""

    whole: int
    bare: int

    @property
    def total(self) -> int:
        """All that wait."""
        return self.whole + self.bare


class Unarchived(RoleOwner):
    """The groups of one run that wait for the archive. Methods that write raise FencedError."""

    async def backlog(self) -> dict[Lane, Backlog]:
        """How many groups wait, by lane; one round trip."""
        lists = [key for lane in Lane for key in self._lists(lane)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in lists:
                pipe.llen(key)
            sizes = await pipe.execute()
        return {lane: Backlog(*sizes[2 * at : 2 * at + 2]) for at, lane in enumerate(Lane)}

    async def names(self, lane: Lane, most: int, *, bare: bool = False) -> list[str]:
        """The groups that have waited longest, at most `most`; by default those with payloads."""
        found = await self._redis.lrange(self._lists(lane)[bare], 0, most - 1)
        prefix = self._keys.group("")
        return [key.decode().removeprefix(prefix) for key in found]

    async def hashes(self, names: Sequence[str]) -> list[EndedGroup]:
        """These groups without their payloads, in one round trip."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._keys.group(name))
            found = await pipe.execute()
        return [EndedGroup(name, fields) for name, fields in zip(names, found, strict=True)]

    async def with_payloads(self, groups: Sequence[EndedGroup], at_once: int) -> AsyncGenerator[EndedGroup, None]:
        """These groups in turn, each with its payloads, of which at most `at_once` are read in one round trip.

        Whole groups of few samples are read together.
        """
        samples = max((group.samples for group in groups), default=1)
        together = max(1, at_once // max(1, samples))
        for start in range(0, len(groups), together):
            chunk = groups[start : start + together]
            wanted = [(at, index) for at, group in enumerate(chunk) for index in range(group.samples)]
            for first in range(0, len(wanted), at_once):
                await self._read_payloads(chunk, wanted[first : first + at_once])
            for group in chunk:
                yield group

    async def _read_payloads(self, groups: Sequence[EndedGroup], wanted: Sequence[tuple[int, int]]) -> None:
        keys = [self._keys.payload(groups[at].name, index) for at, index in wanted]
        # One call: a command for each payload would cost this process more than all that is in them.
        replies = await read_fields(self._redis, keys, PAYLOAD_FIELDS)
        for (at, index), values in zip(wanted, replies, strict=True):
            known = {name: value for name, value in zip(_NAMES, values, strict=True) if value}
            if known:
                groups[at].payloads[index] = known

    async def take(self, lane: Lane, groups: Sequence[EndedGroup], *, abandoned: bool = False) -> int:
        """Delete the payloads of groups that are in the archive, or are `abandoned`. Returns how many had waited."""
        streams = self._keys.lane(lane)
        taken = 0
        for chunk in self._chunks(groups):
            taken += await self._call(
                "take_archived",
                unarchived_key=streams.unarchived,
                bare_key=streams.bare,
                released_key=streams.released,
                counters_key=streams.counters,
                group_keys=[self._keys.group(group.name) for group in chunk],
                payload_keys=self._payloads(chunk),
                evaluated_ttl_s=EVALUATED_TTL_S,
                abandoned=int(abandoned),
                payload_count_list=[group.samples for group in chunk],
            )
        return taken

    async def strip(self, lane: Lane, most: int) -> tuple[int, int]:
        """Delete the payloads of the `most` groups that have waited longest; they wait on without.

        Beyond UNARCHIVED_KEPT such groups, the oldest are abandoned. Returns how many were stripped and abandoned.
        """
        streams, stripped = self._keys.lane(lane), 0
        for chunk in self._chunks(await self.hashes(await self.names(lane, most))):
            stripped += await self._call(
                "strip_unarchived",
                unarchived_key=streams.unarchived,
                bare_key=streams.bare,
                group_keys=[self._keys.group(group.name) for group in chunk],
                payload_keys=self._payloads(chunk),
                payload_count_list=[group.samples for group in chunk],
            )
        surplus = int(await self._redis.llen(streams.bare)) - UNARCHIVED_KEPT
        oldest = await self.names(lane, surplus, bare=True) if surplus > 0 else []
        return stripped, await self.take(lane, await self.hashes(oldest), abandoned=True)

    def _lists(self, lane: Lane) -> tuple[str, str]:
        streams = self._keys.lane(lane)
        return streams.unarchived, streams.bare

    @staticmethod
    def _chunks(groups: Sequence[EndedGroup]) -> list[Sequence[EndedGroup]]:
        size = groups_per_call(max((group.samples for group in groups), default=1))
        return [groups[start : start + size] for start in range(0, len(groups), size)]

    def _payloads(self, groups: Sequence[EndedGroup]) -> list[str]:
        return [self._keys.payload(group.name, index) for group in groups for index in range(group.samples)]
