"""Owns the sampler's table of its groups: verdicts so far, kept groups, untrained batches.

Must not do I/O, except that `recall` and `recover` read groups from Redis.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from services.contracts import Lane, Outcome, Task, Verdict
from services.sampler.backpressure import Flow
from services.sampler.selection.order import CONSUMPTION
from services.streams.connection.client import Redis
from services.streams.delivery.consumer import Delivery
from services.streams.delivery.leases import Lease
from services.streams.keys import RunKeys
from services.streams.state.group_state import BATCHED, KEPT, PENDING, REOPENED, read_fields, read_groups

log = logging.getLogger(__name__)


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
    def scores(self) -> list[float]:
        """The scores by sample index, each in [0, 1]; that of an unknown verdict means nothing."""
        return [verdict.score for verdict in self.in_order]

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that wrote a token of this group."""
        return min(self.versions)

    @property
    def versions(self) -> set[int]:
        """The oldest policy version of each response."""
        return {verdict.facts.oldest_version for verdict in self.verdicts.values()}


@dataclass
class GroupVerdicts:
    """Verdicts of one group that are recorded together; `decision`: '' unless the last of them decides.

    Without verdicts, it is the decision on a group whose verdicts are all recorded. `rest`, `posterior` and `result`:
    see GroupTransitions.record_verdicts.
    """

    group: str
    deliveries: list[Delivery[Verdict]] = field(default_factory=list)
    decision: str = ""
    rest: Task | None = None
    posterior: tuple[str, str] = ("", "")
    result: str = ""

    @property
    def leased(self) -> list[tuple[Lease, Verdict]]:
        """The verdicts, each with its lease."""
        return [(delivery.lease, delivery.message) for delivery in self.deliveries]


def verdicts_by_group(
    deliveries: Iterable[Delivery[Verdict]], decide: Callable[[GroupVerdicts, Verdict], None]
) -> list[GroupVerdicts]:
    """The verdicts of one read by group, in the order of the decisions; those that decide nothing come last.

    `decide` is called with each verdict in turn, and sets the decision that it leads to.
    """
    decided: list[GroupVerdicts] = []
    undecided: dict[str, GroupVerdicts] = {}
    for delivery in deliveries:
        name = delivery.message.group
        verdicts = undecided.setdefault(name, GroupVerdicts(name))
        verdicts.deliveries.append(delivery)
        decide(verdicts, delivery.message)
        if verdicts.decision:
            decided.append(undecided.pop(name))
    return decided + list(undecided.values())


class GroupTable:
    """All groups of the training lane that have not been released, by their state.

    `generating` is in the order of dispatch. `batched`: the groups of each untrained batch, by rollout step.
    `reopened`: groups that a rewind reopened and that wait to be dispatched again, with their prompts' ids.
    `undecided`: groups that were added with all their verdicts: a failover lost the decision on them.
    No method costs more than what it changes, except those that read whole states: `next_batch`, `unknown` and
    `open_groups`.
    """

    def __init__(self) -> None:
        self.generating: dict[str, Group] = {}
        self.kept: dict[str, Group] = {}
        self.batched: dict[int, tuple[str, ...]] = {}
        self.reopened: dict[str, str] = {}
        self.undecided: dict[str, None] = {}
        self._kept_before = 0
        self._kept_by_age: list[tuple[int, str]] = []
        self._prompts: Counter[str] = Counter()

    def add(self, name: str, group: Group) -> None:
        """Add a group that is being generated."""
        self.reopened.pop(name, None)
        self.generating[name] = group
        self._prompts[group.task.prompt.id] += 1
        if group.judged:
            self.undecided[name] = None

    def keep(self, name: str) -> None:
        """Move a judged group to the kept groups, after those kept before it."""
        group = self._take(name)
        group.kept_order = self._kept_before + 1
        self.restore_kept(name, group)

    def restore_kept(self, name: str, group: Group) -> None:
        """Add a group that was kept before, by this sampler or an earlier one."""
        self.kept[name] = group
        self._kept_before = max(self._kept_before, group.kept_order)
        heapq.heappush(self._kept_by_age, (group.oldest_version, name))

    def remove(self, name: str) -> None:
        """Remove a group that is being generated, was kept or reopened, because it was released."""
        if name in self.generating:
            self._take(name)
        elif self.reopened.pop(name, None) is None:
            del self.kept[name]

    def _take(self, name: str) -> Group:
        group = self.generating.pop(name)
        self.undecided.pop(name, None)
        prompt = group.task.prompt.id
        self._prompts[prompt] -= 1
        if not self._prompts[prompt]:
            del self._prompts[prompt]
        return group

    def kept_where(self, too_old: Callable[[int], bool]) -> list[str]:
        """The kept groups whose oldest version is `too_old`, oldest first; they stay in the table."""
        found: dict[str, None] = {}
        while self._kept_by_age:
            version, name = self._kept_by_age[0]
            known = self.kept.get(name)
            if known is not None and known.oldest_version == version:
                if not too_old(version):
                    break
                found[name] = None
            heapq.heappop(self._kept_by_age)
        return list(found)

    def next_batch(self, consumption: str, size: int) -> list[str]:
        """The ids of the kept groups for the next batch, at most `size`, ordered by the `consumption` setting."""
        key = CONSUMPTION[consumption]
        ordered = sorted(self.kept.items(), key=lambda item: key(item[1].oldest_version, item[1].kept_order))
        return [name for name, _ in ordered[:size]]

    def batch_published(self, step: int, names: list[str]) -> None:
        """Move kept groups to the batch of `step`; they hold their slots until that rollout step is committed."""
        for name in names:
            del self.kept[name]
        self.batched[step] = tuple(names)

    def batches_lost(self, step: int) -> None:
        """Remove the batches of rollout step `step` and later."""
        self.batched = {batch: names for batch, names in self.batched.items() if batch < step}

    def trained(self, step: int) -> None:
        """Free the slots of the batches up to rollout step `step`, which is committed."""
        for batch in [batch for batch in self.batched if batch <= step]:
            del self.batched[batch]

    def flow(self, survival: float) -> Flow:
        """How many groups are in each state, for back-pressure."""
        return Flow(len(self.generating), len(self.kept), sum(map(len, self.batched.values())), survival)

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Those of the `names` that are not in the table."""
        batched = {name for batch in self.batched.values() for name in batch}
        known = (self.generating, self.kept, self.reopened, batched)
        return [name for name in names if not any(name in part for part in known)]

    @property
    def in_flight(self) -> int:
        """How many groups are being generated, kept or in a batch."""
        return len(self.generating) + len(self.kept) + sum(map(len, self.batched.values()))

    @property
    def oldest_generating(self) -> str:
        """The group that was dispatched first of those being generated; '' if there is none."""
        return next(iter(self.generating), "")

    @property
    def prompts_in_flight(self) -> Mapping[str, int]:
        """How many groups of each prompt are not judged yet, by its id: a view, because every turn needs it."""
        return MappingProxyType(self._prompts)

    @property
    def open_groups(self) -> list[str]:
        """The ids of all groups that are neither released nor batched, sorted."""
        return sorted([*self.generating, *self.kept, *self.reopened])


def as_stored(fields: Mapping[bytes, bytes]) -> Group:
    """A group from its hash in Redis."""
    task = Task.model_validate_json(fields[b"task"])
    return Group(task, stored_verdicts(fields), int(fields.get(b"kept_order", b"0")))


def stored_verdicts(fields: Mapping[bytes, bytes]) -> dict[int, Verdict]:
    """The verdicts in a group's hash, by the index of their sample."""
    verdicts = (Verdict.model_validate_json(value) for key, value in fields.items() if key.startswith(b"verdict:"))
    return {verdict.index: verdict for verdict in verdicts}


async def recall(redis: Redis, keys: RunKeys, table: GroupTable, names: list[str]) -> list[str]:
    """Add groups to the table as Redis has them, in the order of `names`. Returns those that are not open in Redis.

    A group that is kept or pending is read as a whole; of a batched or reopened one only the fields that the table has.
    """
    gone, whole, batched = [], [], dict[int, list[str]]()
    for name, (state, step, prompt) in zip(
        names, await read_fields(redis, keys, names, ("state", "step", "prompt")), strict=True
    ):
        if state == BATCHED.encode():
            batched.setdefault(int(step or 0), []).append(name)
        elif state == REOPENED.encode():
            table.reopened[name] = (prompt or b"").decode()
        else:
            whole.append(name)
    for in_step, members in batched.items():
        table.batched[in_step] = (*table.batched.get(in_step, ()), *members)
    async for name, fields in read_groups(redis, keys, whole):
        state = fields.get(b"state")
        if state == KEPT.encode():
            table.restore_kept(name, as_stored(fields))
        elif state == PENDING.encode():
            table.add(name, as_stored(fields))
        else:
            gone.append(name)
    return gone


async def recover(redis: Redis, keys: RunKeys, lane: Lane) -> GroupTable:
    """The table of a lane, rebuilt from Redis."""
    table = GroupTable()
    names = sorted([member.decode() async for member in redis.sscan_iter(keys.lane(lane).pending, count=1000)])
    for name in await recall(redis, keys, table, list(dict.fromkeys(names))):
        log.warning("group %s is pending, but Redis lost its hash; the audit releases it", name)
    return table
