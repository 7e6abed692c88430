"""A run's record changes in one step: fenced, repeatable, and while Redis is full."""

import asyncio
import hashlib
import json
import time

import pytest

from services.contracts import RunState, Transition
from services.settings import parse_recipe
from services.streams.connection.functions import FencedError, RedisFullError, call
from services.streams.keys import ACTIVE_RUNS, INDEX, RUNS, WORDS, RunKeys
from services.streams.runs.lists import RunFilter, RunLists
from services.streams.state.events import EventLog
from services.streams.state.ownership import become_owner
from services.streams.state.rewards.reward_files import RewardFileError, read_reward_files
from services.streams.state.runs import (
    EndedRunError,
    NoCheckpointError,
    ResumeChanges,
    RunRecords,
    RunStateError,
    UnknownRunError,
    UsedRunError,
)
from tests.harness.small_run import recipe_document

RECIPE = parse_recipe(recipe_document("/model"))


@pytest.fixture
async def records(redis, run_id):
    """The records, with one queued run."""
    records = RunRecords(redis)
    await records.create(run_id, RECIPE)
    return records


async def test_transitions_are_a_history_with_times_and_reasons(records, run_id):
    began = time.time()
    for state in (RunState.STARTING, RunState.RUNNING, RunState.PAUSED, RunState.RUNNING, RunState.FAILED):
        record = await records.transition(run_id, state, f'because "{state}" \\ [é]]')
    assert [change.state.value for change in record.history] == [
        "queued",
        "starting",
        "running",
        "paused",
        "running",
        "failed",
    ]
    assert record.reason == 'because "failed" \\ [é]]'
    assert began <= record.history[1].at <= record.history[-1].at <= time.time()
    with pytest.raises(EndedRunError, match="has ended: it is failed"):
        await records.transition(run_id, RunState.RUNNING, "never")
    assert (await records.get(run_id)).state is RunState.FAILED


async def test_concurrent_changes_are_all_kept(records, run_id):
    changes = [records.transition(run_id, RunState.RUNNING, f"change {number}") for number in range(40)]
    await asyncio.gather(*changes, *(records.scale(run_id, 1 + number) for number in range(40)))
    record = await records.get(run_id)
    assert sorted(change.reason for change in record.history[1:]) == sorted(f"change {number}" for number in range(40))


async def test_a_previous_controller_is_fenced(redis, records, run_id):
    keys = RunKeys(run_id)
    previous, owner = [await become_owner(redis, keys, "controller") for _ in range(2)]
    with pytest.raises(FencedError, match="newer owner"):
        await records.transition(run_id, RunState.FAILED, "a previous controller's", fence=previous)
    with pytest.raises(FencedError):
        await records.set_summary(run_id, {"run": run_id}, fence=previous)
    with pytest.raises(FencedError):
        await records.set_paths(run_id, fence=previous, model_path="/previous")
    assert (await records.transition(run_id, RunState.STARTING, "placing", fence=owner)).state is RunState.STARTING
    await records.set_paths(run_id, fence=owner, model_path="/owner")
    await records.set_summary(run_id, {"steps": 3}, fence=owner)
    record = await records.get(run_id)
    assert (record.model_path, record.summary) == ("/owner", {"steps": 3})
    assert (await records.request_cancel(run_id)).cancel_requested, "users are not fenced"


async def test_a_change_whose_reply_was_lost_can_be_repeated(redis, records, run_id):
    keys = RunKeys(run_id)
    ended = Transition(state=RunState.FAILED, at=time.time(), reason="broken").model_dump_json()
    for _ in range(3):
        reply = await call(
            redis,
            "change_record",
            record_key=keys.record,
            epoch_key=keys.epoch("controller"),
            deleted_keys=[],
            fence="",
            run=run_id,
            states=",queued,",
            closings=",,",
            revision="",
            transition=ended,
            counted_field="resumptions",
            deleted_field_list=[],
            set_field_list=["state", "failed"],
            **INDEX,
            **WORDS,
        )
        assert reply == 1
    record = await records.get(run_id)
    assert ([change.state.value for change in record.history], record.resumptions) == (["queued", "failed"], 1)


async def test_creation_is_whole_and_can_be_repeated(redis, records, run_id):
    with pytest.raises(UsedRunError, match="in use"):
        await records.create(run_id, RECIPE)
    created = (await redis.hget(RunKeys(run_id).record, "created_at")).decode()
    keys = RunKeys(run_id)
    again = {
        "record_key": keys.record,
        "files_key": keys.reward_files,
        "request_key": f"{keys.record}:no-request",
        **INDEX,
        **WORDS,
    }
    again |= {"request": "", "request_kept_s": 1}
    lists = {"field_list": ["state", "lost reply"], "file_list": ["./rewards.py", "lost reply"]}
    assert await call(redis, "create_record", **again, run=run_id, created_at=created, **lists) == 1
    assert (await records.get(run_id)).state is RunState.QUEUED
    assert not await redis.exists(keys.reward_files)
    await redis.zadd(RUNS, {f"{run_id}-announced": 1.0})
    assert run_id in await listed(redis)


async def listed(redis):
    return ids((await RunLists(redis).page(RunFilter(), 1000)).records)


def ids(found):
    return [record.id for record in found]


async def test_the_index_of_active_runs_follows_each_change(redis, records, run_id):
    assert run_id in ids(await records.active())
    await records.transition(run_id, RunState.FAILED, "test")
    assert run_id not in ids(await records.active())
    assert not await redis.sismember(ACTIVE_RUNS, run_id)
    await records.resume(run_id)
    assert run_id in ids(await records.active())
    await records.set_summary(run_id, {"steps": 1})
    assert run_id in ids(await records.active())


async def test_what_does_not_belong_into_the_index_is_removed(redis, records, run_id):
    await records.transition(run_id, RunState.FAILED, "test")
    gone = f"{run_id}-gone"
    await redis.sadd(ACTIVE_RUNS, run_id, gone)
    assert not {run_id, gone} & {*ids(await records.active())}
    assert not {run_id.encode(), gone.encode()} & await redis.smembers(ACTIVE_RUNS)
    await redis.srem(ACTIVE_RUNS, run_id)
    await records.resume(run_id)
    await redis.srem(ACTIVE_RUNS, run_id)  # an earlier release does not keep the index
    await records.index(run_id)
    assert run_id in ids(await records.active())


@pytest.mark.parametrize("run", ["missing", "UPPER", "a}b"])
async def test_unknown_runs_are_named(records, run):
    for change in (
        records.get(run),
        records.transition(run, RunState.RUNNING, ""),
        records.request_pause(run),
        records.request_cancel(run),
        records.resume(run),
        records.scale(run, 2),
        records.set_paths(run, model_path=""),
        records.set_summary(run, {}),
    ):
        with pytest.raises(UnknownRunError, match="does not exist"):
            await change


async def in_state(records, run, state):
    if state is not RunState.QUEUED:
        await records.transition(run, state, "test")


@pytest.mark.parametrize("state", [state for state in RunState if state is not RunState.RUNNING])
async def test_only_a_running_run_can_be_paused(records, run_id, state):
    await in_state(records, run_id, state)
    with pytest.raises(RunStateError, match=f"is {state.value}; only a running one can be paused"):
        await records.request_pause(run_id)
    assert not (await records.get(run_id)).pause_requested


async def test_a_paused_run_continues(redis, records, run_id):
    starved = RunKeys(run_id).starved
    await records.transition(run_id, RunState.RUNNING, "test")
    assert (await records.request_pause(run_id)).pause_requested
    await records.transition(run_id, RunState.PAUSED, "on request")
    await redis.set(starved, "0:5 1:0")
    with pytest.raises(RunStateError, match="is paused; cancel it first"):
        await records.resume(run_id, ResumeChanges(0))
    assert await redis.exists(starved)
    record = await records.resume(run_id)
    assert (record.state, record.pause_requested, record.resumptions) == (RunState.PAUSED, False, 0)
    assert not await redis.exists(starved)


async def test_resume_withdraws_a_pause_that_has_not_started(records, run_id):
    await records.transition(run_id, RunState.RUNNING, "test")
    await records.request_pause(run_id)
    assert not (await records.resume(run_id)).pause_requested
    with pytest.raises(RunStateError, match="is running; cancel it first"):
        await records.resume(run_id)


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED])
async def test_an_ended_run_is_queued_again(redis, records, run_id, state):
    keys = RunKeys(run_id)
    await redis.set(keys.checkpoints, json.dumps([2, 4]))
    await redis.set(keys.starved, "0:5 1:0")
    await records.transition(run_id, RunState.RUNNING, "test")
    await records.request_pause(run_id)
    await records.request_cancel(run_id)
    await records.set_summary(run_id, {"steps": 4})
    await records.set_paths(run_id, model_path="/model", export_path="/export")
    await records.transition(run_id, state, "test")
    first = await records.resume(run_id)
    assert (first.state, first.reason, first.resumptions, first.resume_step) == (RunState.QUEUED, "resumed", 1, None)
    assert (first.cancel_requested, first.pause_requested, first.summary) == (False, False, None)
    assert (first.model_path, first.export_path) == ("/model", "/export")
    assert not await redis.exists(keys.starved)
    await records.transition(run_id, state, "test")
    second = await records.resume(run_id, ResumeChanges(4))
    assert (second.reason, second.resumptions, second.resume_step) == ("resumed from step 4", 2, 4)
    assert second.export_path is None, "the exported weights leave the history"
    await records.transition(run_id, state, "test")
    assert (await records.resume(run_id, ResumeChanges(0))).resume_step == 0
    await records.transition(run_id, state, "test")
    assert (await records.resume(run_id)).resume_step is None


async def test_a_step_without_a_checkpoint_is_rejected(redis, records, run_id):
    await records.transition(run_id, RunState.FAILED, "test")
    with pytest.raises(NoCheckpointError, match=r"^from_step: 3 is not valid: expected .*: 0$"):
        await records.resume(run_id, ResumeChanges(3))
    await redis.set(RunKeys(run_id).checkpoints, json.dumps([4, 2]))
    await redis.hset(RunKeys(run_id).policy, "step", 3)  # a rewind was cut off there
    with pytest.raises(NoCheckpointError, match=r"^from_step: 4 is not valid: expected .*: 0, 2$"):
        await records.resume(run_id, ResumeChanges(from_step=4))
    await redis.hset(RunKeys(run_id).policy, "step", 5)
    with pytest.raises(NoCheckpointError, match=r"^from_step: 3 is not valid: expected .*: 0, 2, 4$"):
        await records.resume(run_id, ResumeChanges(3))
    record = await records.get(run_id)
    assert (record.state, record.resumptions) == (RunState.FAILED, 0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (RunState.QUEUED, "is queued; cancel it first"),
        (RunState.STARTING, "is starting; cancel it first"),
        (RunState.RUNNING, "is running; cancel it first"),
        (RunState.SUCCEEDED, "is succeeded; it has nothing left to do"),
    ],
)
async def test_active_and_succeeded_runs_cannot_be_resumed(records, run_id, state, message):
    await in_state(records, run_id, state)
    for step in (None, 0):
        with pytest.raises(RunStateError, match=message):
            await records.resume(run_id, ResumeChanges(step))


async def test_one_of_many_concurrent_resumptions_counts(records, run_id):
    await records.transition(run_id, RunState.CANCELLED, "test")
    results = await asyncio.gather(*(records.resume(run_id) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(result, RunStateError) for result in results) == 19
    record = await records.get(run_id)
    assert ([change.state.value for change in record.history], record.resumptions) == (
        ["queued", "cancelled", "queued"],
        1,
    )


async def test_a_full_redis_takes_every_change_but_no_new_run(own_server, run_id):
    _, redis = own_server
    records, keys = RunRecords(redis), RunKeys(run_id)
    await records.create(run_id, RECIPE)
    await redis.config_set("maxmemory", 1)
    with pytest.raises(RedisFullError, match="maxmemory"):
        await records.create(f"{run_id}-2", RECIPE)
    await records.transition(run_id, RunState.RUNNING, "test")
    await records.request_pause(run_id)
    await records.transition(run_id, RunState.PAUSED, "on request")
    await records.resume(run_id)
    await records.scale(run_id, 3)
    await records.request_cancel(run_id)
    await records.set_summary(run_id, {"steps": 0})
    await records.transition(run_id, RunState.CANCELLED, "on request")
    await EventLog(redis, keys, "test").write("test", "a line")
    assert (await records.resume(run_id)).resumptions == 1
    assert await listed(redis) == ids(await records.active()) == [run_id]


async def test_a_run_resumes_with_other_ranks_and_replicas(records, run_id):
    await records.transition(run_id, RunState.FAILED, "lost a machine")
    record = await records.resume(run_id, ResumeChanges(learner_ranks=3, rollout=2))
    assert (record.recipe.learner.ranks, record.rollout_replicas, record.resume_step) == (3, 2, None)
    assert record.reason == "resumed, 3 learner ranks, 2 rollout replicas"
    await records.transition(run_id, RunState.PAUSED, "test")
    with pytest.raises(RunStateError, match="cancel it first"):
        await records.resume(run_id, ResumeChanges(learner_ranks=2))
    assert (await records.get(run_id)).recipe.learner.ranks == 3


FILES = {"./rewards.py": "def score(): ...\n# é\r\n", "./rubric.md": "Is it right?"}


async def test_the_files_of_a_run_are_stored_with_its_record(redis, run_id):
    records = RunRecords(redis)
    record = await records.create(run_id, RECIPE, FILES)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in FILES.items()}
    assert record.files == digests
    assert await read_reward_files(redis, record) == FILES
    with pytest.raises(UsedRunError, match="in use"):
        await records.create(run_id, RECIPE, {"./rewards.py": "def score(): return 1", "./other.py": ""})
    again = await records.get(run_id)
    assert (again.files, await read_reward_files(redis, again)) == (digests, FILES)
    await records.transition(run_id, RunState.FAILED, "test")
    resumed = await records.resume(run_id, ResumeChanges(learner_ranks=2))
    assert (resumed.files, await read_reward_files(redis, resumed)) == (digests, FILES)


async def test_a_run_without_files_has_none(redis, records, run_id):
    record = await records.get(run_id)
    assert (record.files, await read_reward_files(redis, record)) == ({}, {})
    assert not await redis.exists(RunKeys(run_id).reward_files)


async def test_a_file_that_is_missing_or_differs_is_named(redis, run_id):
    record = await RunRecords(redis).create(run_id, RECIPE, FILES)
    key = RunKeys(run_id).reward_files
    await redis.hset(key, "./rubric.md", "Is it short?")
    expected = f"^run '{run_id}': its file './rubric.md' is not the one that was submitted: its SHA-256 in Redis is "
    with pytest.raises(RewardFileError, match=f"{expected}.* has {record.files['./rubric.md']}$"):
        await read_reward_files(redis, record)
    await redis.hdel(key, "./rubric.md")
    with pytest.raises(RewardFileError, match=r"its file '\./rubric\.md' is no longer in Redis"):
        await read_reward_files(redis, record)


async def test_a_lost_run_keeps_the_digests_of_its_files(redis, run_id):
    records = RunRecords(redis)
    record = await records.create(run_id, RECIPE, FILES)
    await redis.unlink(RunKeys(run_id).record, RunKeys(run_id).reward_files)
    assert await records.restore_failed(record, "Redis lost it")
    assert (await records.get(run_id)).files == record.files
