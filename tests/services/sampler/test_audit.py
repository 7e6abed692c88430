"""The audit on a real server: orphans are found exactly, whatever stage their messages are in."""

from types import SimpleNamespace

import pytest

from services.contracts import Lane
from services.sampler.groups import Group
from services.sampler.watches.audit import Audit, Differences
from services.streams.keys import RunKeys
from tests.services.driven import BODY, DrivenRun, publish_sample, publish_verdict, sample_of, task_of, verdict_on


@pytest.fixture
async def run(redis, run_id):
    return await DrivenRun.open(redis, RunKeys(run_id))


@pytest.fixture
def audit(run):
    return Audit(SimpleNamespace(redis=run.redis, keys=run.keys), Lane.TRAIN)


async def looks(audit, generating, kept=None, times=3):
    return [await audit.look(generating, kept or {}) for _ in range(times)]


async def staged(run, stage):
    """A group with two samples whose first one has reached `stage`; returns the stream of its message."""
    delivery = await run.dispatched("g0")
    if stage == "task":
        return run.streams.tasks
    sample = sample_of(run.keys, "g0", 0)
    await publish_sample(run.transitions, Lane.TRAIN, delivery.lease, 2, sample, BODY)
    if stage == "sample":
        return run.streams.samples
    [held] = await run.verifier().read(1, 1)
    await publish_verdict(run.transitions, Lane.TRAIN, held.lease, verdict_on(sample))
    return run.streams.verdicts


@pytest.mark.parametrize("stage", ["task", "sample", "verdict"])
async def test_a_group_whose_message_is_gone_is_orphaned(run, audit, stage):
    stream = await staged(run, stage)
    generating = {"g0": Group(task_of("g0"))}
    assert await looks(audit, generating) == [Differences()] * 3, "every message exists"
    await run.redis.xtrim(stream, maxlen=0)
    found = await looks(audit, generating, times=2)
    assert [difference.orphaned for difference in found] == [[], ["g0"]], "the second look confirms the first"


async def test_a_group_in_progress_is_no_orphan(run, audit):
    """Its task is acked and trimmed, but its samples and verdicts have followed."""
    await run.judged("g0")
    await run.redis.xtrim(run.streams.tasks, maxlen=0)
    await run.redis.xtrim(run.streams.samples, maxlen=0)
    assert await looks(audit, {"g0": Group(task_of("g0"))}, times=4) == [Differences()] * 4


async def test_a_group_in_another_state_is_reported(run, audit):
    await run.dispatched("g0")
    await run.decided("g1", "kept")
    generating = {"g0": Group(task_of("g0")), "g1": Group(task_of("g1")), "g2": Group(task_of("g2"))}
    [found] = await looks(audit, generating, times=1)
    assert found.changed == ["g1", "g2"]
    [found] = await looks(audit, {}, {"g0": Group(task_of("g0")), "g1": Group(task_of("g1"))}, times=1)
    assert found.changed == ["g0"]


async def test_a_look_costs_the_same_whatever_the_backlog(run, audit, monkeypatch):
    monkeypatch.setattr("services.sampler.watches.audit.GROUPS_PER_LOOK", 10)
    groups = {f"g{number:03d}": Group(task_of(f"g{number:03d}")) for number in range(25)}
    await run.sampler.dispatch(Lane.TRAIN, [group.task for group in groups.values()], None)
    seen = []
    monkeypatch.setattr(
        "services.sampler.watches.audit.read_fields",
        lambda redis, keys, names, fields: seen.append(names) or _pending(names),
    )
    await looks(audit, groups, times=3)
    assert [len(names) for names in seen] == [10, 10, 5]
    assert {name for names in seen for name in names} == set(groups)


async def _pending(names):
    return [[b"pending"] for _ in names]
