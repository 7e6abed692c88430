"""Unknown verdicts: many of them pause a run until it is resumed, and a prompt without any judgement is dropped."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.contracts import Lane, Outcome, Sample, Verdict
from services.sampler.data import PromptsExhaustedError
from services.sampler.queue.unknowns import LEAST_VERDICTS, UnjudgedPrompts, UnknownShare
from services.sampler.service import SamplerService
from services.settings import parse_recipe
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.payloads import fetch_texts
from services.streams.keys import RunKeys
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import GroupTransitions
from services.streams.state.runs import is_paused
from tests.harness.hand_fleet import DEADLINE_S, HandFleet, HandLearner, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.sampler.judged import group_of

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


def verdict(outcome, index=0, reason=""):
    """A verdict on a sample of group g."""
    found = group_of((outcome, 4, False, 3)).verdicts[0]
    return found.model_copy(update={"index": index, "reason": reason})


@pytest.mark.parametrize(
    ("groups", "size", "window"), [(4, 4, LEAST_VERDICTS), (16, 4, 64), (16, 8, 128), (512, 16, 8192)]
)
def test_the_window_is_a_batch_and_at_least_64_verdicts(groups, size, window):
    document = recipe_document(
        "/m", algorithm={"group_size": size}, limits={"groups_per_step": groups, "max_inflight_groups": 4 * groups}
    )
    share = UnknownShare.of(parse_recipe(document))
    for _ in range(window - 1):
        share.judged(verdict(U))
    assert (share.excess, share.share) == (None, 0.0), "no decision on fewer"
    share.judged(verdict(U))
    assert share.share == 1.0
    assert share.excess is not None


def test_the_reason_of_a_pause_has_share_count_and_last_reason():
    share = UnknownShare(0.25, 4)
    for outcome in (C, W, U, C):
        share.judged(verdict(outcome, reason="KeyError: 'answer'"))
    assert (share.share, share.excess) == (0.25, None), "the limit itself does not pause"
    share.judged(verdict(U, 3, "no answer within 10 s"))
    text = "2 of the last 4 verdicts (50%) are unknown, more than verifier.max_unknown_share = 0.25: the run pauses"
    assert share.excess == f"{text}; the last one, sample 3 of group g: no answer within 10 s"
    for _ in range(8):
        share.judged(verdict(C))
    assert (share.share, bool(share.excess)) == (0.5, True), "verdicts on groups in flight do not hide the reason"
    share.clear()
    assert (share.share, share.excess) == (0.0, None)
    for outcome in (U, C, C, C):
        share.judged(verdict(outcome))
    assert share.share == 0.25


@given(outcomes=st.lists(st.sampled_from(Outcome), max_size=60), size=st.integers(1, 12))
def test_the_share_is_that_of_the_last_verdicts(outcomes, size):
    share = UnknownShare(None, size)
    for outcome in outcomes:
        share.judged(verdict(outcome))
    last = outcomes[-size:]
    assert share.share == (pytest.approx(last.count(U) / size) if len(last) == size else 0.0)
    assert share.excess is None, "without a limit nothing pauses"


def unjudged_group(prompt="p", outcomes=(U, U), reasons=("r0", "r1")):
    """A judged group of a prompt."""
    group = group_of(*[(outcome, 4, False, 3) for outcome in outcomes])
    group.task = group.task.model_copy(update={"prompt": group.task.prompt.model_copy(update={"id": prompt})})
    for index, reason in enumerate(reasons):
        group.verdicts[index] = group.verdicts[index].model_copy(update={"reason": reason})
    return group


def test_a_prompt_is_unjudgeable_after_two_groups_in_a_row():
    prompts = UnjudgedPrompts()
    assert prompts.judged(unjudged_group("a")) is None
    assert prompts.judged(unjudged_group("b")) is None
    assert prompts.judged(unjudged_group("a", outcomes=(U, W))) is None, "a judgement ends the row"
    assert prompts.judged(unjudged_group("a")) is None
    assert prompts.judged(unjudged_group("b", reasons=("first", "last"))) == "last"
    assert prompts.judged(unjudged_group("a", reasons=("", ""))) == "no reason given"
    assert prompts.judged(unjudged_group("a")) is None
    prompts.clear()
    assert prompts.judged(unjudged_group("a")) is None, "counted from 0 again"


async def test_a_damaged_payload_is_no_fault_of_the_prompt(redis, run_id):
    _, damaged = await fetch_texts(redis, [f"penstock:{{{run_id}}}:payload:g:0"])
    [(key, reason)] = damaged.items()
    lost = unjudged_group("a", reasons=(reason, "not judged"))
    facts = lost.verdicts[0].facts.model_copy(update={"payload": key})
    lost.verdicts[0] = lost.verdicts[0].model_copy(update={"facts": facts})
    prompts = UnjudgedPrompts()
    assert prompts.judged(unjudged_group("a")) is None
    assert prompts.judged(lost) is None
    assert prompts.judged(lost) is None
    assert prompts.judged(unjudged_group("a")) is not None, "nor does it end the row"


class HandVerifier:
    """Judges every other sample of a group correct; training samples of which `unknown` is true get no judgement."""

    def __init__(self, redis, keys, unknown):
        self.redis, self.keys, self.unknown = redis, keys, unknown
        self.transitions = GroupTransitions(redis, keys, "verifier")

    async def run(self):
        consumers = {
            lane: Consumer(self.redis, self.keys, self.keys.lane(lane).samples, "verifier", "hand", Sample, 5.0, 3)
            for lane in Lane
        }
        for consumer in consumers.values():
            await consumer.open()
        while True:
            for lane, consumer in consumers.items():
                for delivery in await consumer.read(32, 0.02):
                    await self.transitions.publish_verdicts(
                        lane, [(delivery.lease, self.judged(lane, delivery.message))]
                    )

    def judged(self, lane, sample):
        outcome = C if sample.index % 2 else W
        if lane is Lane.TRAIN and self.unknown(sample):
            outcome = U
        return Verdict(
            group=sample.group,
            index=sample.index,
            outcome=outcome,
            score=float(outcome is C),
            reason="" if outcome is not U else "RuntimeError: no grader",
            facts=sample.facts,
        )


def question(sample):
    """What the sample's prompt asks."""
    return sample.reference["entry"]["question"]


async def phases(context, phase):
    return [event.text for _, event in await context.event_log.events() if event.phase == phase]


def metric(name, run, **labels):
    return REGISTRY.get_sample_value(name, {"run": run, **labels})


async def test_a_run_that_is_not_judged_pauses_until_resumed(redis, run_id):
    limits = {"rollout_steps": 5, "max_inflight_groups": 12}  # those in flight at the pause are too few for the steps
    document = recipe_document("/none", data={"train": 60}, limits=limits, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    verifier = HandVerifier(redis, keys, lambda sample: True)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        running(SamplerService().run(sampler), fleet.run(), learner.run(), verifier.run()) as tasks,
    ):

        async def pause_reported():
            return bool(await phases(sampler, "verdicts-unknown"))

        await until(pause_reported, tasks, "the pause")
        text = (await redis.get(keys.starved)).decode()
        assert text.startswith(
            "64 of the last 64 verdicts (100%) are unknown, more than verifier.max_unknown_share = 0.5"
        )
        assert text.endswith(": RuntimeError: no grader")
        assert await phases(sampler, "verdicts-unknown") == [text]
        assert await is_paused(redis, keys)

        async def all_judged():
            judged = int(await redis.hget(keys.lane(Lane.TRAIN).counters, "judged"))
            return judged == (await group_counts(redis, keys)).dispatched

        verifier.unknown = lambda sample: False  # the groups in flight are judged
        await until(all_judged, tasks, "the groups in flight to end")
        assert metric("penstock_unknown_verdicts_ratio", run_id) == 1.0, "the alert fires until the run is resumed"
        assert metric("penstock_starvation_level", run_id) == 0, "another alert does not fire"
        assert await redis.hgetall(keys.dropped) == {}, "the judging is at fault, not a prompt"
        sent = (await group_counts(redis, keys)).dispatched
        await redis.delete(keys.starved)
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
        assert metric("penstock_unknown_verdicts_ratio", run_id) == 0
        assert len(await phases(sampler, "verdicts-unknown")) == 1
    assert counts.reconciled, counts
    assert counts.dispatched > sent
    assert counts.trained == 20


async def test_an_unjudgeable_prompt_is_dropped_and_stays_so(redis, run_id):
    limits = {"rollout_steps": 6, "lease_s": 1.0}
    document = recipe_document("/none", data={"train": 6}, limits=limits, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    bad = set()

    def unknown(sample):
        bad.add(question(sample)) if len(bad) < 2 else None
        return question(sample) in bad

    def drawn(tasks):
        return [task.prompt.reference["entry"]["question"] for task in tasks]

    async with (
        service_context(redis, run_id, document, "sampler") as first,
        service_context(redis, run_id, document, "sampler") as second,
        running(fleet.run(), learner.run(), HandVerifier(redis, keys, unknown).run()) as tasks,
    ):
        async with running(SamplerService().run(first)) as sampling:

            async def both_dropped():
                return len(await phases(first, "prompt-unjudgeable")) == 2

            await until(both_dropped, [*tasks, *sampling], "two dropped prompts")
            assert metric("penstock_dropped_prompts", run_id, cause="unjudgeable") == 2
        texts = await phases(first, "prompt-unjudgeable")
        before = len(fleet.tasks)
        async with running(SamplerService().run(second)) as sampling:
            await until(lambda: evaluated(redis, keys, "after"), [*tasks, *sampling], "the last evaluation")
        dropped = await redis.hgetall(keys.dropped)
        counts = await group_counts(redis, keys)
        assert await phases(second, "prompt-unjudgeable") == texts
    assert set(dropped.values()) == {b"unjudgeable"}
    assert sorted(texts) == sorted(
        f"never drawn again: prompt {prompt.decode()!r}: 2 groups in a row have no known verdict; the last reason: "
        "RuntimeError: no grader"
        for prompt in dropped
    )
    assert not set(drawn(fleet.tasks[before:])) & bad, "a restarted sampler remembers them"
    assert len(fleet.tasks) > before
    assert learner.batches[-1].sampling_metrics["prompts_unjudgeable"] == 2
    assert counts.reconciled, counts


async def test_a_run_whose_prompts_are_all_unjudgeable_fails(redis, run_id):
    document = recipe_document("/none", data={"train": 3}, verifier={"max_unknown_share": None})
    keys = RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        running(HandFleet(redis, keys).run(), HandVerifier(redis, keys, lambda sample: True).run()),
    ):
        with pytest.raises(PromptsExhaustedError, match=r"none of the 3 training prompts .*: 3 unjudgeable"):
            await asyncio.wait_for(SamplerService().run(sampler), DEADLINE_S)
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 0


async def test_scores_train_by_spread_end_to_end(redis, run_id):
    """No response is correct, but their scores differ: the groups are kept, and their rewards are those of scores."""

    class Scorer(HandVerifier):
        def judged(self, lane, sample):
            found = super().judged(lane, sample)
            named = {"style": 0.25 * sample.index}
            return found.model_copy(update={"outcome": W, "score": 0.25 * (sample.index % 3), "rewards": named})

    document = recipe_document("/none", algorithm={"reward": "score"}, limits={"rollout_steps": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        running(
            SamplerService().run(sampler), fleet.run(), learner.run(), Scorer(redis, keys, lambda sample: False).run()
        ) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        [before, *_] = await sampler.event_log.evaluations()
    [batch] = learner.batches
    assert len(batch.groups) == 4
    for group in batch.groups:
        assert [sample.reward for sample in group.samples] == [-1.0, -0.5, 0.0, -1.0]
        assert sum(sample.advantage for sample in group.samples) == pytest.approx(0.0, abs=1e-9)
    metrics = batch.sampling_metrics
    assert (metrics["accuracy"], metrics["reward"], metrics["score"]) == (0.0, -0.625, 0.1875)
    assert metrics["reward_style"] == pytest.approx(0.375)
    assert (before.accuracy, before.rewards) == (0.0, {"style": pytest.approx(before.rewards["style"])})
    assert before.score is not None
    assert before.score > 0
