"""Owns the actions of the services in the queue's test: each runs on Redis and on the model; the replies must agree.

Must not choose the actions (the machine does), nor define the expected replies (the model does).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from services.contracts import Cause, Fence, Lane, Release, Task, VersionSpan
from services.streams.connection.functions import FencedError, call_for_each
from services.streams.connection.functions import call as append
from services.streams.delivery.consumer import Delivery, trim
from services.streams.delivery.drawn import DrawnTokens
from services.streams.delivery.leases import Lease, renew_lease
from services.streams.delivery.partials import NEVER, Partial, Piece, keep_partials
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.group_state import (
    Effect,
    GroupTransitions,
    RejectedMessageError,
    missing_samples,
    trim_released,
)
from services.streams.state.policy_history import History
from services.streams.state.rewind import ReopenedGroup, Rewind
from services.streams.unarchived import Unarchived
from tests.services.driven import (
    BODY,
    STATE,
    DrivenRun,
    Dying,
    Hasty,
    batch_of,
    record_of,
    sample_of,
    snapshot_at,
    task_of,
    verdict_on,
)
from tests.services.streams.queue_model import (
    ENDED,
    MAX_DELIVERIES,
    SAMPLES,
    STREAMS,
    TASKS,
    TOMBSTONES,
    VERDICTS,
    Entry,
    Group,
    LoggedBatch,
    Model,
)
from tests.services.streams.queue_view import READERS, View

RUN = "model"
G = 2
DRAWN = DrawnTokens(np.array([5], np.int32), np.array([-0.5], np.float32), (VersionSpan(version=1, start=0, end=1),))
"""Samples of a group; a screen draws one of them."""
NAMES = ("a", "b")
"""Consumers of each kind."""
LEASE_S = 3600.0
LONGEST = 2
"""Acked entries that a stream keeps behind an entry that is not acked."""
HELD = 8
"""How many held deliveries the test remembers."""


@dataclass(frozen=True)
class Server:
    """What all machines of a test share: a loop, two clients of their own server, and the situations so far."""

    runner: asyncio.Runner
    client: Any
    view: Any
    met: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Held:
    """A delivery that a consumer holds, alive or presumed dead. `owner`: the sampler of that time."""

    stream: str
    name: str
    delivery: Delivery[Any]
    entry: Entry
    owner: GroupTransitions

    def __repr__(self) -> str:
        return f"<{self.stream} {self.entry.group}:{self.entry.index} of {self.name}, {self.entry.state}>"


class Actors:
    """Samplers, replicas, verifiers and learners of one run. The last of `samplers` and `learners` owns its role."""

    def __init__(self, server: Server) -> None:
        self._server = server
        server.view.flushdb()
        self.keys = RunKeys(RUN)
        self.model = Model()
        self.seen = View(server.view, RUN)
        self.held: list[Held] = []
        self.announced: tuple[History, LoggedBatch, int, str] | None = None
        self._versions: dict[int, tuple[int, str, int]] = {}
        self._nonce = 0.0
        self._calls = 1
        self._next_group = 0
        self.run: DrivenRun = self.do(DrivenRun.open(Hasty(server.client), self.keys, LEASE_S, MAX_DELIVERIES))
        self._event_log = EventLog(self.run.redis, self.keys, "test")
        self.samplers = [self.run.sampler]
        self.learners = [self.run.learner]
        self.commit_policy(0)

    def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call. Every other one is sent together with others: one with an effect, one without."""
        self._calls += 1
        return self._server.runner.run(self._together(call) if self._calls % 2 else call)

    async def _together(self, call: Coroutine[Any, Any, Any]) -> Any:
        redis, number = self.run.redis, str(self._calls)
        before = append(
            redis,
            "append_message",
            record_key=self.keys.record,
            stream_key=self.keys.key("beside"),
            message=number,
            kept=1,
        )
        # A full Redis rejects calls that grow it, so they are sent apart from the others.
        after = call_for_each(
            redis,
            "publish_samples",
            group_key=self.keys.group("absent"),
            samples_key=self.run.streams.samples,
            tasks_key=self.run.streams.tasks,
            counters_key=self.run.streams.counters,
            in_flight_key=self.run.streams.tokens_in_flight,
            partials_key=self.keys.partials("absent"),
            payload_keys=[self.keys.payload("absent", 0)],
            consumer_group="rollout",
            group="absent",
            task_entry="0-1",
            wanted=1,
            index_list=[0],
            sample_list=[""],
            token_count_list=[1],
            payload_field_list=["text", ""],
        )
        appended, reply, unknown = await asyncio.gather(before, call, after, return_exceptions=True)
        assert (appended, unknown) == (1, [Effect.UNKNOWN_GROUP])
        [(_, fields)] = await redis.xrevrange(self.keys.key("beside"), count=1)
        assert fields == {b"m": number.encode()}
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def met(self, situation: str, *conditions: Any) -> None:
        """Count a situation if all conditions hold, so that the test can check that it occurred."""
        self._server.met[situation] += all(conditions)

    def check(self) -> None:
        deleted = self.do(trim_released(self.run.redis, self.keys, Lane.TRAIN, TOMBSTONES))
        assert deleted == self.model.trim_released()
        self.seen.look()
        self.seen.check(self.model)

    def holding(self, stream: str) -> list[Held]:
        return [held for held in self.held if held.stream == stream]

    def leases(self) -> list[tuple[str, Entry]]:
        return [(name, entry) for name in STREAMS for entry in self.model.streams[name].of("leased")]

    def consumer(self, stream: str, name: str) -> Any:
        return {TASKS: self.run.rollout, SAMPLES: self.run.verifier, VERDICTS: self.run.judge}[stream](name)

    def key(self, stream: str) -> str:
        return str(getattr(self.run.streams, stream))

    def owned(self, writer: GroupTransitions | History, call: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
        """Whether the writer still owns its role, and the reply; the call of a previous owner must fail."""
        name = call.__name__
        if writer in (self.samplers[-1], self.learners[-1]):
            return True, self.do(call)
        try:
            self.do(call)
        except FencedError:
            self.met(f"{name} by a previous owner")
            return False, None
        raise AssertionError(f"a previous owner wrote: {name}")

    def rejected(self, messages: Sequence[Held], call: Coroutine[Any, Any, Any]) -> None:
        """The group of the messages has no hash: the call must fail, and the messages become letters."""
        name = call.__name__
        try:
            assert set(self.do(call)) == {Effect.UNKNOWN_GROUP}, f"a call for a group without a hash succeeded: {name}"
        except RejectedMessageError:
            assert call.__name__ == "missing_samples"
        self.met(f"{name} for a group without a hash")
        for held in messages:
            self.dead_letter(held, Cause.INVALID)

    # Groups in flight.

    def dispatch(self, sampler: GroupTransitions, stop: int | None, times: int = 1) -> None:
        name = f"g{self._next_group}"
        for _ in range(times):
            owned, reply = self.owned(sampler, sampler.dispatch(Lane.TRAIN, [task_of(name, G, stop)], STATE))
            if owned:
                assert reply == self.model.dispatch(name, G, stop or G)
                self._next_group += reply

    def read(self, stream: str, name: str, count: int) -> list[Held]:
        taken, lost = self.model.streams[stream].take(name, count)
        for entry in lost:
            self.model.dead_letter(entry, Cause.DELIVERIES.value)
        deliveries = self.do(self.consumer(stream, name).read(count, 0.001))
        assert [(delivery.message.group, delivery.deliveries) for delivery in deliveries] == [
            (entry.group, entry.deliveries) for entry in taken
        ]
        self.met("a lease taken over", any(entry.deliveries > 1 for entry in taken))
        self.met("dead-lettered after too many deliveries", lost)
        new = [Held(stream, name, *pair, self.samplers[-1]) for pair in zip(deliveries, taken, strict=True)]
        self.held = [*self.held, *new][-HELD:]
        return new

    def publish(self, held: Held, *indices: int) -> None:
        """A replica publishes samples in one call."""
        entry, group = held.entry, self.model.groups[held.entry.group]
        nonces = [self._nonce + place for place in range(1, len(indices) + 1)]
        self._nonce = nonces[-1]
        samples = [
            (sample_of(self.keys, group.name, index, started_at=nonce), replace(BODY, text=str(nonce)))
            for index, nonce in zip(indices, nonces, strict=True)
        ]
        call = self.run.transitions.publish_samples(Lane.TRAIN, held.delivery.lease, entry.wanted, samples)
        if group.gone:
            return self.rejected([held], call)
        state, leased = group.state, entry.state
        fresh = self.model.publish(entry, dict(zip(indices, nonces, strict=True)))
        assert self.do(call) == fresh
        self.met("a sample under a lease that was taken over", any(fresh), entry.owner != held.name)
        self.met("a second sample", not all(fresh), state == "pending", leased == "leased")
        self.met("several samples at once", len(fresh) > 1, all(fresh))
        self.met("a sample under a lease of an abandoned history", state == "pending", leased == "abandoned")
        self.met("a sample of a group that has ended", state in ENDED)
        return None

    def keep(self, held: Held, index: int) -> None:
        """A replica keeps what it has drawn of a sample so far, in a new attempt."""
        entry, self._nonce = held.entry, self._nonce + 1
        again, state, leased = entry.deliveries > 1, self.model.groups[entry.group].state, entry.state
        pieces = [Piece(index, str(self._nonce), 0, 0, Partial(DRAWN, 1.0))]
        call = keep_partials(
            self.run.redis, self.keys, held.delivery.lease, entry.group, pieces, BODY.prompt_ids, MAX_DELIVERIES
        )
        kept = self.model.keep(entry, held.name, index)
        assert self.do(call) == [len(DRAWN) if kept else NEVER]
        self.met("a delivery that is not counted", kept, again, entry.deliveries == 1)
        self.met("a partial of a group that has ended", state in ENDED)
        self.met("a partial under a lease of an abandoned history", state == "pending", leased == "abandoned")

    def draw(self, held: Held) -> None:
        """All that a replica does with a task."""
        call = missing_samples(self.run.redis, self.keys, held.delivery.message)
        if self.model.groups[held.entry.group].gone:
            return self.rejected([held], call)
        missing = self.do(call)
        assert missing == self.model.missing(held.entry)
        self.met("a group with missing samples", 0 < len(missing) < held.entry.wanted)
        if missing:
            self.publish(held, *missing)
        if not missing:
            self.do(self.consumer(TASKS, held.name).ack(held.delivery.lease))
            self.model.ack(held.entry)
        return None

    def judge(self, *samples: Held) -> None:
        """A verifier publishes verdicts on samples of one group in one call."""
        group = self.model.groups[samples[0].entry.group]
        verdicts = [(held.delivery.lease, verdict_on(held.delivery.message)) for held in samples]
        call = self.run.transitions.publish_verdicts(Lane.TRAIN, verdicts)
        if group.gone:
            return self.rejected(samples, call)
        leased = {held.entry.state for held in samples}
        fresh = [self.model.judge(held.entry) for held in samples]
        assert self.do(call) == fresh
        self.met("several verdicts at once", len(fresh) > 1, all(fresh))
        self.met("a second verdict", "done" in leased)
        self.met("a verdict of an abandoned history", "abandoned" in leased)
        self.met("a verdict on a sample of a group that has ended", any(fresh), group.state in ENDED)
        return None

    def record(self, verdicts: Sequence[Held], decision: str, early: str = "", lost: bool = False) -> None:
        """The sampler decides a group with its last verdict; `early`: its decision before that, if any.

        `lost`: a failover loses the decision, but not the verdicts.
        """
        last = verdicts[-1]
        group, entries = self.model.groups[last.entry.group], [held.entry for held in verdicts]
        decision, rest = self.possible(group, decision)
        if not self.model.complete_with(entries):
            decision = early
        elif lost:
            decision = ""
        given = [(held.delivery.lease, held.delivery.message) for held in verdicts]
        call = last.owner.record_verdicts(Lane.TRAIN, group.name, given, decision, rest=rest)
        if group.gone and last.owner is self.samplers[-1]:
            return self.rejected(verdicts, call)
        owned, reply = self.owned(last.owner, call)
        if owned:
            before = group.state
            assert reply == self.model.record(entries, decision)
            self.met(f"decided: {decision}", decision, before == "pending")
            self.met("several verdicts recorded at once", len(verdicts) > 1)
            self.met("a verdict for a group that has ended", before in ENDED)
            self.met("a verdict for a group that is kept or batched", before in ("kept", "batched"))
        return None

    @staticmethod
    def possible(group: Group, decision: str) -> tuple[str, Task | None]:
        """The decision, and the task for the other samples: a group that has them all cannot draw more."""
        if decision == "more" and group.wanted < G:
            return decision, task_of(group.name, G)
        return "kept" if decision == "more" else decision, None

    def decide(self, owner: GroupTransitions, name: str, decision: str) -> None:
        """The sampler decides a group whose verdicts are all recorded."""
        group = self.model.groups[name]
        decision, rest = self.possible(group, decision)
        owned, reply = self.owned(owner, owner.record_verdicts(Lane.TRAIN, name, [], decision, rest=rest))
        if owned:
            assert reply == []
            self.model.decide(group, decision)
            self.met("a decision again")

    def release(self, name: str, release: Release) -> None:
        before = self.model.groups[name].state
        reply = self.do(self.samplers[-1].release(Lane.TRAIN, name, release, G))
        assert reply == self.model.release(name, release.value)
        self.met(f"release of a {before} group")

    # The archive of groups.

    def archive(self, sampler: GroupTransitions, names: Sequence[str], times: int = 1) -> None:
        """A sampler has written groups to the archive, or some that are not to be archived any more."""
        archive = Unarchived(self.run.redis, self.keys, "sampler", sampler.fence)
        groups = self.do(archive.hashes([name for name in names if not self.model.groups[name].gone]))
        for _ in range(times):
            try:
                taken = self.do(archive.take(Lane.TRAIN, groups))
            except FencedError:
                assert sampler is not self.samplers[-1]
                self.met("take_archived by a previous owner")
                return
            assert sampler is self.samplers[-1] or not groups, "nothing is written for no group"
            self.met("groups archived after they were stripped", set(names) & set(self.model.bare))
            assert taken == self.model.archive([group.name for group in groups])
            self.met("groups archived" if taken else "groups archived again")

    def strip(self, most: int, late: Sequence[str] = ()) -> None:
        """The archive could not be written for long. `late`: groups that were stripped after it had looked."""
        archive = Unarchived(self.run.redis, self.keys, "sampler", self.samplers[-1].fence)
        waiting = archive.names

        async def names(lane: Lane, most: int, *, bare: bool = False) -> list[str]:
            return [*await waiting(lane, most, bare=bare), *(() if bare else late)]

        archive.names = names
        stripped, abandoned = self.do(archive.strip(Lane.TRAIN, most))
        assert (stripped, abandoned) == (self.model.strip(most), 0)
        self.met("groups stripped", stripped)
        self.met("a group to be stripped had been", late)

    # Faults of deliveries.

    def lapse(self, stream: str, entry: Entry) -> None:
        """Let one lease lapse. Its entry's id comes from the last view."""
        place = self.model.streams[stream].entries.index(entry)
        name = self.seen.streams[stream].entries[place][0]
        self.do(self.run.lapse(Lease(self.key(stream), READERS[stream], entry.owner, name)))
        entry.lapsed = True

    def renew(self, held: Held) -> None:
        owned = self.model.renew(held.entry, held.name)
        assert self.do(renew_lease(self.run.redis, held.delivery.lease)) == owned
        self.met("a late renewal", not owned, held.entry.state == "leased")
        self.met("a renewal in an abandoned history", held.entry.state == "abandoned")

    def dead_letter(self, held: Held, cause: Cause) -> None:
        self.do(self.consumer(held.stream, held.name).dead_letter(held.delivery, "test", cause))
        buried = self.model.dead_letter(held.entry, cause.value)
        self.met("not dead-lettered by a previous consumer", not buried)

    def end_dead_lettered(self) -> None:
        """End the groups of letters, as the sampler does, except for letters of an abandoned history."""
        stored = self.do(self._event_log.dead_letters())
        assert [letter.group for _, letter in stored] == [letter.group for letter in self.model.letters]
        for letter in self.model.letters:
            group = self.model.groups[letter.group]
            if letter.cause != "invalid" and group.state == "pending" and letter.life == group.life:
                self.met("a group ended by a letter")
                self.release(letter.group, Release.DEAD)

    def duplicate(self, stream: str, place: int) -> None:
        """Add a copy of a message, as a client does that repeats a write."""
        entry, body = self.seen.streams[stream].entries[place]
        raw = self._server.view.xrange(self.key(stream), entry, entry)[0][1]
        copy = self._server.view.xadd(self.key(stream), raw).decode()
        self.seen.copies.add(copy)
        self.model.duplicate(stream, self.model.streams[stream].entries[place])
        self.met(f"a duplicate of {body['kind']}")

    def trim(self, stream: str) -> None:
        dropped, behind = self.model.streams[stream].trim(LONGEST)
        assert self.do(trim(self.run.redis, self.key(stream), READERS[stream], LEASE_S, LONGEST)) == dropped + behind
        self.met("trimmed up to a lease", dropped, self.model.streams[stream].of("leased"))
        self.met("trimmed behind a lease", behind)
        self.met("trimmed up to the last delivery", dropped, self.model.streams[stream].of("new"))

    # Batches and the weight history.

    def publish_batch(self, sampler: GroupTransitions, names: list[str]) -> None:
        batch = batch_of(self.keys, self.model.queue_step + 1, names, G)
        owned, reply = self.owned(sampler, sampler.publish_batch(batch, snapshot_at(batch.step)))
        if owned:
            assert reply == self.model.publish_batch(names)
            self.met(f"a batch {'published' if reply else 'rejected'}")

    def announce(self, learner: History, batch: LoggedBatch, weights: str) -> None:
        """A learner has trained a batch and announces its version; it may die before the commit."""
        owned, version = self.owned(learner, learner.announce(batch.step, weights, 1))
        if owned:
            self._note_version(version, batch.step, weights)
            self.announced = learner, batch, version, weights

    def _note_version(self, version: int, step: int, weights: str) -> None:
        assert version == self.model.announce(step, weights)
        meaning = step, weights, self.model.rewinds
        assert self._versions.setdefault(version, meaning) == meaning, f"version {version} is used twice"

    def commit(self) -> None:
        """The learner that announced last commits."""
        assert self.announced
        learner, batch, version, weights = self.announced
        logged = batch_of(self.keys, batch.step, batch.groups, G)
        # A batch that was released or rewound since has no entry; the call ends before it needs one.
        entry = next((stored.entry for stored in self.do(learner.batches()) if stored.batch.step == batch.step), "")
        owned, reply = self.owned(learner, learner.commit_step(record_of(logged, version, weights), entry))
        if owned:
            assert reply == self.model.commit(batch, version, weights)
            self.met(f"a step {'committed' if reply else 'not committed twice'}")
            self.met("a step committed again after a rewind", reply, self.model.rewinds)

    def release_batch(self, learner: History, batch: LoggedBatch, times: int = 1, dies: bool = False) -> None:
        """Release a committed batch, one group per call; the learner may die after the first call."""
        log = self.do(self.learners[-1].batches())
        assert [logged.batch.step for logged in log] == [logged.step for logged in self.model.log]
        logged = log[self.model.log.index(batch)]
        if dies and len(batch.groups) > 1 and learner is self.learners[-1]:
            dying = History(Dying(self.run.redis, 1), self.keys, "learner", learner.fence)
            try:
                self.do(dying.release_batch(logged))
            except ConnectionAbortedError:
                self.model.release_batch(batch, 1)
                self.met("a release of a batch cut off")
            return
        for _ in range(times):
            owned, reply = self.owned(learner, learner.release_batch(logged))
            if owned:
                assert reply == self.model.release_batch(batch, len(batch.groups))
                self.met(f"a batch {'released' if reply else 'not released twice'}")

    def lose_epoch(self, role: str, owner: GroupTransitions | History) -> None:
        """A failover loses the owner's epoch: the next owner gets the same one."""
        self.met("two owners of one epoch")
        self._server.view.set(self.keys.epoch(role), Fence(owner.fence.epoch - 1, "before").token)

    def new_sampler(self, lost: bool = False) -> None:
        """A new owner; the previous one still runs, and writes. `lost`: its epoch was lost."""
        if lost:
            self.lose_epoch("sampler", self.samplers[-1])
        self.samplers = [*self.samplers[-1:], self.do(GroupTransitions.fenced(self.run.redis, self.keys, "sampler"))]

    def new_learner(self, lost: bool = False) -> None:
        if lost:
            self.lose_epoch("learner", self.learners[-1])
        self.learners = [*self.learners[-1:], self.do(History.fenced(self.run.redis, self.keys, "learner"))]

    def rewind(self, step: int) -> None:
        """The run is rewound to an older checkpoint. Replicas and verifiers still hold their deliveries."""
        self.new_learner()
        self.new_sampler()
        names = list(self.model.reopened(step))
        self.do(self._rewound(step, names))
        waiting = [batch.step for batch in self.model.log if batch.trained]
        self.met("rewound over a group that waits for the archive", {*names} & {*self.model.unarchived})
        self.met("rewound over a released step", any(at > step and at not in waiting for at, _ in self.model.steps))
        self.met("rewound to a step that was not released", any(at <= step for at in waiting))
        self.model.rewind(step)
        self.commit_policy(step)

    async def _rewound(self, step: int, names: list[str]) -> None:
        """The calls of a rewind, as the learner and the sampler make them; then all its groups are dispatched."""
        await self.learners[-1].release_committed(self.model.committed[1] if self.model.committed else 0)
        rewind = Rewind(self.run.redis, self.keys, "sampler", self.samplers[-1].fence, self.model.rewinds + 1)
        trained = {name for at, group_names in self.model.steps if at > step for name in group_names}
        records = [(entry, found) for entry, found in await self._records() if found.step > step]
        assert await rewind.start()
        await rewind.reopen([ReopenedGroup(name, "p0", G) for name in names if name not in trained])
        for entry, record in reversed(records):
            await rewind.reopen([ReopenedGroup(name, "p0", G) for name in record.groups], record.step, entry)
        await rewind.finish(step, None, [], "rewound")
        if names:
            await self.samplers[-1].dispatch(Lane.TRAIN, [task_of(name, G) for name in names], None)

    async def _records(self) -> list[tuple[str, Any]]:
        return await EventLog(self.run.redis, self.keys, "sampler").steps()

    def commit_policy(self, step: int) -> None:
        learner, weights = self.learners[-1], f"w{step}"
        version = self.do(learner.announce(step, weights, 1))
        self._note_version(version, step, weights)
        self.do(learner.commit_policy(version, step, weights))
        self.model.committed = version, step, weights
