"""Owns the sampler's memory of its groups: verdicts so far, kept groups in order, batches out.

Must not do I/O, except that `recover` reads what an earlier sampler left in Redis.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from services.contracts import Batch, Lane, Outcome, Task, Verdict
from services.sampler.credit.filtering import KEPT
from services.sampler.pacing import Flow
from services.streams.connection import Redis
from services.streams.journal import read_all
from services.streams.keys import RunKeys


@dataclass
class Group:
    """One dispatched group and the verdicts it has."""

    task: Task
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    @property
    def judged(self) -> bool:
        """Whether every sample has a verdict."""
        return len(self.verdicts) == self.task.samples

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


class Ledger:
    """All groups of one lane that have not been released."""

    def __init__(self) -> None:
        self.generating: dict[str, Group] = {}
        self.kept: OrderedDict[str, Group] = OrderedDict()
        self.batched: dict[int, int] = {}

    def dispatched(self, task: Task) -> None:
        """A task went out."""
        self.generating[task.group] = Group(task)

    def keep(self, name: str) -> None:
        """A judged group waits for a batch, behind those kept before it."""
        self.kept[name] = self.generating.pop(name)

    def batch_out(self, version: int, names: list[str]) -> None:
        """Groups left for the learner; they hold their slots until a version above `version` is published."""
        for name in names:
            del self.kept[name]
        self.batched[version] = len(names)

    def published(self, version: int) -> None:
        """Policy `version` is out: batches consumed by older versions free their slots."""
        self.batched = {consumed: count for consumed, count in self.batched.items() if consumed >= version}

    def flow(self, survival: float) -> Flow:
        """Where the groups stand, for pacing."""
        return Flow(len(self.generating), len(self.kept), sum(self.batched.values()), survival)


async def recover(redis: Redis, keys: RunKeys, lane: Lane) -> tuple[Ledger, Batch | None]:
    """The ledger as Redis has it, and the last batch that was published."""
    ledger = Ledger()
    names = sorted(member.decode() for member in await redis.smembers(keys.lane(lane).pending))
    hashes = await asyncio.gather(*(redis.hgetall(keys.group(name)) for name in names))
    for name, fields in zip(names, hashes, strict=True):
        group = Group(Task.model_validate_json(fields[b"task"]))
        for key, value in fields.items():
            if key.startswith(b"verdict:"):
                verdict = Verdict.model_validate_json(value)
                group.verdicts[verdict.index] = verdict
        if fields[b"state"] == b"pending":
            ledger.generating[name] = group
        elif fields[b"state"] == KEPT.encode():
            ledger.kept[name] = group
    if lane is not Lane.TRAIN:
        return ledger, None
    batches = [batch for _, batch in await read_all(redis, keys.batches, Batch)]
    for batch in batches:
        ledger.batched[batch.version] = len(batch.groups)
    return ledger, batches[-1] if batches else None
