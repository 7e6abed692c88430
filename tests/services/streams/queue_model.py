"""Owns the model of the queue logic in plain Python: groups, streams, letters, batches, the weight history.

Must not import the code under test, nor talk to Redis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

TASKS, SAMPLES, VERDICTS = "tasks", "samples", "verdicts"
STREAMS = (TASKS, SAMPLES, VERDICTS)
MAX_DELIVERIES = 2
MOST_FORGIVEN = 2 * MAX_DELIVERIES
TOMBSTONES = 1
TOKENS = 2
"""Of each response."""
ENDED = ("trained", "filtered", "stale", "dead")


@dataclass(eq=False)
class Entry:
    """A message on a stream. `wanted`: a task's samples; `nonce` distinguishes the attempts at one sample."""

    group: str
    life: int
    wanted: int = 0
    index: int = -1
    nonce: float = 0.0
    state: str = "new"
    owner: str = ""
    deliveries: int = 0
    lapsed: bool = False
    forgiven: int = 0
    kept: set[int] = field(default_factory=set)
    furthest: tuple[int, int] = (0, 0)


@dataclass
class Stream:
    """Entries in order. `grouped`: whether the consumer group exists; a rewind deletes it."""

    entries: list[Entry] = field(default_factory=list)
    grouped: bool = True

    def of(self, state: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.state == state]

    @property
    def waiting(self) -> bool:
        """Whether an entry is not acked yet."""
        return any(entry.state in ("new", "leased") for entry in self.entries)

    def take(self, consumer: str, count: int) -> tuple[list[Entry], list[Entry]]:
        """The entries that a read delivers, and those that it dead-letters: lapsed leases first, else new entries."""
        if not self.grouped:
            self.grouped = True
            return [], []
        lapsed = [entry for entry in self.of("leased") if entry.lapsed][:count]
        taken = lapsed
        for entry in lapsed:
            entry.owner, entry.lapsed, entry.deliveries = consumer, False, entry.deliveries + 1
        lost = [entry for entry in taken if entry.deliveries > MAX_DELIVERIES]
        taken = [entry for entry in taken if entry.deliveries <= MAX_DELIVERIES]
        if not taken:
            taken = self.of("new")[:count]
            for entry in taken:
                entry.owner, entry.deliveries = consumer, 1
        for entry in taken:
            entry.state = "leased"
        return taken, lost

    def trim(self, longest: int) -> tuple[int, int]:
        """Delete entries before the oldest lease, or before the last delivery, and behind the lease; how many of each.

        Behind the lease only the oldest acked ones go, until `longest` are left; the last delivered one stays.
        """
        delivered = [place for place, entry in enumerate(self.entries) if entry.state != "new"]
        leased = [place for place, entry in enumerate(self.entries) if entry.state == "leased"]
        if not self.grouped or not delivered:
            return 0, 0
        first = leased[0] if leased else delivered[-1]
        done = [entry for entry in self.entries[first : delivered[-1]] if entry.state == "done"] if leased else []
        del self.entries[:first]
        gone = done[: max(0, len(self.entries) - longest)]
        self.entries = [entry for entry in self.entries if entry not in gone]
        return first, len(gone)


@dataclass
class Group:
    """`life` rises when a rewind reopens the group; `payloads`, `judged`, `recorded` are nonces by index.

    `tokens`: generated for it so far, while it is in flight.
    """

    name: str
    samples: int
    wanted: int
    state: str = "pending"
    life: int = 0
    gone: bool = False
    released: bool = False
    extended: bool = False
    payloads: dict[int, float] = field(default_factory=dict)
    published: int = 0
    judged: dict[int, float] = field(default_factory=dict)
    recorded: dict[int, float] = field(default_factory=dict)
    tokens: int = 0


@dataclass
class Letter:
    group: str
    life: int
    cause: str


@dataclass
class LoggedBatch:
    step: int
    groups: tuple[str, ...]
    trained: bool = False


class Model:
    """The expected state of a run. Each method does what a call must do, and returns the expected reply."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.streams = {name: Stream() for name in STREAMS}
        self.tombstones: list[str] = []
        self.unarchived: list[str] = []
        self.bare: list[str] = []
        self.letters: list[Letter] = []
        self.log: list[LoggedBatch] = []
        self.steps: list[tuple[int, tuple[str, ...]]] = []
        self.queue_step = 0
        self.committed: tuple[int, int, str] | None = None
        self.announced: tuple[int, int, str] | None = None
        self.version_steps: dict[int, int] = {}
        self.published_as: dict[int, tuple[int, int, str]] = {}
        self.rewinds = 0
        self.response_tokens = 0
        self.tokens: Counter[str] = Counter()
        self.step_tokens: dict[int, int] = {}

    def counts(self) -> Counter[str]:
        """The counters; groups that have not ended are `pending`."""
        counts = Counter(group.state for group in self.groups.values() if group.state in ENDED)
        counts["dispatched"] = len(self.groups)
        counts["pending"] = sum(group.state not in ENDED for group in self.groups.values())
        return +counts

    def by_state(self, *states: str) -> list[str]:
        return [name for name, group in self.groups.items() if group.state in states]

    def dispatch(self, name: str, samples: int, wanted: int) -> bool:
        if name in self.groups and not self.groups[name].gone:
            return False
        self.groups[name] = Group(name, samples, wanted)
        self.publish_task(self.groups[name])
        return True

    def publish_task(self, group: Group) -> None:
        self.streams[TASKS].entries.append(Entry(group.name, group.life, wanted=group.wanted))

    def missing(self, entry: Entry) -> list[int]:
        group = self.groups[entry.group]
        return [n for n in range(entry.wanted) if n not in group.payloads] if group.state == "pending" else []

    def keep(self, entry: Entry, owner: str, index: int) -> bool:
        """A replica keeps what it has of a sample. A delivery that brings the task further is not counted."""
        group = self.groups[entry.group]
        mine = entry.state == "leased" and entry.owner == owner
        if group.gone or group.state != "pending" or not mine or index in group.payloads:
            return False
        entry.kept.add(index)
        reached = group.published, len(entry.kept - set(group.payloads))
        if reached > entry.furthest:
            entry.furthest = reached
            if entry.deliveries > 1:
                entry.forgiven += entry.deliveries - 1
                if entry.forgiven <= MOST_FORGIVEN:
                    entry.deliveries, entry.lapsed = 1, False
        return True

    def publish(self, entry: Entry, nonces: Mapping[int, float]) -> list[bool]:
        """Whether each sample is fresh. `nonces`: by index."""
        group = self.groups[entry.group]
        fresh = []
        for index, nonce in nonces.items():
            fresh.append(group.state == "pending" and index not in group.payloads and entry.state == "leased")
            if fresh[-1]:
                group.payloads[index] = nonce
                group.published += 1
                group.tokens += TOKENS
                self.tokens["generated"] += TOKENS
                self.streams[SAMPLES].entries.append(Entry(group.name, group.life, index=index, nonce=nonce))
        if group.state != "pending" or group.published >= entry.wanted:
            self.ack(entry)
        return fresh

    def judge(self, entry: Entry) -> bool:
        group = self.groups[entry.group]
        fresh = entry.state == "leased" and entry.index not in group.judged
        if fresh:
            group.judged[entry.index] = entry.nonce
            verdict = Entry(group.name, group.life, index=entry.index, nonce=entry.nonce)
            self.streams[VERDICTS].entries.append(verdict)
        self.ack(entry)
        return fresh

    def complete_with(self, entries: Sequence[Entry]) -> bool:
        """Whether the group has all requested verdicts, with these."""
        group = self.groups[entries[0].group]
        return {*group.recorded, *(entry.index for entry in entries)} >= set(range(group.wanted))

    def record(self, entries: Sequence[Entry], decision: str) -> list[bool]:
        """Whether each verdict had an effect. The last one decides."""
        *earlier, last = entries
        return [*(self.record_one(entry, "") for entry in earlier), self.record_one(last, decision)]

    def record_one(self, entry: Entry, decision: str) -> bool:
        group = self.groups[entry.group]
        self.ack(entry)
        if group.state != "pending":
            return False
        fresh = entry.index not in group.recorded
        group.recorded.setdefault(entry.index, entry.nonce)
        self.response_tokens += TOKENS if fresh else 0
        if decision == "":
            return fresh
        self.decide(group, decision)
        return True

    def undecided(self) -> list[str]:
        """The groups that have all requested verdicts, but no decision."""
        pending = [self.groups[name] for name in self.by_state("pending")]
        return [group.name for group in pending if group.recorded.keys() >= set(range(group.wanted))]

    def decide(self, group: Group, decision: str) -> None:
        """Change a pending group as its last verdict decides."""
        if decision == "more":
            if not group.extended:
                group.extended, group.wanted = True, group.samples
                self.publish_task(group)
        elif decision == "kept":
            group.state = "kept"
        else:
            self.end(group, decision)

    def spend(self, group: Group, use: str) -> int:
        """The group is no longer in flight; its tokens, which have this use from now on."""
        tokens, group.tokens = group.tokens, 0
        self.tokens[use] += tokens
        return tokens

    def end(self, group: Group, state: str) -> None:
        group.state = state
        self.spend(group, state)
        self.unarchived.append(group.name)

    def archive(self, names: Sequence[str]) -> int:
        """Groups are in the archive; how many of them had waited for it."""
        waiting = [name for name in names if name in self.unarchived or name in self.bare]
        for name in waiting:
            (self.unarchived if name in self.unarchived else self.bare).remove(name)
            self.groups[name].payloads = {}
            self.tombstones.append(name)
        return len(waiting)

    def strip(self, most: int) -> int:
        """The groups that have waited longest wait without payloads; how many."""
        names, self.unarchived = self.unarchived[:most], self.unarchived[most:]
        for name in names:
            self.groups[name].payloads = {}
        self.bare += names
        return len(names)

    def trim_released(self) -> int:
        deleted = self.tombstones[: max(0, len(self.tombstones) - TOMBSTONES)]
        for name in deleted:
            self.groups[name].gone = True
        del self.tombstones[: len(deleted)]
        return len(deleted)

    def release(self, name: str, state: str) -> bool:
        group = self.groups[name]
        if group.state not in ("pending", "kept"):
            return False
        self.end(group, state)
        return True

    def duplicate(self, stream: str, entry: Entry) -> None:
        self.streams[stream].entries.append(replace(entry, state="new", owner="", deliveries=0, lapsed=False))

    def ack(self, entry: Entry) -> bool:
        done = entry.state == "leased"
        if done:
            entry.state = "done"
        return done

    def renew(self, entry: Entry, consumer: str) -> bool:
        owned = entry.state == "leased" and entry.owner == consumer
        if owned:
            entry.lapsed = False
        return owned

    def dead_letter(self, entry: Entry, cause: str) -> bool:
        if not self.ack(entry):
            return False
        self.letters.append(Letter(entry.group, entry.life, cause))
        return True

    def publish_batch(self, names: list[str]) -> bool:
        if any(self.groups[name].state != "kept" for name in names):
            return False
        for name in names:
            self.groups[name].state = "batched"
        self.queue_step += 1
        self.log.append(LoggedBatch(self.queue_step, tuple(names)))
        return True

    def announce(self, step: int, weights: str) -> int:
        """The version of these weights. Versions whose samples exceed a max_staleness of 1 have no step any more."""
        known = [version for version, *of in filter(None, (self.committed, self.announced)) if of == [step, weights]]
        version = known[0] if known else self.announced[0] + 1 if self.announced else 0
        if not known:
            self.announced = version, step, weights
        recent = {other: at for other, at in self.version_steps.items() if at >= step - 2}
        self.version_steps = {other: min(at, step) for other, at in recent.items()} | {version: step}
        return version

    def commit(self, batch: LoggedBatch, version: int, weights: str) -> bool:
        if self.committed and self.committed[1] >= batch.step:
            return False
        for name in batch.groups:
            self.groups[name].state = "trained"
        self.step_tokens[batch.step] = sum(self.spend(self.groups[name], "trained") for name in batch.groups)
        batch.trained = True
        self.steps.append((batch.step, batch.groups))
        self.committed = version, batch.step, weights
        return True

    def release_batch(self, batch: LoggedBatch, calls: int) -> bool:
        """Release a batch with that many calls, one group each; False if it was released before."""
        if batch not in self.log:
            return False
        for name in batch.groups[:calls]:
            if not self.groups[name].released:
                self.groups[name].released = True
                self.unarchived.append(name)
        if calls >= len(batch.groups):
            self.log.remove(batch)
        return True

    def reopened(self, step: int) -> dict[str, bool]:
        """The groups that a rewind to `step` reopens, and whether each was trained."""
        trained = [name for at, names in self.steps if at > step for name in names]
        return dict.fromkeys(self.by_state("pending", "kept", "batched"), False) | dict.fromkeys(trained, True)

    def rewind(self, step: int) -> None:
        assert self.committed
        for batch in [batch for batch in self.log if batch.trained]:
            self.release_batch(batch, len(batch.groups))
        for stream in self.streams.values():
            for entry in stream.entries:
                entry.state = "abandoned"
            stream.entries, stream.grouped = [], False
        self.log = []
        self.rewinds += 1
        for name in self.reopened(step):
            old = self.groups[name]
            self.spend(old, "discarded")
            for names in (self.unarchived, self.bare, self.tombstones):
                if name in names:
                    names.remove(name)
            self.groups[name] = Group(name, old.samples, old.samples, life=old.life + 1)
            self.publish_task(self.groups[name])
        for at in [at for at in self.step_tokens if at > step]:
            tokens = self.step_tokens.pop(at)
            self.tokens.update(trained=-tokens, discarded=tokens)
        self.steps = [(at, names) for at, names in self.steps if at <= step]
        self.queue_step = step
        self.committed = self.committed[0], step, ""
        self.version_steps = {}
