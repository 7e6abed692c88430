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
DECISIONS = ("kept", "kept", "more", "more", "filtered", "dead")
COMES_BACK = ("never", "renews", "works", "gives up")
TIMES = st.sampled_from([1, 2])
"""How often a call is made: the reply to the first one may have been lost."""
DATA = st.data()


def pick(data: Any, options: Any) -> Any:
    return data.draw(st.sampled_from(list(options)))


def writer(data: Any, owners: list[Any]) -> Any:
    """The owner of a role, or the one before."""
    return {"owner": owners[-1], "former owner": owners[0]}[pick(data, ["owner", "owner", "former owner"])]


class QueueMachine(RuleBasedStateMachine):
    """The processes of one run, which die, hang and come back as they please.

    What a rule needs is made ready by healthy processes first, so that no step is without effect.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.actors = Actors(server)

    @initialize()
    def begin(self) -> None:
        self.some_pending()

    @invariant()
    def holds(self) -> None:
        self.actors.check()

    # What is made ready.

    def some_pending(self) -> None:
        if not self.actors.model.by_state("pending"):
            self.actors.dispatch(self.actors.samplers[-1], None)

    def some_held(self, stream: str) -> list[Held]:
        """Deliveries in hand; when there are none, groups are brought that far."""
        acts = self.actors
        for _ in range(3):
            if held := acts.holding(stream):
                return held
            self.some_pending()
            for earlier in STREAMS[: STREAMS.index(stream)]:
                for one in acts.read(earlier, "a", 2):
                    (acts.draw if earlier == TASKS else acts.judge)(one)
            acts.read(stream, "a", 2)
        return acts.holding(stream)

    def some_kept(self) -> list[str]:
        for _ in range(3):
            if kept := self.actors.model.by_state("kept"):
                return kept
            for one in self.some_held(VERDICTS):
                self.actors.record(one, "kept")
            self.actors.held = [one for one in self.actors.held if one.stream != VERDICTS]
        return self.actors.model.by_state("kept")

    def some_batch(self, trained: bool) -> list[Any]:
        """The next batch to be trained; or those that were, and are not covered."""
        acts = self.actors
        if not [one for one in acts.model.log if trained or not one.trained] and (kept := self.some_kept()):
            acts.publish_batch(acts.samplers[-1], kept[:1])
        waiting = [one for one in acts.model.log if not one.trained][:1]
        if not trained:
            return waiting
        if not [one for one in acts.model.log if one.trained]:
            self.train_well()
        return [one for one in acts.model.log if one.trained]

    def train_well(self) -> None:
        """One more rollout step, by the learner that owns the role."""
        acts = self.actors
        for batch in self.some_batch(trained=False):
            acts.announce(acts.learners[-1], batch, f"w{batch.step}")
            acts.commit()

    # What happens.

    @rule(data=DATA, stop=st.sampled_from([None, 1]), times=TIMES)
    def dispatch(self, data: Any, stop: int | None, times: int) -> None:
        if len(self.actors.model.by_state("pending", "kept", "batched")) < OPEN_GROUPS:
            self.actors.dispatch(writer(data, self.actors.samplers), stop, times)

    @rule(stream=st.sampled_from(STREAMS), name=st.sampled_from(NAMES), count=st.integers(1, 3))
    def deliver(self, stream: str, name: str, count: int) -> None:
        self.actors.read(stream, name, count)

    def act(self, data: Any, one: Held) -> None:
        """What a consumer does with what it holds, whatever became of it meanwhile."""
        if one.stream == TASKS:
            self.actors.publish(one, data.draw(st.integers(0, one.entry.wanted - 1)))
        elif one.stream == SAMPLES:
            self.actors.judge(one)
        else:
            self.actors.record(one, pick(data, DECISIONS))

    @rule(data=DATA, stream=st.sampled_from(STREAMS), times=TIMES)
    def work(self, data: Any, stream: str, times: int) -> None:
        if held := self.some_held(stream):
            one = pick(data, held)
            for _ in range(times):
                self.act(data, one)

    @rule(data=DATA)
    def draw(self, data: Any) -> None:
        if held := self.some_held(TASKS):
            self.actors.draw(pick(data, held))

    @rule(data=DATA, decision=st.sampled_from(DECISIONS), early=st.sampled_from(["", "", "filtered"]))
    def record(self, data: Any, decision: str, early: str) -> None:
        if held := self.some_held(VERDICTS):
            self.actors.record(pick(data, held), decision, early)

    @rule(decision=st.sampled_from(DECISIONS))
    def go_on(self, decision: str) -> None:
        """Consumers that nothing happens to."""
        for one in self.actors.read(TASKS, "b", 3):
            self.actors.draw(one)
        for one in self.actors.read(SAMPLES, "b", 4):
            self.actors.judge(one)
        for one in self.actors.read(VERDICTS, "b", 4):
            self.actors.record(one, decision)

    @rule(data=DATA)
    def lapse(self, data: Any) -> None:
        if leases := self.actors.leases():
            self.actors.lapse(*pick(data, leases))

    @rule(name=st.sampled_from(NAMES))
    def crash(self, name: str) -> None:
        """All consumers of this name die, and time passes for what they held."""
        self.actors.held = [one for one in self.actors.held if one.name != name]
        for stream, entry in self.actors.leases():
            if entry.owner == name:
                self.actors.lapse(stream, entry)

    @rule(
        data=DATA, stream=st.sampled_from(STREAMS), comes_back=st.sampled_from(["never", "renews", "works", "gives up"])
    )
    def take_over(self, data: Any, stream: str, comes_back: str) -> None:
        """A consumer hangs for longer than its lease, and another one takes over."""
        held = [one for one in self.some_held(stream) if one.entry.state == "leased"]
        if not held:
            return
        one = pick(data, held)
        self.actors.check()
        self.actors.lapse(stream, one.entry)
        self.actors.read(stream, "ab".replace(one.name, ""), 1)
        if comes_back == "renews":
            self.actors.renew(one)
        elif comes_back == "works":
            self.act(data, one)
        elif comes_back == "gives up":
            self.actors.give_up(one, Cause.TOO_LONG)

    @rule(data=DATA)
    def renew(self, data: Any) -> None:
        if self.actors.held:
            self.actors.renew(pick(data, self.actors.held))

    @rule(data=DATA, stream=st.sampled_from(STREAMS))
    def give_up(self, data: Any, stream: str) -> None:
        if held := self.some_held(stream):
            self.actors.give_up(pick(data, held), Cause.TOO_LONG)

    @rule()
    def bury_dead(self) -> None:
        self.actors.bury_dead()

    @rule(data=DATA)
    def redrive(self, data: Any) -> None:
        if not self.actors.model.letters and (held := self.some_held(TASKS)):
            self.actors.give_up(pick(data, held), Cause.TOO_LONG)
            self.actors.bury_dead()
        if self.actors.model.letters:
            self.actors.redrive(pick(data, self.actors.model.letters))

    @rule(data=DATA, release=st.sampled_from([Release.STALE, Release.DEAD]))
    def release(self, data: Any, release: Release) -> None:
        known = [name for name, one in self.actors.model.groups.items() if not one.gone]
        if known:
            self.actors.release(pick(data, known), release)

    @rule(stream=st.sampled_from(STREAMS))
    def trim(self, stream: str) -> None:
        self.actors.trim(stream)

    @rule(data=DATA, size=st.integers(1, 2), spoilt=st.sampled_from([False] * 4 + [True]))
    def publish_batch(self, data: Any, size: int, spoilt: bool) -> None:
        names = self.some_kept()[:size]
        others = sorted(set(self.actors.model.groups) - set(self.actors.model.by_state("kept")))
        if spoilt and others:
            names = [*names, pick(data, others)]
        if names:
            self.actors.publish_batch(writer(data, self.actors.samplers), names)

    @rule(data=DATA, rounded=st.sampled_from(["", "", "~"]), dies=st.sampled_from([False, False, True]))
    def train(self, data: Any, rounded: str, dies: bool) -> None:
        """A learner trains the next batch; it may die between its broadcast and its commit."""
        if batches := self.some_batch(trained=False):
            [batch] = batches
            self.actors.announce(writer(data, self.actors.learners), batch, f"w{batch.step}{rounded}")
            if not dies and self.actors.announced:
                self.actors.commit()

    @rule()
    def commit_late(self) -> None:
        """Whoever announced last commits, although another may have done so."""
        if self.actors.announced:
            self.actors.commit()

    @rule(data=DATA, times=st.sampled_from([1, 1, 2]))
    def cover(self, data: Any, times: int) -> None:
        if trained := self.some_batch(trained=True):
            self.actors.cover(writer(data, self.actors.learners), pick(data, trained), times)

    @rule()
    def new_sampler(self) -> None:
        self.actors.new_sampler()

    @rule()
    def new_learner(self) -> None:
        self.actors.new_learner()

    @rule(data=DATA, steps=st.integers(0, 2))
    def rewind(self, data: Any, steps: int) -> None:
        """Back to an older step, `steps` of them trained only now; whoever holds something goes on with it."""
        for _ in range(steps):
            self.train_well()
        if last := self.actors.model.committed[1]:
            held = list(self.actors.held)
            self.actors.rewind(data.draw(st.integers(0, last - 1)))
            self.actors.check()
            for one in held:
                pick(data, [self.act, lambda _, one: self.actors.renew(one), lambda *_: None])(data, one)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self.drain()

    def drain(self) -> None:
        """Everybody dies; fresh processes bring every group to its end."""
        acts = self.actors
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
