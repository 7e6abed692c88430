"""Owns the interleavings of the queue's test: what happens next, to whom, and what is made ready for it.

Must not touch Redis or the model but through the actors.
"""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.contracts import Cause, Release
from tests.services.queue_actors import NAMES, Actors, Held, Server
from tests.services.queue_model import SAMPLES, STREAMS, TASKS, VERDICTS

OPEN_GROUPS = 6
DATA = st.data()
STREAM = st.sampled_from(STREAMS)
NAME = st.sampled_from(NAMES)
DECISION = st.sampled_from(["kept", "more", "filtered", "dead"])
COMES_BACK = st.sampled_from(["never", "renews", "works", "gives up"])
TIMES = st.sampled_from([1, 2])
"""How often a call is made: the reply to the first one may have been lost."""


def pick(data: Any, options: Any) -> Any:
    """One of them; each as likely, however many were drawn before."""
    found = list(options)
    return found[data.draw(st.integers(0, 10**6)) % len(found)]


def writer(data: Any, owners: list[Any]) -> Any:
    """The owner of a role, or the one before."""
    return owners[pick(data, [-1, -1, 0])]


class QueueMachine(RuleBasedStateMachine):
    """The processes of one run, which die, hang and come back as they please.

    What a rule needs is made ready by healthy processes first, so that no step is without effect.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.acts = Actors(server)
        self._dispatched = 0

    @initialize()
    def begin(self) -> None:
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
        """Deliveries in hand, by default such as nobody was done with; if there are none, groups are brought so far."""
        for _ in range(3):
            held = [one for one in self.acts.holding(stream) if one.entry.state == "leased" or not leased]
            if held:
                return held
            before = STREAMS[: STREAMS.index(stream)]
            if not any(self.acts.model.streams[name].of("new") for name in (*before, stream)):
                self.some_new()
            for earlier in before:
                for one in self.acts.read(earlier, "a", 2):
                    (self.acts.draw if earlier == TASKS else self.acts.judge)(one)
            self.acts.read(stream, "a", 2)
        return []

    def some_kept(self) -> list[str]:
        for _ in range(4):
            if kept := self.acts.model.by_state("kept"):
                return kept
            for one in self.some_held(VERDICTS):
                self.acts.record(one, "kept")
        return []

    def some_batch(self) -> list[Any]:
        """The next batch to be trained."""
        waiting = [one for one in self.acts.model.log if not one.trained]
        if not waiting and (kept := self.some_kept()):
            self.acts.publish_batch(self.acts.samplers[-1], kept[:1])
        return [one for one in self.acts.model.log if not one.trained][:1]

    def train_well(self) -> None:
        """One more rollout step, by the learner that owns the role."""
        for batch in self.some_batch():
            self.acts.announce(self.acts.learners[-1], batch, f"w{batch.step}")
            self.acts.commit()

    # What happens.

    @rule(data=DATA, stop=st.sampled_from([None, 1]), times=TIMES)
    def dispatch(self, data: Any, stop: int | None, times: int) -> None:
        if len(self.acts.model.by_state("pending", "kept", "batched")) < OPEN_GROUPS:
            self.acts.dispatch(writer(data, self.acts.samplers), stop, times)

    @rule(stream=STREAM, name=NAME, count=st.integers(1, 3))
    def deliver(self, stream: str, name: str, count: int) -> None:
        self.acts.read(stream, name, count)

    def act(self, data: Any, one: Held) -> None:
        """What a consumer does with what it holds, whatever became of it meanwhile."""
        if one.stream == TASKS:
            self.acts.publish(one, pick(data, range(one.entry.wanted)))
        elif one.stream == SAMPLES:
            self.acts.judge(one)
        else:
            self.acts.record(one, data.draw(DECISION))

    @rule(data=DATA, stream=STREAM, times=TIMES, leased=st.booleans())
    def work(self, data: Any, stream: str, times: int, leased: bool) -> None:
        if held := self.some_held(stream, leased):
            one = pick(data, held)
            for _ in range(times):
                self.act(data, one)

    @rule(data=DATA)
    def publish_twice(self, data: Any) -> None:
        if held := self.some_held(TASKS):
            one = pick(data, held)
            index = pick(data, range(one.entry.wanted))
            self.acts.publish(one, index)
            self.acts.publish(one, index)

    @rule(data=DATA, leased=st.booleans())
    def draw(self, data: Any, leased: bool) -> None:
        if held := self.some_held(TASKS, leased):
            self.acts.draw(pick(data, held))

    @rule(data=DATA, decision=DECISION, early=st.sampled_from(["", "", "filtered"]))
    def record(self, data: Any, decision: str, early: str) -> None:
        if held := self.some_held(VERDICTS):
            self.acts.record(pick(data, held), decision, early)

    @rule(decision=DECISION)
    def go_on(self, decision: str) -> None:
        """Consumers that nothing happens to."""
        for one in self.acts.read(TASKS, "b", 3):
            self.acts.draw(one)
        for one in self.acts.read(SAMPLES, "b", 4):
            self.acts.judge(one)
        for one in self.acts.read(VERDICTS, "b", 4):
            self.acts.record(one, decision)

    @rule(data=DATA)
    def lapse(self, data: Any) -> None:
        if leases := self.acts.leases():
            self.acts.lapse(*pick(data, leases))

    @rule(name=NAME)
    def crash(self, name: str) -> None:
        """All consumers of this name die, and time passes for what they held."""
        self.acts.held = [one for one in self.acts.held if one.name != name]
        for stream, entry in self.acts.leases():
            if entry.owner == name:
                self.acts.lapse(stream, entry)

    @rule(data=DATA, stream=STREAM, comes_back=COMES_BACK)
    def take_over(self, data: Any, stream: str, comes_back: str) -> None:
        """A consumer hangs for longer than its lease, and another one takes over."""
        if not (held := self.some_held(stream)):
            return
        one = pick(data, held)
        self.acts.check()
        self.acts.lapse(stream, one.entry)
        self.acts.read(stream, "ab".replace(one.name, ""), 1)
        if comes_back == "renews":
            self.acts.renew(one)
        elif comes_back == "works":
            self.act(data, one)
        elif comes_back == "gives up":
            self.acts.give_up(one, Cause.TOO_LONG)

    @rule(data=DATA)
    def renew(self, data: Any) -> None:
        if self.acts.held:
            self.acts.renew(pick(data, self.acts.held))

    @rule(data=DATA, stream=STREAM, leased=st.booleans(), times=TIMES)
    def give_up(self, data: Any, stream: str, leased: bool, times: int) -> None:
        if held := self.some_held(stream, leased):
            one = pick(data, held)
            for _ in range(times):
                self.acts.give_up(one, Cause.TOO_LONG)

    @rule()
    def bury_dead(self) -> None:
        self.acts.bury_dead()

    @rule(data=DATA, times=TIMES)
    def redrive(self, data: Any, times: int) -> None:
        if not self.acts.model.letters and (held := self.some_held(TASKS)):
            self.acts.give_up(pick(data, held), Cause.TOO_LONG)
            self.acts.bury_dead()
        if self.acts.model.letters:
            letter = pick(data, self.acts.model.letters)
            for _ in range(times):
                self.acts.redrive(letter)

    @rule(data=DATA, release=st.sampled_from([Release.STALE, Release.DEAD]))
    def release(self, data: Any, release: Release) -> None:
        known = [name for name, one in self.acts.model.groups.items() if not one.gone]
        if known:
            self.acts.release(pick(data, known), release)

    @rule(stream=STREAM)
    def trim(self, stream: str) -> None:
        self.acts.trim(stream)

    @rule(data=DATA, size=st.integers(1, 2), spoilt=st.sampled_from([False, False, True]))
    def publish_batch(self, data: Any, size: int, spoilt: bool) -> None:
        names = self.some_kept()[:size]
        others = sorted(set(self.acts.model.groups) - set(self.acts.model.by_state("kept")))
        if spoilt and others:
            names = [*names, pick(data, others)]
        if names:
            self.acts.publish_batch(writer(data, self.acts.samplers), names)

    @rule(data=DATA, rounded=st.sampled_from(["", "~"]), dies=st.booleans())
    def train(self, data: Any, rounded: str, dies: bool) -> None:
        """A learner trains the next batch; it may die between its broadcast and its commit."""
        for batch in self.some_batch():
            self.acts.announce(writer(data, self.acts.learners), batch, f"w{batch.step}{rounded}")
            if not dies and self.acts.announced:
                self.acts.commit()

    @rule()
    def commit_late(self) -> None:
        """Whoever announced last commits, although another may have done so."""
        if self.acts.announced:
            self.acts.commit()

    @rule(data=DATA, times=TIMES)
    def cover(self, data: Any, times: int) -> None:
        if not any(one.trained for one in self.acts.model.log):
            self.train_well()
        if trained := [one for one in self.acts.model.log if one.trained]:
            self.acts.cover(writer(data, self.acts.learners), pick(data, trained), times)

    @rule(sampler=st.booleans())
    def replace(self, sampler: bool) -> None:
        (self.acts.new_sampler if sampler else self.acts.new_learner)()

    @rule(data=DATA, steps=st.integers(0, 2))
    def rewind(self, data: Any, steps: int) -> None:
        """Back to an older step, `steps` of them trained only now; whoever holds something goes on with it."""
        for _ in range(steps):
            self.train_well()
        held, last = list(self.acts.held), self.acts.model.committed[1]
        if not last:
            return
        self.acts.rewind(pick(data, range(last)))
        self.acts.check()
        for one in held:
            pick(data, [self.act, lambda _, one: self.acts.renew(one), lambda *_: None])(data, one)

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
            self.go_on("kept")
            acts.bury_dead()
        else:
            raise AssertionError("groups that never end, or messages that nobody is done with")
        while kept := acts.model.by_state("kept"):
            acts.publish_batch(acts.samplers[-1], kept[:2])
        while any(not one.trained for one in acts.model.log):
            self.train_well()
        for batch in list(acts.model.log):
            acts.cover(acts.learners[-1], batch)
        for stream in STREAMS:
            acts.trim(stream)
        acts.check()
        assert acts.model.counts()["pending"] == 0
        assert acts.seen.payloads == {}
        assert all(len(seen.entries) <= 1 for seen in acts.seen.streams.values())
