"""Owns the sampler's memory of its groups: verdicts so far, kept groups, batches out.

Must not do I/O, except that `recover` and `recall` read what is in Redis.
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
    """One dispatched group and the verdicts it has; `kept_order`: the how-manieth it was to be kept."""

    task: Task
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    kept_order: int = 0

    @property
    def judged(self) -> bool:
        """Whether every sample that was asked for has a verdict."""
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


class Ledger:
    """All groups of one lane that have not been released."""

    def __init__(self) -> None:
        self.generating: dict[str, Group] = {}
        self.kept: dict[str, Group] = {}
        self.batched: dict[int, int] = {}
        self._kept_before = 0

    def dispatched(self, task: Task) -> None:
        """A task went out."""
        self.generating[task.group] = Group(task)

    def keep(self, name: str) -> None:
        """A judged group waits for a batch, behind those kept before it."""
        self._kept_before += 1
        group = self.generating.pop(name)
        group.kept_order = self._kept_before
        self.kept[name] = group

    def restore_kept(self, name: str, group: Group) -> None:
        """Take in a group that an earlier sampler kept."""
        self.kept[name] = group
        self._kept_before = max(self._kept_before, group.kept_order)

    def next_batch(self, consumption: str, size: int) -> list[str]:
        """The names of the kept groups to be trained next, at most `size`; `consumption` is the setting."""
        waiting = [Waiting(name, group.oldest_version, group.kept_order) for name, group in self.kept.items()]
        return in_order(consumption, waiting)[:size]

    def batch_out(self, step: int, names: list[str]) -> None:
        """Groups left for the learner; they hold their slots until rollout step `step` is committed."""
        for name in names:
            del self.kept[name]
        self.batched[step] = len(names)

    def taken_back(self, step: int, groups: Mapping[str, Group]) -> None:
        """The batches of `step` and later are no more; `groups` are kept again."""
        self.batched = {out: count for out, count in self.batched.items() if out < step}
        for name, group in groups.items():
            self.restore_kept(name, group)

    def trained(self, step: int) -> None:
        """Rollout step `step` is committed: its batch and those before it free their slots."""
        self.batched = {out: count for out, count in self.batched.items() if out > step}

    def flow(self, survival: float) -> Flow:
        """Where the groups stand, for pacing."""
        return Flow(len(self.generating), len(self.kept), sum(self.batched.values()), survival)

    @property
    def prompts_under_way(self) -> set[str]:
        """The ids of the prompts that have a group which is not judged yet."""
        return {group.task.prompt.id for group in self.generating.values()}

    @property
    def open_groups(self) -> list[str]:
        """Every group that was neither released nor batched, by id."""
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
    """A group in that `state` that the ledger lacks: a dead one that somebody had redriven. None for any other."""
    fields = await redis.hgetall(keys.group(name))
    return as_stored(fields) if fields.get(b"state") == state.encode() else None


async def recover(redis: Redis, keys: RunKeys, lane: Lane) -> Ledger:
    """The ledger as Redis has it."""
    ledger = Ledger()
    names = sorted(member.decode() for member in await redis.smembers(keys.lane(lane).pending))
    hashes = await asyncio.gather(*(redis.hgetall(keys.group(name)) for name in names))
    batched: Counter[int] = Counter()
    for name, fields in zip(names, hashes, strict=True):
        if fields[b"state"] == b"pending":
            ledger.generating[name] = as_stored(fields)
        elif fields[b"state"] == KEPT.encode():
            ledger.restore_kept(name, as_stored(fields))
        elif fields[b"state"] == b"batched":
            batched[int(fields[b"step"])] += 1
    ledger.batched = dict(batched)
    return ledger
