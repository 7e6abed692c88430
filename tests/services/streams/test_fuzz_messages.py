"""Hostile messages on every stream, on a real server: each becomes a dead letter with a reason, or changes only its own
group; the reader continues with the next message, and the counters reconcile."""

import asyncio
import itertools
import logging
from collections import Counter
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.contracts import (
    BEFORE,
    Cause,
    EvaluationRecord,
    Lane,
    Sample,
    Task,
    Verdict,
    WeightAck,
    WeightPlan,
)
from services.streams.connection.client import connect
from services.streams.delivery.consumer import Consumer, tail_messages
from services.streams.delivery.validation import LARGEST_LETTER, LARGEST_MESSAGE
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog, letters, read_all
from services.streams.state.group_state import RejectedMessageError, missing_samples
from tests.services.driven import (
    EVENT,
    LETTER,
    STATE,
    DrivenRun,
    Hasty,
    batch_of,
    publish_verdict,
    record_of,
    record_verdict,
    sample_of,
    snapshot_at,
    task_of,
    verdict_on,
)
from tests.services.hostile import RAW, broken

FUZZED = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
RUNS = (f"fuzz-{number}" for number in itertools.count())
TASK = task_of("g0", 2, 1)
R = RunKeys("r")
SAMPLE = sample_of(R, "g0", 0)


@pytest.fixture(scope="module")
def loop(redis_url):
    """Runs a coroutine function with a connection to the real server."""
    with asyncio.Runner() as runner:
        client = runner.run(connect(redis_url))
        yield lambda work: runner.run(work(client))
        runner.run(client.aclose())


@pytest.fixture(params=[30, pytest.param(150, marks=pytest.mark.slow)])
def fuzz(loop, request):
    """`fuzz_with` a small number of examples, or slowly with a large one."""
    return partial(fuzz_with, loop, request.param)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "services.streams")


def of_run(raw, keys):
    """A message of run `r`, changed to be of this run."""
    return raw.replace(b"penstock:{r}:", keys.key("").encode())


class Fuzzed:
    """A run, and the hostile entries on its streams, each of which must become a letter or be admitted."""

    @classmethod
    async def open(cls, redis):
        self = cls()
        self.keys = RunKeys(next(RUNS))
        self.run = await DrivenRun.open(Hasty(redis), self.keys)
        self.hostile = {}
        self.met = Counter()
        return self

    async def send(self, stream, raws):
        for raw in raws:
            body = of_run(raw, self.keys)
            [entry] = await self.run.append(stream, body)
            self.hostile[entry] = body

    async def read_all(self, consumer, serve):
        """Serve all entries of a stream as a service does; returns the served entries."""
        served = []
        # A read of invalid entries alone returns nothing, although valid ones may follow.
        for _ in range(3 + len(self.hostile)):
            deliveries = await consumer.read(8, 0.001)
            for delivery in deliveries:
                try:
                    await serve(delivery)
                except RejectedMessageError as error:
                    await consumer.dead_letter(delivery, str(error), Cause.INVALID)
                else:
                    served.append(delivery.lease.entry)
                    await consumer.ack(delivery.lease)
        return served

    async def check(self, stream, served):
        """Each hostile entry was served as a message of this run, or became a letter with the reason."""
        admitted = set(self.hostile) & set(served)
        self.met.update({"dead": len(self.hostile) - len(admitted), "admitted": len(admitted)})
        event_log = EventLog(self.run.redis, self.keys, "test")
        dead = {letter.entry: letter for _, letter in await event_log.dead_letters()}
        assert set(dead) == set(self.hostile) - admitted
        for entry, letter in dead.items():
            assert (letter.cause, letter.stream) == (Cause.INVALID, stream)
            assert 10 < len(letter.reason) < 700, letter.reason
            assert letter.reason.isprintable(), letter.reason
            if letter.size == len(self.hostile[entry]):
                assert letter.body == self.hostile[entry][:LARGEST_LETTER].decode(errors="replace")
        await self.run.counts()

    async def close(self):
        names = [key async for key in self.run.redis.scan_iter(match=self.keys.key("*"), count=1000)]
        await self.run.redis.unlink(*names)


def fuzz_with(loop, examples, message, scenario, *, may_admit=True):
    """Run `scenario(fuzzed run, hostile messages)` many times; most messages become letters, some may be admitted."""
    met = Counter()

    @settings(FUZZED, max_examples=examples)
    @given(st.lists(broken(message), min_size=1, max_size=4))
    def example(raws):
        async def work(redis):
            fuzzed = await Fuzzed.open(redis)
            await scenario(fuzzed, raws)
            met.update(fuzzed.met)
            await fuzzed.close()

        loop(work)

    example()
    assert met["admitted"] > examples // 10 or not may_admit, met
    assert met["dead"] > examples // 2, met
    print(dict(met))


def test_hostile_tasks(fuzz):
    async def scenario(fuzzed, raws):
        run, drawn = fuzzed.run, []
        await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
        await fuzzed.send(run.streams.tasks, raws)
        await run.sampler.dispatch(Lane.TRAIN, [task_of("g1")], STATE)

        async def serve(delivery):
            task = delivery.message
            for index in await missing_samples(run.redis, fuzzed.keys, task):
                await run.publish(delivery.lease, sample_of(fuzzed.keys, task.group, index), task.wanted)
            drawn.append(task.group)

        served = await fuzzed.read_all(run.rollout(), serve)
        assert set(drawn) == {"g0", "g1"}, "the consumer continues with the next message"
        await fuzzed.check(run.streams.tasks, served)
        assert await run.counts() == {"dispatched": 2, "pending": 2}
        assert await run.redis.xlen(run.streams.samples) == 4, "each sample is published once"

    fuzz(TASK, scenario)


def test_hostile_samples(fuzz):
    async def scenario(fuzzed, raws):
        run = fuzzed.run
        held = await run.dispatched("g0")
        await run.publish(held.lease, sample_of(fuzzed.keys, "g0", 0))
        await fuzzed.send(run.streams.samples, raws)
        await run.publish(held.lease, sample_of(fuzzed.keys, "g0", 1))

        async def serve(delivery):
            await publish_verdict(run.transitions, Lane.TRAIN, delivery.lease, verdict_on(delivery.message))

        served = await fuzzed.read_all(run.verifier(), serve)
        await fuzzed.check(run.streams.samples, served)
        verdicts = await run.judge().read(20, 0.001)
        assert sorted(verdict.message.index for verdict in verdicts) == [0, 1], "each sample is judged once"

    fuzz(SAMPLE, scenario)


def test_hostile_verdicts(fuzz):
    async def scenario(fuzzed, raws):
        run, seen = fuzzed.run, set()
        samples = await run.published("g0")
        await publish_verdict(run.transitions, Lane.TRAIN, samples[0].lease, verdict_on(samples[0].message))
        await fuzzed.send(run.streams.verdicts, raws)
        await publish_verdict(run.transitions, Lane.TRAIN, samples[1].lease, verdict_on(samples[1].message))

        async def serve(delivery):
            verdict = delivery.message
            decision = "kept" if seen | {verdict.index} == {0, 1} else ""
            await record_verdict(run.sampler, Lane.TRAIN, delivery.lease, verdict, decision)
            seen.add(verdict.index)

        served = await fuzzed.read_all(run.judge(), serve)
        await fuzzed.check(run.streams.verdicts, served)
        assert await run.counts() == {"dispatched": 1, "pending": 1}
        assert await run.state("g0") == "kept"
        fields = await run.redis.hgetall(fuzzed.keys.group("g0"))
        assert {name for name in fields if name.startswith(b"verdict:")} == {b"verdict:0", b"verdict:1"}

    fuzz(verdict_on(SAMPLE), scenario)


def test_hostile_batches(fuzz):
    async def scenario(fuzzed, raws):
        run = fuzzed.run
        await fuzzed.send(fuzzed.keys.batches, raws)
        await run.decided("g0", "kept")
        assert await run.sampler.publish_batch(batch_of(fuzzed.keys, 1, ["g0"]), snapshot_at(1))
        await fuzzed.send(fuzzed.keys.batches, raws[:1])
        log = await run.learner.batches()
        accepted = [logged for logged in log if await run.learner.accepts(logged, 1)]
        await fuzzed.check(fuzzed.keys.batches, [])
        [logged] = accepted
        assert logged.entry not in fuzzed.hostile, "only the sampler's batch is trained"
        assert await run.learner.batches() == accepted, "the log holds no invalid batch any more"
        assert await run.learner.commit_step(
            record_of(logged.batch, await run.learner.announce(1, "w1", 1)), logged.entry
        )
        assert await run.counts() == {"dispatched": 1, "trained": 1}

    fuzz(batch_of(R, 1, ["g0"]), scenario, may_admit=False)


EVALUATION = EvaluationRecord(
    name=BEFORE, version=0, prompts=1, samples_per_prompt=1, accuracy=0.5, standard_error=0.1, unknown=0
)
TAILED = {
    "weight_plans": WeightPlan(generation=1, version=0, host="h", port=1, world=2, members={"a": 1}, timeout_s=1.0),
    "weight_acks": WeightAck(member="a", generation=1, version=0, phase="applied"),
    "events": EVENT,
    "steps": record_of(batch_of(R, 1, ["g0"]), 1),
    "evaluations": EVALUATION,
}
"""The streams without a consumer group, with a message of each."""


@pytest.mark.parametrize("stream", TAILED)
def test_hostile_entries_of_streams_without_acks(fuzz, stream):
    message = TAILED[stream]

    async def scenario(fuzzed, raws):
        key = getattr(fuzzed.keys, stream)
        [first] = await fuzzed.run.append(key, message)
        await fuzzed.send(key, raws)
        [last] = await fuzzed.run.append(key, message)
        messages = await tail_messages(fuzzed.run.redis, fuzzed.keys, key, type(message), "0-0")
        entries = [entry for entry, _ in messages]
        assert {first, last} <= set(entries)
        again = await read_all(fuzzed.run.redis, fuzzed.keys, key, type(message))
        assert [entry for entry, _ in again] == entries, "invalid entries were deleted"
        await fuzzed.check(key, entries)

    fuzz(message, scenario)


def test_hostile_dead_letters(fuzz):
    async def scenario(fuzzed, raws):
        run = fuzzed.run
        await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
        await run.append(fuzzed.keys.dead, LETTER)
        await fuzzed.send(fuzzed.keys.dead, raws)
        event_log = EventLog(run.redis, fuzzed.keys, "test")
        shown = await letters(run.redis, fuzzed.keys)
        assert len(shown) == len(raws) + 1, "an invalid letter is listed too"
        await event_log.dead_letters()
        read = [letter for _, letter in await event_log.dead_letters()]
        assert len(read) == len(raws) + 1, "an invalid letter becomes a valid one with the reason"
        fuzzed.met.update("dead" if letter.stream == fuzzed.keys.dead else "admitted" for letter in read)
        assert await run.counts() == {"dispatched": 1, "pending": 1}

    fuzz(LETTER, scenario)


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize(
    ("stream", "group", "model"),
    [("tasks", "rollout", Task), ("samples", "verifier", Sample), ("verdicts", "sampler", Verdict)],
)
def test_entries_that_hold_no_message_become_letters(loop, lane, stream, group, model):
    async def work(redis):
        fuzzed = await Fuzzed.open(redis)
        key = getattr(fuzzed.keys.lane(lane), stream)
        consumer = Consumer(fuzzed.run.redis, fuzzed.keys, key, group, "c", model, 30.0, 2)
        await consumer.open()
        await fuzzed.send(key, RAW)
        fuzzed.hostile[(await redis.xadd(key, {"n": b"{}"})).decode()] = b""
        assert await fuzzed.read_all(consumer, None) == []
        await fuzzed.check(key, [])
        await fuzzed.close()

    loop(work)


def test_message_above_the_limit_gets_a_small_dead_letter(loop):
    async def work(redis):
        fuzzed = await Fuzzed.open(redis)
        run, raw = fuzzed.run, TASK.model_dump_json().encode()
        [entry] = await run.append(run.streams.tasks, raw.replace(b'"p0"', b'"' + b"x" * LARGEST_MESSAGE + b'"'))
        await run.sampler.dispatch(Lane.TRAIN, [task_of("g1")], STATE)
        [delivery] = await run.rollout().read(4, 0.01)
        assert delivery.message.group == "g1"
        [(_, letter)] = await letters(redis, fuzzed.keys)
        assert letter.reason == f"{LARGEST_MESSAGE + len(raw) - 2} bytes; a Task has at most {LARGEST_MESSAGE}"
        assert (letter.entry, len(letter.body)) == (entry, LARGEST_LETTER)
        await fuzzed.close()

    loop(work)


@pytest.mark.parametrize("stream", ["events", "steps", "evaluations"])
def test_page_of_hostile_entries_does_not_hide_later_ones(loop, stream):
    async def work(redis):
        fuzzed = await Fuzzed.open(redis)
        key, message = getattr(fuzzed.keys, stream), TAILED[stream]
        await fuzzed.run.append(key, *[b"{}"] * 600, message)
        messages = await read_all(redis, fuzzed.keys, key, type(message))
        assert [body for _, body in messages] == [message]
        await fuzzed.close()

    loop(work)
