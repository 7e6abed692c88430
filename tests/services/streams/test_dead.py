"""Dead letters on a real server: they are listed, and their groups are redriven once, under a new name."""

import asyncio
import json

import pytest

from services.contracts import (
    Cause,
    Lane,
    Outcome,
    Task,
)
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.validation import LARGEST_LETTER
from services.streams.keys import RunKeys
from services.streams.state.dead_letters import NotRedrivableError, UnknownLetterError, get_letter, letters, redrive_all
from services.streams.state.group_state import KEPT, MORE, missing_samples
from tests.services.streams.hand_lane import SAMPLES, Pipeline, letter_of, task


@pytest.fixture
async def pipeline(redis, run_id):
    return await Pipeline(redis, RunKeys(run_id)).open()


async def test_a_dead_lettered_task_is_redriven_once(pipeline):
    letter = await pipeline.dead_task("g00000000")
    assert (letter.redriven, letter.letter.group) == (None, "g00000000")
    attempt = await pipeline.redriven(letter)
    assert (attempt.group, attempt.redriven) == ("g00000000", "g00000000-r1")
    assert await pipeline.counts() == {"dispatched": 2, "dead": 1, "pending": 1}
    [(_, event)] = await pipeline.event_log.events()
    assert event.phase == "redriven"
    assert event.text == (
        "g00000000 is requeued as g00000000-r1; it was dead-lettered: delivered 3 times without an ack"
    )
    [seen] = await letters(pipeline.redis, pipeline.keys)
    assert seen.redriven == "g00000000-r1"
    assert await pipeline.rejection(seen) == "its group was requeued before, as g00000000-r1"
    assert await pipeline.rejection(letter) == "its group was requeued before, as g00000000-r1"
    assert await pipeline.through(KEPT) == "g00000000-r1"
    assert await pipeline.rollout.read(1, 0.05) == []
    assert await pipeline.counts() == {"dispatched": 2, "dead": 1, "pending": 1}, "a kept group waits for its batch"


async def test_the_whole_group_of_a_dead_lettered_sample_is_redriven(pipeline):
    redis, keys = pipeline.redis, pipeline.keys
    await pipeline.dispatch("g0")
    [drawing] = await pipeline.rollout.read(1, 1)
    for index in range(SAMPLES):
        assert await pipeline.draw(drawing, index)
    judged, lost, late = await pipeline.verifier.read(SAMPLES, 1)
    assert await pipeline.judge(judged)
    [verdict] = await pipeline.sampler.read(1, 1)
    assert await pipeline.record(verdict)
    letter = await pipeline.bury(lost, pipeline.verifier)
    assert not await redis.exists(*(keys.payload("g0", index) for index in range(SAMPLES)))
    assert (await pipeline.redriven(letter)).redriven == "g0-r1"

    # Messages of the dead group that were still in flight do not count for the new group.
    assert await pipeline.judge(late, Outcome.WRONG)
    [stray] = await pipeline.sampler.read(1, 1)
    assert not await pipeline.record(stray)
    assert not await pipeline.draw(drawing, 1)

    [again] = await pipeline.rollout.read(1, 1)
    assert await missing_samples(redis, keys, again.message) == [0, 1, 2]
    for index in range(SAMPLES):
        assert await pipeline.draw(again, index)
    for sample in await pipeline.verifier.read(SAMPLES, 1):
        assert await pipeline.judge(sample)
    for number, verdict in enumerate(await pipeline.sampler.read(SAMPLES, 1), 1):
        assert verdict.message.outcome is Outcome.CORRECT
        assert await pipeline.record(verdict, KEPT if number == SAMPLES else "")
    assert await redis.hget(keys.group("g0-r1"), "state") == b"kept"
    assert await redis.hget(keys.group("g0"), "state") == b"dead"
    assert await pipeline.counts() == {"dispatched": 2, "dead": 1, "pending": 1}
    await redis.delete(keys.group("g0"))
    [seen] = await letters(redis, keys)
    assert await pipeline.rejection(seen) == "its group was requeued before, as g0-r1"


async def test_several_letters_of_a_group_redrive_it_once(pipeline):
    await pipeline.dispatch("g0", "g1")
    first, second = await pipeline.rollout.read(2, 1)
    for index in range(SAMPLES):
        await pipeline.draw(first, index)
    samples = await pipeline.verifier.read(SAMPLES, 1)
    for sample in samples[:2]:
        await pipeline.verifier.dead_letter(sample, "the verifier died", Cause.DELIVERIES)
    await pipeline.bury(samples[2], pipeline.verifier)
    await pipeline.bury(second, pipeline.rollout)
    attempts = await redrive_all(pipeline.redis, pipeline.keys, pipeline.event_log)
    assert [attempt.redriven for attempt in attempts] == ["g0-r1", "g0-r1", "g0-r1", "g1-r1"]
    assert [attempt.reason for attempt in attempts[:2]] == ["requeued as g0-r1", "with another letter of its group"]
    assert await pipeline.counts() == {"dispatched": 4, "dead": 2, "pending": 2}
    assert await redrive_all(pipeline.redis, pipeline.keys, pipeline.event_log) == []
    assert len(await pipeline.event_log.events()) == 2


async def test_one_of_many_concurrent_redrives_succeeds(pipeline):
    letter = await pipeline.dead_task("g0")
    results = await asyncio.gather(*(pipeline.redriven(letter) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(result, NotRedrivableError) for result in results) == 19
    assert await pipeline.counts() == {"dispatched": 2, "dead": 1, "pending": 1}
    assert len(await pipeline.rollout.read(10, 0.1)) == 1


async def test_a_redriven_group_that_dies_can_be_redriven(pipeline):
    await pipeline.redriven(await pipeline.dead_task("g0"))
    [again] = await pipeline.rollout.read(1, 1)
    letter = await pipeline.bury(again, pipeline.rollout)
    assert (letter.letter.group, letter.redriven) == ("g0-r1", None)
    assert (await pipeline.redriven(letter)).redriven == "g0-r2"
    assert await pipeline.counts() == {"dispatched": 3, "dead": 2, "pending": 1}


async def test_a_group_without_a_hash_is_redriven_from_its_task(pipeline):
    letter = await pipeline.dead_task("g0")
    await pipeline.redis.delete(pipeline.keys.group("g0"))
    assert (await pipeline.redriven(letter)).redriven == "g0-r1"
    [again] = await pipeline.rollout.read(1, 1)
    assert again.message == task("g0").model_copy(update={"group": "g0-r1"})
    assert await pipeline.counts() == {"dispatched": 2, "dead": 1, "pending": 1}


async def test_a_redriven_group_starts_with_its_screen_again(pipeline):
    await pipeline.dispatch("g0", stop=2)
    [delivery] = await pipeline.rollout.read(1, 1)
    letter = await pipeline.bury(delivery, pipeline.rollout)
    await pipeline.redriven(letter)
    [again] = await pipeline.rollout.read(1, 1)
    assert (again.message.stop, again.message.samples) == (2, SAMPLES)


async def test_a_group_that_died_after_its_screen_is_redriven_whole(pipeline):
    await pipeline.dispatch("g0", stop=1)
    [delivery] = await pipeline.rollout.read(1, 1)
    await pipeline.draw(delivery, 0)
    [sample] = await pipeline.verifier.read(1, 1)
    await pipeline.judge(sample)
    [verdict] = await pipeline.sampler.read(1, 1)
    await pipeline.transitions.record_verdict(
        Lane.TRAIN, verdict.lease, verdict.message, MORE, SAMPLES, rest=task("g0"), posterior=("p", "1 1 0")
    )
    [rest] = await pipeline.rollout.read(1, 1)
    await pipeline.redriven(await pipeline.bury(rest, pipeline.rollout))
    assert await pipeline.through(KEPT) == "g0-r1"


async def test_only_dead_groups_are_redriven(pipeline):
    await pipeline.dispatch("g0", "g1")
    pending, kept = await pipeline.rollout.read(2, 1)
    await pipeline.rollout.dead_letter(pending, "not yet ended", Cause.DELIVERIES)
    await pipeline.rollout.dead_letter(kept, "a duplicate", Cause.DELIVERIES)
    await pipeline.redis.hset(pipeline.keys.group("g1"), "state", "kept")
    not_ended, duplicate = await letters(pipeline.redis, pipeline.keys)
    assert "is pending: the sampler has not ended it; redrive it later" in await pipeline.rejection(not_ended)
    assert "is not dead but kept" in await pipeline.rejection(duplicate)


async def test_an_evaluation_is_not_redriven(pipeline):
    evaluation = pipeline.keys.lane(Lane.EVALUATION)
    await pipeline.transitions.dispatch(Lane.EVALUATION, [task("e.held-out.before.000000")], None)
    consumer = Consumer(pipeline.redis, pipeline.keys, evaluation.tasks, "rollout", "r", Task, 30.0, 3)
    await consumer.open()
    [delivery] = await consumer.read(1, 1)
    await consumer.dead_letter(delivery, "too long", Cause.TOO_LONG)
    [letter] = await letters(pipeline.redis, pipeline.keys)
    assert await pipeline.rejection(letter) == "an evaluation is not requeued"


async def test_letters_of_other_runs_groups_are_not_redriven(pipeline):
    lane, foreign = pipeline.lane, task("foreign").model_dump_json()
    cases = [
        (lane.tasks, foreign, {"group": "foreign"}, "its task is not valid: not valid"),
        (lane.samples, "{}", {"group": "foreign"}, "group 'foreign' is not a group of this run"),
        (lane.verdicts, "{}", {"group": None}, "it names no group: not valid"),
        (lane.verdicts, "{}", {"group": "../x:1"}, "group '../x:1' is not a group of this run"),
        (lane.tasks, foreign, {"group": "g" * 65, "cause": Cause.DELIVERIES}, "is not a group of this run"),
        (lane.tasks, foreign[:-1], {"group": "foreign", "cause": Cause.DELIVERIES}, "not a valid Task"),
        (lane.tasks, foreign, {"group": "g0", "cause": Cause.DELIVERIES}, "its task names another group, 'foreign'"),
        (pipeline.keys.batches, "{}", {}, "has no groups"),
    ]
    for stream, body, fields, reason in cases:
        assert reason in await pipeline.rejection(await letter_of(pipeline, stream, body, **fields))
    attempts = await redrive_all(pipeline.redis, pipeline.keys, pipeline.event_log)
    assert [attempt.redriven for attempt in attempts] == [None] * len(cases)
    assert all(reason in attempt.reason for attempt, (*_, reason) in zip(attempts, cases, strict=True))
    assert await pipeline.counts() == {}


async def test_a_truncated_message_alone_cannot_be_redriven(pipeline):
    await pipeline.transitions.dispatch(Lane.TRAIN, [task("g0", text="x" * LARGEST_LETTER)], None)
    [delivery] = await pipeline.rollout.read(1, 1)
    letter = await pipeline.bury(delivery, pipeline.rollout)
    assert not letter.letter.whole
    await pipeline.redis.rename(pipeline.keys.group("g0"), pipeline.keys.group("aside"))
    assert f"only {LARGEST_LETTER} of its" in await pipeline.rejection(letter)
    await pipeline.redis.rename(pipeline.keys.group("aside"), pipeline.keys.group("g0"))
    assert (await pipeline.redriven(letter)).redriven == "g0-r1", "the group's hash still has the task"


async def test_a_broken_sample_does_not_prevent_a_redrive(pipeline):
    await pipeline.dead_task("g0")
    letter = await letter_of(pipeline, pipeline.lane.samples, "{", group="g0")
    assert (await pipeline.redriven(letter)).redriven == "g0-r1"


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[]", b'{"kind": "dead"}', b'{"kind": "task", "group": 3}'])
async def test_an_entry_that_is_not_a_letter_is_listed_as_such(pipeline, body):
    await pipeline.redis.xadd(pipeline.keys.dead, {"m": body})
    await pipeline.redis.xadd(pipeline.keys.dead, {"other": "field"})
    good = await pipeline.dead_task("g0")
    broken, empty, last = await letters(pipeline.redis, pipeline.keys)
    assert "not a valid DeadLetter" in broken.letter.reason
    assert "not a valid DeadLetter" in empty.letter.reason
    assert last == good
    attempts = await redrive_all(pipeline.redis, pipeline.keys, pipeline.event_log)
    assert [attempt.redriven for attempt in attempts] == [None, None, "g0-r1"]


async def test_letters_come_in_pages(pipeline):
    entries = [(await letter_of(pipeline, pipeline.lane.verdicts, json.dumps(n))).entry for n in range(5)]
    first = await letters(pipeline.redis, pipeline.keys, count=3)
    rest = await letters(pipeline.redis, pipeline.keys, first[-1].entry)
    assert [letter.entry for letter in [*first, *rest]] == entries
    with pytest.raises(UnknownLetterError, match="no dead letter '5-5'"):
        await get_letter(pipeline.redis, pipeline.keys, "5-5")
