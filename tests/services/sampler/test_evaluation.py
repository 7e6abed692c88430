"""Evaluations: the record of a set, and the lane on a real server; the test plays the fleet."""

import asyncio
import time

import pytest
from prometheus_client import REGISTRY

from services.contracts import Cause, EvaluationRecord, Lane, Outcome, PassAt, ProcessInfo, Prompt, PromptResult, Task
from services.sampler.evaluation.evaluator import HeldOut, held_out_sets, sampling_of, summarise
from services.sampler.evaluation.progress import result_of
from services.sampler.service import SamplerService
from services.settings import parse_recipe
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.validation import Source, make_letter
from services.streams.keys import RunKeys
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import GroupTransitions
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.rewind import Rewind
from services.waits import cancel_and_wait
from tests.harness.hand_fleet import HandFleet, running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.sampler.archiving import evaluate
from tests.services.sampler.judged import answered_group
from verifier.service import VerifierService

pytestmark = pytest.mark.usefixtures("loaded_once")

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


def test_record_of_a_set_by_hand():
    groups = [
        answered_group("g0", (C, "a"), (C, "a"), (W, "b"), (W, "c"), oldest=2),
        answered_group("g1", (W, "d"), (W, "d"), (C, "a"), (U, ""), newest=5, tokens=10),
    ]
    recipe = parse_recipe(recipe_document("/m", evaluation={"samples": 4, "temperature": 0.9, "top_p": 0.6}))
    held_out = HeldOut("aime", (), 4)
    record = summarise("step-5", held_out, sampling_of(recipe), [result_of(group) for group in groups], dropped=1)
    assert (record.name, record.set, record.version, record.newest_version) == ("step-5", "aime", 2, 5)
    assert (record.prompts, record.samples_per_prompt, record.unknown, record.dropped) == (2, 4, 1, 1)
    assert (record.temperature, record.top_p) == (0.9, 0.6)
    # 1/2 and 1/3: mean 5/12; s / sqrt(2) = |1/2 - 1/3| / 2.
    assert (record.accuracy, record.standard_error) == pytest.approx((5 / 12, 1 / 12))
    # g0: 1 - C(2,2)/C(4,2) = 5/6; g1, from its three known verdicts: 1 - C(2,2)/C(3,2) = 2/3.
    assert [estimate.k for estimate in record.pass_at] == [1, 2, 4]
    assert [estimate.value for estimate in record.pass_at] == pytest.approx([5 / 12, 3 / 4, 1.0])
    assert [estimate.standard_error for estimate in record.pass_at] == pytest.approx([1 / 12, 1 / 12, 0.0])
    # "a" has the most votes in g0 and is correct; "d" has the most in g1 and is wrong.
    assert (record.majority, record.majority_standard_error) == pytest.approx((0.5, 0.5))
    assert (record.response_length, record.truncated_share) == (7.0, 0.25)
    assert time.time() - record.at < 10


def test_a_record_without_known_verdicts_has_no_scores():
    record = summarise("after", HeldOut("x", (), 2), sampling_of(parse_recipe(recipe_document("/m"))), [], dropped=3)
    assert (record.prompts, record.dropped, record.pass_at, record.majority) == (0, 3, (), None)
    unknown = [result_of(answered_group("g0", (U, ""), (U, "")))]
    record = summarise("after", HeldOut("x", (), 2), sampling_of(parse_recipe(recipe_document("/m"))), unknown, 0)
    assert (record.prompts, record.unknown, record.pass_at, record.majority) == (1, 2, (), None)


def scored(name, *scores, rewards=()):
    """An evaluated group whose responses have these scores (None: unknown verdicts) and named rewards."""
    group = answered_group(name, *[(U if score is None else W, "") for score in scores])
    for index, score in enumerate(scores):
        changes = {"score": score or 0.0, "rewards": rewards[index] if rewards else {}}
        group.verdicts[index] = group.verdicts[index].model_copy(update=changes)
    return group


def test_a_record_has_the_mean_score_and_that_of_each_reward():
    rewards = [{"math": 0.5, "style": 1.0}, {"style": 0.0}]
    groups = [scored("g0", 0.2, 0.6, rewards=rewards), scored("g1", 0.8, None), scored("g2", None, None)]
    results = [PromptResult.model_validate_json(result_of(group).model_dump_json()) for group in groups]
    assert [result.score for result in results] == [pytest.approx(0.4), 0.8, None]
    settings = sampling_of(parse_recipe(recipe_document("/m")))
    record = summarise("after", HeldOut("x", (), 2), settings, results, 0)
    assert (record.score, record.score_standard_error) == (pytest.approx(0.6), pytest.approx(0.2))
    assert record.rewards == {"math": 0.5, "style": 0.5}
    assert record.accuracy == 0.0
    nothing = summarise("after", HeldOut("x", (), 2), settings, results[2:], 0)
    assert (nothing.score, nothing.score_standard_error, nothing.rewards) == (None, None, {})
    older = PromptResult.model_validate({**results[0].model_dump(exclude={"score", "rewards"})})
    assert summarise("after", HeldOut("x", (), 2), settings, [older], 0).score is None, "of an older release"


def test_sets_of_a_recipe_and_their_samples():
    other = {"name": "aime", "source": "jsonl", "path": "/a.jsonl", "samples": 32}
    recipe = parse_recipe(recipe_document("/m", evaluation={"samples": 2, "sets": [other, other | {"name": "b"}]}))
    sets = held_out_sets(recipe, (), {"b": (), "aime": ()})
    assert [(held_out.name, held_out.samples) for held_out in sets] == [("held-out", 2), ("aime", 32), ("b", 32)]
    alone = parse_recipe(recipe_document("/m", data={"held_out": 0}, evaluation={"sets": [other]}))
    assert [held_out.name for held_out in held_out_sets(alone, (), {"aime": ()})] == ["aime"]


PROMPTS = tuple(
    Prompt(
        id=f"p{n}",
        messages=({"role": "user", "content": "?"},),
        verifier="reasoning-gym",
        reference={"task": "chain_sum", "entry": {"question": "?", "answer": str(n), "metadata": {}}},
    )
    for n in range(6)
)


def ready(run, service):
    return ProcessInfo(id=f"{service}-1", service=service, run=run, host="h", pid=1, metrics="h:1", state="ready")


async def test_an_evaluation_beside_training_takes_half_the_slots(redis, run_id):
    document = recipe_document("/none", rollout={"max_sequences": 8})
    async with (
        service_context(redis, run_id, document, "sampler") as context,
        Heartbeat(redis, ready(run_id, "rollout")),
        Heartbeat(redis, ready(run_id, "verifier")),
    ):
        keys = RunKeys(run_id)
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        sets = (HeldOut("x", PROMPTS, 2),)
        tasks = keys.lane(Lane.EVALUATION).tasks
        async with running(evaluate(context, transitions, sets, name="step-1", beside_training=True)) as evaluating:
            await until(lambda: some(redis, tasks), evaluating, "the first tasks")
            await asyncio.sleep(0.7)
            assert await redis.xlen(tasks) == 2  # half of 8 sequences, two per group
        async with running(evaluate(context, transitions, sets, name="step-1")) as evaluating:

            async def all_dispatched():
                return await redis.xlen(tasks) == 6

            await until(all_dispatched, evaluating, "the remaining tasks, with the whole fleet")


async def test_a_paused_run_dispatches_no_evaluation_tasks(redis, run_id):
    document = recipe_document("/none", rollout={"max_sequences": 4})
    async with (
        service_context(redis, run_id, document, "sampler") as context,
        Heartbeat(redis, ready(run_id, "rollout")),
    ):
        keys = RunKeys(run_id)
        await redis.hset(keys.record, "pause_requested", "1")
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        sets = (HeldOut("x", PROMPTS, 2),)
        tasks = keys.lane(Lane.EVALUATION).tasks
        async with running(evaluate(context, transitions, sets, name="step-1")) as evaluating:
            await asyncio.sleep(1.2)
            assert await redis.xlen(tasks) == 0
            assert context.waits.current(time.time()) == (), "a pause is not a stall"
            await redis.hdel(keys.record, "pause_requested")
            await until(lambda: some(redis, tasks), evaluating, "tasks after the run resumes")


async def some(redis, stream, least=1):
    return await redis.xlen(stream) >= least


async def test_an_evaluation_resumes_and_drops_a_dead_lettered_prompt(redis, run_id):
    keys = RunKeys(run_id)
    document = recipe_document("/none")
    async with (
        service_context(redis, run_id, document, "sampler") as context,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier)) as verifying,
    ):
        sets = (HeldOut("x", PROMPTS, 2), HeldOut("y", PROMPTS[:2], 1))
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        consumer = Consumer(redis, keys, keys.lane(Lane.EVALUATION).tasks, "rollout", "hand", Task, 5.0, 3)
        await consumer.open()
        fleet = HandFleet(redis, keys, skill=1.0)
        async with running(evaluate(context, transitions, sets)) as first:
            await until(lambda: some(redis, keys.lane(Lane.EVALUATION).tasks, 2), first, "two tasks")
            answered, too_long = await consumer.read(2, 5)
            await fleet.answer(Lane.EVALUATION, answered)
            await consumer.dead_letter(too_long, "303 tokens", Cause.TOO_LONG)

            async def both_ended():
                return await redis.scard(keys.lane(Lane.EVALUATION).pending) == 4

            await until(both_ended, first, "the end of two groups")
        async with running(fleet.run()) as generating:
            second = evaluate(context, transitions, sets)
            assert await asyncio.wait_for(second, 150)
            again = evaluate(context, transitions, sets)
            assert await asyncio.wait_for(again, 60)
            assert not [service for service in (*generating, *verifying) if service.done()]
        x, y = await context.event_log.evaluations()
        counts = await group_counts(redis, keys, Lane.EVALUATION)
    assert (x.set, x.name, x.prompts, x.dropped, x.accuracy, x.majority) == ("x", "before", 5, 1, 1.0, 1.0)
    assert (y.set, y.name, y.prompts, y.dropped, y.samples_per_prompt) == ("y", "before", 2, 0, 1)
    assert x.pass_at == (PassAt(k=1, value=1.0, standard_error=0.0), PassAt(k=2, value=1.0, standard_error=0.0))
    assert (counts.dispatched, counts.evaluated, counts.dead, counts.pending) == (8, 7, 1, 0)
    assert counts.reconciled
    for score in ("avg", "pass", "majority"):
        labels = {"run": run_id, "set": "x", "score": score}
        assert REGISTRY.get_sample_value("penstock_evaluation_score_ratio", labels) == 1.0


async def test_an_evaluation_follows_a_redis_that_lost_writes(redis, run_id, monkeypatch):
    """A failover loses the dispatch of one prompt and the task of another: the first is asked again, one is dropped."""
    monkeypatch.setattr("services.sampler.watches.audit.EVERY_S", 0.2)
    keys = RunKeys(run_id)
    lane = keys.lane(Lane.EVALUATION)
    async with service_context(redis, run_id, recipe_document("/none"), "sampler") as context:
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        consumer = Consumer(redis, keys, lane.tasks, "rollout", "hand", Task, 5.0, 3)
        await consumer.open()
        async with running(evaluate(context, transitions, (HeldOut("x", PROMPTS[:2], 1),))) as evaluating:
            await until(lambda: some(redis, lane.tasks, 2), evaluating, "two tasks")
            first, second = [delivery.message.group for delivery in await consumer.read(2, 5)]
            async with redis.pipeline(transaction=True) as pipe:
                pipe.delete(keys.group(first))
                pipe.srem(lane.pending, first)
                pipe.hincrby(lane.counters, "dispatched", -1)
                pipe.xtrim(lane.tasks, maxlen=0)
                await pipe.execute()

            async def asked_again():
                return {delivery.message.group for delivery in await consumer.read(2, 0.05)} == {first}

            await until(asked_again, evaluating, "the first prompt, asked again")

            async def dropped():
                return (await group_counts(redis, keys, Lane.EVALUATION)).dead == 1

            await until(dropped, evaluating, "the second prompt, dropped")
            counts = await group_counts(redis, keys, Lane.EVALUATION)
            assert counts.reconciled, counts
            assert await redis.hget(keys.group(second), "state") == b"dead"


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_evaluation_decides_again_what_redis_lost(redis, run_id, restarted):
    """A failover loses the decision on a prompt, but not its verdict; the sampler dies of it, or lives on."""
    keys = RunKeys(run_id)
    lane = keys.lane(Lane.EVALUATION)
    document = recipe_document("/none")
    async with (
        service_context(redis, run_id, document, "sampler") as context,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier)) as verifying,
    ):
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        consumer = Consumer(redis, keys, lane.tasks, "rollout", "hand", Task, 5.0, 3)
        await consumer.open()
        fleet = HandFleet(redis, keys, skill=1.0)

        def evaluation():
            return evaluate(context, transitions, (HeldOut("x", PROMPTS[:2], 1),))

        async def one_ended():
            return await redis.scard(lane.pending) == 1

        async with running(evaluation()) as evaluating:
            await until(lambda: some(redis, lane.tasks, 2), evaluating, "two tasks")
            answered, later = await consumer.read(2, 5)
            await fleet.answer(Lane.EVALUATION, answered)
            await until(one_ended, [*evaluating, *verifying], "the end of one prompt")
            if restarted:
                await cancel_and_wait(*evaluating)
            name = answered.message.group
            [(_, verdict)] = await redis.xrange(lane.verdicts)
            pending = {"state": "pending", "samples": 1, "verdict:0": verdict[b"m"]}
            async with redis.pipeline(transaction=True) as pipe:
                pipe.delete(keys.group(name))
                pipe.hset(keys.group(name), mapping=pending)
                pipe.sadd(lane.pending, name)
                pipe.hincrby(lane.counters, "judged", -1)
                pipe.hincrby(lane.counters, "evaluated", -1)
                await pipe.execute()
            await fleet.answer(Lane.EVALUATION, later)
            assert await asyncio.wait_for(evaluation() if restarted else evaluating[0], 90)
        [record] = await context.event_log.evaluations()
        counts = await group_counts(redis, keys, Lane.EVALUATION)
        left = await redis.smembers(lane.pending)
    assert (record.prompts, record.dropped, record.accuracy) == (2, 0, 1.0)
    assert counts.reconciled, counts
    assert (counts.dispatched, counts.evaluated) == (2, 2)
    assert not left


@pytest.mark.parametrize("lost", ["release", "letter and release"])
async def test_an_evaluation_drops_again_what_redis_lost(redis, run_id, lost):
    """A failover loses the release of a dropped prompt; if it loses the dead letter too, the task is leased again."""
    keys = RunKeys(run_id)
    lane = keys.lane(Lane.EVALUATION)
    async with (
        service_context(redis, run_id, recipe_document("/none"), "sampler") as context,
        service_context(redis, run_id, recipe_document("/none"), "verifier") as verifier,
        running(VerifierService().run(verifier)) as verifying,
    ):
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        consumer = Consumer(redis, keys, lane.tasks, "rollout", "hand", Task, 5.0, 3)
        await consumer.open()
        fleet = HandFleet(redis, keys, skill=1.0)
        async with running(evaluate(context, transitions, (HeldOut("x", PROMPTS[:2], 1),))) as evaluating:
            await until(lambda: some(redis, lane.tasks, 2), evaluating, "two tasks")
            too_long, later = await consumer.read(2, 5)
            await consumer.dead_letter(too_long, "303 tokens", Cause.TOO_LONG)

            async def dead():
                return (await group_counts(redis, keys, Lane.EVALUATION)).dead

            await until(dead, evaluating, "the dropped prompt")
            name = too_long.message.group
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hset(keys.group(name), "state", "pending")
                pipe.sadd(lane.pending, name)
                pipe.hincrby(lane.counters, "dead", -1)
                pipe.lrem(lane.released, 0, keys.group(name))
                if lost == "letter and release":
                    pipe.delete(keys.dead)
                    again = await redis.xadd(lane.tasks, {"m": too_long.message.model_dump_json()})
                    pipe.hset(keys.group(name), "entry", again)
                await pipe.execute()
            await fleet.answer(Lane.EVALUATION, later)
            if lost == "letter and release":
                [redelivered] = await consumer.read(1, 5)
                await fleet.answer(Lane.EVALUATION, redelivered)
            await until(context.event_log.evaluations, [*evaluating, *verifying], "the record")
            assert await asyncio.wait_for(evaluating[0], 90)
        [record] = await context.event_log.evaluations()
        counts = await group_counts(redis, keys, Lane.EVALUATION)
        left = await redis.smembers(lane.pending)
    dropped = 1 if lost == "release" else 0
    assert (record.prompts, record.dropped) == (2 - dropped, dropped)
    assert counts.reconciled, counts
    assert (counts.dispatched, counts.evaluated, counts.dead) == (2, 2 - dropped, dropped)
    assert not left


async def test_letters_from_before_a_rewind_drop_no_prompt(redis, run_id):
    """The rewind deleted an evaluation of this name, in which two prompts had dead letters."""
    keys = RunKeys(run_id)
    document = recipe_document("/none")
    for number in range(2):
        source = Source(keys.lane(Lane.EVALUATION).tasks, f"{number + 1}-0", b"{}")
        letter = make_letter(source, "3 deliveries", Cause.DELIVERIES, f"e.x.before.{number:06d}", "p")
        await redis.xadd(keys.dead, {"m": letter.model_dump_json()})
    fleet = HandFleet(redis, keys, skill=1.0)
    async with (
        service_context(redis, run_id, document, "sampler") as context,
        service_context(redis, run_id, document, "verifier") as verifier,
    ):
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        rewind = Rewind(redis, keys, "sampler", transitions.fence, 1)
        assert await rewind.start()
        evaluation = evaluate(context, transitions, (HeldOut("x", PROMPTS[:2], 1),))
        async with running(VerifierService().run(verifier), fleet.run()):
            assert await asyncio.wait_for(evaluation, 90)
        [record] = await context.event_log.evaluations()
    assert (record.prompts, record.dropped) == (2, 0)


async def test_an_evaluation_without_verdicts_is_a_named_wait(redis, run_id):
    document = recipe_document("/none", limits={"stall_timeout_s": 2.0})
    async with service_context(redis, run_id, document, "sampler") as context:
        transitions = await GroupTransitions.fenced(redis, RunKeys(run_id), "sampler")
        sets = (HeldOut("x", PROMPTS, 1),)
        async with running(evaluate(context, transitions, sets, name="step-1")) as evaluating:

            async def stalled():
                return [wait for wait in context.waits.current(time.time()) if wait.stalled(time.time())]

            await until(stalled, evaluating, "the stall")
            [wait] = await stalled()
    assert (wait.name, wait.deadline_s) == ("evaluation", 2.0)
    assert wait.waits_for == "6 of 6 prompts of evaluation 'step-1' of 'x'"


async def test_a_run_without_rollout_steps_is_evaluated_once(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 0})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run()) as tasks,
    ):

        async def evaluated():
            return await sampler.event_log.evaluations()

        await until(evaluated, tasks, "the evaluation")
        [record] = await sampler.event_log.evaluations()
        counts = await group_counts(redis, keys)
    assert isinstance(record, EvaluationRecord)
    assert (record.name, record.set, record.prompts, record.version) == ("evaluation", "held-out", 8, 0)
    assert counts.dispatched == 0


async def test_a_failed_maintenance_ends_a_sampler_that_is_done(redis, run_id, monkeypatch):
    """Nothing would trim the run's streams or measure memory any more."""
    monkeypatch.setattr("services.sampler.queue.maintenance.EVERY_S", 0.2)
    document = recipe_document("/none", limits={"rollout_steps": 0})
    keys = RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), HandFleet(redis, keys).run(), SamplerService().run(sampler)) as tasks,
    ):

        async def evaluated_and_deleted():
            groups = [key async for key in redis.scan_iter(keys.group("*"), 1000)]
            return await sampler.event_log.evaluations() and not groups

        async def fails(*_):
            raise RuntimeError("a failed trim")

        await until(evaluated_and_deleted, tasks, "the end of the work")
        monkeypatch.setattr("services.sampler.queue.maintenance.trim_released", fails)
        with pytest.raises(RuntimeError, match="a failed trim"):
            await asyncio.wait_for(tasks[-1], 30)


def test_a_result_has_the_versions_of_all_its_responses():
    group = answered_group("g0", (C, "a"), (W, "b"), (C, "a"))
    for index, (oldest, newest) in enumerate([(3, 4), (2, 2), (5, 7)]):
        verdict = group.verdicts[index]
        facts = verdict.facts.model_copy(update={"oldest_version": oldest, "newest_version": newest})
        group.verdicts[index] = verdict.model_copy(update={"facts": facts})
    result = result_of(group)
    assert (result.oldest_version, result.newest_version) == (2, 7)
