"""Delivery on a real server: leases, idempotent transitions, late results and counters, under faults too."""

import asyncio

import pytest

from services.contracts import Cause, Lane, Outcome, Release, Sample
from services.streams.connection.functions import FencedError
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.leases import LeaseLostError, LeaseRenewal, renew_lease
from services.streams.delivery.snapshots import read_snapshot
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts, response_tokens
from services.streams.state.group_state import (
    EVALUATED,
    MORE,
    Effect,
    GroupTransitions,
    RejectedMessageError,
    missing_samples,
    trim_released,
)
from tests.services.driven import (
    BODY,
    STATE,
    DrivenRun,
    batch_of,
    contents,
    publish_sample,
    publish_verdict,
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


async def payloads(redis, keys):
    return {key.decode().split("payload:")[1] async for key in redis.scan_iter(match=keys.key("payload:*"))}


async def letters(run):
    return [letter for _, letter in await EventLog(run.redis, run.keys, "test").dead_letters()]


@pytest.mark.parametrize("run", ["a:b", "", "A", "a}b", "../x", "x" * 100, "a\n"])
def test_run_id_cannot_escape_its_prefix(run):
    with pytest.raises(ValueError, match="run id"):
        RunKeys(run)


async def test_life_of_a_group_reconciles_at_every_step(run):
    await run.decided("g0", "kept")
    assert await run.counts() == {"dispatched": 1, "pending": 1}
    await run.decided("g1", Release.FILTERED)
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g2")], STATE)
    assert await run.sampler.release(Lane.TRAIN, "g2", Release.DEAD, 2)
    assert await run.counts() == {"dispatched": 3, "filtered": 1, "dead": 1, "pending": 1}
    assert await run.sampler.publish_batch(batch_of(run.keys, 1, ["g0"]), snapshot_at(1))
    assert not await run.sampler.publish_batch(batch_of(run.keys, 2, ["g0"]), snapshot_at(2)), "in one batch only"
    assert not await run.sampler.release(Lane.TRAIN, "g0", Release.STALE, 2), "a batched group cannot be released"
    assert await run.counts() == {"dispatched": 3, "filtered": 1, "dead": 1, "pending": 1}
    assert await run.state("g0") == "batched"


async def test_ended_groups_keep_payloads_until_archived(run, redis, keys):
    for group, release in [("g0", Release.FILTERED), ("g1", Release.DEAD)]:
        await run.decided(group, release)
    await run.decided("g2", "kept")
    await run.decided("g3", "kept")
    assert await run.sampler.release(Lane.TRAIN, "g2", Release.STALE, 2)
    assert await payloads(redis, keys) == {f"g{group}:{index}" for group in range(4) for index in range(2)}
    assert await trim_released(redis, keys, Lane.TRAIN, 0) == 0, "the hash of a group that waits for the archive stays"
    assert await run.archived() == ["g0", "g1", "g2"]
    assert await payloads(redis, keys) == {"g3:0", "g3:1"}
    assert await redis.lrange(run.streams.released, 0, -1) == [keys.group(f"g{n}").encode() for n in range(3)]
    assert [await run.state(f"g{n}") for n in range(4)] == ["filtered", "dead", "stale", "kept"]
    assert [await redis.ttl(keys.group(f"g{n}")) for n in range(4)] == [-1] * 4, "the hashes do not expire"


async def test_a_group_of_an_older_release_is_not_withdrawn(run, redis, keys):
    """Its hash names none of its messages, so that they would keep their effect."""
    await run.dispatched("g0")
    await redis.hdel(keys.group("g0"), "entry")
    assert not await run.sampler.withdraw(Lane.TRAIN, "g0", 2)
    assert await redis.hget(keys.group("g0"), "state") == b"pending"


async def test_what_a_withdrawn_group_left_has_no_effect(run, redis, keys):
    """One sample is judged, one is with the verifier, one is missing; then the group is withdrawn and sent again."""
    task = await run.dispatched("g0", 3)
    for index in range(2):
        assert await run.publish(task.lease, sample_of(keys, "g0", index), 3)
    first, second = await run.verifier().read(2, 1)
    assert await publish_verdict(run.transitions, Lane.TRAIN, first.lease, verdict_on(first.message))
    assert await run.sampler.withdraw(Lane.TRAIN, "g0", 3)
    assert not await run.sampler.withdraw(Lane.TRAIN, "g0", 3), "it is not pending any more"
    assert (await run.state("g0"), await payloads(redis, keys)) == ("reopened", set())
    assert await run.counts() == {"dispatched": 1, "pending": 1}
    for sent_again in (False, True):
        if sent_again:
            assert await run.sampler.dispatch(Lane.TRAIN, [task_of("g0", 3)], STATE)
        before = await redis.hgetall(keys.group("g0"))
        assert not await renew_lease(redis, task.lease)
        assert not await run.publish(task.lease, sample_of(keys, "g0", 2), 3)
        assert not await publish_verdict(run.transitions, Lane.TRAIN, second.lease, verdict_on(second.message))
        assert await run.judge().read(2, 0.01) == []
        assert await redis.hgetall(keys.group("g0")) == before
    assert await missing_samples(redis, keys, task_of("g0", 3)) == [0, 1, 2]
    [again] = await run.rollout().read(2, 1)
    assert again.message.group == "g0"
    assert await run.counts() == {"dispatched": 1, "pending": 1}


async def test_a_limited_number_of_tombstones_stays(run, redis, keys):
    for number in range(515):
        await run.sampler.dispatch(Lane.TRAIN, [task_of(f"g{number}")], STATE)
        await run.sampler.release(Lane.TRAIN, f"g{number}", Release.DEAD, 2)
    await run.archived()
    assert await redis.llen(run.streams.released) == 515
    assert await trim_released(redis, keys, Lane.TRAIN) == 3
    assert await redis.llen(run.streams.released) == 512
    assert [await run.state(f"g{number}") for number in (0, 1, 2, 3, 514)] == [None, None, None, "dead", "dead"]
    assert await run.counts() == {"dispatched": 515, "dead": 515}
    with pytest.raises(RejectedMessageError, match="group 'g0' is not a group of this run"):
        await missing_samples(redis, keys, task_of("g0"))


async def test_dispatching_twice_counts_once(run, redis, keys):
    assert await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
    before = await contents(redis, keys)
    assert not await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
    assert await contents(redis, keys) == before


async def test_second_delivery_generates_only_what_is_missing(run, redis, keys):
    first = await run.dispatched("g0")
    assert await missing_samples(redis, keys, first.message) == [0, 1]
    assert await run.publish(first.lease, sample_of(keys, "g0", 1))
    await run.lapse(first.lease)
    [second] = await run.rollout("r1").read(1, 1)
    assert second.deliveries == 2
    assert await missing_samples(redis, keys, second.message) == [0]
    assert not await run.publish(second.lease, sample_of(keys, "g0", 1)), "the first result wins"
    assert await run.publish(second.lease, sample_of(keys, "g0", 0))
    assert await redis.xlen(run.streams.samples) == 2
    assert (await redis.xpending(run.streams.tasks, "rollout"))["pending"] == 0


async def test_late_result_of_a_lapsed_lease_counts_if_first(run, redis, keys):
    first = await run.dispatched("g0")
    await run.lapse(first.lease)
    [second] = await run.rollout("r1").read(1, 1)
    assert await run.publish(first.lease, sample_of(keys, "g0", 0, started_at=7.0))
    assert not await run.publish(second.lease, sample_of(keys, "g0", 0, started_at=8.0))
    [delivery] = await run.verifier().read(4, 0.01)
    assert delivery.message.facts.started_at == 7.0


async def test_the_first_of_concurrent_results_wins(run, redis, keys):
    """Eight replicas and then eight verifiers, each on its own connection, answer for the same two samples."""
    delivery = await run.dispatched("g0")

    def attempts(publish):
        return asyncio.gather(*(publish(index, float(attempt)) for attempt in range(8) for index in range(2)))

    fresh = await attempts(lambda index, at: run.publish(delivery.lease, sample_of(keys, "g0", index, at)))
    assert sum(fresh) == 2
    samples = await run.verifier().read(20, 0.01)
    assert sorted(sample.message.index for sample in samples) == [0, 1]
    leases = {sample.message.index: sample.lease for sample in samples}

    def judge(index, at):
        verdict = verdict_on(sample_of(keys, "g0", index, at), Outcome.WRONG if at else Outcome.CORRECT)
        return publish_verdict(run.transitions, Lane.TRAIN, leases[index], verdict)

    assert sum(await attempts(judge)) == 2
    verdicts = await run.judge().read(20, 0.01)
    assert sorted(verdict.message.index for verdict in verdicts) == [0, 1]


async def test_late_results_of_an_ended_group_only_ack_their_message(run, redis, keys):
    task = await run.dispatched("g0")
    assert await run.publish(task.lease, sample_of(keys, "g0", 0))
    [sample] = await run.verifier().read(1, 0.01)
    await publish_verdict(run.transitions, Lane.TRAIN, sample.lease, verdict_on(sample.message))
    [verdict] = await run.judge().read(1, 0.01)
    assert await run.sampler.release(Lane.TRAIN, "g0", Release.DEAD, 2)
    before = await run.counts()
    assert await missing_samples(redis, keys, task.message) == []
    assert not await run.publish(task.lease, sample_of(keys, "g0", 1))
    assert not await record_verdict(run.sampler, Lane.TRAIN, verdict.lease, verdict.message, "kept")
    assert not await run.sampler.release(Lane.TRAIN, "g0", Release.STALE, 2)
    assert await run.counts() == before == {"dispatched": 1, "dead": 1}
    assert await run.state("g0") == "dead"
    assert await payloads(redis, keys) == {"g0:0"}, "it waits for the archive"
    for stream, group in [(run.streams.tasks, "rollout"), (run.streams.verdicts, "sampler")]:
        assert (await redis.xpending(stream, group))["pending"] == 0, f"{stream} has a message that is not acked"


@pytest.mark.parametrize(
    ("group", "index", "reason"),
    [
        ("g9", 0, "group 'g9' is not a group of this run"),
        ("g0", 2, "index 2 is not a sample of group 'g0'"),
    ],
)
async def test_messages_that_fit_no_group_change_nothing(run, redis, keys, group, index, reason):
    task = await run.dispatched("g0")
    sample = sample_of(keys, group, index)
    before = await contents(redis, keys)
    calls = [
        run.publish(task.lease, sample),
        publish_verdict(run.transitions, Lane.TRAIN, task.lease, verdict_on(sample)),
        record_verdict(run.sampler, Lane.TRAIN, task.lease, verdict_on(sample), "kept"),
    ]
    for call in calls:
        with pytest.raises(RejectedMessageError, match=reason):
            await call
    assert await contents(redis, keys) == before


async def test_a_task_with_more_samples_than_its_group_is_rejected(run, redis, keys):
    await run.dispatched("g0")
    with pytest.raises(RejectedMessageError, match="samples 3 exceed those of group 'g0', 2"):
        await missing_samples(redis, keys, task_of("g0", samples=3))
    assert await missing_samples(redis, keys, task_of("g0", samples=3, stop=1)) == [0]


async def test_screened_group_draws_the_rest_once_and_keeps_samples(run, redis, keys):
    screen = await run.dispatched("g0", samples=3, stop=1)
    assert await missing_samples(redis, keys, screen.message) == [0]
    assert await run.publish(screen.lease, sample_of(keys, "g0", 0), wanted=1)
    assert (await redis.xpending(run.streams.tasks, "rollout"))["pending"] == 0, "the screen's task is acked"
    [sample] = await run.verifier().read(1, 0.01)
    await publish_verdict(run.transitions, Lane.TRAIN, sample.lease, verdict_on(sample.message))
    [verdict] = await run.judge().read(1, 0.01)
    for _ in range(2):
        await record_verdict(
            run.sampler, Lane.TRAIN, verdict.lease, verdict.message, MORE, rest=task_of("g0", samples=3)
        )
    assert await run.state("g0") == "pending"
    [rest] = await run.rollout().read(4, 0.01)
    assert await missing_samples(redis, keys, rest.message) == [1, 2]
    for index in (1, 2):
        assert await run.publish(rest.lease, sample_of(keys, "g0", index), wanted=3)
    assert (await redis.xpending(run.streams.tasks, "rollout"))["pending"] == 0
    assert await run.counts() == {"dispatched": 1, "pending": 1}


async def test_evaluated_group_is_counted_apart_and_can_be_deleted(run, redis, keys):
    streams = keys.lane(Lane.EVALUATION)
    consumers = [
        Consumer(redis, keys, stream, group, "c", model, 30.0, 2)
        for stream, group, model in [
            (streams.tasks, "rollout", type(task_of("g"))),
            (streams.samples, "verifier", Sample),
        ]
    ]
    for consumer in consumers:
        await consumer.open()
    assert await run.sampler.dispatch(Lane.EVALUATION, [task_of("e0", 1)], None)
    assert await redis.get(keys.sampler_state) is None
    [task] = await consumers[0].read(1, 0.01)
    assert await publish_sample(run.transitions, Lane.EVALUATION, task.lease, 1, sample_of(keys, "e0", 0), BODY)
    [sample] = await consumers[1].read(1, 0.01)
    verdict = verdict_on(sample.message)
    assert await publish_verdict(run.transitions, Lane.EVALUATION, sample.lease, verdict)
    assert await record_verdict(run.sampler, Lane.EVALUATION, sample.lease, verdict, EVALUATED, result="{}")
    assert await payloads(redis, keys) == {"e0:0"}
    assert await redis.hexists(keys.group("e0"), "task"), "the archive tells the prompt"
    assert await run.archived(Lane.EVALUATION) == ["e0"]
    assert await payloads(redis, keys) == set()
    assert await redis.hkeys(keys.group("e0")) == [b"state", b"samples", b"result", b"archive"]
    assert (await group_counts(redis, keys, Lane.EVALUATION)).pending == 0
    assert await run.counts() == {}
    assert 0 < await redis.ttl(keys.group("e0")) <= 7 * 24 * 3600
    await run.sampler.delete_evaluated(["e0"])
    assert await run.state("e0") is None


async def test_decision_updates_posterior_tokens_and_order(run, redis, keys):
    for group in ("g0", "g1"):
        first, second = await run.judged(group)
        await record_verdict(run.sampler, Lane.TRAIN, first.lease, first.message, "", posterior=("p0", "lost"))
        posterior = ("p0", f"of {group}")
        await record_verdict(run.sampler, Lane.TRAIN, second.lease, second.message, "kept", posterior=posterior)
        assert await redis.hgetall(keys.posteriors) == {b"p0": f"of {group}".encode()}
    assert await response_tokens(redis, keys) == 4 * 2
    assert [await redis.hget(keys.group(f"g{n}"), "kept_order") for n in range(2)] == [b"1", b"2"]
    counters = await redis.hgetall(run.streams.counters)
    assert int(counters[b"judged"]) == 2


async def test_verdicts_recorded_together_count_their_own_tokens(run, redis, keys):
    pairs = []
    for delivery, tokens in zip(await run.judged("g0", 3), (2, 7, 5), strict=True):
        facts = delivery.message.facts.model_copy(update={"response_tokens": tokens})
        pairs.append((delivery.lease, delivery.message.model_copy(update={"facts": facts})))
    assert await run.sampler.record_verdicts(Lane.TRAIN, "g0", pairs, "kept") == [Effect.FRESH] * 3
    assert await response_tokens(redis, keys) == 14


async def test_a_batch_carries_the_snapshot_and_the_queue_s_position(run, redis, keys):
    await run.decided("g0", "kept")
    batch = batch_of(keys, 1, ["g0"], last=True)
    assert await run.sampler.publish_batch(batch, snapshot_at(1))
    assert await read_snapshot(redis, batch.snapshot) == snapshot_at(1)
    assert await read_snapshot(redis, "") is None
    assert await read_snapshot(redis, keys.snapshot(2)) is None
    assert await redis.hgetall(keys.queue) == {b"step": b"1", b"last": b"1", b"judged": b"1"}
    [logged] = await run.learner.batches()
    assert logged.batch == batch
    assert await run.learner.batches(after=logged.entry) == []


async def test_a_batch_of_a_group_that_is_not_kept_is_not_published(run, redis, keys):
    await run.decided("g0", "kept")
    await run.dispatched("g1")
    before = await contents(redis, keys)
    assert not await run.sampler.publish_batch(batch_of(keys, 1, ["g0", "g1"]), snapshot_at(1))
    assert not await run.sampler.publish_batch(batch_of(keys, 1, ["g0", "never"]), snapshot_at(1))
    assert await contents(redis, keys) == before


async def test_renewal_keeps_a_lease_and_does_not_steal_a_lost_one(redis, keys):
    run = await DrivenRun.open(redis, keys, lease_s=0.3)
    holder = run.rollout("r0")
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
    [held] = await holder.read(1, 1)
    async with holder.renewing(held.lease):
        await asyncio.sleep(0.8)
        assert await run.rollout("r1").read(1, 0.05) == []
    await asyncio.sleep(0.4)
    other = run.rollout("r1")
    [taken] = await other.read(1, 1)
    assert taken.lease.entry == held.lease.entry
    before = await contents(redis, keys)
    assert not await renew_lease(redis, held.lease)
    assert await contents(redis, keys) == before, "the other consumer still holds the lease"
    assert await renew_lease(redis, taken.lease)
    await other.ack(taken.lease)
    assert not await renew_lease(redis, taken.lease), "an acked entry has no owner"


async def test_work_stops_when_its_lease_is_lost(redis, keys):
    run = await DrivenRun.open(redis, keys, lease_s=0.3)
    for number in range(3):
        await run.sampler.dispatch(Lane.TRAIN, [task_of(f"g{number}")], STATE)
    holder = run.rollout("r0")
    kept, taken, finished = await holder.read(3, 1)

    async def work(delivery):
        async with holder.renewing(delivery.lease):
            await asyncio.sleep(60 if delivery is taken else 1.0)

    works = [asyncio.create_task(work(delivery)) for delivery in (kept, taken, finished)]
    await asyncio.sleep(0.05)
    await redis.xclaim(run.streams.tasks, "rollout", "r1", 0, [taken.lease.entry])
    results = await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), 30)
    assert [type(result) for result in results] == [type(None), LeaseLostError, type(None)]
    assert taken.lease.entry in str(results[1])


async def test_of_watched_leases_the_lost_ones_are_named(redis, keys):
    run = await DrivenRun.open(redis, keys, lease_s=0.3)
    for number in range(3):
        await run.sampler.dispatch(Lane.TRAIN, [task_of(f"g{number}")], STATE)
    holder = run.rollout("r0")
    leases = [delivery.lease for delivery in await holder.read(3, 1)]
    lost, found = [], asyncio.Event()

    def note(lease):
        lost.append(lease)
        found.set()

    with LeaseRenewal(redis, 0.3).watching(leases, note):
        await redis.xclaim(run.streams.tasks, "rollout", "r1", 0, [leases[1].entry])
        await asyncio.wait_for(found.wait(), 30)
        await asyncio.sleep(0.3)
    assert lost == [leases[1]], "each is named once"


async def test_a_second_entry_on_a_sample_has_no_effect_in_one_call(run, redis, keys):
    """As after a failover that lost the publication, but not the entry."""
    held = await run.published("g0", 1)
    [(_, sample)] = await redis.xrange(run.streams.samples)
    await redis.xadd(run.streams.samples, sample)
    held += await run.verifier().read(1, 1)
    verdicts = [(delivery.lease, verdict_on(delivery.message)) for delivery in held]
    assert await run.transitions.publish_verdicts(Lane.TRAIN, verdicts) == [Effect.FRESH, Effect.LATE]
    [(_, verdict)] = await redis.xrange(run.streams.verdicts)
    await redis.xadd(run.streams.verdicts, verdict)
    judged = [(delivery.lease, delivery.message) for delivery in await run.judge().read(2, 1)]
    assert await run.sampler.record_verdicts(Lane.TRAIN, "g0", judged, "") == [Effect.FRESH, Effect.LATE]
    assert await response_tokens(redis, keys) == judged[0][1].facts.response_tokens


async def test_messages_of_a_group_have_their_own_effects(run):
    """Of samples and verdicts that are sent in one call, some are late, and some are outside of the group."""
    task, keys = await run.dispatched("g0", 3), run.keys
    assert await publish_sample(run.transitions, Lane.TRAIN, task.lease, 3, sample_of(keys, "g0", 1), BODY)
    samples = [(sample_of(keys, "g0", index), BODY) for index in (0, 1, 2)]
    effects = await run.transitions.publish_samples(Lane.TRAIN, task.lease, 3, samples)
    assert effects == [Effect.FRESH, Effect.LATE, Effect.FRESH]
    held = await run.verifier().read(3, 1)
    assert sorted(delivery.message.index for delivery in held) == [0, 1, 2]
    verdicts = [(delivery.lease, verdict_on(delivery.message)) for delivery in held]
    outside = (held[0].lease, verdicts[0][1].model_copy(update={"index": 3}))
    effects = await run.transitions.publish_verdicts(Lane.TRAIN, [*verdicts[:2], verdicts[0], outside, verdicts[2]])
    assert effects == [Effect.FRESH, Effect.FRESH, Effect.LATE, Effect.OUTSIDE_GROUP, Effect.FRESH]
    judged = [(delivery.lease, delivery.message) for delivery in await run.judge().read(3, 1)]
    outside = (judged[0][0], judged[0][1].model_copy(update={"index": 3}))
    effects = await run.sampler.record_verdicts(Lane.TRAIN, "g0", [judged[0], outside, judged[1]], "")
    assert effects == [Effect.FRESH, Effect.OUTSIDE_GROUP, Effect.FRESH]
    effects = await run.sampler.record_verdicts(Lane.TRAIN, "g0", [judged[1], outside, judged[2]], "kept")
    assert effects == [Effect.LATE, Effect.OUTSIDE_GROUP, Effect.FRESH], "a message outside does not stop the decision"
    assert await run.redis.hget(keys.group("g0"), "state") == b"kept"


async def test_a_lapsed_lease_is_found_behind_many_live_ones(run, redis):
    for number in range(40):
        await run.sampler.dispatch(Lane.TRAIN, [task_of(f"g{number}")], STATE)
    *_, last = await run.rollout("r0").read(40, 1)
    await run.lapse(last.lease)
    [taken] = await run.rollout("r1").read(1, 0.01)
    assert taken.message.group == "g39"


async def test_a_message_without_an_ack_is_dead_lettered(run):
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g7")], STATE)
    for number in range(1, 3):
        [delivery] = await run.rollout().read(1, 1)
        assert (delivery.message.group, delivery.deliveries) == ("g7", number)
        await run.lapse(delivery.lease)
    assert await run.rollout().read(1, 0.05) == []
    [letter] = await letters(run)
    assert (letter.group, letter.prompt, letter.cause) == ("g7", "p0", Cause.DELIVERIES)
    assert (letter.reason, letter.deliveries) == ("delivered 2 times without an ack", 3)
    assert letter.size == len(letter.body)
    assert await run.counts() == {"dispatched": 1, "pending": 1}, (
        "the sampler ends the group; the letter alone does not"
    )


async def test_a_repeated_dead_letter_is_written_once_and_acks(run, redis, keys):
    first = await run.dispatched("g0")
    await run.lapse(first.lease)
    [second] = await run.rollout("r1").read(1, 1)
    await run.rollout("r0").dead_letter(first, "its prompt has 999 tokens", Cause.TOO_LONG)
    await run.rollout("r1").dead_letter(second, "its prompt has 999 tokens", Cause.TOO_LONG)
    [letter] = await letters(run)
    assert (letter.cause, letter.deliveries, letter.entry) == (Cause.TOO_LONG, 1, first.lease.entry)
    assert (await redis.xpending(run.streams.tasks, "rollout"))["pending"] == 0


async def test_a_consumer_continues_after_its_stream_was_deleted(run, redis, keys):
    held = await run.dispatched("g0")
    consumer = run.rollout()
    await redis.delete(run.streams.tasks)
    assert not await renew_lease(redis, held.lease)
    assert await consumer.read(1, 0.01) == [], "the consumer creates its group again"
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g1")], STATE)
    [delivery] = await consumer.read(2, 0.01)
    assert delivery.message.group == "g1"
    await consumer.ack(delivery.lease)
    await redis.delete(run.streams.tasks)
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g2")], STATE)
    assert not await renew_lease(redis, held.lease), "the stream has no consumer group"
    assert [delivery.message.group for _ in range(2) for delivery in await consumer.read(2, 0.01)] == ["g2"]


async def test_results_under_leases_of_deleted_streams_do_not_count(run, redis, keys):
    task = await run.dispatched("g0")
    assert await run.publish(task.lease, sample_of(keys, "g0", 0))
    [sample] = await run.verifier().read(1, 0.01)
    await redis.delete(run.streams.tasks, run.streams.samples)
    before = await contents(redis, keys)
    assert not await run.publish(task.lease, sample_of(keys, "g0", 1))
    assert not await publish_verdict(run.transitions, Lane.TRAIN, sample.lease, verdict_on(sample.message))
    assert await contents(redis, keys) == before


async def test_hostile_message_does_not_stop_the_consumer(run):
    bodies = (b"", b"\xff\xfe", b"[]", b'{"kind": "sample"}', b'{"kind": "task", "group": 3}')
    await run.append(run.streams.tasks, *bodies)
    await run.redis.xadd(run.streams.tasks, {"other": "field"})
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
    [delivery] = await run.rollout().read(10, 1)
    assert delivery.message.group == "g0"
    assert [letter.cause for letter in await letters(run)] == [Cause.INVALID] * 6


async def test_a_previous_owner_is_fenced(redis, keys):
    previous = await GroupTransitions.fenced(redis, keys, "sampler")
    owner = await GroupTransitions.fenced(redis, keys, "sampler")
    assert (previous.fence.epoch, owner.fence.epoch) == (1, 2)
    with pytest.raises(FencedError):
        await previous.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
    assert await owner.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
