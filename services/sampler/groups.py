"""Owns the sampler's table of its groups: verdicts so far, kept groups, untrained batches.

Must not do I/O, except that `recover` and `recall` read groups from Redis.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.contracts import Lane, Outcome, Task, Verdict
from services.sampler.advantage.filtering import KEPT
from services.sampler.backpressure import Flow
from services.sampler.selection.order import Waiting, in_order
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys


@dataclass
class Group:
    """One dispatched group and its verdicts. `kept_order`: its ordinal among all kept groups, from 1; 0 if not kept."""

    task: Task
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    kept_order: int = 0

    @property
    def judged(self) -> bool:
        """Whether every requested sample has a verdict."""
        return len(self.verdicts) >= self.task.wanted

    @property
    def in_order(self) -> list[Verdict]:
        """The verdicts by sample index."""
        return [self.verdicts[index] for index in sorted(self.verdicts)]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes by sample index."""
        return [verdict.outcome for verdict in self.in_order]

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that wrote a token of this group."""
        return min(verdict.facts.oldest_version for verdict in self.verdicts.values())


class GroupTable:
    """All groups of one lane that have not been released. `batched`: groups per untrained batch, by rollout step."""

    def __init__(self) -> None:
        self.generating: dict[str, Group] = {}
        self.kept: dict[str, Group] = {}
        self.batched: dict[int, int] = {}
        self._kept_before = 0

    def dispatched(self, task: Task) -> None:
        """Add the group of a dispatched task."""
        self.generating[task.group] = Group(task)

    def keep(self, name: str) -> None:
        """Move a judged group to the kept groups, after those kept before it."""
        self._kept_before += 1
        group = self.generating.pop(name)
        group.kept_order = self._kept_before
        self.kept[name] = group

    def restore_kept(self, name: str, group: Group) -> None:
        """Add a group that was kept before, by this sampler or an earlier one."""
        self.kept[name] = group
        self._kept_before = max(self._kept_before, group.kept_order)

    def next_batch(self, consumption: str, size: int) -> list[str]:
        """The ids of the kept groups for the next batch, at most `size`, ordered by the `consumption` setting."""
        waiting = [Waiting(name, group.oldest_version, group.kept_order) for name, group in self.kept.items()]
        return in_order(consumption, waiting)[:size]

    def batch_published(self, step: int, names: list[str]) -> None:
        """Move kept groups to the batch of `step`; they hold their slots until that rollout step is committed."""
        for name in names:
            del self.kept[name]
        self.batched[step] = len(names)

    def batches_lost(self, step: int, groups: Mapping[str, Group]) -> None:
        """Remove the batches of rollout step `step` and later; their `groups` are kept again."""
        self.batched = {batch: count for batch, count in self.batched.items() if batch < step}
        for name, group in groups.items():
            self.restore_kept(name, group)

    def trained(self, step: int) -> None:
        """Free the slots of the batches up to rollout step `step`, which is committed."""
        self.batched = {batch: count for batch, count in self.batched.items() if batch > step}

    def flow(self, survival: float) -> Flow:
        """How many groups are in each state, for back-pressure."""
        return Flow(len(self.generating), len(self.kept), sum(self.batched.values()), survival)

    @property
    def prompts_in_flight(self) -> set[str]:
        """The ids of the prompts whose group is not judged yet."""
        return {group.task.prompt.id for group in self.generating.values()}

    @property
    def open_groups(self) -> list[str]:
        """The ids of all groups that are neither released nor batched, sorted."""
        return sorted([*self.generating, *self.kept])


def as_stored(fields: dict[bytes, bytes]) -> Group:
    """A group from its hash in Redis."""
    group = Group(Task.model_validate_json(fields[b"task"]), kept_order=int(fields.get(b"kept_order", b"0")))
    for key, value in fields.items():
        if key.startswith(b"verdict:"):
            verdict = Verdict.model_validate_json(value)
            group.verdicts[verdict.index] = verdict
    return group


async def recall(redis: Redis, keys: RunKeys, name: str, state: str = "pending") -> Group | None:
    """A group that Redis has in `state` and the table lacks, such as a requeued dead group. None in any other state."""
    fields = await redis.hgetall(keys.group(name))
    return as_stored(fields) if fields.get(b"state") == state.encode() else None


async def recover(redis: Redis, keys: RunKeys, lane: Lane) -> GroupTable:
    """The table of a lane, rebuilt from Redis."""
    table = GroupTable()
    names = sorted(member.decode() for member in await redis.smembers(keys.lane(lane).pending))
    hashes = await asyncio.gather(*(redis.hgetall(keys.group(name)) for name in names))
    batched: Counter[int] = Counter()
    for name, fields in zip(names, hashes, strict=True):
        if fields[b"state"] == b"pending":
            table.generating[name] = as_stored(fields)
        elif fields[b"state"] == KEPT.encode():
            table.restore_kept(name, as_stored(fields))
        elif fields[b"state"] == b"batched":
            batched[int(fields[b"step"])] += 1
    table.batched = dict(batched)
    return table
