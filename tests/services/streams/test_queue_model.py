"""Any interleaving of the services' actions on a run's groups keeps the queue's guarantees, on a real server.

The test detects each fault of the table in the library of functions. Most examples and faults are slow;
the quick ones detect the same kinds of error, less thoroughly.
"""

import asyncio
import logging

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from redis import Redis
from redis.exceptions import ResponseError

from services.streams.connection import functions as function_library
from services.streams.connection.client import connect
from services.streams.connection.functions import FencedError, library
from services.streams.state import policy_history
from services.streams.state.group_state import RejectedMessageError
from services.streams.state.policy_history import BatchReclaimedError, StateLostError
from tests.harness.servers.redis_servers import embedded_server
from tests.services.streams.queue_actors import Server
from tests.services.streams.queue_faults import FAULTS
from tests.services.streams.queue_machine import QueueMachine

DETECTED = (AssertionError, FencedError, ResponseError, BatchReclaimedError, RejectedMessageError, StateLostError)
"""What a planted fault may end with: a check of the test, or one of the platform."""

WHOLE = settings(
    max_examples=160,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
UNTIL_DETECTED = settings(WHOLE, phases=[Phase.generate], print_blob=False, report_multiple_bugs=False)


SITUATIONS = """
    groups archived; groups archived again; groups stripped; a group to be stripped had been;
    groups archived after they were stripped;
    take_archived by a previous owner; rewound over a group that waits for the archive;
    a batch released; a batch not released twice; a batch published; a batch rejected; a group ended by a letter;
    a release of a batch cut off;
    a group with missing samples; a late renewal; a lease taken over;
    a renewal in an abandoned history; a sample of a group that has ended;
    a sample under a lease that was taken over; a sample under a lease of an abandoned history; a second sample;
    several samples at once; several verdicts at once; several verdicts recorded at once;
    a second verdict; a decision again; a delivery that is not counted; a partial of a group that has ended;
    a partial under a lease of an abandoned history;
    a step committed; a step committed again after a rewind; a step not committed twice;
    a verdict for a group that has ended; a verdict for a group that is kept or batched;
    a verdict of an abandoned history; a verdict on a sample of a group that has ended; announce by a previous owner;
    commit_step by a previous owner; release_batch by a previous owner; decided: dead; decided: filtered; decided: kept;
    decided: more; dispatch by a previous owner; dead-lettered after too many deliveries;
    a duplicate of task; a duplicate of sample;
    a duplicate of verdict; not dead-lettered by a previous consumer; missing_samples for a group without a hash;
    publish_batch by a previous owner; publish_samples for a group without a hash;
    publish_verdicts for a group without a hash; record_verdicts by a previous owner;
    record_verdicts for a group without a hash; release of a batched group; release of a dead group;
    release of a kept group; release of a pending group; release of a trained group; rewound over a released step;
    rewound to a step that was not released; trimmed behind a lease; trimmed up to a lease;
    trimmed up to the last delivery; two owners of one epoch
"""
"""The situations that must occur: otherwise the test might pass because nothing happened."""
FEW, RARE = 40, 8
"""A small number of examples, and how many situations they may miss; the order of sets decides which."""
QUICK = {
    "a batch leaves its groups kept",
    "a batched group is released",
    "a released batch is not archived",
    "an archived group keeps its payloads",
    "a rewind leaves groups to be archived",
    "a previous owner writes",
    "a group is dispatched twice",
    "a late renewal steals the lease",
    "a message is dropped without a dead letter",
    "a late replica keeps its pieces",
    "a recorded verdict is not acked",
    "a rewind leaves verdicts",
    "a task is never acked",
    "a trained group stays pending",
    "a trained group's tokens stay in flight",
    "a verdict of an abandoned history counts",
    "equal epochs",
    "trimming drops undelivered entries",
}
"""One quickly detected fault of almost every function; the others are slow."""


@pytest.fixture(scope="module")
def server():
    with embedded_server() as own, asyncio.Runner() as runner:
        url = f"redis://127.0.0.1:{own.port}/0"
        client, view = runner.run(connect(url)), Redis.from_url(url, protocol=2, socket_timeout=60)
        yield Server(runner, client, view)
        view.close()
        runner.run(client.aclose())


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "services.streams")


@pytest.fixture
def give_code(monkeypatch):
    """Puts faults into the library. A batch is released with one call per group."""
    original = function_library._sources()

    def give(*faults):
        functions = {"shared": original[0], **original[1]}
        for name, old, new, count in faults:
            assert functions[name].count(old) == count, f"{name}: expected {count} x {old}"
            functions[name] = functions[name].replace(old, new)
        changed = functions.pop("shared"), functions
        monkeypatch.setattr(policy_history, "GROUPS_PER_CALL", 1)
        monkeypatch.setattr(function_library, "_sources", lambda: changed)
        library.cache_clear()

    yield give
    monkeypatch.undo()
    library.cache_clear()


@pytest.mark.parametrize(
    ("thoroughness", "examples", "may_miss"),
    [
        # A failure is reported without shrinking, which takes minutes; the slow test shrinks.
        (settings(WHOLE, phases=set(Phase) - {Phase.shrink, Phase.explain}), FEW, RARE),
        # Which situations fewer examples meet depends on the order of sets.
        pytest.param(WHOLE, 4 * WHOLE.max_examples, 0, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
    ids=["few", "all"],
)
def test_any_interleaving_keeps_the_guarantees(server, give_code, thoroughness, examples, may_miss):
    give_code()
    server.met.clear()
    run_state_machine_as_test(lambda: QueueMachine(server), settings=settings(thoroughness, max_examples=examples))
    situations = {" ".join(situation.split()) for situation in SITUATIONS.split(";")}
    never_met = {name for name in situations if not server.met[name]}
    assert len(never_met) <= may_miss, never_met


def test_the_quick_faults_are_in_the_table():
    assert set(FAULTS) >= QUICK


def test_each_fault_of_the_table_can_be_put_in(give_code):
    for faults in FAULTS.values():
        give_code(faults)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_is_detected(server, give_code, name):
    give_code(FAULTS[name])
    with pytest.raises(DETECTED):
        run_state_machine_as_test(lambda: QueueMachine(server), settings=UNTIL_DETECTED)
