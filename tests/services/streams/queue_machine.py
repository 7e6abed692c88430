"""Owns the interleavings of the queue's test: it chooses the next action and its target, and prepares both.

Must use Redis and the model only through the actors.
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


ACTIONS = (
    "dispatch",
    "deliver",
    "work",
    "publish_twice",
    "keep",
    "draw",
    "record",
    "decide_again",
    "proceed",
    "proceed",
    "lapse",
    "crash",
    "take_over",
    "take_over",
    "renew",
    "dead_letter",
    "end_dead_lettered",
    "duplicate",
    "release",
    "trim",
    "publish_batch",
    "train",
    "commit_late",
    "release_batch",
    "archive",
    "archive",
    "strip",
    "replace",
    "rewind",
)


def pick(data: Any, options: Iterable[T]) -> T:
    """One of the options, each as likely: a plain `sampled_from` prefers the first ones."""
    choices = list(options)
    return choices[data.draw(st.integers(0, 10**6)) % len(choices)]


def by_group(messages: Iterable[Held]) -> list[list[Held]]:
    """The messages of each group, which are handled in one call."""
    groups: dict[str, list[Held]] = {}
    for held in messages:
        groups.setdefault(held.entry.group, []).append(held)
    return list(groups.values())


def writer(data: Any, owners: list[T]) -> T:
    """The owner of a role, or the previous one."""
    return owners[pick(data, (-1, -1, 0))]


class QueueMachine(RuleBasedStateMachine):
    """The processes of one run, which die, hang and come back at any time.

    Healthy processes first prepare what an action needs, so that each step has an effect.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.acts = Actors(server)
        self._dispatched = 0

    @initialize(absent=st.sets(st.sampled_from(ACTIONS), max_size=8))
    def begin(self, absent: set[str]) -> None:
        """Omit some actions in this run, so that the others occur more often."""
        self.actions = [name for name in ACTIONS if name not in absent]
        self.some_new()

    @invariant()
    def holds(self) -> None:
        self.acts.check()

    # Preparations.

    def some_new(self) -> None:
        """Dispatch one more group; every other group is screened."""
        self._dispatched += 1
        self.acts.dispatch(self.acts.samplers[-1], 1 if self._dispatched % 2 else None)

    def some_held(self, stream: str, leased: bool = True) -> list[Held]:
        """Held deliveries, by default unfinished ones; if there are none, consumers bring groups to this stream."""
        for _ in range(3):
            held = [
                delivery for delivery in self.acts.holding(stream) if delivery.entry.state == "leased" or not leased
            ]
            if held:
                return held
            before = STREAMS[: STREAMS.index(stream)]
            if not any(self.acts.model.streams[name].of("new") for name in (*before, stream)):
                self.some_new()
            for earlier in before:
                for reached in self.acts.read(earlier, "a", 2):
                    (self.acts.draw if earlier == TASKS else self.acts.judge)(reached)
            self.acts.read(stream, "a", 2)
        return []

    def some_kept(self, count: int = 1) -> list[str]:
        for _ in range(4 * count):
            if len(kept := self.acts.model.by_state("kept")) >= count:
                return kept
            for held in self.some_held(VERDICTS):
                self.acts.record([held], "kept")
        return self.acts.model.by_state("kept")

    def some_batch(self) -> list[Any]:
        """The next batch to be trained."""
        waiting = [batch for batch in self.acts.model.log if not batch.trained]
        if not waiting and (kept := self.some_kept()):
            self.acts.publish_batch(self.acts.samplers[-1], kept[:1])
        return [batch for batch in self.acts.model.log if not batch.trained][:1]

    def train_one(self) -> None:
        """One more rollout step, by the learner that owns the role."""
        for batch in self.some_batch():
            self.acts.announce(self.acts.learners[-1], batch, f"w{batch.step}")
            self.acts.commit()

    # The actions.

    @rule(number=st.integers(0, 10**6), data=st.data())
    def action(self, number: int, data: Any) -> None:
        """One of the actions. They are not rules: hypothesis omits half of the rules, and few runs would get far."""
        name = self.actions[number % len(self.actions)]
        note(f"{name}:")
        getattr(self, name)(data)

    def dispatch(self, data: Any) -> None:
        if len(self.acts.model.by_state("pending", "kept", "batched")) < OPEN_GROUPS:
            self.acts.dispatch(writer(data, self.acts.samplers), pick(data, (None, 1)), pick(data, TIMES))

    def deliver(self, data: Any) -> None:
        self.acts.read(pick(data, STREAMS), pick(data, NAMES), pick(data, (1, 2, 3)))

    def act(self, data: Any, held: Held) -> None:
        """A consumer processes a delivery that it holds, even if the lease lapsed meanwhile."""
        if held.stream == TASKS:
            gone = self.acts.model.groups[held.entry.group].gone  # rare, and to be published for, not only kept
            act = self.acts.publish if gone else pick(data, (self.acts.publish, self.acts.keep))
            act(held, pick(data, range(held.entry.wanted)))
        elif held.stream == SAMPLES:
            self.acts.judge(held)
        else:
            self.acts.record([held], pick(data, DECISIONS))

    def work(self, data: Any) -> None:
        if held := self.some_held(pick(data, STREAMS), pick(data, (True, False))):
            delivery = pick(data, held)
            for _ in range(pick(data, TIMES)):
                self.act(data, delivery)

    def publish_twice(self, data: Any) -> None:
        if held := self.some_held(TASKS):
            delivery = pick(data, held)
            index = pick(data, range(delivery.entry.wanted))
            self.acts.publish(delivery, index)
            self.acts.publish(delivery, index)

    def keep(self, data: Any) -> None:
        if held := self.some_held(TASKS, pick(data, (True, True, False))):
            delivery = pick(data, held)
            self.acts.keep(delivery, pick(data, range(delivery.entry.wanted)))

    def draw(self, data: Any) -> None:
        if held := self.some_held(TASKS, pick(data, (True, False))):
            self.acts.draw(pick(data, held))

    def record(self, data: Any) -> None:
        if held := self.some_held(VERDICTS):
            self.acts.record([pick(data, held)], pick(data, DECISIONS), pick(data, ("", "", "filtered")))

    def decide_again(self, data: Any) -> None:
        """A failover lost the decision on a group, and the sampler finds the group without one."""
        if not self.acts.model.undecided() and (held := self.some_held(VERDICTS)):
            self.acts.record(pick(data, by_group(held)), "kept", lost=True)
        if names := self.acts.model.undecided():
            self.acts.decide(writer(data, self.acts.samplers), pick(data, names), pick(data, DECISIONS))

    def proceed(self, data: Any) -> None:
        self.all_proceed(pick(data, DECISIONS))

    def all_proceed(self, decision: str) -> None:
        """All consumers process their streams without a fault."""
        for held in self.acts.read(TASKS, "b", 3):
            self.acts.draw(held)
        for samples in by_group(self.acts.read(SAMPLES, "b", 4)):
            self.acts.judge(*samples)
        for verdicts in by_group(self.acts.read(VERDICTS, "b", 4)):
            self.acts.record(verdicts, decision)

    def lapse(self, data: Any) -> None:
        if leases := self.acts.leases():
            self.acts.lapse(*pick(data, leases))

    def crash(self, data: Any) -> None:
        """All consumers of a name die, and their leases lapse."""
        name = pick(data, NAMES)
        self.acts.held = [held for held in self.acts.held if held.name != name]
        for stream, entry in self.acts.leases():
            if entry.owner == name:
                self.acts.lapse(stream, entry)

    def take_over(self, data: Any) -> None:
        """A consumer hangs for longer than its lease, and another one takes over; it may come back."""
        stream = pick(data, STREAMS)
        if not (held := self.some_held(stream)):
            return
        delivery = pick(data, held)
        self.acts.check()
        self.acts.lapse(stream, delivery.entry)
        self.acts.read(stream, "ab".replace(delivery.name, ""), 1)
        pick(data, (self.act, self.renew_one, self.dead_letter_one, self.nothing))(data, delivery)

    def renew_one(self, data: Any, held: Held) -> None:
        self.acts.renew(held)

    def dead_letter_one(self, data: Any, held: Held) -> None:
        self.acts.dead_letter(held, Cause.TOO_LONG)

    def nothing(self, data: Any, held: Held) -> None:
        pass

    def renew(self, data: Any) -> None:
        if held := self.some_held(pick(data, STREAMS), pick(data, (True, False))):
            self.acts.renew(pick(data, held))

    def dead_letter(self, data: Any) -> None:
        if held := self.some_held(pick(data, STREAMS), pick(data, (True, False))):
            delivery = pick(data, held)
            for _ in range(pick(data, TIMES)):
                self.acts.dead_letter(delivery, Cause.TOO_LONG)

    def end_dead_lettered(self, data: Any) -> None:
        self.acts.end_dead_lettered()

    def duplicate(self, data: Any) -> None:
        """Duplicates a message, acked or not."""
        stream, states = pick(data, STREAMS), pick(data, (("done",), ("new", "leased")))
        entries = self.acts.model.streams[stream].entries
        if places := [place for place, entry in enumerate(entries) if entry.state in states]:
            self.acts.duplicate(stream, pick(data, places))

    def release(self, data: Any) -> None:
        """Releases a group in any state; consumers that hold its messages continue."""
        working = [held.entry.group for held in self.some_held(pick(data, STREAMS))]
        known = {name: group.state for name, group in self.acts.model.groups.items() if not group.gone}
        states = [[name for name in known if known[name] == state] for state in sorted(set(known.values()))]
        if names := pick(data, (working, *states)):
            released = {pick(data, names), pick(data, names)}  # of two, the first has no hash any more
            for name in sorted(released):
                self.acts.release(name, pick(data, (Release.STALE, Release.DEAD)))
            self.acts.check()
            for held in [held for held in self.acts.held if held.entry.group in released]:
                self.act(data, held)

    def trim(self, data: Any) -> None:
        self.acts.trim(pick(data, STREAMS))

    def publish_batch(self, data: Any) -> None:
        """Publish a batch of kept groups; sometimes one of them is not kept."""
        names = self.some_kept()[: pick(data, (1, 2))]
        others = sorted(set(self.acts.model.groups) - set(self.acts.model.by_state("kept")))
        if others and pick(data, (False, False, True)):
            names = [*names, pick(data, others)]
        if names:
            self.acts.publish_batch(writer(data, self.acts.samplers), names)

    def train(self, data: Any) -> None:
        """A learner trains the next batch; it may die between its announcement and its commit."""
        for batch in self.some_batch():
            weights = f"w{batch.step}{pick(data, ('', '~'))}"
            self.acts.announce(writer(data, self.acts.learners), batch, weights)
            if self.acts.announced and pick(data, (True, False)):
                self.acts.commit()

    def commit_late(self, data: Any) -> None:
        """The learner that announced last commits, although another may have committed."""
        if self.acts.announced:
            self.acts.commit()

    def release_batch(self, data: Any) -> None:
        dies = pick(data, (True, False, False))
        if dies and all(batch.trained for batch in self.acts.model.log) and (kept := self.some_kept(2)):
            self.acts.publish_batch(self.acts.samplers[-1], kept[:2])
            self.train_one()
        if not any(batch.trained for batch in self.acts.model.log):
            self.train_one()
        if trained := [batch for batch in self.acts.model.log if batch.trained]:
            learner, batch = writer(data, self.acts.learners), trained[-1] if dies else pick(data, trained)
            self.acts.release_batch(learner, batch, pick(data, TIMES), dies)

    def archive(self, data: Any) -> None:
        """Archive some groups that wait for it; sometimes one that does not."""
        model = self.acts.model
        names = [*model.bare, *model.unarchived][: pick(data, (1, 3))]
        if others := sorted(set(model.groups) - set(names)):
            names += [pick(data, others)] if pick(data, (False, False, True)) else []
        if names:
            self.acts.archive(writer(data, self.acts.samplers), names, pick(data, TIMES))

    def strip(self, data: Any) -> None:
        bare = self.acts.model.bare
        self.acts.strip(pick(data, (1, 2)), bare[:1] if pick(data, (True, False)) else ())

    def replace(self, data: Any) -> None:
        pick(data, (self.acts.new_sampler, self.acts.new_learner))(lost=pick(data, (True, False)))

    def rewind(self, data: Any) -> None:
        """Rewinds to an older step, which may be trained only now; consumers still process what they hold."""
        for _ in range(pick(data, (0, 1, 2))):
            self.train_one()
        held, last = list(self.acts.held), self.acts.model.committed[1]
        if not last:
            return
        self.acts.rewind(pick(data, range(last)))
        self.acts.check()
        for delivery in held:
            pick(data, (self.act, self.renew_one, self.nothing))(data, delivery)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self.drain()

    def drain(self) -> None:
        """All processes die; new processes bring every group to its end."""
        acts = self.acts
        acts.new_sampler()
        acts.new_learner()
        for _ in range(40):
            acts.check()
            if not (acts.model.by_state("pending") or any(acts.model.streams[name].waiting for name in STREAMS)):
                break
            for stream, entry in acts.leases():
                acts.lapse(stream, entry)
            self.all_proceed("kept")
            for name in acts.model.undecided():
                acts.decide(acts.samplers[-1], name, "kept")
            acts.end_dead_lettered()
        else:
            raise AssertionError("groups that never end, or messages that are never acked")
        while kept := acts.model.by_state("kept"):
            acts.publish_batch(acts.samplers[-1], kept[:2])
        while any(not batch.trained for batch in acts.model.log):
            self.train_one()
        for batch in list(acts.model.log):
            acts.release_batch(acts.learners[-1], batch)
        acts.archive(acts.samplers[-1], [*acts.model.bare, *acts.model.unarchived])
        for stream in STREAMS:
            acts.trim(stream)
        acts.check()
        assert acts.model.counts()["pending"] == 0
        assert acts.seen.payloads == {}
        assert all(len(seen.entries) <= 1 for seen in acts.seen.streams.values())
