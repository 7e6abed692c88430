"""A run's weight history on a real server: versions, steps, batches until they are released, rewinds."""

import itertools

import pytest

from services.contracts import BatchGroup, Cause, CommittedPolicy, Lane, Release, Task
from services.streams.connection.functions import FencedError, call
from services.streams.delivery.leases import renew_lease
from services.streams.delivery.snapshots import read_snapshot
from services.streams.keys import EVALUATION_GROUP, RunKeys
from services.streams.state import policy_history
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts, response_tokens
from services.streams.state.group_state import missing_samples, trim_released
from services.streams.state.policy_history import (
    BatchReclaimedError,
    History,
    StateLostError,
    committed_step,
    read_policy,
)
from services.streams.state.rewind import ReopenedGroup, Rewind
from tests.services.driven import (
    EVENT,
    STATE,
    DrivenRun,
    Dying,
    batch_of,
    contents,
    publish_verdict,
    record_of,
    record_verdict,
    sample_of,
    snapshot_at,
    task_of,
    verdict_on,
)


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


@pytest.fixture
async def run(redis, keys):
    return await DrivenRun.open(redis, keys)


def standing(policy):
    return policy.version, policy.step, policy.weights


async def payload_groups(redis, keys):
    names = [key.decode() async for key in redis.scan_iter(match=keys.key("payload:*"))]
    return {name.split("payload:")[1].split(":")[0] for name in names}


async def test_weights_keep_their_version_and_others_get_a_new_one(run):
    learner = run.learner
    assert await learner.policy() is None
    assert await learner.announce(0, "w0", 1) == 0
    assert await learner.policy() is None, "announced is not committed"
    assert await learner.announce(0, "w0", 1) == 0, "a learner that died before its commit announces the same version"
    await learner.commit_policy(0, 0, "w0")
    assert standing(await learner.policy()) == (0, 0, "w0")
    assert await learner.announce(0, "w0", 1) == 0, "a restarted learner has bit-equal weights"
    assert await learner.announce(1, "w1", 1) == 1
    successor = await History.fenced(run.redis, run.keys, "learner")
    assert await successor.announce(1, "other bits", 1) == 2, "version 1 may have reached a replica"
    assert await successor.announce(1, "w1", 1) == 3, "a version is never used again"
    assert (await successor.policy()) == CommittedPolicy(
        version=0, step=0, weights="w0", announced=3, version_steps='{"0": 0, "1": 1, "2": 1, "3": 1}'
    )
    with pytest.raises(FencedError):
        await learner.announce(1, "w1", 1)


async def test_the_same_weights_at_another_step_are_another_version(run):
    """Every optimizer step of a rollout step may have been skipped."""
    await run.learner.commit_policy(await run.learner.announce(0, "w", 1), 0, "w")
    assert await run.learner.announce(1, "w", 1) == 1


async def version_steps(run):
    return (await read_policy(run.redis, run.keys)).version_steps


async def test_a_restart_leaves_each_version_its_step(run):
    """A learner that is restarted publishes the same step again: no sample becomes more stale by that."""
    await run.learner.commit_policy(await run.learner.announce(4, "w4", 1), 4, "w4")
    for bits in ("w5", "other bits", "and again others"):
        await run.learner.announce(5, bits, 1)
    assert await version_steps(run) == {0: 4, 1: 5, 2: 5, 3: 5}
    await run.learner.announce(4, "restored otherwise", 1)
    assert await version_steps(run) == {0: 4, 1: 4, 2: 4, 3: 4, 4: 4}, "none of step 5 was committed"
    await run.learner.announce(6, "w6", 1)
    assert await version_steps(run) == {0: 4, 1: 4, 2: 4, 3: 4, 4: 4, 5: 6}
    await run.learner.announce(7, "w7", 1)
    assert await version_steps(run) == {5: 6, 6: 7}, "a batch of step 7 does not take samples of step 4"


@pytest.mark.parametrize("commit", ["policy", "step"])
async def test_a_commit_restores_a_lost_announcement(run, redis, keys, commit):
    """A failover may lose an announcement whose version reached the replicas, before it is committed."""
    logged = await run.batched(1, "g0")
    await run.learner.commit_policy(await run.learner.announce(0, "w0", 1), 0, "w0")
    before = await redis.hgetall(keys.policy)
    version = await run.learner.announce(1, "w1", 1)
    await redis.delete(keys.policy)
    await redis.hset(keys.policy, mapping=before)
    if commit == "step":
        assert await run.learner.commit_step(record_of(logged.batch, version), logged.entry)
    else:
        await run.learner.commit_policy(version, 1, "w1")
    assert await version_steps(run) == {0: 0, version: 1}
    assert await run.learner.announce(1, "w1", 1) == version
    assert await run.learner.announce(2, "w2", 1) == version + 1


async def test_a_version_that_only_a_replica_knows_is_not_used_again(run):
    await run.learner.commit_policy(await run.learner.announce(0, "w0", 1), 0, "w0")
    assert await run.learner.announce(0, "w0", 1, held=0) == 0
    assert await run.learner.announce(0, "w0", 1, held=3) == 4, "replicas must return to the committed weights"
    assert await run.learner.announce(1, "w1", 1, held=4) == 5
    assert await run.learner.announce(1, "w1", 1, held=5) == 5


async def test_versions_of_an_abandoned_history_have_no_step(run, redis, keys):
    await run.learner.commit_policy(await run.learner.announce(0, "w0", 9), 0, "w0")
    await run.trained(1, "g0")
    rewind = Rewind(redis, keys, "sampler", run.sampler.fence, 1)
    assert await rewind.start()
    await rewind.finish(0, None, [], "rewound")
    assert await version_steps(run) == {}
    assert await run.learner.announce(0, "w0", 9) == 2, "what the replicas still generate is of the other history"
    assert await version_steps(run) == {2: 0}


async def test_an_older_version_does_not_come_back(run):
    await run.learner.commit_policy(4, 2, "w2")
    await run.learner.commit_policy(3, 1, "w1")
    assert standing(await run.learner.policy()) == (4, 2, "w2")
    await run.learner.commit_policy(4, 2, "w2")
    assert standing(await run.learner.policy()) == (4, 2, "w2")


async def test_a_step_is_committed_once_and_trains_its_groups(run, redis, keys):
    logged = await run.batched(1, "g0", "g1")
    assert await run.counts() == {"dispatched": 2, "pending": 2}
    version = await run.learner.announce(1, "w1", 1)
    record = record_of(logged.batch, version)
    assert await run.learner.commit_step(record, logged.entry)
    assert await run.counts() == {"dispatched": 2, "trained": 2}
    assert standing(await run.learner.policy()) == (0, 1, "w1")
    event_log = EventLog(redis, keys, "test")
    assert ((await read_policy(redis, keys)).version, await committed_step(redis, keys)) == (0, 1)
    assert [step for _, step in await event_log.steps()] == [record]
    fields = await redis.hmget(keys.group("g0"), "state", "step", "staleness")
    assert fields == [b"trained", b"1", b"1"]
    before = await contents(redis, keys)
    repeated = record.model_copy(update={"version": 5, "weights": "others"})
    assert not await run.learner.commit_step(repeated, logged.entry), "a step is committed once"
    assert await contents(redis, keys) == before


@pytest.mark.parametrize("again", [["g0", "g2"], ["g0", "g1"]])
async def test_batch_reclaimed_during_training_is_not_committed(run, redis, keys, again):
    first = await run.batched(1, "g0", "g1")
    await run.decided("g2", "kept")
    version = await run.learner.announce(1, "w1", 1)
    await redis.xdel(keys.batches, first.entry)
    assert await run.sampler.reclaim_batch(1, first.entry, {1: ["g0", "g1"]})
    assert await run.counts() == {"dispatched": 3, "pending": 3}
    assert [await run.state(name) for name in ("g0", "g1")] == ["kept", "kept"]
    assert await run.sampler.publish_batch(batch_of(keys, 1, again), snapshot_at(1))
    before = await contents(redis, keys)
    with pytest.raises(BatchReclaimedError, match="reclaimed the batch of rollout step 1"):
        await run.learner.commit_step(record_of(first.batch, version), first.entry)
    assert await contents(redis, keys) == before
    [second] = await run.learner.batches()
    assert await run.learner.accepts(second, 1)
    assert await run.learner.commit_step(record_of(second.batch, version), second.entry)
    assert await run.counts() == {"dispatched": 3, "trained": 2, "pending": 1}
    assert not await run.sampler.reclaim_batch(1, second.entry, {1: again}), "the batch was trained"


async def test_a_step_is_not_committed_after_one_that_redis_lost(run, redis, keys):
    """A failover lost the commit of step 1, but not the batch of step 2, which was published before."""
    await run.learner.commit_policy(await run.learner.announce(0, "w0", 1), 0, "w0")
    first = await run.batched(1, "g0")
    second = await run.batched(2, "g1")
    version = await run.learner.announce(2, "w2", 1)
    before = await contents(redis, keys)
    with pytest.raises(StateLostError, match="rollout step 1 was committed, and is not any more"):
        await run.learner.commit_step(record_of(second.batch, version), second.entry)
    assert await contents(redis, keys) == before
    assert await run.learner.commit_step(record_of(first.batch, version), first.entry)


async def test_later_batch_waits_and_is_reclaimed_with_its_predecessor(run, redis, keys):
    first = await run.batched(1, "g0")
    second = await run.batched(2, "g1")
    assert not await run.learner.accepts(second, 1)
    assert await run.learner.batches() == [first, second], "the later batch stays in the log"
    await redis.xdel(keys.batches, first.entry)
    assert await run.sampler.reclaim_batch(1, first.entry, {1: ["g0"], 2: ["g1"]})
    assert await run.learner.batches() == []
    assert [await run.state(name) for name in ("g0", "g1")] == ["kept", "kept"]


@pytest.mark.parametrize(
    ("entry", "batches", "text"),
    [
        (
            "7-0",
            {1: ["g0", "g1"], 2: ["g2"]},
            "step 1, step 2: Redis lost the entry of the batch of step 1; 3 groups are kept, to be published again",
        ),
        (
            "",
            {1: ["g0", "g1"]},
            "step 1: Redis lost the publication of the batch of step 1; 2 groups are kept, to be published again",
        ),
        (
            "",
            {2: ["g2"]},
            "step 1, step 2: Redis lost the commit of step 1 and the publication of the batch of step 1; "
            "its groups and 1 of later steps are kept, to be published again",
        ),
    ],
)
async def test_the_event_of_a_lost_batch_says_what_was_lost(run, redis, keys, entry, batches, text):
    assert await run.sampler.reclaim_batch(1, entry, batches)
    [(_, event)] = await EventLog(redis, keys, "test").events()
    assert (event.service, event.phase, event.text) == ("sampler", "batch-lost", text)


async def test_deleted_evaluations_leave_nothing_published(run, redis, keys):
    group = f"{EVALUATION_GROUP}held-out.step-2.000000"
    await redis.hset(keys.group(group), mapping={"state": "pending", "samples": 2})
    await redis.hset(keys.payload(group, 0), mapping={"text": "42"})
    [entry] = await run.append(keys.evaluations, EVENT)
    await Rewind(redis, keys, "sampler", run.sampler.fence, 1).delete_evaluations([entry], 0)
    assert await redis.exists(keys.group(group), keys.payload(group, 0)) == 0
    assert await redis.xlen(keys.evaluations) == 0
    await redis.hset(keys.group(group), mapping={"state": "pending", "samples": 2})  # the evaluation runs again
    assert await missing_samples(redis, keys, task_of(group)) == [0, 1]


async def test_restarted_learner_trains_the_uncommitted_batch_again(run):
    logged = await run.batched(1, "g0")
    assert await run.learner.announce(1, "w1", 1) == 0
    successor = await History.fenced(run.redis, run.keys, "learner")
    with pytest.raises(FencedError):
        await run.learner.commit_step(record_of(logged.batch, 0), logged.entry)
    assert await run.counts() == {"dispatched": 1, "pending": 1}
    assert await successor.batches() == [logged]
    assert await successor.announce(1, "rounded otherwise", 1) == 1
    assert await successor.commit_step(record_of(logged.batch, 1, "rounded otherwise"), logged.entry)
    assert standing(await successor.policy()) == (1, 1, "rounded otherwise")
    assert await run.counts() == {"dispatched": 1, "trained": 1}


async def test_batch_keeps_its_payloads_until_it_is_released(run, redis, keys):
    first, second = await run.trained(1, "g0"), await run.trained(2, "g1", "g2")
    assert await run.learner.batches() == [first, second]
    assert await payload_groups(redis, keys) == {"g0", "g1", "g2"}
    assert await run.learner.release_batch(first)
    assert await run.learner.batches() == [second]
    [waiting] = await run.unarchived.hashes(["g0"])
    assert BatchGroup.model_validate_json(waiting.fields[b"trained_as"]) == first.batch.groups[0]
    assert (waiting.fields[b"step"], waiting.fields[b"version"]) == (b"1", b"0")
    assert await run.archived() == ["g0"]
    assert await payload_groups(redis, keys) == {"g1", "g2"}
    assert await read_snapshot(redis, keys.snapshot(1)) == snapshot_at(1), "a checkpoint of the step may need it"
    assert await run.state("g0") == "trained", "late results still find the group's state"
    assert not await run.learner.release_batch(first)
    assert await redis.lrange(run.streams.released, 0, -1) == [keys.group("g0").encode()]
    assert await run.archived() == [], "a batch that is released again is not archived again"
    assert await run.learner.release_batch(second)
    assert await payload_groups(redis, keys) == {"g1", "g2"}
    assert await run.archived() == ["g1", "g2"]
    assert await payload_groups(redis, keys) == set()
    assert await read_snapshot(redis, keys.snapshot(1)) is None
    assert await read_snapshot(redis, keys.snapshot(2)) == snapshot_at(2)
    assert await run.counts() == {"dispatched": 3, "trained": 3}


async def test_a_release_that_was_cut_off_is_resumed(run, redis, keys, monkeypatch):
    """The learner dies after each of the calls in turn; the next one releases what is committed, and only that."""
    monkeypatch.setattr(policy_history, "GROUPS_PER_CALL", 2)
    for died_after in range(3):
        first = 2 * died_after + 1
        names = [f"g{first}.{number}" for number in range(5)]
        logged = await run.trained(first, *names)
        following = await run.batched(first + 1, f"g{first}.next")
        dying = History(Dying(redis, died_after), keys, "learner", run.learner.fence)
        with pytest.raises(ConnectionAbortedError):
            await dying.release_batch(logged)
        assert await run.learner.batches() == [logged, following]
        assert await run.archived() == names[: 2 * died_after]
        assert await payload_groups(redis, keys) == {*names[2 * died_after :], f"g{first}.next"}
        await run.learner.release_committed(first)
        assert await run.learner.batches() == [following]
        assert await run.archived() == names[2 * died_after :]
        assert await payload_groups(redis, keys) == {f"g{first}.next"}
        version = await run.learner.announce(first + 1, f"w{first + 1}", 1)
        assert await run.learner.commit_step(record_of(following.batch, version), following.entry)
        assert await run.learner.release_batch(following)
        await run.archived()
    released = await redis.lrange(run.streams.released, 0, -1)
    assert len(released) == len(set(released)) == 18
    assert await run.counts() == {"dispatched": 18, "trained": 18}
    left = sorted([key async for key in redis.scan_iter(match=keys.key("sampler-snapshot:*"))])
    assert left == [keys.snapshot(6).encode()], "only the last committed step's stays"


async def test_only_the_samplers_batch_of_a_step_is_accepted(run, redis, keys):
    first = await run.batched(1, "g0")
    doubled = first.batch.model_copy(update={"groups": first.batch.groups * 2})
    await run.append(keys.batches, batch_of(keys, 2, ["g0"]), batch_of(keys, 1, ["never"]), doubled, first.batch)
    _, wrong_step, *others = await run.learner.batches()
    assert not await run.learner.accepts(wrong_step, 2)
    for logged in others:
        assert not await run.learner.accepts(logged, 1)
    assert await run.learner.accepts(first, 1)
    assert await run.learner.batches() == [first]
    letters = [letter for _, letter in await EventLog(redis, keys, "test").dead_letters()]
    assert [letter.reason.removeprefix("not the batch of rollout step ") for letter in letters] == [
        "2: g0",
        "1: never",
        "1: g0",
        "1: g0",
    ]
    assert await run.learner.commit_step(record_of(first.batch, await run.learner.announce(1, "w1", 1)), first.entry)
    assert not await run.learner.accepts(first, 1), "the batch was trained"


async def test_a_foreign_or_copied_batch_releases_nothing_else(run, redis, keys):
    first = await run.trained(1, "g0")
    await run.decided("g1", "kept")
    await run.append(keys.batches, batch_of(keys, 1, ["g1"]), batch_of(keys, 7, ["g0"]), first.batch)
    _, foreign, later, again = await run.learner.batches()
    before = await contents(redis, keys)
    for logged in (foreign, later):
        assert await run.learner.release_batch(logged)
    assert await run.learner.batches() == [first, again]
    after = await contents(redis, keys)
    assert {name for name in before if after.get(name) != before[name]} == {keys.batches}
    assert await run.learner.release_batch(first)
    assert await run.learner.release_batch(again)
    await run.archived()
    assert await redis.lrange(run.streams.released, 0, -1) == [keys.group("g0").encode()], "one tombstone"
    assert await payload_groups(redis, keys) == {"g1"}


async def test_hostile_entries_of_the_batch_log_are_dead_lettered(run, redis, keys):
    good = await run.batched(1, "g0")
    another = batch_of(RunKeys("another-run"), 1, ["g0"])
    empty = good.batch.model_copy(update={"groups": ()})
    await run.append(keys.batches, b"", b"\xff", b"[]", task_of("g0"), another, empty)
    await redis.xadd(keys.batches, {"other": "field"})
    assert await run.learner.batches() == [good]
    assert await redis.xlen(keys.batches) == 1
    letters = [letter for _, letter in await EventLog(redis, keys, "test").dead_letters()]
    assert [letter.cause for letter in letters] == [Cause.INVALID] * 7
    assert [letter.stream for letter in letters] == [keys.batches] * 7
    assert "payload" in letters[4].reason
    assert "groups: []" in letters[5].reason


class TestRewind:
    """A run of four batches: the first is released, the last untrained; g5 is kept, g7 half generated, g8 screened."""

    @pytest.fixture
    async def long_run(self, run):
        return await self.prepared(run)

    async def prepared(self, run):
        for step in range(1, 4):
            await run.trained(step, f"g{step}")
        await run.learner.release_batch((await run.learner.batches())[0])
        await run.batched(4, "g4")
        await run.decided("g5", "kept")
        await run.decided("g6", Release.FILTERED)
        run.task = await run.dispatched("g7")
        assert await run.publish(run.task.lease, sample_of(run.keys, "g7", 0))
        [run.sample] = await run.verifier().read(1, 0.01)
        assert await run.sampler.dispatch(Lane.TRAIN, [task_of("g8", stop=1)], STATE)
        assert await run.counts() == {"dispatched": 8, "trained": 3, "filtered": 1, "pending": 4}
        return run

    async def back(self, run, step, resumption=1, posteriors=(), response_tokens=None, redis=None):
        redis = redis or run.redis
        rewind = Rewind(redis, run.keys, "sampler", run.sampler.fence, resumption)
        pending = sorted(name.decode() for name in await run.redis.smembers(run.streams.pending))
        records = await EventLog(run.redis, run.keys, "test").steps()
        if not await rewind.start():
            return False
        await rewind.reopen([ReopenedGroup(name, "p0", 2) for name in pending])
        for entry, record in reversed(records):
            if record.step > step:
                await rewind.reopen([ReopenedGroup(name, "p0", 2) for name in record.groups], record.step, entry)
        await rewind.store_posteriors(dict(posteriors))
        await rewind.finish(step, response_tokens, [2, 3, 4], "rewound")
        return True

    async def again(self, run):
        """Dispatch the reopened groups, as the sampler does when it has slots."""
        names = sorted(name.decode() for name in await run.redis.smembers(run.streams.pending))
        await run.sampler.dispatch(Lane.TRAIN, [task_of(name) for name in names], STATE)

    async def test_later_steps_leave_and_their_groups_are_drawn_again(self, long_run, redis, keys):
        run = long_run
        assert await response_tokens(redis, keys) == 24
        assert await self.back(run, 1, posteriors={"p0": "2:1:0", "p1": "1:2:0"}.items(), response_tokens=8)
        assert await response_tokens(redis, keys) == 8, "the token budget counts only the history that stays"
        assert await run.counts() == {"dispatched": 8, "trained": 1, "filtered": 1, "pending": 6}
        event_log = EventLog(redis, keys, "test")
        assert [record.step for _, record in await event_log.steps()] == [1]
        assert [event.phase for _, event in await event_log.events()] == ["rewound"]
        policy = await read_policy(redis, keys)
        assert (policy.step, policy.weights, policy.resumption) == (1, "", 1)
        assert await run.learner.batches() == []
        assert await redis.hgetall(keys.posteriors) == {b"p0": b"2:1:0", b"p1": b"1:2:0"}
        assert [await redis.hget(keys.queue, name) for name in ("step", "last")] == [b"1", b"0"]
        assert not await redis.exists(run.streams.tasks), "the sampler dispatches them when it has slots"
        await self.again(run)
        assert await run.counts() == {"dispatched": 8, "trained": 1, "filtered": 1, "pending": 6}
        tasks = [Task.model_validate_json(fields[b"m"]) for _, fields in await redis.xrange(run.streams.tasks)]
        assert {task.group for task in tasks} == {"g2", "g3", "g4", "g5", "g7", "g8"}
        assert all(task.stop is None for task in tasks), "no task is of a screen alone"
        for task in tasks:
            assert await missing_samples(redis, keys, task) == [0, 1], "no sample from before the rewind stays"

    async def test_letters_from_before_a_rewind_are_marked(self, long_run, redis, keys):
        await redis.xadd(keys.dead, {"m": "{}"})
        newest = await redis.xadd(keys.dead, {"m": "{}"})
        assert await self.back(long_run, 1)
        assert await redis.hget(keys.queue, "letters") == newest

    async def facts(self, run):
        """What a rewind leaves, without the ids of entries."""
        redis, keys = run.redis, run.keys
        names = sorted(name.decode() for name in await redis.smembers(run.streams.pending))
        kept = sorted([key.decode().partition("}:")[2] async for key in redis.scan_iter(f"{keys.key('')}*")])
        return {
            "states": {name: await run.state(name) for name in names},
            "counts": await run.counts(),
            "policy": await redis.hgetall(keys.policy),
            "queue": await redis.hmget(keys.queue, "step", "last"),
            "steps": [record.step for _, record in await EventLog(redis, keys, "test").steps()],
            "posteriors": await redis.hgetall(keys.posteriors),
            "keys": kept,
        }

    async def test_a_rewind_that_was_cut_off_anywhere_is_repeated(self, long_run, redis, keys):
        """After each of its calls in turn the sampler dies; between two of them the run is consistent."""
        rates = {"p0": "2:1:0"}.items()
        await self.back(long_run, 1, posteriors=rates)
        wanted, left = await self.facts(long_run), 0
        for calls in itertools.count(1):
            run = await self.prepared(await DrivenRun.open(redis, RunKeys(f"{keys.run}-{calls}")))
            dying = Dying(redis, calls)
            try:
                await self.back(run, 1, posteriors=rates, redis=dying)
            except ConnectionAbortedError:
                counts = await group_counts(redis, run.keys)
                assert counts.reconciled, counts
                steps = [record.step for _, record in await EventLog(redis, run.keys, "test").steps()]
                assert steps == list(range(1, (await read_policy(redis, run.keys)).step + 1))
                assert await self.back(run, 1, posteriors=rates)
            assert await self.facts(run) == wanted
            if left := dying.left:
                break
        assert left == 1
        assert calls > 5, "a rewind has several calls"

    async def test_a_rewind_happens_once_per_resumption(self, long_run, redis, keys):
        assert await self.back(long_run, 1)
        before = await contents(redis, keys)
        assert not await self.back(long_run, 1)
        assert await contents(redis, keys) == before
        assert await self.back(long_run, 0, resumption=2)
        assert await long_run.counts() == {"dispatched": 8, "filtered": 1, "pending": 7}

    async def test_results_of_the_abandoned_history_do_not_count(self, long_run, redis, keys):
        run = long_run
        logged = (await run.learner.batches())[-1]
        assert await self.back(run, 2)
        before = await contents(redis, keys)
        assert not await run.publish(run.task.lease, sample_of(keys, "g7", 1)), "generated in the abandoned history"
        verdict = verdict_on(run.sample.message)
        assert not await publish_verdict(run.transitions, Lane.TRAIN, run.sample.lease, verdict)
        assert not await renew_lease(redis, run.task.lease)
        assert not await run.learner.release_batch(logged)
        assert not await run.sampler.publish_batch(batch_of(keys, 3, ["g5"]), snapshot_at(3)), (
            "the group is no longer kept"
        )
        assert await contents(redis, keys) == before

    async def test_steps_are_trained_again_under_new_versions(self, long_run, redis, keys):
        run = long_run
        policy = await run.learner.policy()
        assert (policy.version, policy.announced) == (2, 2)
        assert await self.back(run, 1)
        assert await run.learner.announce(1, "w1", 1) == 3
        await run.learner.commit_policy(3, 1, "w1")
        await self.again(run)
        assert await run.rollout("r1").read(1, 0.01) == [], "the consumer group is created again"
        [delivery] = [task for task in await run.rollout("r1").read(6, 0.01) if task.message.group == "g2"]
        for index in range(2):
            assert await run.publish(delivery.lease, sample_of(keys, "g2", index, started_at=9.0))
        await run.verifier().open()
        for sample in await run.verifier().read(4, 0.01):
            await publish_verdict(run.transitions, Lane.TRAIN, sample.lease, verdict_on(sample.message))
        await run.judge().open()
        for verdict in await run.judge().read(4, 0.01):
            await record_verdict(
                run.sampler, Lane.TRAIN, verdict.lease, verdict.message, "kept" if verdict.message.index else ""
            )
        assert await run.sampler.publish_batch(batch_of(keys, 2, ["g2"]), snapshot_at(2))
        [logged] = await run.learner.batches()
        version = await run.learner.announce(2, "w2", 1)
        assert version == 4
        assert await run.learner.commit_step(record_of(logged.batch, version), logged.entry)
        assert await run.counts() == {"dispatched": 8, "trained": 2, "filtered": 1, "pending": 5}
        steps = [record.groups for _, record in await EventLog(redis, keys, "test").steps()]
        assert steps == [("g1",), ("g2",)], "the surviving history has each group once"

    async def test_copied_batch_does_not_retire_a_reopened_group(self, long_run, redis, keys):
        run = long_run
        logged = (await run.learner.batches())[0]
        await run.append(keys.batches, logged.batch)
        for batch in [logged, (await run.learner.batches())[-1]]:
            assert await run.learner.release_batch(batch)
        assert await self.back(run, 1)
        for number in range(600):
            await run.sampler.dispatch(Lane.TRAIN, [task_of(f"h{number}")], STATE)
            await run.sampler.release(Lane.TRAIN, f"h{number}", Release.DEAD, 2)
        await run.archived()
        assert await trim_released(redis, keys, Lane.TRAIN) > 80
        assert await run.state("g2") == "reopened"

    async def test_a_group_reopened_while_released_ones_are_trimmed_stays(self, long_run, redis, keys):
        run = long_run
        await run.learner.release_committed(3)
        await run.archived()
        head = await redis.lrange(run.streams.released, 0, -1)
        assert head == [keys.group(name).encode() for name in ("g1", "g6", "g2", "g3")]
        assert await self.back(run, 1)
        arguments = {"released_key": run.streams.released, "kept": 1}
        assert await call(redis, "trim_released", group_keys=head[2:], **arguments) == 0
        assert await call(redis, "trim_released", group_keys=head[:3], **arguments) == 1
        assert [await run.state(name) for name in ("g1", "g6", "g2", "g3")] == [
            None,
            "filtered",
            "reopened",
            "reopened",
        ]

    async def test_nothing_of_a_batch_is_left_behind(self, long_run, redis, keys):
        await long_run.learner.release_committed(3)  # as the learner does before it lets the sampler rewind
        assert await self.back(long_run, 2)
        assert await payload_groups(redis, keys) == {"g1", "g6", "g2"}
        assert await long_run.archived() == ["g1", "g6", "g2"], "those that stay ended, and not g3"
        assert await payload_groups(redis, keys) == set()
        assert [key async for key in redis.scan_iter(match=keys.key("sampler-snapshot:*"))] == []
        released = {name.decode() for name in await redis.lrange(long_run.streams.released, 0, -1)}
        assert released == {keys.group(name) for name in ("g1", "g2", "g6")}


@pytest.mark.parametrize(("samples", "groups"), [(0, 64), (16, 64), (64, 32), (512, 4), (4096, 1)])
def test_a_call_frees_a_bounded_number_of_payloads(samples, groups):
    assert policy_history.groups_per_call(samples) == groups
