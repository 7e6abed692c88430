"""Batches that are published ahead of the policy: each is as stale as the step that will train it makes it."""

import pytest

from services.contracts import Batch, CommittedPolicy, Lane, Outcome
from services.sampler.data import load_splits
from services.sampler.queue.publication import BatchPublisher
from services.sampler.queue.state import QueueState
from services.streams.delivery.snapshots import read_snapshot
from services.streams.keys import RunKeys
from services.streams.state.events import read_all
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import GroupTransitions
from tests.harness.small_run import recipe_document, service_context
from tests.services.sampler.judged import group_of

C, W = Outcome.CORRECT, Outcome.WRONG
LIMITS = {"groups_per_step": 1, "max_staleness": 1, "rollout_steps": 9, "max_inflight_groups": 8}


async def keep(redis, keys, state, **versions):
    """Keep a group of two responses for each name, in this order; `versions`: their oldest ones."""
    for order, (name, oldest) in enumerate(versions.items(), start=1):
        group = group_of(*((outcome, 4, False, version) for outcome, version in zip((C, W), oldest, strict=True)))
        group.kept_order = order
        for index, verdict in group.verdicts.items():
            facts = verdict.facts.model_copy(update={"payload": keys.payload(name, index)})
            group.verdicts[index] = verdict.model_copy(update={"group": name, "facts": facts})
        await redis.hset(keys.group(name), mapping={"state": "kept", "samples": 2})
        await redis.sadd(keys.lane(Lane.TRAIN).pending, name)
        state.table.restore_kept(name, group)
        state.window.judged(group, "kept")


@pytest.fixture
async def queue(redis, run_id):
    """(the queue's state, its publisher) of a run with a group per step that may be one step ahead of the policy."""
    document = recipe_document("/none", algorithm={"group_size": 2}, learner={"mini_batch_groups": 1}, limits=LIMITS)
    async with service_context(redis, run_id, document, "sampler") as context:
        transitions = await GroupTransitions.fenced(redis, RunKeys(run_id), "sampler")
        state = await QueueState.load(context, transitions, load_splits(context.record.recipe.data).train)
        yield state, BatchPublisher(state)


async def published(redis, keys):
    batches = await read_all(redis, keys, keys.batches, Batch)
    return [
        (batch.step, batch.version, [(each.group, each.staleness) for each in batch.groups]) for _, batch in batches
    ]


async def test_a_batch_published_ahead_counts_the_steps_before_it(redis, run_id, queue):
    state, publisher = queue
    keys = RunKeys(run_id)
    await keep(redis, keys, state, a=(0, 0), b=(0, 0), c=(0, 0))
    await publisher.publish_due(CommittedPolicy(version=0, step=0, version_steps='{"0": 0}'))
    assert await published(redis, keys) == [(1, 0, [("a", 0)]), (2, 1, [("b", 1)])], "two steps ahead is too far"
    assert list(state.table.kept) == ["c"]
    # Step 1 is trained, step 2 is not: step 3 will train what is two steps old by then.
    state.table.trained(1)
    await publisher.publish_due(CommittedPolicy(version=1, step=1, version_steps='{"0": 0, "1": 1}'))
    assert len(await published(redis, keys)) == 2
    assert not state.table.kept
    assert (await group_counts(redis, keys)).stale == 1


async def test_a_group_is_as_stale_as_its_oldest_response(redis, run_id, queue):
    state, publisher = queue
    keys = RunKeys(run_id)
    state.next_step = 3
    await keep(redis, keys, state, new=(2, 2), mixed=(2, 0), old=(1, 1))
    await publisher.publish_due(CommittedPolicy(version=2, step=2, version_steps='{"0": 0, "1": 1, "2": 2}'))
    assert await published(redis, keys) == [(3, 2, [("old", 1)]), (4, 3, [("new", 1)])], "the oldest first"
    assert (await group_counts(redis, keys)).stale == 1, "one response of `mixed` is two steps old"
    snapshots = [await read_snapshot(redis, keys.snapshot(step)) for step in (3, 4)]
    assert [snapshot.queue for snapshot in snapshots] == [("new",), ()], "without the groups of the batch"
