"""Owns the interleavings of the queue's test: what happens next, to whom, and what is made ready for it.

Must not touch Redis or the model but through the actors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.contracts import Cause, Release
from tests.services.streams.queue_actors import NAMES, Actors, Held, Server
from tests.services.streams.queue_model import SAMPLES, STREAMS, TASKS, VERDICTS

T = TypeVar("T")

OPEN_GROUPS = 6
DECISIONS = ("kept", "more", "filtered", "dead")
TIMES = (1, 2)
"""How often a call is made: the reply to the first one may have been lost."""


HAPPENINGS = (
    "dispatch",
    "deliver",
    "work",
    "publish_twice",
    "draw",
    "record",
    "go_on",
    "go_on",
    "lapse",
    "crash",
    "take_over",
    "take_over",
    "renew",
    "give_up",
    "bury_dead",
    "redrive",
    "duplicate",
    "release",
    "trim",
    "publish_batch",
    "train",
    "commit_late",
    "cover",
    "replace",
    "rewind",
)


def pick(data: Any, options: Iterable[T]) -> T:
    """One of them, each as likely: a plain `sampled_from` prefers the first ones."""
    found = list(options)
    return found[data.draw(st.integers(0, 10**6)) % len(found)]


def writer(data: Any, owners: list[T]) -> T:
    """The owner of a role, or the one before."""
    return owners[pick(data, (-1, -1, 0))]


class QueueMachine(RuleBasedStateMachine):
    """The processes of one run, which die, hang and come back as they please.

    What a rule needs is made ready by healthy processes first, so that no step is without effect.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.acts = Actors(server)
        self._dispatched = 0

    @initialize(absent=st.sets(st.sampled_from(HAPPENINGS), max_size=8))
    def begin(self, absent: set[str]) -> None:
        """Some things do not happen in this run, so that others happen more often."""
        self.happenings = [name for name in HAPPENINGS if name not in absent]
        self.some_new()

    @invariant()
    def holds(self) -> None:
        self.acts.check()

    # What is made ready.

    def some_new(self) -> None:
        """One more group; every other one is screened."""
        self._dispatched += 1
        self.acts.dispatch(self.acts.samplers[-1], 1 if self._dispatched % 2 else None)

    def some_held(self, stream: str, leased: bool = True) -> list[Held]:
        """Held deliveries, by default unfinished ones; if there are none, groups are brought to this point."""
        for _ in range(3):
            held = [item for item in self.acts.holding(stream) if item.entry.state == "leased" or not leased]
            if held:
                return held
            before = STREAMS[: STREAMS.index(stream)]
            if not any(self.acts.model.streams[name].of("new") for name in (*before, stream)):
                self.some_new()
            for earlier in before:
                for item in self.acts.read(earlier, "a", 2):
                    (self.acts.draw if earlier == TASKS else self.acts.judge)(item)
            self.acts.read(stream, "a", 2)
        return []

    def some_kept(self) -> list[str]:
        for _ in range(4):
            if kept := self.acts.model.by_state("kept"):
                return kept
            for item in self.some_held(VERDICTS):
                self.acts.record(item, "kept")
        return []

    def some_batch(self) -> list[Any]:
        """The next batch to be trained."""
        waiting = [item for item in self.acts.model.log if not item.trained]
        if not waiting and (kept := self.some_kept()):
            self.acts.publish_batch(self.acts.samplers[-1], kept[:1])
        return [item for item in self.acts.model.log if not item.trained][:1]

    def train_well(self) -> None:
        """One more rollout step, by the learner that owns the role."""
        for batch in self.some_batch():
            self.acts.announce(self.acts.learners[-1], batch, f"w{batch.step}")
            self.acts.commit()

    # What happens.

    @rule(what=st.integers(0, 10**6), data=st.data())
    def happens(self, what: int, data: Any) -> None:
        """One of the happenings. Not rules of their own: hypothesis leaves half of those out, and few runs get far."""
        name = self.happenings[what % len(self.happenings)]
        note(f"{name}:")
        getattr(self, name)(data)

    def dispatch(self, data: Any) -> None:
        if len(self.acts.model.by_state("pending", "kept", "batched")) < OPEN_GROUPS:
            self.acts.dispatch(writer(data, self.acts.samplers), pick(data, (None, 1)), pick(data, TIMES))

    def deliver(self, data: Any) -> None:
        self.acts.read(pick(data, STREAMS), pick(data, NAMES), pick(data, (1, 2, 3)))

    def act(self, data: Any, item: Held) -> None:
        """What a consumer does with what it holds, whatever became of it meanwhile."""
        if item.stream == TASKS:
            self.acts.publish(item, pick(data, range(item.entry.wanted)))
        elif item.stream == SAMPLES:
            self.acts.judge(item)
        else:
            self.acts.record(item, pick(data, DECISIONS))

    def work(self, data: Any) -> None:
        if held := self.some_held(pick(data, STREAMS), pick(data, (True, False))):
            item = pick(data, held)
            for _ in range(pick(data, TIMES)):
                self.act(data, item)

    def publish_twice(self, data: Any) -> None:
        if held := self.some_held(TASKS):
            item = pick(data, held)
            index = pick(data, range(item.entry.wanted))
            self.acts.publish(item, index)
            self.acts.publish(item, index)

    def draw(self, data: Any) -> None:
        if held := self.some_held(TASKS, pick(data, (True, False))):
            self.acts.draw(pick(data, held))

    def record(self, data: Any) -> None:
        if held := self.some_held(VERDICTS):
            self.acts.record(pick(data, held), pick(data, DECISIONS), pick(data, ("", "", "filtered")))

    def go_on(self, data: Any) -> None:
        self.all_go_on(pick(data, DECISIONS))

    def all_go_on(self, decision: str) -> None:
        """Consumers that nothing happens to."""
        for item in self.acts.read(TASKS, "b", 3):
            self.acts.draw(item)
        for item in self.acts.read(SAMPLES, "b", 4):
            self.acts.judge(item)
        for item in self.acts.read(VERDICTS, "b", 4):
            self.acts.record(item, decision)

    def lapse(self, data: Any) -> None:
        if leases := self.acts.leases():
            self.acts.lapse(*pick(data, leases))

    def crash(self, data: Any) -> None:
        """All consumers of a name die, and time passes for what they held."""
        name = pick(data, NAMES)
        self.acts.held = [item for item in self.acts.held if item.name != name]
        for stream, entry in self.acts.leases():
            if entry.owner == name:
                self.acts.lapse(stream, entry)

    def take_over(self, data: Any) -> None:
        """A consumer hangs for longer than its lease, and another one takes over; it may come back."""
        stream = pick(data, STREAMS)
        if not (held := self.some_held(stream)):
            return
        item = pick(data, held)
        self.acts.check()
        self.acts.lapse(stream, item.entry)
        self.acts.read(stream, "ab".replace(item.name, ""), 1)
        pick(data, (self.act, self.renew_one, self.give_up_one, self.nothing))(data, item)

    def renew_one(self, data: Any, item: Held) -> None:
        self.acts.renew(item)

    def give_up_one(self, data: Any, item: Held) -> None:
        self.acts.give_up(item, Cause.TOO_LONG)

    def nothing(self, data: Any, item: Held) -> None:
        pass

    def renew(self, data: Any) -> None:
        if held := self.some_held(pick(data, STREAMS), pick(data, (True, False))):
            self.acts.renew(pick(data, held))

    def give_up(self, data: Any) -> None:
        if held := self.some_held(pick(data, STREAMS), pick(data, (True, False))):
            item = pick(data, held)
            for _ in range(pick(data, TIMES)):
                self.acts.give_up(item, Cause.TOO_LONG)

    def bury_dead(self, data: Any) -> None:
        self.acts.bury_dead()

    def redrive(self, data: Any) -> None:
        if not self.acts.model.letters and (held := self.some_held(TASKS)):
            self.acts.give_up(pick(data, held), Cause.TOO_LONG)
            self.acts.bury_dead()
        if self.acts.model.letters:
            self.acts.redrive(pick(data, self.acts.model.letters), pick(data, TIMES))

    def duplicate(self, data: Any) -> None:
        """Duplicates a message, acked or not."""
        stream, states = pick(data, STREAMS), pick(data, (("done",), ("new", "leased")))
        entries = self.acts.model.streams[stream].entries
        if places := [place for place, item in enumerate(entries) if item.state in states]:
            self.acts.duplicate(stream, pick(data, places))

    def release(self, data: Any) -> None:
        """Releases a group in any state; consumers that hold its messages continue."""
        working = [item.entry.group for item in self.some_held(pick(data, STREAMS))]
        known = {name: item.state for name, item in self.acts.model.groups.items() if not item.gone}
        states = [[name for name, state in known.items() if state == item] for item in sorted(set(known.values()))]
        if names := pick(data, (working, *states)):
            name = pick(data, names)
            self.acts.release(name, pick(data, (Release.STALE, Release.DEAD)))
            self.acts.check()
            for item in [item for item in self.acts.held if item.entry.group == name]:
                self.act(data, item)

    def trim(self, data: Any) -> None:
        self.acts.trim(pick(data, STREAMS))

    def publish_batch(self, data: Any) -> None:
        """Of kept groups; now and then one among them is not."""
        names = self.some_kept()[: pick(data, (1, 2))]
        others = sorted(set(self.acts.model.groups) - set(self.acts.model.by_state("kept")))
        if others and pick(data, (False, False, True)):
            names = [*names, pick(data, others)]
        if names:
            self.acts.publish_batch(writer(data, self.acts.samplers), names)

    def train(self, data: Any) -> None:
        """A learner trains the next batch; it may die between its broadcast and its commit."""
        for batch in self.some_batch():
            weights = f"w{batch.step}{pick(data, ('', '~'))}"
            self.acts.announce(writer(data, self.acts.learners), batch, weights)
            if self.acts.announced and pick(data, (True, False)):
                self.acts.commit()

    def commit_late(self, data: Any) -> None:
        """The learner that announced last commits, although another may have committed."""
        if self.acts.announced:
            self.acts.commit()

    def cover(self, data: Any) -> None:
        if not any(item.trained for item in self.acts.model.log):
            self.train_well()
        if trained := [item for item in self.acts.model.log if item.trained]:
            self.acts.cover(writer(data, self.acts.learners), pick(data, trained), pick(data, TIMES))

    def replace(self, data: Any) -> None:
        pick(data, (self.acts.new_sampler, self.acts.new_learner))()

    def rewind(self, data: Any) -> None:
        """Rewinds to an older step, which may be trained only now; consumers continue with what they hold."""
        for _ in range(pick(data, (0, 1, 2))):
            self.train_well()
        held, last = list(self.acts.held), self.acts.model.committed[1]
        if not last:
            return
        self.acts.rewind(pick(data, range(last)))
        self.acts.check()
        for item in held:
            pick(data, (self.act, self.renew_one, self.nothing))(data, item)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self.drain()

    def drain(self) -> None:
        """Everybody dies; fresh processes bring every group to its end."""
        acts = self.acts
        acts.new_sampler()
        acts.new_learner()
        for _ in range(40):
            acts.check()
            if not (acts.model.by_state("pending") or any(acts.model.streams[name].waiting for name in STREAMS)):
                break
            for stream, entry in acts.leases():
                acts.lapse(stream, entry)
            self.all_go_on("kept")
            acts.bury_dead()
        else:
            raise AssertionError("groups that never end, or messages that are never acked")
        while kept := acts.model.by_state("kept"):
            acts.publish_batch(acts.samplers[-1], kept[:2])
        while any(not item.trained for item in acts.model.log):
            self.train_well()
        for batch in list(acts.model.log):
            acts.cover(acts.learners[-1], batch)
        for stream in STREAMS:
            acts.trim(stream)
        acts.check()
        assert acts.model.counts()["pending"] == 0
        assert acts.seen.payloads == {}
        assert all(len(seen.entries) <= 1 for seen in acts.seen.streams.values())
