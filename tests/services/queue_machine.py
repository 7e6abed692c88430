"""Owns the interleavings of the queue's test: every call that services make of a run's groups, in any order.

Must not decide what is right; the model says what a call must do, the view what must hold after it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.contracts import Cause, Lane, Release
from services.streams.dead import NotRedrivableError, letters, redrive
from services.streams.effects import Effects, RefusedMessageError, missing_samples
from services.streams.history import History, Reopened, rewind
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.leases import Delivery, trim
from services.streams.library import FencedError
from tests.services.driven import BODY, STATE, DrivenRun, batch_of, record_of, sample_of, snapshot_at, task_of, verdict_on
from tests.services.queue_model import MAX_DELIVERIES, SAMPLES, STREAMS, TASKS, VERDICTS, Entry, LoggedBatch, Model
from tests.services.queue_view import READERS, View

RUN = "model"
G = 2
"""Samples of a group; a screen draws one."""
NAMES = ("a", "b")
"""Consumers of each kind."""
LEASE_S = 3600.0


@dataclass(frozen=True)
class Held:
    """A delivery in the hands of a consumer, alive or taken for dead. `owner`: the sampler's writes, as of then."""

    stream: str
    name: str
    delivery: Delivery[Any]
    entry: Entry
    owner: Effects


@dataclass(frozen=True)
class Server:
    """What the machines of one test share: a server of their own, a loop, and two clients of it."""

    runner: asyncio.Runner
    client: Any
    view: Any


def one_of(what: str):
    """Any element of the machine's attribute or property."""
    return st.runner().flatmap(lambda machine: st.sampled_from(list(getattr(machine, what))))


def some(what: str):
    """A rule that needs elements of the machine's attribute or property."""
    return precondition(lambda machine: bool(getattr(machine, what)))


class QueueMachine(RuleBasedStateMachine):
    """Samplers, rollouts, verifiers and learners of one run, which die, hang and come back as they please."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        server.view.flushdb()
        self.keys = RunKeys(RUN)
        self.model = Model()
        self.seen = View(server.view, RUN)
        self.held: list[Held] = []
        self.nonce = 0.0
        self.next_group = 0

    def do(self, call: Any) -> Any:
        return self.server.runner.run(call)
