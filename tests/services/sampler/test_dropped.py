"""Dropped prompts: the run remembers them, whatever becomes of the dead letters that dropped them."""

import asyncio

from prometheus_client import REGISTRY

from services.contracts import Cause, Lane
from services.sampler.data import load_splits
from services.sampler.queue.faults.dead_letters import DeadLetterWatch
from services.sampler.queue.starvation import Level
from services.sampler.queue.state import QueueState
from services.streams.delivery.consumer import discard_entry
from services.streams.delivery.validation import Source, make_letter
from services.streams.keys import RunKeys
from services.streams.retention import DEAD_KEPT
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import GroupTransitions
from tests.harness.small_run import recipe_document, service_context


async def write_letters(redis, keys, *causes_and_prompts):
    """Dead-letters a task per cause and prompt; returns the last letter's entry."""
    stream = keys.lane(Lane.TRAIN).tasks

    async def write(cause, prompt):
        entry = (await redis.xadd(stream, {"m": "{}"})).decode()
        letter = make_letter(Source(stream, entry, b"{}"), "test", cause, "gone", prompt)
        await discard_entry(redis, keys, stream, entry, letter)

    await asyncio.gather(*(write(*letter) for letter in causes_and_prompts))
    return (await redis.xrevrange(keys.dead, count=1))[0][0].decode()


async def test_a_prompt_stays_dropped_after_any_number_of_letters(redis, run_id):
    keys = RunKeys(run_id)
    async with service_context(redis, run_id, recipe_document("/none", data={"train": 4}), "sampler") as context:
        prompts = load_splits(context.record.recipe.data).train

        async def restarted():
            transitions = await GroupTransitions.fenced(redis, keys, "sampler")
            return await QueueState.load(context, transitions, prompts)

        def metric(cause):
            return REGISTRY.get_sample_value("penstock_dropped_prompts", {"run": run_id, "cause": cause})

        first = await restarted()
        assert (first.letters_after, metric("too-long"), metric("refused")) == ("0-0", 0, 0)
        faults = [(Cause.TOO_LONG, prompts[0].id), (Cause.REFUSED, prompts[2].id), (Cause.TOO_LONG, "an older file's")]
        await write_letters(redis, keys, *faults)
        newest = await write_letters(redis, keys, *[(Cause.DELIVERIES, prompts[1].id)] * (DEAD_KEPT + 10))
        kept = [entry.decode() for entry, _ in await redis.xrange(keys.dead)]
        assert (len(kept), kept[-1]) == (DEAD_KEPT, newest), "the letters of the faulty prompts are gone"

        second = await restarted()
        assert (metric("too-long"), metric("refused")) == (1, 1), "known before any letter is read"
        await DeadLetterWatch(second).release_groups()
        assert second.dispatcher.metrics == {"prompts_too_long": 1, "prompts_refused": 1, "prompts_unjudgeable": 0}
        await second.dispatcher.dispatch(2, 1.0, 0, Level.NORMAL)
        assert second.table.prompts_in_flight.keys() == {prompts[1].id, prompts[3].id}
        assert await redis.hgetall(keys.dropped) == {
            prompts[0].id.encode(): b"too-long",
            prompts[2].id.encode(): b"refused",
            b"an older file's": b"too-long",
        }


async def test_each_group_of_a_dropped_prompt_is_released(redis, run_id):
    """A prompt was drawn twice before its first letter, and the sampler restarted before it read the letters."""
    keys = RunKeys(run_id)
    tasks = keys.lane(Lane.TRAIN).tasks
    async with service_context(redis, run_id, recipe_document("/none", data={"train": 1}), "sampler") as context:
        prompts = load_splits(context.record.recipe.data).train
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        first = await QueueState.load(context, transitions, prompts)
        await first.dispatcher.dispatch(2, 1.0, 0, Level.NORMAL)
        generating = list(first.table.generating)
        for name in generating:
            letter = make_letter(Source(tasks, "1-0", b"{}"), "999 tokens", Cause.TOO_LONG, name, prompts[0].id)
            await redis.xadd(keys.dead, {"m": letter.model_dump_json()})
        assert len(generating) > 1
        second = await QueueState.load(context, transitions, prompts)
        await DeadLetterWatch(second).release_groups()
        assert not second.table.generating
        counts = await group_counts(redis, keys)
        assert (counts.dead, counts.pending) == (len(generating), 0)
        texts = [event.text for _, event in await context.event_log.events() if event.phase == "prompt-too-long"]
        assert texts == ["never drawn again: 999 tokens"]
        await DeadLetterWatch(await QueueState.load(context, transitions, prompts)).release_groups()
        assert (await group_counts(redis, keys)).dead == len(generating), "a letter that is read again does nothing"
        assert len(await context.event_log.events()) == len(texts)


async def test_a_letter_of_an_earlier_release_is_remembered(redis, run_id):
    """Its replica writes the letter only, which a rewind makes obsolete."""
    keys = RunKeys(run_id)
    async with service_context(redis, run_id, recipe_document("/none", data={"train": 4}), "sampler") as context:
        [prompt, *others] = load_splits(context.record.recipe.data).train
        state = await QueueState.load(context, await GroupTransitions.fenced(redis, keys, "sampler"), (prompt, *others))
        source = Source(keys.lane(Lane.TRAIN).tasks, "1-0", b"{}")
        letter = make_letter(source, "test", Cause.TOO_LONG, "gone", prompt.id)
        await redis.xadd(keys.dead, {"m": letter.model_dump_json()})
        await DeadLetterWatch(state).release_groups()
    assert await redis.hgetall(keys.dropped) == {prompt.id.encode(): b"too-long"}
