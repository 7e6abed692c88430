"""Evaluations beside training: the record, the timetable, and the lane on a real server; the test plays the fleet."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY

from services.contracts import (
    Cause,
    EvaluationRecord,
    Lane,
    Outcome,
    PassAt,
    ProcessInfo,
    Prompt,
    SampleFacts,
    Task,
    Verdict,
)  # fmt: skip
from services.sampler.evaluation import Evaluator, HeldOut, held_out_sets, sampling_of, summarise
from services.sampler.ledger import Group
from services.sampler.service import SamplerService
from services.sampler.timetable import Timetable, due_steps
from services.settings import parse_recipe
from services.streams.effects import Effects, group_counts
from services.streams.keys import RunKeys
from services.streams.leases import Consumer
from services.streams.presence import Presence
from tests.harness.hand_fleet import HandFleet, HandLearner, running, until
from tests.harness.recipes import recipe_document
from tests.harness.service_context import service_context
from verifier.service import VerifierService

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


def judged(name, *verdicts, oldest=3, newest=3, tokens=4):
    """A group of (outcome, answer) verdicts."""
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), verifier="math", reference={})
    sampling = sampling_of(parse_recipe(recipe_document("/m")))
    group = Group(Task(group=name, prompt=prompt, samples=len(verdicts), sampling=sampling))
    for index, (outcome, answer) in enumerate(verdicts):
        facts = SampleFacts(
            payload="k", prompt_tokens=3, response_tokens=tokens, truncated=index == 0, mean_logprob=0.0,
            oldest_version=oldest, newest_version=newest, started_at=0.0, finished_at=1.0,
        )  # fmt: skip
        verdict = Verdict(group=name, index=index, outcome=outcome, score=0.0, answer=answer, facts=facts)
        group.verdicts[index] = verdict
    return group


def test_record_of_a_set_by_hand():
    groups = [
        judged("g0", (C, "a"), (C, "a"), (W, "b"), (W, "c"), oldest=2),
        judged("g1", (W, "d"), (W, "d"), (C, "a"), (U, ""), newest=5, tokens=10),
    ]
    recipe = parse_recipe(recipe_document("/m", evaluation={"samples": 4, "temperature": 0.9, "top_p": 0.6}))
    held_out = HeldOut("aime", (), 4)
    record = summarise("step-5", held_out, sampling_of(recipe), groups, dropped=1)
    assert (record.name, record.set, record.version, record.newest_version) == ("step-5", "aime", 2, 5)
    assert (record.prompts, record.samples_per_prompt, record.unknown, record.dropped) == (2, 4, 1, 1)
    assert (record.temperature, record.top_p) == (0.9, 0.6)
    # 1/2 and 1/3: mean 5/12; s / sqrt(2) = |1/2 - 1/3| / 2.
    assert (record.accuracy, record.standard_error) == pytest.approx((5 / 12, 1 / 12))
    # g0: 1 - C(2,2)/C(4,2) = 5/6; g1 of its three known ones: 1 - C(2,2)/C(3,2) = 2/3.
    assert [one.k for one in record.pass_at] == [1, 2, 4]
    assert [one.value for one in record.pass_at] == pytest.approx([5 / 12, 3 / 4, 1.0])
    assert [one.standard_error for one in record.pass_at] == pytest.approx([1 / 12, 1 / 12, 0.0])
    # "a" has most votes in g0 and is right, "d" in g1 and is wrong.
    assert (record.majority, record.majority_standard_error) == pytest.approx((0.5, 0.5))
    assert (record.response_length, record.truncated_share) == (7.0, 0.25)
    assert time.time() - record.at < 10


def test_record_of_nothing_known_claims_nothing():
    record = summarise("after", HeldOut("x", (), 2), sampling_of(parse_recipe(recipe_document("/m"))), [], dropped=3)
    assert (record.prompts, record.dropped, record.pass_at, record.majority) == (0, 3, (), None)
    unknown = [judged("g0", (U, ""), (U, ""))]
    record = summarise("after", HeldOut("x", (), 2), sampling_of(parse_recipe(recipe_document("/m"))), unknown, 0)
    assert (record.prompts, record.unknown, record.pass_at, record.majority) == (1, 2, (), None)


def test_sets_of_a_recipe_and_their_samples():
    other = {"name": "aime", "source": "jsonl", "path": "/a.jsonl", "samples": 32}
    recipe = parse_recipe(recipe_document("/m", evaluation={"samples": 2, "sets": [other, other | {"name": "b"}]}))
    found = held_out_sets(recipe, (), {"b": (), "aime": ()})
    assert [(one.name, one.samples) for one in found] == [("held-out", 2), ("aime", 32), ("b", 32)]
    alone = parse_recipe(recipe_document("/m", data={"held_out": 0}, evaluation={"sets": [other]}))
    assert [one.name for one in held_out_sets(alone, (), {"aime": ()})] == ["aime"]


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
    """Ends an evaluation when the test says so."""

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
    return [event.text for _, event in await context.journal.events() if event.phase == "evaluation-skipped"]


@asynccontextmanager
async def opened(redis, run_id, steps, every):
    """A timetable at policy version 0, the evaluator whose ends the test decides, and their service's context."""
    document = recipe_document("/none", limits={"rollout_steps": steps}, evaluation={"every": every})
    async with service_context(redis, run_id, document, "sampler") as context:
        hand = HandEvaluator()
        timetable = Timetable(context, hand)
        await timetable.open(0)
        yield timetable, hand, context
        await timetable.close()


async def test_timetable_runs_one_at_a_time_and_says_what_it_skips(redis, run_id):
    async with opened(redis, run_id, steps=6, every=1) as (timetable, hand, context):

        async def tick(version):
            await timetable.tick(version)
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
        assert await skipped(context) == ["step-2: had not begun when step-3 fell due"]
        await hand.end("step-1")
        await tick(3)
        await tick(5)  # two at once: the fourth is skipped at once, the fifth waits
        assert [name for name, _ in hand.begun] == ["before", "step-1", "step-3"]
        finishing = asyncio.create_task(timetable.finish(6))
        await asyncio.sleep(0.1)
        assert (await skipped(context))[1:] == [
            "step-4: had not begun when step-5 fell due",
            "step-5: had not begun when training was done; the last policy version is evaluated instead",
        ]
        assert len(hand.begun) == 3, "the last one waits for the one under way"
        await hand.end("step-3")
        await asyncio.sleep(0.05)
        assert hand.begun[3:] == [("after", False)]
        await hand.end("after")
        assert await asyncio.wait_for(finishing, 5)


async def test_a_run_that_ends_early_owes_no_evaluation_of_later_steps(redis, run_id):
    async with opened(redis, run_id, steps=100, every=4) as (timetable, hand, context):
        await timetable.tick(0)
        await asyncio.sleep(0)
        await hand.end("before")
        await timetable.tick(3)
        finishing = asyncio.create_task(timetable.finish(6))
        await asyncio.sleep(0.1)
        told = await skipped(context)
        await hand.end("after")
        assert await asyncio.wait_for(finishing, 5)
    assert told == ["step-4: had not begun when training was done; the last policy version is evaluated instead"]
    assert [name for name, _ in hand.begun] == ["before", "after"]


async def test_failed_evaluation_is_raised_by_the_next_tick(redis, run_id):
    async with opened(redis, run_id, steps=6, every=0) as (timetable, hand, _):
        await timetable.tick(0)
        await asyncio.sleep(0)
        await hand.end("before", RuntimeError("no verdict"))
        with pytest.raises(RuntimeError, match="no verdict"):
            await timetable.tick(0)


@pytest.mark.parametrize("newest_is_recorded", [False, True])
async def test_timetable_goes_on_where_an_earlier_one_stopped(redis, run_id, newest_is_recorded):
    document = recipe_document("/none", limits={"rollout_steps": 30}, evaluation={"every": 5})
    async with service_context(redis, run_id, document, "sampler") as context:
        effects = Effects(redis, context.keys, "sampler")
        task = judged("e.held-out.step-5.000000", (C, "a")).task
        await effects.dispatch(Lane.EVALUATION, task, None)
        if newest_is_recorded:
            held_out = HeldOut("held-out", (), 2)
            await context.journal.evaluation(summarise("step-15", held_out, task.sampling, [], 0), "sampler", 0)
        hand = HandEvaluator()
        timetable = Timetable(context, hand)
        await timetable.open(17)
        resumed = ("before", "step-5") if newest_is_recorded else ("before", "step-5", "step-15")
        for name in resumed:
            await timetable.tick(17)
            await asyncio.sleep(0)
            assert hand.begun[-1][0] == name
            await hand.end(name)
        await timetable.tick(17)
        assert len(hand.begun) == len(resumed), "step-10, missed long ago, is not made up"
        await timetable.close()


PROMPTS = tuple(
    Prompt(id=f"p{n}", messages=({"role": "user", "content": "?"},), verifier="reasoning-gym",
           reference={"task": "chain_sum", "entry": {"question": "?", "answer": str(n), "metadata": {}}})
    for n in range(6)
)  # fmt: skip


def ready(run, service):
    return ProcessInfo(id=f"{service}-1", service=service, run=run, host="h", pid=1, metrics="h:1", state="ready")


async def test_beside_training_only_half_the_slots_are_taken(redis, run_id):
    document = recipe_document("/none", rollout={"max_sequences": 8})
    async with (
        service_context(redis, run_id, document, "sampler") as context,
        Presence(redis, ready(run_id, "rollout")),
        Presence(redis, ready(run_id, "verifier")),
    ):
        keys = RunKeys(run_id)
        evaluator = Evaluator(context, Effects(redis, keys, "sampler"), (HeldOut("x", PROMPTS, 2),))
        tasks = keys.lane(Lane.EVALUATION).tasks
        async with running(evaluator.run("step-1", beside_training=True)) as evaluating:
            await until(lambda: some(redis, tasks), evaluating, "the first tasks")
            await asyncio.sleep(0.7)
            assert await redis.xlen(tasks) == 2  # 8 sequences, half of them, two a group
        async with running(evaluator.run("step-1")) as evaluating:

            async def all_out():
                return await redis.xlen(tasks) == 6

            await until(all_out, evaluating, "the rest, when it has the fleet to itself")


async def test_a_paused_run_asks_no_further_questions(redis, run_id):
    document = recipe_document("/none", rollout={"max_sequences": 4})
    async with (
        service_context(redis, run_id, document, "sampler") as context,
        Presence(redis, ready(run_id, "rollout")),
    ):
        keys = RunKeys(run_id)
        await redis.hset(keys.record, "pause_requested", "1")
        evaluator = Evaluator(context, Effects(redis, keys, "sampler"), (HeldOut("x", PROMPTS, 2),))
        tasks = keys.lane(Lane.EVALUATION).tasks
        async with running(evaluator.run("step-1")) as evaluating:
            await asyncio.sleep(1.2)
            assert await redis.xlen(tasks) == 0
            assert context.waits.current(time.time()) == (), "a pause is no stall"
            await redis.hdel(keys.record, "pause_requested")
            await until(lambda: some(redis, tasks), evaluating, "the questions, once the run goes on")


async def some(redis, stream):
    return await redis.xlen(stream) > 0


async def test_interrupted_evaluation_is_resumed_and_a_given_up_prompt_dropped(redis, run_id):
    keys = RunKeys(run_id)
    document = recipe_document("/none")
    async with (
        service_context(redis, run_id, document, "sampler") as context,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier)) as verifying,
    ):
        sets = (HeldOut("x", PROMPTS, 2), HeldOut("y", PROMPTS[:2], 1))
        effects = Effects(redis, keys, "sampler")
        consumer = Consumer(redis, keys, keys.lane(Lane.EVALUATION).tasks, "rollout", "hand", Task, 5.0, 3)
        await consumer.open()
        fleet = HandFleet(redis, keys, skill=1.0)
        async with running(Evaluator(context, effects, sets).run("before")) as first:
            await until(lambda: some(redis, keys.lane(Lane.EVALUATION).tasks), first, "the first tasks")
            answered, given_up = await consumer.read(2, 5)
            await fleet.answer(Lane.EVALUATION, answered)
            await consumer.give_up(given_up, "303 tokens are too many", Cause.TOO_LONG)

            async def both_ended():
                return await redis.scard(keys.lane(Lane.EVALUATION).pending) == 4

            await until(both_ended, first, "the end of two groups")
        async with running(fleet.run()) as generating:
            second = Evaluator(context, effects, sets).run("before")
            assert await asyncio.wait_for(second, 60)
            again = Evaluator(context, effects, sets).run("before")
            assert await asyncio.wait_for(again, 10)
            assert not [one for one in (*generating, *verifying) if one.done()]
        x, y = await context.journal.evaluations()
        counts = await group_counts(redis, keys, Lane.EVALUATION)
    assert (x.set, x.name, x.prompts, x.dropped, x.accuracy, x.majority) == ("x", "before", 5, 1, 1.0, 1.0)
    assert (y.set, y.name, y.prompts, y.dropped, y.samples_per_prompt) == ("y", "before", 2, 0, 1)
    assert x.pass_at == (PassAt(k=1, value=1.0, standard_error=0.0), PassAt(k=2, value=1.0, standard_error=0.0))
    assert (counts.dispatched, counts.dead, counts.pending) == (8, 1, 0)
    for score in ("avg", "pass", "majority"):
        assert REGISTRY.get_sample_value("penstock_evaluation", {"run": run_id, "set": "x", "score": score}) == 1.0


async def test_an_evaluation_that_hears_nothing_is_a_wait_with_its_name(redis, run_id):
    document = recipe_document("/none", limits={"stall_timeout_s": 2.0})
    async with service_context(redis, run_id, document, "sampler") as context:
        evaluator = Evaluator(context, Effects(redis, RunKeys(run_id), "sampler"), (HeldOut("x", PROMPTS, 1),))
        async with running(evaluator.run("step-1")) as evaluating:

            async def stalled():
                return [wait for wait in context.waits.current(time.time()) if wait.stalled(time.time())]

            await until(stalled, evaluating, "the stall")
            [wait] = await stalled()
    assert (wait.name, wait.deadline_s) == ("evaluation", 2.0)
    assert wait.waits_for == "6 of 6 prompts of evaluation 'step-1' of 'x'"


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
    extra = {"name": "long-sums", "task": "chain_sum", "prompts": 3, "samples": 3, "seed": 5,
             "options": {"min_terms": 3, "max_terms": 3}}  # fmt: skip
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
            return len([one for one in await sampler.journal.evaluations() if one.name == name]) == 2

        await until(lambda: both("before"), serving, "the first evaluation of both sets")

        async def trained():
            return await sampler.journal.policy_version() == 4

        async with running(learner.run()) as learning:
            tasks = [*serving, *learning]
            await until(trained, tasks, "the last policy version, while an earlier one is still being evaluated")
            assert {one.name for one in await sampler.journal.evaluations()} == {"before"}
            fleet.gate.set()
            await until(lambda: both("after"), tasks, "the last evaluation of both sets")
        records = {(one.name, one.set): one for one in await sampler.journal.evaluations()}
        said = await skipped(sampler)
    [beside] = {name for name, _ in records} - {"before", "after"}
    assert set(records) == {(name, kind) for name in ("before", beside, "after") for kind in ("held-out", "long-sums")}
    assert sorted([beside, *(text.split(":")[0] for text in said)]) == ["step-1", "step-2", "step-3"]
    before, after = records["before", "long-sums"], records["after", "long-sums"]
    assert (before.version, before.newest_version, before.prompts, before.samples_per_prompt) == (0, 0, 3, 3)
    assert (after.version, after.newest_version) == (4, 4)
    assert [one.k for one in before.pass_at] == [1, 2, 3]


async def test_run_of_no_rollout_steps_is_evaluated_once(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 0})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run()) as tasks,
    ):

        async def evaluated():
            return await sampler.journal.evaluations()

        await until(evaluated, tasks, "the evaluation")
        [record] = await sampler.journal.evaluations()
        counts = await group_counts(redis, keys)
    assert isinstance(record, EvaluationRecord)
    assert (record.name, record.set, record.prompts, record.version) == ("evaluation", "held-out", 8, 0)
    assert counts.dispatched == 0
