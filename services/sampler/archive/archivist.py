"""Owns when ended groups are archived, and what gives way while the archive cannot be written.

Must not stop the training: a full disk or a store that does not answer costs responses in the archive, reported by
events, and nothing else.

    a group ends --> waits with its payloads --> written to a file, off the event loop --> payloads leave Redis
                                   |
                                   +-- the archive cannot be written for PATIENCE_S, and the backlog is full:
                                       the oldest wait without payloads; beyond a number of those, they are abandoned
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pyarrow as pa

from services.contracts import Lane, Release
from services.process.hosting import Context
from services.sampler.archive.rows import archived_row
from services.sampler.watches.memory import RedisMemory
from services.storage.groups.merging import merge_once
from services.storage.groups.parts import GROUP_ID, list_parts, write_part
from services.storage.mirror import Mirror, run_mirror
from services.storage.places import runs_folder
from services.streams.memory_bound import archive_backlog
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import read_policy
from services.streams.unarchived import Backlog, EndedGroup, Unarchived

log = logging.getLogger(__name__)

WAIT = "archive"
POLL_S = 0.25
PART_S = 3.0
"""A group waits at most so long for others that go into the same file."""
FULL_PART = 64
"""So many groups are written at once without waiting for others."""
MOST_GROUPS, MOST_BYTES = 256, 32 << 20
"""Of one file: groups, and bytes of their payloads after which no other group is added."""
READ_BYTES, BYTES_PER_TOKEN = 4 << 20, 24
"""Of payloads that are read in one round trip, computed from the longest response."""
RETRY_S, MERGE_S = 5.0, 30.0
"""Pauses after a failure, and between looks for files to merge."""
PATIENCE_S = 30.0
"""How long the archive may fail before groups lose their payloads."""
CLOSING_S = 5.0
"""For the last groups, when the process is about to stop."""
LANES: dict[str, tuple[str, ...]] = {"trained": (Release.TRAINED,), "none": ()}
"""By limits.archive: the releases that are archived; all others: every one."""


class Archivist:
    """Archives the groups of one run. `open` starts it, once its process owns the sampler's role."""

    def __init__(self, context: Context, memory: RedisMemory) -> None:
        self._context = context
        self._memory = memory
        self._recipe = context.record.recipe
        self._most = archive_backlog(self._recipe)
        self._folder: Path = runs_folder() / context.keys.run
        self._mirror: Mirror = run_mirror(context.keys.run)
        self._opened = asyncio.Event()
        self._writing = asyncio.Lock()
        self._waiting: Unarchived
        self._since: dict[Lane, float] = {}
        self._failing_since: float | None = None
        self._retry_at = 0.0
        self._written = 0
        self._newest_ms = 0
        tokens = self._recipe.max_prompt_tokens + max(
            self._recipe.rollout.max_new_tokens, self._recipe.evaluation_new_tokens
        )
        self._at_once = max(1, min(256, READ_BYTES // (BYTES_PER_TOKEN * tokens)))

    def open(self, transitions: GroupTransitions) -> None:
        """Start to archive, under the sampler's fence."""
        self._waiting = Unarchived(self._context.redis, self._context.keys, "sampler", transitions.fence)
        self._opened.set()

    async def run(self) -> None:
        """Archive groups as they end, until cancelled. Raises FencedError."""
        await self._opened.wait()
        while True:
            for lane, backlog in (await self._waiting.backlog()).items():
                if self._is_due(lane, backlog) and time.monotonic() >= self._retry_at:
                    await self._archive_next(lane)
                await self._give_way(lane, backlog)
            await asyncio.sleep(POLL_S)

    async def room(self, in_flight: int) -> int:
        """How many training groups may be dispatched beside those in flight, so that those that wait have room."""
        backlog = (await self._waiting.backlog())[Lane.TRAIN]
        limits = self._context.record.recipe.limits  # as edited last
        return max(0, limits.max_inflight_groups + self._most - in_flight - backlog.whole)

    async def drain(self, lanes: Sequence[Lane] = tuple(Lane), deadline_s: float = PATIENCE_S) -> bool:
        """Archive all groups that wait now; whether it did so. Ends after `deadline_s` seconds of failures.

        Where the archive has failed for long already, it is tried once.
        """
        end = time.monotonic() + (0.0 if self._impatient else deadline_s)
        with self._context.waits.on(WAIT, "the groups that have ended to be archived", max(deadline_s, PATIENCE_S)):
            backlogs = await self._waiting.backlog()
            left = {lane: backlogs[lane].total for lane in lanes}
            while lane := next((lane for lane, groups in left.items() if groups > 0), None):
                if done := await self._archive_next(lane):
                    left[lane] -= done
                elif not (await self._waiting.backlog())[lane].total:
                    left[lane] = 0
                elif time.monotonic() > end:
                    return False
                else:
                    await asyncio.sleep(min(RETRY_S, POLL_S))
        return True

    async def close(self) -> None:
        """Archive what waits, if the role is owned, as the process is about to stop; its successor does the rest."""
        if self._opened.is_set() and not await self.drain(deadline_s=CLOSING_S):
            left = sum(backlog.total for backlog in (await self._waiting.backlog()).values())
            text = f"{left} ended groups could not be archived; they are lost if the run ends here, else they wait on"
            await self._context.event_log.write("archive-incomplete", text)

    def _is_due(self, lane: Lane, backlog: Backlog) -> bool:
        """Whether enough groups wait, or one waits for long."""
        if backlog.total == 0:
            self._since.pop(lane, None)
            return False
        since = self._since.setdefault(lane, time.monotonic())
        return backlog.total >= min(FULL_PART, self._most // 2) or time.monotonic() - since >= PART_S

    @property
    def _impatient(self) -> bool:
        """Whether the archive has failed for so long that groups give way."""
        return self._failing_since is not None and time.monotonic() - self._failing_since >= PATIENCE_S

    async def _archive_next(self, lane: Lane) -> int:
        """Write the groups of a lane that have waited longest to one file; how many. 0: none wait, or it failed."""
        async with self._writing:
            names = await self._waiting.names(lane, MOST_GROUPS, bare=True)
            names = names or await self._waiting.names(lane, MOST_GROUPS)
            groups = await self._read(await self._waiting.hashes(names))
            chosen = [group for group in groups if self._is_archived(group)]
            if chosen and not await self._write(lane, chosen):
                return 0
            self._since.pop(lane, None)
            await self._waiting.take(lane, groups)
            return len(groups)

    def _is_archived(self, group: EndedGroup) -> bool:
        """Whether the recipe wants the group archived. One without a state is left: Redis lost it."""
        release = group.fields.get(b"state", b"").decode()
        wanted = LANES.get(self._recipe.limits.archive)
        return bool(release) and GROUP_ID.fullmatch(group.name) is not None and (wanted is None or release in wanted)

    async def _read(self, groups: Sequence[EndedGroup]) -> list[EndedGroup]:
        """The first of the groups, with the payloads of those to be archived, until they have MOST_BYTES."""
        wanted = [group for group in groups if self._is_archived(group)]
        done, size = {group.name for group in groups} - {group.name for group in wanted}, 0
        async with aclosing(self._waiting.with_payloads(wanted, self._at_once)) as reading:
            async for group in reading:
                done.add(group.name)
                size += sum(len(value) for fields in group.payloads.values() for value in fields.values())
                if size > MOST_BYTES:
                    break
        return [group for group in groups if group.name in done]

    async def _write(self, lane: Lane, groups: Sequence[EndedGroup]) -> bool:
        """Write one file; False, reported, if that fails."""
        policy = await read_policy(self._context.redis, self._context.keys)
        resumption = policy.resumption if policy else 0
        try:
            name = await asyncio.to_thread(self._write_file, lane, resumption, groups)
        except (OSError, pa.ArrowException) as error:
            await self._failed(f"{type(error).__name__}: {error}")
            return False
        self._written += len(groups)
        log.debug("archived %d groups in %s", len(groups), name)
        if self._failing_since is not None:
            self._failing_since = None
            await self._context.event_log.write("archive-resumed", f"{len(groups)} groups, {groups[0].name} first")
        return True

    def _write_file(self, lane: Lane, resumption: int, groups: Sequence[EndedGroup]) -> str:
        """Blocks until the file is durable."""
        if not self._newest_ms:
            self._newest_ms = max((part.at_ms for part in list_parts(self._folder, self._mirror)), default=1)
        # Every file has a time of its own, whatever the clock does: the newer row of a group counts.
        self._newest_ms = max(self._newest_ms + 1, time.time_ns() // 1_000_000)
        rows = [archived_row(self._recipe, lane, resumption, group, self._newest_ms) for group in groups]
        return write_part(self._folder, self._mirror, rows)

    async def _failed(self, why: str) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        log.warning("the archive of groups cannot be written, tried again in %g s: %s", RETRY_S, why)
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            text = f"{why}; ended groups wait in Redis; when no more fit, the oldest lose their responses"
            await self._context.event_log.write("archive-failed", text)

    async def _give_way(self, lane: Lane, backlog: Backlog) -> None:
        """Let the oldest groups go on without payloads, if nothing else helps: down to half of the backlog.

        If Redis is short of memory, all of them: groups in flight need it.
        """
        if not self._impatient:
            return
        short = self._memory.full is not None
        if backlog.whole < (1 if short else self._most):
            return
        stripped, abandoned = await self._waiting.strip(lane, backlog.whole - (0 if short else self._most // 2))
        text = f"{stripped} ended groups of lane {lane.value} lost their responses in Redis before they were archived"
        await self._context.event_log.write(
            "archive-incomplete", text + (f", {abandoned} are lost" if abandoned else "")
        )

    async def merge(self) -> None:
        """Merge small files of the archive, a few at a time, until cancelled. One that is damaged stays as it is."""
        await self._opened.wait()
        while True:
            try:
                while await asyncio.to_thread(merge_once, self._folder, self._mirror):
                    log.debug("merged files of the archive")
            except (OSError, pa.ArrowException) as error:
                log.warning("files of the archive of groups are not merged, tried again in %g s: %s", MERGE_S, error)
            await asyncio.sleep(MERGE_S)
