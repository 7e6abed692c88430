"""Evaluations beside training: when they are due, which are skipped and reported, and that training never waits."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.contracts import Lane, Outcome
from services.sampler.evaluation.evaluator import HeldOut, summarise
from services.sampler.evaluation.schedule import EvaluationSchedule, due_steps
from services.sampler.service import SamplerService
from services.streams.keys import RunKeys
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import read_policy
from tests.harness.hand_fleet import HandFleet, HandLearner, running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.sampler.judged import answered_group
from verifier.service import VerifierService

pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.mark.parametrize(
    ("every", "total", "known", "version", "due"),
    [
        (0, 10, 0, 9, []),
        (1, 4, 0, 1, [1]),
        (1, 4, 1, 3, [2, 3]),
        (1, 4, 3, 4, []),  # the last version is evaluated as "after"
        (5, 20, 0, 4, []),
        (5, 20, 4, 5, [5]),
        (5, 20, 5, 14, [10]),
        (5, 20, 5, 15, [10, 15]),
    ],
)
def test_due_steps(every, total, known, version, due):
    assert due_steps(every, total, known, version) == due


class HandEvaluator:
    """Ends an evaluation when the test calls `end`."""

    def __init__(self):
        self.begun, self.ends = [], {}

    async def run(self, name, *, beside_training=False):
        self.begun.append((name, beside_training))
        self.ends[name] = asyncio.get_running_loop().create_future()
        return await self.ends[name]

    async def end(self, name, result=True):
        if isinstance(result, Exception):
            self.ends[name].set_exception(result)
        else:
            self.ends[name].set_result(result)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def skipped(context):
    return [event.text for _, event in await context.event_log.events() if event.phase == "evaluation-skipped"]


@asynccontextmanager
async def opened(redis, run_id, steps, every):
    """A schedule at policy version 0, an evaluator whose evaluations the test ends, and their service's context."""
    document = recipe_document("/none", limits={"rollout_steps": steps}, evaluation={"every": every})
    async with service_context(redis, run_id, document, "sampler") as context:
        hand = HandEvaluator()
        schedule = EvaluationSchedule(context, hand)
        await schedule.open(0)
        yield schedule, hand, context
        await schedule.close()


async def test_one_evaluation_runs_at_a_time_and_skips_are_reported(redis, run_id):
    async with opened(redis, run_id, steps=6, every=1) as (schedule, hand, context):

        async def tick(version):
            await schedule.tick(version)
            await asyncio.sleep(0)  # the evaluation begins

        await tick(0)
        await tick(1)  # step-1 waits for "before"
        assert hand.begun == [("before", False)]
        await hand.end("before")
        await tick(1)
        assert hand.begun[1:] == [("step-1", True)]
        await tick(2)
        assert await skipped(context) == []
        await tick(3)
        assert await skipped(context) == ["step-2: had not started when step-3 became due"]
        await hand.end("step-1")
        await tick(3)
        await tick(5)  # step-4 and step-5 are due: step-4 is skipped at once, step-5 waits
        assert [name for name, _ in hand.begun] == ["before", "step-1", "step-3"]
        finishing = asyncio.create_task(schedule.finish(6))
        await asyncio.sleep(0.1)
        assert (await skipped(context))[1:] == [
            "step-4: had not started when step-5 became due",
            "step-5: had not started when training finished; the last policy version is evaluated instead",
        ]
        assert len(hand.begun) == 3, "the last evaluation waits for the running one"
        await hand.end("step-3")
        await asyncio.sleep(0.05)
        assert hand.begun[3:] == [("after", False)]
        await hand.end("after")
        assert await asyncio.wait_for(finishing, 60)


async def test_a_run_that_ends_early_skips_the_waiting_evaluation(redis, run_id):
    async with opened(redis, run_id, steps=100, every=4) as (schedule, hand, context):
        await schedule.tick(0)
        await asyncio.sleep(0)
        await hand.end("before")
        await schedule.tick(3)
        finishing = asyncio.create_task(schedule.finish(6))
        await asyncio.sleep(0.1)
        texts = await skipped(context)
        await hand.end("after")
        assert await asyncio.wait_for(finishing, 60)
    assert texts == ["step-4: had not started when training finished; the last policy version is evaluated instead"]
    assert [name for name, _ in hand.begun] == ["before", "after"]


async def test_failed_evaluation_is_raised_by_the_next_tick(redis, run_id):
    async with opened(redis, run_id, steps=6, every=0) as (schedule, hand, _):
        await schedule.tick(0)
        await asyncio.sleep(0)
        await hand.end("before", RuntimeError("no verdict"))
        with pytest.raises(RuntimeError, match="no verdict"):
            await schedule.tick(0)


@pytest.mark.parametrize("newest_is_recorded", [False, True])
async def test_the_schedule_resumes_where_an_earlier_one_stopped(redis, run_id, newest_is_recorded):
    document = recipe_document("/none", limits={"rollout_steps": 30}, evaluation={"every": 5})
    async with service_context(redis, run_id, document, "sampler") as context:
        transitions = await GroupTransitions.fenced(redis, context.keys, "sampler")
        task = answered_group("e.held-out.step-5.000000", (Outcome.CORRECT, "a")).task
        await transitions.dispatch(Lane.EVALUATION, [task], None)
        if newest_is_recorded:
            held_out = HeldOut("held-out", (), 2)
            await transitions.record_evaluation(summarise("step-15", held_out, task.sampling, [], 0))
        hand = HandEvaluator()
        schedule = EvaluationSchedule(context, hand)
        await schedule.open(17)
        resumed = ("before", "step-5") if newest_is_recorded else ("before", "step-5", "step-15")
        for name in resumed:
            await schedule.tick(17)
            await asyncio.sleep(0)
            assert hand.begun[-1][0] == name
            await hand.end(name)
        await schedule.tick(17)
        assert len(hand.begun) == len(resumed), "step-10, missed long ago, is not evaluated"
        await schedule.close()


class HeldBackFleet(HandFleet):
    """Answers evaluations of single steps only once `gate` is set."""

    def __init__(self, redis, keys):
        super().__init__(redis, keys)
        self.gate = asyncio.Event()
        self.later = set()

    async def answer(self, lane, delivery):
        if ".step-" not in delivery.message.group or self.gate.is_set():
            await super().answer(lane, delivery)
            return

        async def when_open():
            await self.gate.wait()
            await super(HeldBackFleet, self).answer(lane, delivery)

        self.later.add(asyncio.create_task(when_open()))


@pytest.mark.timeout(180)
async def test_training_never_waits_for_an_evaluation(redis, run_id):
    extra = {
        "name": "long-sums",
        "task": "chain_sum",
        "prompts": 3,
        "samples": 3,
        "seed": 5,
        "options": {"min_terms": 3, "max_terms": 3},
    }
    document = recipe_document("/none", limits={"rollout_steps": 4}, evaluation={"every": 1, "sets": [extra]})
    keys = RunKeys(run_id)
    fleet = HeldBackFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run()) as serving,
    ):

        async def both(name):
            return len([record for record in await sampler.event_log.evaluations() if record.name == name]) == 2

        await until(lambda: both("before"), serving, "the first evaluation of both sets")

        async def trained():
            policy = await read_policy(sampler.redis, sampler.keys)
            return policy is not None and policy.version == 4

        async with running(learner.run()) as learning:
            tasks = [*serving, *learning]
            await until(trained, tasks, "the last policy version, while an earlier one is still being evaluated")
            assert {record.name for record in await sampler.event_log.evaluations()} == {"before"}
            fleet.gate.set()
            await until(lambda: both("after"), tasks, "the last evaluation of both sets")
        records = {(record.name, record.set): record for record in await sampler.event_log.evaluations()}
        texts = await skipped(sampler)
    [beside] = {name for name, _ in records} - {"before", "after"}
    assert set(records) == {
        (name, held_out) for name in ("before", beside, "after") for held_out in ("held-out", "long-sums")
    }
    assert sorted([beside, *(text.split(":")[0] for text in texts)]) == ["step-1", "step-2", "step-3"]
    before, after = records["before", "long-sums"], records["after", "long-sums"]
    assert (before.version, before.newest_version, before.prompts, before.samples_per_prompt) == (0, 0, 3, 3)
    assert (after.version, after.newest_version) == (4, 4)
    assert [estimate.k for estimate in before.pass_at] == [1, 2, 3]
