"""Dispatch: a prompt that is too long is drawn once; generation batches are whole, and their number is limited."""

import asyncio
import itertools
from unittest.mock import AsyncMock

import pytest
from prometheus_client import REGISTRY

from services.contracts import Cause, DeadLetter, Lane, Prompt, SamplerState, Task
from services.sampler.data import PromptsExhaustedError, load_splits
from services.sampler.groups import GroupTable
from services.sampler.queue.dispatch import Dispatcher, task_of
from services.sampler.queue.starvation import Level
from services.sampler.queue.state import starvation_of
from services.sampler.service import SamplerService
from services.settings import parse_recipe
from services.streams.connection.functions import RedisFullError
from services.streams.delivery.consumer import Consumer, faulty_prompt
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog, read_all
from services.streams.state.group_counts import group_counts, response_tokens
from services.streams.state.group_state import GroupTransitions
from tests.harness.hand_fleet import DEADLINE_S, HandFleet, HandLearner, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from verifier.service import VerifierService

pytestmark = pytest.mark.usefixtures("loaded_once")


def test_a_task_is_sampled_as_the_recipe_says():
    document = recipe_document("/model", rollout={"temperature": 0.8, "top_p": 0.7, "top_k": 20, "max_new_tokens": 9})
    prompt = Prompt(id="p", messages=(), verifier="math", reference={})
    drawn = task_of(parse_recipe(document), "g0", prompt).sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_new_tokens) == (0.8, 0.7, 20, 9)


class Alternating:
    """Replaces the fleet's random numbers: every other answer is correct, so every group is kept."""

    def __init__(self):
        self.values = itertools.cycle((0.0, 1.0))

    def random(self):
        return next(self.values)


class Rarely:
    """Replaces the fleet's random numbers: one answer in 24 is correct."""

    def __init__(self):
        self.values = itertools.cycle([1.0] * 23 + [0.0])

    def random(self):
        return next(self.values)


class ShortSighted(HandFleet):
    """Dead-letters training tasks whose question contains one of `refused`, as a replica does with a long prompt."""

    def __init__(self, redis, keys, refused, cause=Cause.TOO_LONG):
        super().__init__(redis, keys)
        self.random = Alternating()
        self.refused, self.cause = refused, cause
        self.met = set()
        tasks = keys.lane(Lane.TRAIN).tasks
        self.dead = Consumer(redis, keys, tasks, "rollout", "hand", Task, 5.0, 3)

    def refuses(self, task):
        return any(part in task.prompt.messages[-1]["content"] for part in self.refused)

    async def answer(self, lane, delivery):
        prompt = delivery.message.prompt
        if lane is Lane.TRAIN and self.refuses(delivery.message):
            self.met.add(prompt.id)
            await self.dead.dead_letter(delivery, f"prompt {prompt.id!r} has 999 tokens", self.cause)
        else:
            await super().answer(lane, delivery)


async def events(redis, keys, phase):
    return [event.text for _, event in await EventLog(redis, keys, "test").events() if event.phase == phase]


async def test_a_restarted_sampler_does_not_draw_dropped_prompts(redis, run_id):
    document = recipe_document("/none", data={"train": 12}, limits={"rollout_steps": 8})
    keys = RunKeys(run_id)
    fleet = ShortSighted(redis, keys, ["1 +", "2 +", "3 +", "4 +"])
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as first,
        service_context(redis, run_id, document, "sampler") as second,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        async with running(SamplerService().run(first)) as sampling:

            async def an_epoch_and_a_batch():
                drawn = {task.prompt.id: fleet.refuses(task) for task in fleet.tasks}
                texts = await events(redis, keys, "prompt-too-long")
                return len(drawn) == 12 and len(texts) == sum(drawn.values()) and len(learner.batches) >= 1

            await until(an_epoch_and_a_batch, [*tasks, *sampling], "every prompt drawn once")
        sent, texts = len(fleet.tasks), await events(redis, keys, "prompt-too-long")
        async with running(SamplerService().run(second)) as sampling:
            await until(lambda: evaluated(redis, keys, "after"), [*tasks, *sampling], "the last evaluation")
        later = {task.prompt.id for task in fleet.tasks[sent:]}
        counts = await group_counts(redis, keys)
        texts_after = await events(redis, keys, "prompt-too-long")
        dead = await events(redis, keys, "group-dead")
    assert 1 < len(fleet.met) < 12
    assert later, "the second sampler drew something"
    assert not later & fleet.met, "a dropped prompt is never drawn again"
    assert texts_after == texts
    assert sorted(texts) == sorted(f"never drawn again: prompt {prompt!r} has 999 tokens" for prompt in fleet.met)
    assert counts.reconciled, counts
    assert counts.trained == 32
    assert counts.dead >= len(fleet.met)
    assert dead == []
    assert learner.batches[-1].sampling_metrics["prompts_too_long"] == len(fleet.met)
    assert learner.batches[-1].sampling_metrics["prompts_refused"] == 0


@pytest.mark.parametrize(
    ("cause", "reason"),
    [(Cause.TOO_LONG, "6 too-long"), pytest.param(Cause.REFUSED, "6 refused", marks=pytest.mark.slow)],
)
async def test_a_run_without_a_usable_prompt_fails_with_the_reason(redis, run_id, cause, reason):
    document = recipe_document("/none", data={"train": 6})
    keys = RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        running(ShortSighted(redis, keys, [""], cause).run()),
    ):
        with pytest.raises(
            PromptsExhaustedError, match=rf"none of the 6 training prompts .*: {reason} \(data\.max_pro"
        ):
            await asyncio.wait_for(SamplerService().run(sampler), DEADLINE_S)
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.dispatched == counts.dead + counts.pending


async def test_a_delivery_failure_does_not_drop_the_prompt(redis, run_id):
    document = recipe_document("/none", data={"train": 4}, limits={"rollout_steps": 1, "max_staleness": 0})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    fleet.random = Alternating()
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(
            SamplerService().run(sampler), VerifierService().run(verifier), HandLearner(redis, keys, fleet).run()
        ) as tasks,
    ):
        consumer = Consumer(redis, keys, keys.lane(Lane.TRAIN).tasks, "rollout", "hand", Task, 5.0, 3)
        await consumer.open()
        [delivery] = await consumer.read(1, 20)
        lost = delivery.message
        await consumer.dead_letter(delivery, "lost", Cause.DELIVERIES)
        async with running(fleet.run()) as generating:
            await until(lambda: evaluated(redis, keys, "after"), [*tasks, *generating], "the last evaluation")
        drawn = [lost.prompt.id, *(task.prompt.id for task in fleet.tasks)]
    assert len(drawn) == 5
    assert len(set(drawn[:4])) == 4, "the first epoch has all four prompts, the dead-lettered one included"


@pytest.mark.parametrize(
    ("cause", "lane", "dropped"),
    [
        (Cause.TOO_LONG, Lane.TRAIN, "p"),
        (Cause.REFUSED, Lane.TRAIN, "p"),
        (Cause.DELIVERIES, Lane.TRAIN, ""),
        (Cause.UNSTATED, Lane.TRAIN, ""),
        (Cause.TOO_LONG, Lane.EVALUATION, ""),  # ids of an evaluation set's prompts are not training prompts' ids
    ],
)
def test_only_a_fault_of_a_training_prompt_drops_it(cause, lane, dropped):
    keys = RunKeys("r")
    letter = DeadLetter(
        stream=keys.lane(lane).tasks, entry="1-0", reason="", deliveries=1, cause=cause, prompt="p", body=""
    )
    assert faulty_prompt(keys, letter) == dropped


@pytest.mark.parametrize(("reward", "draws"), [("verdict", 8), ("score", 0)])
async def test_no_pass_rate_is_asked_where_the_spread_filters(redis, run_id, reward, draws):
    """Starvation level 2 draws by pass rate, and the levels above it include that."""
    document = recipe_document("/none", algorithm={"reward": reward})
    async with service_context(redis, run_id, document, "sampler") as context:
        prompts = load_splits(context.record.recipe.data).train
        transitions = await GroupTransitions.fenced(redis, RunKeys(run_id), "sampler")
        dispatcher = Dispatcher(context, transitions, GroupTable(), prompts, SamplerState(cursor=0, next_group=0))
        await dispatcher.dispatch(2, 1.0, 0, Level.PARTIAL, room=8)
    assert dispatcher.state.draws == draws


def test_the_level_of_pass_rates_is_skipped_by_spread():
    document = recipe_document("/none", algorithm={"reward": "score"})
    starvation = starvation_of(parse_recipe(document))
    levels = set()
    for _ in range(15 * 4):
        starvation.group_judged()
        starvation.update(0, "")
        levels.add(starvation.level)
    assert levels == {Level.NORMAL, Level.WIDEN}


async def test_a_dropped_prompt_is_counted_once(redis, run_id):
    keys = RunKeys(run_id)
    document = recipe_document("/none", data={"train": 4})
    async with service_context(redis, run_id, document, "sampler") as context:
        prompts = load_splits(context.record.recipe.data).train
        dispatcher = Dispatcher(
            context,
            await GroupTransitions.fenced(redis, keys, "sampler"),
            GroupTable(),
            prompts,
            SamplerState(cursor=0, next_group=0),
        )

        def metric(cause):
            return REGISTRY.get_sample_value("penstock_dropped_prompts", {"run": run_id, "cause": cause})

        assert dispatcher.metrics == {"prompts_too_long": 0, "prompts_refused": 0, "prompts_unjudgeable": 0}
        for cause in ("too-long", "refused"):
            dispatcher.drop({prompts[0].id: cause, "of an older file": cause})
            assert dispatcher.metrics == {"prompts_too_long": 1, "prompts_refused": 0, "prompts_unjudgeable": 0}
            assert (metric("too-long"), metric("refused")) == (1, 0)


class SlowLearner(HandLearner):
    """Trains until every dispatched group is generated, so that all of a generation batch have the same version."""

    async def train(self):
        while True:
            [group] = await self.redis.xinfo_groups(self.keys.lane(Lane.TRAIN).tasks)
            if group["pending"] == group["lag"] == 0:
                return
            await asyncio.sleep(0.05)


def by_generation_batches(max_staleness=0, steps=3, **rule):
    sampling = {"refill": "generation_batches", "generation_batch_factor": 2, **rule}
    limits = {"rollout_steps": steps, "max_staleness": max_staleness}
    return recipe_document("/none", algorithm={"group_size": 4, "dynamic_sampling": sampling}, limits=limits)


@pytest.mark.conformance(
    formula="surplus groups wait for the next batch (Algorithm 1); on-policy they are discarded (code)",
    setting="refill = generation_batches, limits.max_staleness",
)
@pytest.mark.parametrize(
    ("max_staleness", "counts", "drawn_in", "stale"),
    [
        # Every group is kept: 2 x 4 are drawn for each step, 4 are trained, the other 4 are stale one version later.
        (0, (24, 12, 8, 4), [0, 1, 2], [0, 4, 4]),
        # The other 4 make the second batch.
        (1, (16, 12, 0, 4), [0, 0, 1], [0, 0, 0]),
    ],
)
async def test_surplus_of_a_generation_batch_waits_or_grows_stale(
    redis, run_id, max_staleness, counts, drawn_in, stale
):
    document = by_generation_batches(max_staleness)
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    fleet.random = Alternating()
    learner = SlowLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        ended = await group_counts(redis, keys)
    assert (ended.dispatched, ended.trained, ended.stale, ended.pending) == counts
    numbers = [[int(group.group[1:]) // 8 for group in batch.groups] for batch in learner.batches]
    assert numbers == [[number] * 4 for number in drawn_in], "each batch is of one generation batch"
    assert [batch.sampling_metrics["groups_stale"] for batch in learner.batches] == stale
    if max_staleness == 0:
        assert [batch.sampling_metrics["generation_batches"] for batch in learner.batches] == [1, 1, 1]


@pytest.mark.conformance(
    formula="at most max_num_gen_batches (code), then a partial batch or a pause instead of its ValueError",
    setting="dynamic_sampling.max_generation_batches",
)
@pytest.mark.parametrize("skill", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
async def test_the_limit_of_generation_batches_starves_the_run(redis, run_id, skill):
    document = by_generation_batches(steps=1, max_generation_batches=2)
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys, skill=skill)
    fleet.random = Rarely()
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), fleet.run(), learner.run(), SamplerService().run(sampler)) as tasks,
    ):

        async def starved_event():
            return bool(await events(redis, keys, f"starvation-{'partial' if skill else 'pause'}"))

        await until(starved_event, tasks, "the event of the starvation")
        if skill:
            await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
        starved = await redis.get(keys.starved)
        state = SamplerState.model_validate_json(await redis.get(keys.sampler_state))
    assert (counts.dispatched, counts.pending) == (16, 0)
    if skill:
        assert [len(batch.groups) for batch in learner.batches] == [counts.trained]
        assert 1 <= counts.trained < 4
        assert starved is None
    else:
        assert starved.decode().endswith(
            "groups by correct answers of 4: 16 with 0, 0 with 1, 0 with 2, 0 with 3, 0 with 4"
        )
        assert state.generation_batches == 2, "a restarted sampler continues the count"


@pytest.mark.parametrize("judged_at_once", [True, False])
async def test_a_generation_batch_counts_once_it_is_whole(redis, run_id, judged_at_once):
    """Redis has room for one group at a time, and every group is filtered."""
    keys = RunKeys(run_id)
    document = by_generation_batches(max_generation_batches=2)
    async with service_context(redis, run_id, document, "sampler") as context:
        transitions, table = await GroupTransitions.fenced(redis, keys, "sampler"), GroupTable()
        prompts = load_splits(context.record.recipe.data).train
        dispatcher = Dispatcher(context, transitions, table, prompts, SamplerState(cursor=0, next_group=0))
        stored = []
        for number in range(1, 20):
            await dispatcher.dispatch(1, 1.0, 0, Level.NORMAL, room=1)
            state = SamplerState.model_validate_json(await redis.get(keys.sampler_state))
            stored.append((state.next_group, state.generation_batches))
            assert dispatcher.exhausted == (number >= 16)
            if judged_at_once or number % 8 == 0:
                for name in list(table.generating):
                    table.remove(name)
    counted = [(number, number // 8) for number in range(1, 17)]
    assert stored == [*counted, (16, 2), (16, 2), (16, 2)]


async def test_a_restart_draws_what_was_drawn_but_not_sent(redis, run_id, monkeypatch):
    """Redis rejects all tasks at first, and has room for one of them then."""
    keys = RunKeys(run_id)
    async with service_context(redis, run_id, recipe_document("/none"), "sampler") as context:
        prompts = load_splits(context.record.recipe.data).train
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        first = Dispatcher(context, transitions, GroupTable(), prompts, SamplerState(cursor=0, next_group=0))
        with monkeypatch.context() as full:
            full.setattr(transitions, "dispatch", AsyncMock(side_effect=RedisFullError("maxmemory")))
            with pytest.raises(RedisFullError):
                await first.dispatch(3, 1.0, 0, Level.NORMAL, room=3)
        await first.dispatch(3, 1.0, 0, Level.NORMAL, room=1)
        stored = SamplerState.model_validate_json(await redis.get(keys.sampler_state))
        assert stored == first.state == SamplerState(cursor=1, next_group=1)
        second = Dispatcher(context, transitions, GroupTable(), prompts, stored)
        await second.dispatch(3, 1.0, 0, Level.NORMAL, room=2)
        sent = await read_all(redis, keys, keys.lane(Lane.TRAIN).tasks, Task)
    assert [task.group for _, task in sent] == [f"g{number:08d}" for number in range(3)]
    assert len({task.prompt.id for _, task in sent}) == 3
    assert first._selection.place.cursor == 3


async def test_a_restarted_sampler_continues_generation_batches(redis, run_id):
    document = by_generation_batches(max_generation_batches=1)
    keys = RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as first,
        service_context(redis, run_id, document, "sampler") as second,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier)) as tasks,
    ):
        async with running(SamplerService().run(first)) as sampling:

            async def one_generation_batch():
                return (await group_counts(redis, keys)).dispatched == 8

            await until(one_generation_batch, [*tasks, *sampling], "the first generation batch")
        async with running(HandFleet(redis, keys, skill=0.0).run(), SamplerService().run(second)) as sampling:

            async def paused():
                return await redis.get(keys.starved) is not None

            await until(paused, [*tasks, *sampling], "the pause")
        assert (await group_counts(redis, keys)).dispatched == 8


async def test_a_budget_of_response_tokens_ends_the_run(redis, run_id):
    budget = 300
    document = recipe_document("/none", limits={"rollout_steps": 50, "response_tokens": budget})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), fleet.run(), learner.run(), SamplerService().run(sampler)) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts, generated = await group_counts(redis, keys), await response_tokens(redis, keys)
    spent = list(itertools.accumulate(batch.sampling_metrics["response_tokens"] for batch in learner.batches))
    assert 1 < len(spent) < 50
    assert spent[-2] < budget <= generated, "the first batch published after the budget is spent is the last"
    assert [batch.last for batch in learner.batches] == [*[False] * (len(spent) - 1), True]
    assert generated >= spent[-1], "partly judged groups count too"
    assert counts.reconciled, counts
