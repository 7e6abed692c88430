"""The sampler and the verifier together on a real server; the test plays the fleet and the learner."""

import asyncio
from base64 import b64decode

import pytest
from prometheus_client import REGISTRY

from services.contracts import Cause, Lane, Task
from services.sampler.selection.posterior import EVIDENCE
from services.sampler.service import SamplerService
from services.streams.delivery.consumer import Consumer
from services.streams.keys import RunKeys
from services.streams.state.group_counts import group_counts
from tests.harness.hand_fleet import STALENESS, HandFleet, HandLearner, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from verifier.service import VerifierService


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_run_of_three_steps_reconciles(redis, run_id, max_staleness):
    document = recipe_document("/none", limits={"max_staleness": max_staleness, "rollout_steps": 3})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
        evaluations = {record.name: record for record in await sampler.event_log.evaluations()}
    assert counts.reconciled, counts
    assert counts.trained == 12
    assert [batch.step for batch in learner.batches] == [1, 2, 3]
    staleness = [sample.staleness for batch in learner.batches for group in batch.groups for sample in group.samples]
    assert all(0 <= versions <= max_staleness for versions in staleness), staleness
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert len(set(names)) == len(names) == 12, "a group is trained once"
    for batch in learner.batches:
        for group in batch.groups:
            correct = sum(sample.correct for sample in group.samples)
            assert 0 < correct < 4
            assert sum(sample.advantage for sample in group.samples) == pytest.approx(0.0, abs=1e-9)
    assert (evaluations["before"].version, evaluations["after"].version) == (0, 3)
    assert evaluations["before"].prompts == 8
    assert 0.2 < evaluations["before"].accuracy < 0.8


@pytest.mark.usefixtures("loaded_once")
async def test_a_replaced_sampler_neither_loses_nor_repeats_a_group(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 4})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as first,
        service_context(redis, run_id, document, "sampler") as second,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        async with running(SamplerService().run(first)) as sampling:

            async def one_step():
                return len(learner.batches) >= 1

            await until(one_step, [*tasks, *sampling], "the first batch")
        async with running(SamplerService().run(second)) as sampling:
            await until(lambda: evaluated(redis, keys, "after"), [*tasks, *sampling], "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 16
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert len(set(names)) == len(names) == 16


@pytest.mark.usefixtures("loaded_once")
async def test_pass_rates_age_by_steps_not_by_publications(redis, run_id):
    """The learner's restarts published the weights of step 0 again and again, up to version 70."""
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    history, _ = await learner.begin()
    fleet.version = await history.announce(0, "w0", STALENESS, held=69)
    await history.commit_policy(fleet.version, 0, "w0")
    assert fleet.version == 70
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        posteriors = (await redis.hgetall(keys.posteriors)).values()
    assert posteriors
    assert {EVIDENCE.unpack(b64decode(entry))[2] for entry in posteriors} <= {0, 1}


@pytest.mark.usefixtures("loaded_once")
async def test_the_run_continues_after_a_dead_lettered_task(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), learner.run()) as tasks,
    ):
        for lane in Lane:
            consumer = Consumer(redis, keys, keys.lane(lane).tasks, "rollout", "hand", Task, 5.0, 3)
            await consumer.open()
            [delivery] = await consumer.read(1, 20)
            await consumer.dead_letter(delivery, "no answer", Cause.DELIVERIES)
        async with running(fleet.run()) as generating:
            await until(lambda: evaluated(redis, keys, "after"), [*tasks, *generating], "the last evaluation")
        counts = await group_counts(redis, keys)
        evaluations = {record.name: record for record in await sampler.event_log.evaluations()}
    assert counts.reconciled, counts
    assert (counts.dead, counts.trained) == (1, 4)
    assert set(evaluations) == {"before", "after"}


def level_of(run):
    return REGISTRY.get_sample_value("penstock_starvation_level", {"run": run})


@pytest.mark.usefixtures("loaded_once")
async def test_a_starving_run_escalates_to_a_pause_until_resumed(redis, run_id):
    levels = {"widen_after": 1, "boundary_after": 2, "partial_after": 3, "pause_after": 4}
    document = recipe_document(
        "/none",
        algorithm={"dynamic_sampling": {"starvation": levels}},
        limits={"rollout_steps": 1},
        evaluation={"samples": 1},
    )
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys, skill=0.0)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):

        async def pause_reported():
            return any(event.phase == "starvation-pause" for _, event in await sampler.event_log.events())

        await until(pause_reported, tasks, "the pause")
        text = (await redis.get(keys.starved)).decode()
        phases = [event.phase for _, event in await sampler.event_log.events()]
        assert level_of(run_id) == 4
        counts = await group_counts(redis, keys)
        assert counts.reconciled, counts
        assert (counts.trained, learner.batches) == (0, [])
        assert "with 0" in text, text
        assert "0 with 4" in text, text
        escalation = [phase for phase in phases if phase.startswith("starvation")]
        assert escalation[0] == "starvation-widen"
        assert escalation[-1] == "starvation-pause"

        async def none_pending():
            return (await group_counts(redis, keys)).pending == 0

        await until(none_pending, tasks, "the in-flight groups to end")
        before = (await group_counts(redis, keys)).dispatched
        await asyncio.sleep(1.0)
        assert (await group_counts(redis, keys)).dispatched == before, "a paused run dispatches nothing"
        fleet.skill = 0.5
        await redis.delete(keys.starved)
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        assert level_of(run_id) < 4
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 4
    assert [len(batch.groups) for batch in learner.batches] == [4]


@pytest.mark.usefixtures("loaded_once")
async def test_few_kept_groups_make_a_partial_batch(redis, run_id):
    levels = {"widen_after": None, "boundary_after": None, "partial_after": 2, "pause_after": None}
    document = recipe_document(
        "/none",
        algorithm={"dynamic_sampling": {"starvation": levels}},
        evaluation={"samples": 1},
        limits={"rollout_steps": 1, "groups_per_step": 4, "max_staleness": 0},
    )
    keys = RunKeys(run_id)
    # Three of the first 54 groups are kept, the seventh first; at most 32 are in flight.
    fleet = HandFleet(redis, keys, skill=0.01)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    [batch] = learner.batches
    assert 1 <= len(batch.groups) < 4
    assert batch.sampling_metrics["groups_missing"] == 4 - len(batch.groups)


@pytest.mark.usefixtures("loaded_once")
async def test_screening_completes_only_mixed_groups(redis, run_id):
    chosen = {"strategy": "screen", "screen_samples": 2}
    document = recipe_document(
        "/none",
        algorithm={"dynamic_sampling": {"selection": chosen}},
        evaluation={"samples": 1},
        limits={"rollout_steps": 3},
    )
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 12
    assert sum(batch.sampling_metrics["groups_screened_out"] for batch in learner.batches) > 0
    for group in (group for batch in learner.batches for group in batch.groups):
        assert 0 < sum(sample.correct for sample in group.samples[:2]) < 2, "the screen was mixed"
        assert len(group.samples) == 4
    # A batch may hold groups judged before the previous batch, so only the sums over the run are comparable.
    judged = sum(batch.sampling_metrics["response_tokens"] for batch in learner.batches)
    trained = sum(sample.tokens for batch in learner.batches for group in batch.groups for sample in group.samples)
    assert judged >= trained
    assert all(batch.sampling_metrics["rollout_tokens_per_trained_token"] > 0 for batch in learner.batches)


@pytest.mark.usefixtures("loaded_once")
async def test_an_orphaned_group_is_released_as_dead(redis, run_id, monkeypatch):
    monkeypatch.setattr("services.sampler.watches.audit.EVERY_S", 0.5)
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    streams = keys.lane(Lane.TRAIN)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier)) as tasks,
    ):

        async def first_task():
            return await redis.xrange(streams.tasks)

        await until(first_task, tasks, "the first task")
        [(entry, _), *_] = await first_task()
        await redis.xdel(streams.tasks, entry)
        await redis.xadd(streams.tasks, {"m": b'{"kind": "task", "group": "g000'})
        async with running(fleet.run()) as generating:

            async def ended():
                return (await group_counts(redis, keys)).dead == 1

            await until(ended, [*tasks, *generating], "the end of the orphan")
            async with running(learner.run()) as learning:
                await until(lambda: evaluated(redis, keys, "after"), [*tasks, *generating, *learning], "the end")
        counts = await group_counts(redis, keys)
        texts = [event.text for _, event in await sampler.event_log.events() if event.phase == "group-orphaned"]
    assert counts.reconciled, counts
    assert texts == ["g00000000: its messages are gone from all streams"]
