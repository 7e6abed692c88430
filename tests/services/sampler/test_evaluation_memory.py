"""Evaluations end on a Redis with little memory: judged prompts leave it, and prompts in flight wait again."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.contracts import Cause, Lane, Outcome, Task
from services.sampler.evaluation.evaluator import HeldOut
from services.sampler.evaluation.progress import EvaluationProgress, result_of
from services.sampler.service import SamplerService
from services.sampler.watches.memory import RedisMemory
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.validation import Source, make_letter
from services.streams.keys import RunKeys
from services.streams.memory_bound import evaluated_prompt
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import GroupTransitions
from services.streams.state.stats import HIGH_WATER
from services.waits import REDIS_MEMORY, cancel_and_wait
from tests.harness.hand_fleet import HandFleet, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.sampler.archiving import evaluate
from tests.services.sampler.judged import answered_group
from tests.services.sampler.test_evaluation import PROMPTS
from tests.services.sampler.test_memory import PatientFleet, events_of
from verifier.service import VerifierService

pytestmark = pytest.mark.usefixtures("quick", "loaded_once")
SERVICES = ("sampler", "verifier", "rollout")


class ShortAnswers(PatientFleet):
    TOKENS = 8


class AllAtOnce(PatientFleet):
    """Answers only once every prompt is in flight, as engines do that generate many responses side by side."""

    def __init__(self, context, started):
        super().__init__(context)
        self._started = started

    async def answer(self, lane, delivery):
        await self._started.wait()
        await super().answer(lane, delivery)


def test_the_verdicts_of_an_older_release_are_read():
    group = answered_group("e.x.before.000000", (Outcome.CORRECT, "a"), (Outcome.WRONG, "b"))
    stored = {b"state": b"evaluated", b"samples": b"2", b"task": group.task.model_dump_json().encode()}
    for index, verdict in group.verdicts.items():
        stored[f"verdict:{index}".encode()] = verdict.model_dump_json().encode()
    progress = EvaluationProgress({group.task.group: group.task}, 2, 1)
    progress.add(group.task.group, stored)
    assert progress.judged == {group.task.group: result_of(group)}


async def check_result(context, prompts):
    """Every prompt of the one evaluation was answered, rightly, and counted once."""
    [record] = await context.event_log.evaluations()
    counts = await group_counts(context.redis, context.keys, Lane.EVALUATION)
    assert (record.prompts, record.dropped, record.accuracy) == (prompts, 0, 1.0)
    assert (counts.dispatched, counts.evaluated, counts.pending) == (prompts, prompts, 0)


async def test_a_judged_prompt_keeps_only_its_result(redis, run_id):
    keys = RunKeys(run_id)
    name = "e.x.before.000000"
    async with (
        service_context(redis, run_id, recipe_document("/none"), "sampler") as context,
        service_context(redis, run_id, recipe_document("/none"), "verifier") as verifier,
        running(VerifierService().run(verifier)) as verifying,
    ):
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        fleet = HandFleet(redis, keys, skill=1.0)
        consumer = Consumer(redis, keys, keys.lane(Lane.EVALUATION).tasks, "rollout", "hand", Task, 5.0, 3)
        await consumer.open()

        def evaluation():
            return evaluate(context, transitions, (HeldOut("x", PROMPTS[:2], 2),))

        async with running(evaluation()) as evaluating:

            async def dispatched():
                return await redis.exists(keys.group(name))

            await until(dispatched, evaluating, "the tasks")
            first, second = await consumer.read(2, 5)
            await fleet.answer(Lane.EVALUATION, first)

            async def judged():
                return await redis.hmget(keys.group(name), "state", "archive") == [b"evaluated", b"done"]

            await until(judged, [*evaluating, *verifying], "the end of the first prompt")
        kept = await redis.hgetall(keys.group(name))
        assert set(kept) == {b"state", b"samples", b"result", b"archive"}
        assert sum(map(len, kept.values())) < 400
        # The same task again has no effect, and the next sampler knows the result.
        await fleet.answer(Lane.EVALUATION, first)
        assert await redis.hgetall(keys.group(name)) == kept
        await fleet.answer(Lane.EVALUATION, second)
        assert await asyncio.wait_for(evaluation(), 90)
        await check_result(context, 2)


async def test_the_next_sampler_dispatches_withdrawn_prompts(crowded, run_id):
    """Prompts whose responses find no room are withdrawn newest first; then the sampler is killed."""
    redis, fill = crowded
    keys = RunKeys(run_id)
    pending = keys.lane(Lane.EVALUATION).pending
    async with (
        service_context(redis, run_id, recipe_document("/none"), "sampler") as context,
        service_context(redis, run_id, recipe_document("/none"), "verifier") as verifier,
        service_context(redis, run_id, recipe_document("/none"), "rollout") as rollout,
        running(VerifierService().run(verifier)) as verifying,
    ):
        memory = RedisMemory(context)
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")

        def evaluation():
            return evaluate(context, transitions, (HeldOut("x", PROMPTS, 2),), memory)

        async def states():
            return [await redis.hget(keys.group(f"e.x.before.{number:06d}"), "state") for number in range(len(PROMPTS))]

        async with running(evaluation()) as evaluating:

            async def dispatched():
                return await redis.scard(pending) == len(PROMPTS)

            await until(dispatched, evaluating, "the tasks")
            await fill(0.9)
            rollout.waits.pending(REDIS_MEMORY, "room for samples", 60)

            async def one_left():
                await memory.look()
                return await states() == [b"pending", *[b"reopened"] * (len(PROMPTS) - 1)]

            await until(one_left, evaluating, "the withdrawals", deadline_s=60)
            await cancel_and_wait(*evaluating)
        texts = events_of(await context.event_log.events(), "prompts-withdrawn")
        assert texts[0].startswith(
            "1 prompts, e.x.before.000005 first: Redis has no room for the responses of rollout-"
        )
        counts = await group_counts(redis, keys, Lane.EVALUATION)
        assert (counts.dispatched, counts.pending, counts.reconciled) == (6, 6, True)
        # A letter of a withdrawn task says nothing about the next one.
        source = Source(keys.lane(Lane.EVALUATION).tasks, "1-0", b"{}")
        letter = make_letter(source, "3 deliveries", Cause.DELIVERIES, "e.x.before.000005", "p")
        await redis.xadd(keys.dead, {"m": letter.model_dump_json()})
        rollout.waits.done(REDIS_MEMORY)
        await fill(0)
        await memory.look()
        async with running(HandFleet(redis, keys, skill=1.0).run(), evaluation()) as tasks:
            await until(lambda: evaluated(redis, keys, "before"), [*tasks, *verifying], "the evaluation")
        await check_result(context, 6)


@pytest.mark.slow
async def test_judged_prompts_do_not_fill_redis(own_server, run_id):
    """The verdicts of all prompts together do not fit."""
    _, redis = own_server
    keys, samples, prompts = RunKeys(run_id), 128, 24
    document = recipe_document(
        "/none", data={"held_out": prompts}, evaluation={"samples": samples}, limits={"rollout_steps": 0}
    )
    async with AsyncExitStack() as stack:
        sampler, verifier, rollout = [
            await stack.enter_async_context(service_context(redis, run_id, document, service)) for service in SERVICES
        ]
        used = (await redis.info("memory"))["used_memory"]
        await redis.config_set("maxmemory", used + 2**20)
        services = (SamplerService().run(sampler), VerifierService().run(verifier), ShortAnswers(rollout).run())
        async with running(*services) as tasks:
            await until(lambda: evaluated(redis, keys, "evaluation"), tasks, "the evaluation")
        [record] = await sampler.event_log.evaluations()
    assert (record.prompts, record.dropped) == (prompts, 0)


@pytest.mark.slow
async def test_evaluations_of_three_runs_end_in_one_redis(own_server, run_id):
    """Each run dispatches what fits into the free memory, so that all together dispatch too much."""
    _, redis = own_server
    runs, prompts, samples = [f"{run_id}-{number}" for number in range(3)], 8, 4
    document = recipe_document(
        "/none",
        model={"max_model_len": 4096},
        rollout={"max_new_tokens": PatientFleet.TOKENS},
        data={"max_prompt_tokens": 64, "held_out": prompts},
        evaluation={"samples": samples},
        limits={"rollout_steps": 0},
    )
    async with AsyncExitStack() as stack:
        contexts = {
            run: [await stack.enter_async_context(service_context(redis, run, document, name)) for name in SERVICES]
            for run in runs
        }
        size = evaluated_prompt(contexts[runs[0]][0].record.recipe, samples)
        used = (await redis.info("memory"))["used_memory"]
        await redis.config_set("maxmemory", int((used + (prompts + 2) * size) / HIGH_WATER))
        started = asyncio.Event()
        services = []
        for sampler, _, rollout in contexts.values():
            services += [SamplerService().run(sampler), AllAtOnce(rollout, started).run()]
        async with running(*services) as tasks:

            async def all_dispatched():
                counts = [await group_counts(redis, RunKeys(run), Lane.EVALUATION) for run in runs]
                return all(found.dispatched == prompts for found in counts)

            await until(all_dispatched, tasks, "the tasks of all runs")
            started.set()

            async def all_evaluated():
                return all([await evaluated(redis, RunKeys(run), "evaluation") for run in runs])

            async def some_withdrawn():
                logged = [await sampler.event_log.events() for sampler, _, _ in contexts.values()]
                return any(events_of(events, "prompts-withdrawn") for events in logged)

            # Nothing is judged before: verdicts in time would free enough memory.
            await until(some_withdrawn, tasks, "a withdrawal")
            async with running(*(VerifierService().run(verifier) for _, verifier, _ in contexts.values())) as judging:
                await until(all_evaluated, [*tasks, *judging], "the evaluations", deadline_s=90)
        for run, (sampler, _, _) in contexts.items():
            [record] = await sampler.event_log.evaluations()
            assert (record.prompts, record.dropped) == (prompts, 0)
            counts = await group_counts(redis, RunKeys(run), Lane.EVALUATION)
            assert (counts.dispatched, counts.evaluated, counts.reconciled) == (prompts, prompts, True)
